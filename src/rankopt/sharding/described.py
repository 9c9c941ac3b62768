"""Turn what was tried and chosen into the plan that is written."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rankopt._version import __version__
from rankopt.sharding.alternatives import Choice, Request, Tried, shortage
from rankopt.sharding.memory import Parts, row_bytes
from rankopt.sharding.planner import PlacedShard, RankSum, Solution
from rankopt.sharding.schema import (
    Alternative,
    MemoryParts,
    RankLoad,
    ShardPlan,
    TablePlan,
    TableShard,
)
from rankopt.sharding.setting import CACHING_KERNELS, Setting
from rankopt.sharding.tables import ModelTables
from rankopt.sharding.topology import Topology
from rankopt.units import format_bytes

LIMITS = (
    "Lookups, exchange and update of a rank are added up as if nothing overlapped.",
    "Activations of the dense layers are not known before they run; the reserved share of memory "
    "is for them.",
)


def described(request: Request, choice: Choice, reproduce: str) -> ShardPlan:
    """Write down a choice."""
    best, model, topology = choice.best, request.model, request.topology
    setting = best.setting
    notes = [*model.notes, _source_of_times(topology), *LIMITS]
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


def _source_of_times(topology: Topology) -> str:
    measured = []
    if topology.measured_lookups is not None:
        measured.append("lookups and updates")
    if topology.measured:
        measured.append("collectives")
    if not measured:
        return "Predicted, not measured: torchrec's formulas over the topology's bandwidths."
    return (
        f"Predicted from measured times of {' and '.join(measured)}; all else by torchrec's "
        "formulas over the topology's bandwidths."
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
                key=table.key,
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
