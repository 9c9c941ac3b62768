"""Plan how a model's tables are spread over a topology, and write the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from rankopt._version import __version__
from rankopt.errors import Problem, UsageError
from rankopt.jobs.inputs import Progress, quiet
from rankopt.models.card import ModelCard
from rankopt.problems import problems_of_validation
from rankopt.sharding.alternatives import LOAD_FACTORS, Choice, Request, Tried, choose, shortage
from rankopt.sharding.card_tables import read_model_tables
from rankopt.sharding.memory import Parts, row_bytes
from rankopt.sharding.planner import PlacedShard, RankSum, Solution
from rankopt.sharding.remedies import remedies
from rankopt.sharding.schema import (
    Alternative,
    MemoryParts,
    RankLoad,
    Remedy,
    ShardPlan,
    TablePlan,
    TableShard,
)
from rankopt.sharding.setting import (
    CACHING_KERNELS,
    SHARDING_TYPES,
    UVM_KERNELS,
    Communication,
    Kernel,
    Setting,
    ShardingType,
    supported_kernels,
    supported_types,
)
from rankopt.sharding.tables import ModelTables, Optimizer, Precision
from rankopt.sharding.topology import Topology, load_topology
from rankopt.units import format_bytes

DEFAULT_BATCH_SIZE = 2048
DEFAULT_OPTIMIZER: Optimizer = "adagrad"
"""The same mathematics as torch.optim.Adagrad, one fp32 state a value."""

LIMITS = (
    "Predicted, not measured: torchrec's formulas over the topology's bandwidths. Lookups, "
    "exchange and update of a rank are added up as if nothing overlapped.",
    "Activations of the dense layers are not known before they run; the reserved share of memory "
    "is for them.",
)


def plan_shards(
    source: ModelCard | str | Path,
    topology: Topology | str | Path,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    optimizer: Optimizer | None = None,
    precision: Precision | None = None,
    serving: bool = False,
    sharding_types: tuple[ShardingType, ...] = (),
    kernels: tuple[Kernel, ...] = (),
    load_factors: tuple[float, ...] = LOAD_FACTORS,
    communication: Communication = "fp32",
    ids_per_row: dict[str, float] | None = None,
    reproduce: str | None = None,
    progress: Progress = quiet,
) -> ShardPlan:
    """Plan without loading or allocating a weight.

    Args:
        source: a model card, its path or name; or a file that lists tables.
        topology: a topology, its path, or its name in benchmarks/topologies.
        batch_size: rows of one rank.
        optimizer: of the tables; None: what the card trains them with, else Adagrad.
        precision: of the rows; None: the model's own, and fp16 where nothing else fits.
        serving: plan inference of quantised tables in place of training.
        sharding_types: what may be chosen from; all when empty.
        kernels: what may be chosen from; all that the device has when empty.
        load_factors: shares of a cached table's rows in device memory, to try.
        communication: what pooled vectors are sent as.
        ids_per_row: lookups of a row by table name, in place of what the card says.
        reproduce: the command to write into the plan.
        progress: told one line per step.

    Returns:
        The plan; where `fits` is False, the nearest miss with its memory and the remedies.

    Raises:
        CardError: the card or its tables are wrong.
        UsageError: the topology is wrong, or the settings contradict it; every problem is listed.
    """
    over = topology if isinstance(topology, Topology) else load_topology(topology)
    progress("reading the tables")
    model = read_model_tables(source).with_ids_per_row(ids_per_row or {})
    trained_with = None if serving else optimizer or model.optimizer or DEFAULT_OPTIMIZER
    if trained_with == "adam" and optimizer is None and over.device == "cpu":
        trained_with = DEFAULT_OPTIMIZER
        note = "the card trains with Adam, which fbgemm does not run on CPUs: planned with Adagrad"
        model = replace(model, notes=(*model.notes, note))
    _check(over, trained_with, precision, sharding_types, kernels, load_factors, batch_size)
    request = Request(
        model=model,
        topology=over,
        batch_size=batch_size,
        optimizer=trained_with,
        precision=precision,
        sharding_types=sharding_types or _types(over, serving),
        kernels=kernels or None,
        load_factors=tuple(sorted(set(load_factors))),
        communication=communication,
    )
    choice = choose(request, progress)
    ways_out: tuple[Remedy, ...] = ()
    if not choice.best.fits:
        progress("looking for remedies")
        ways_out = remedies(request, choice)
    plan = _written(
        request, choice, reproduce or f"rankopt shard plan {source} --topology {over.name}"
    )
    return plan.model_copy(update={"remedies": ways_out})


def _types(topology: Topology, serving: bool) -> tuple[ShardingType, ...]:
    # Row-wise ways on a CPU stay among the alternatives, where it says that torchrec has none.
    return supported_types("cuda", serving=True) if serving else SHARDING_TYPES


def _check(
    topology: Topology,
    optimizer: Optimizer | None,
    precision: Precision | None,
    sharding_types: tuple[ShardingType, ...],
    kernels: tuple[Kernel, ...],
    load_factors: tuple[float, ...],
    batch_size: int,
) -> None:
    serving = optimizer is None
    purpose = "serving" if serving else "training"
    problems = []
    if batch_size < 1:
        problems.append(Problem("--batch-size", "must be at least 1", batch_size))
    if precision == "int8" and not serving:
        hint = "Add --serving to plan quantised tables."
        problems.append(Problem("--precision", "must be fp32 or fp16 in training", precision, hint))
    wrong = [factor for factor in load_factors if not 0 < factor < 1]
    if wrong:
        problems.append(Problem("--load-factors", "must lie between 0 and 1", wrong))
    types = supported_types(topology.device, serving=serving)
    if sharding_types and not set(sharding_types) & set(types):
        what = f"torchrec offers {', '.join(types)} for {purpose} on {topology.device}"
        problems.append(Problem("--sharding-types", what, list(sharding_types)))
    allowed = supported_kernels(topology.device, optimizer)
    bad = [kernel for kernel in kernels if kernel not in allowed]
    if bad:
        with_what = f" with {optimizer}" if optimizer else ""
        what = f"must be among {', '.join(allowed)} for {purpose}{with_what} on {topology.device}"
        problems.append(Problem("--kernels", what, bad))
    elif kernels and all(kernel in UVM_KERNELS | CACHING_KERNELS for kernel in kernels):
        hint = "Add dense, fused or quant, which small tables may take."
        problems.append(
            Problem("--kernels", "must hold one for device memory", list(kernels), hint)
        )
    if problems:
        raise UsageError(problems=problems)


def _written(request: Request, choice: Choice, reproduce: str) -> ShardPlan:
    best, model, topology = choice.best, request.model, request.topology
    setting = best.setting
    notes = [*model.notes, *LIMITS]
    if topology.dense_tflop_per_s is None:
        notes.append("The topology states no dense_tflop_per_s: the step is without dense layers.")
    return ShardPlan(
        model=model.name,
        source=model.source,
        purpose="serving" if setting.serving else "training",
        fits=best.fits,
        chosen=setting.name,
        reason=choice.reason,
        batch_size=request.batch_size,
        precision=setting.precision,
        optimizer=setting.optimizer,
        communication=setting.communication,
        load_factor=setting.load_factor,
        num_tables=len(model.tables),
        table_bytes=_table_bytes(model, setting),
        dense_parameters=model.dense_parameters,
        world_size=topology.world_size,
        topology_name=topology.name,
        topology=topology.model_dump(mode="json"),
        step_ns=best.step_ns if best.fits else None,
        all_to_all_ns=best.all_to_all_ns if best.fits else None,
        tables=tuple(_tables(best, model)),
        ranks=tuple(_rank(rank, topology) for rank in best.ranks),
        alternatives=tuple(_alternative(item, best, topology) for item in choice.tried),
        notes=tuple(notes),
        versions=_versions(),
        reproduce=reproduce,
    )


def _table_bytes(model: ModelTables, setting: Setting) -> int:
    return sum(table.num_rows * row_bytes(table.dim, setting) for table in model.tables)


def _tables(best: Solution, model: ModelTables) -> list[TablePlan]:
    by_name: dict[str, list[PlacedShard]] = {table.name: [] for table in model.tables}
    for placed in best.shards:
        by_name[placed.shard.table.name].append(placed)
    listed = []
    for table in model.tables:
        shards = by_name[table.name]
        first = shards[0].shard
        cached = first.kernel in CACHING_KERNELS
        listed.append(
            TablePlan(
                name=table.name,
                path=table.path,
                num_rows=table.num_rows,
                dim=table.dim,
                ids_per_row=table.ids_per_row,
                pooled=table.pooled,
                size_bytes=table.num_rows * row_bytes(table.dim, best.setting),
                sharding_type=first.sharding_type,
                compute_kernel=first.kernel,
                cache_load_factor=best.setting.load_factor if cached else None,
                shards=tuple(_shard(placed) for placed in shards),
            )
        )
    return listed


def _shard(placed: PlacedShard) -> TableShard:
    return TableShard(
        rank=placed.rank,
        row_offset=placed.row_offset,
        column_offset=placed.column_offset,
        num_rows=placed.shard.num_rows,
        num_columns=placed.shard.num_columns,
        hbm_bytes=placed.use.hbm.total,
        host_bytes=placed.use.host.total,
    )


def _rank(rank: RankSum, topology: Topology) -> RankLoad:
    return RankLoad(
        rank=rank.rank,
        host=topology.host_of(rank.rank),
        num_shards=rank.num_shards,
        hbm=_parts(rank.use.hbm, topology.hbm_bytes),
        host_memory=_parts(rank.use.host, topology.host_bytes),
        lookup_ns=rank.times.lookup_ns,
        update_ns=rank.times.update_ns,
        all_to_all_ns=rank.all_to_all_ns,
        all_reduce_ns=rank.times.all_reduce_ns,
        dense_ns=rank.dense_ns,
        step_ns=rank.step_ns,
    )


def _parts(parts: Parts, capacity_bytes: int) -> MemoryParts:
    return MemoryParts(
        weights_bytes=parts.weights,
        optimizer_bytes=parts.optimizer,
        activations_bytes=parts.activations,
        buffers_bytes=parts.buffers,
        total_bytes=parts.total,
        capacity_bytes=capacity_bytes,
    )


def _alternative(item: Tried, best: Solution, topology: Topology) -> Alternative:
    setting, solution = item.setting, item.solution
    fullest = None if solution is None else solution.fullest
    chosen = solution is best
    return Alternative(
        name=setting.name,
        sharding_types=setting.sharding_types,
        kernels=setting.kernels,
        precision=setting.precision,
        optimizer=setting.optimizer,
        load_factor=setting.load_factor,
        communication=setting.communication,
        changes=setting.changes,
        fits=item.fits,
        chosen=chosen and best.fits,
        fullest_rank=0 if fullest is None else fullest.rank,
        hbm_bytes=0 if fullest is None else fullest.use.hbm.total,
        hbm_capacity_bytes=topology.hbm_bytes,
        host_bytes=0 if fullest is None else fullest.use.host.total,
        host_capacity_bytes=topology.host_bytes,
        step_ns=solution.step_ns if solution is not None and item.fits else None,
        all_to_all_ns=solution.all_to_all_ns if solution is not None and item.fits else None,
        reason=_why(item, chosen),
    )


def _why(item: Tried, chosen: bool) -> str:
    if item.solution is None:
        return item.problem or "not offered"
    if not item.solution.fits:
        need, memory, has = shortage(item.solution)
        return (
            f"rank {item.solution.fullest.rank} needs {format_bytes(need)} of {memory}, "
            f"has {format_bytes(has)}"
        )
    if chosen:
        return "chosen"
    if item.setting.changes is not None:
        return f"fits, but changes the model: {item.setting.changes}"
    return "fits"


def _versions() -> dict[str, str]:
    found = {"rankopt": __version__}
    for name in ("torch", "torchrec"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_plan(file: Path) -> ShardPlan:
    """Read a plan that `rankopt shard plan --out` wrote.

    Raises:
        UsageError: the file is missing or is no plan; every problem is listed.
    """
    try:
        return ShardPlan.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        hint = "Write one: rankopt shard plan CARD --topology T --out FILE."
        problem = Problem(str(file), "must be a readable sharding plan", str(error), hint)
        raise UsageError(problems=[problem]) from error
    except ValidationError as error:
        raise UsageError(problems=problems_of_validation(str(file), error, ShardPlan)) from error
