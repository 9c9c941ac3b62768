"""Run sharding plans on this machine and hold them against what was predicted of them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from rankopt.environment import collect_environment
from rankopt.errors import Problem, UsageError
from rankopt.jobs.inputs import Progress, quiet
from rankopt.jobs.shard_plan import DEFAULT_BATCH_SIZE, request_for
from rankopt.models.card import ModelCard
from rankopt.sharding.alternatives import Choice, Request, Tried, choose
from rankopt.sharding.comparing import compare, order
from rankopt.sharding.described import described
from rankopt.sharding.launch import run_local_ranks
from rankopt.sharding.measure_task import MeasureTask, RankFile, RankPlan, TaskTable
from rankopt.sharding.measured import MeasuredPlan, PlanMeasurement
from rankopt.sharding.memory import dense_use
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.setting import Communication, Setting, ShardingType
from rankopt.sharding.tables import Optimizer
from rankopt.sharding.topology import Topology
from rankopt.units import format_bytes

DEFAULT_ZIPF = 1.05
"""As ids of ads traffic have them."""
DEFAULT_STEPS = 40
QUICK_STEPS = 9
MAX_BLOCKS = 10
MIN_BLOCKS = 3
TIMEOUT_S = 3600
USABLE_SHARE = 0.9
"""Of the memory that is free: the rest is for the processes themselves."""
GIVEN = "the given plan"

NOTES = (
    "Tables alone, as collections of torchrec with random weights: of the dense layers only the "
    "all-reduce of their gradients is run; their memory and compute are left out of both sides.",
    "A part is timed by itself, with the ranks lined up before it; the step is timed whole, and "
    "may overlap what the prediction adds up.",
    "Times are of the slowest rank of every step, memory of the fullest rank, above what its "
    "process held before the plan was set up.",
)


def measure_plans(
    source: ModelCard | str | Path,
    topology: Topology | str | Path,
    *,
    plan: ShardPlan | None = None,
    batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    sharding_types: tuple[ShardingType, ...] = (),
    communication: Communication = "fp32",
    ids_per_row: dict[str, float] | None = None,
    zipf: float = DEFAULT_ZIPF,
    num_steps: int = DEFAULT_STEPS,
    seed: int = 0,
    reproduce: str | None = None,
    progress: Progress = quiet,
    detail: Progress = quiet,
) -> PlanMeasurement:
    """Run the chosen plan and each way to shard by itself, in turns, on this machine.

    Args:
        source: a model card, its path or name; or a file that lists tables.
        topology: of this machine, or of as many ranks as it can run.
        plan: measured beside the alternatives in place of what would be chosen.
        batch_size: rows of one rank; None: the plan's.
        optimizer: of the tables; None: the plan's, or what `plan_shards` takes.
        sharding_types: the ways to shard that are tried; all when empty.
        communication: what pooled vectors are sent as.
        ids_per_row: lookups of a row by table name, in place of what the card says.
        zipf: exponent of the law that ids follow; 0: all alike.
        num_steps: of each alternative, dealt to up to ten blocks.
        seed: of ids.
        reproduce: the command to write into the result.
        progress: told one line per step.
        detail: told how far the measurement is.

    Raises:
        CardError: the card or its tables are wrong.
        UsageError: what is asked contradicts itself, does not fit this machine, or no plan fits.
        EnvironmentProblem: a process failed.
    """
    request = request_for(
        source,
        topology,
        batch_size=batch_size or (plan.batch_size if plan else DEFAULT_BATCH_SIZE),
        optimizer=optimizer or (plan.optimizer if plan else None),
        precision="fp32",
        sharding_types=sharding_types,
        communication=plan.communication if plan else communication,
        ids_per_row=ids_per_row,
        progress=progress,
    )
    backend: Literal["gloo", "nccl"] = "nccl" if request.topology.device == "cuda" else "gloo"
    _check(request, plan, zipf, num_steps)
    plans, chosen, same = _alternatives(request, plan, progress)
    _check_memory(request, list(plans.values()))
    num_blocks = max(MIN_BLOCKS, min(MAX_BLOCKS, num_steps // MIN_BLOCKS))
    task = MeasureTask(
        tables=tuple(TaskTable.of(table) for table in request.model.tables),
        plans=plans,
        backend=backend,
        ranks_per_host=request.topology.ranks_per_host,
        batch_size=request.batch_size,
        zipf=zipf,
        dense_parameters=request.model.dense_parameters,
        num_blocks=num_blocks,
        steps_per_block=math.ceil(num_steps / num_blocks),
        seed=seed,
    )
    progress(f"measuring {len(plans)} plans on {request.topology.world_size} ranks")
    ranks = _run(task, request.topology.world_size, detail)
    return _result(request, task, ranks, chosen, same, reproduce)


def _check(request: Request, plan: ShardPlan | None, zipf: float, num_steps: int) -> None:
    problems = []
    topology = request.topology
    if not 0 <= zipf <= 4:
        problems.append(Problem("--zipf", "must lie between 0 and 4", zipf))
    if num_steps < MIN_BLOCKS:
        problems.append(Problem("--steps", f"must be at least {MIN_BLOCKS}", num_steps))
    num_gpus = torch.cuda.device_count() if topology.device == "cuda" else 0
    if topology.device == "cuda" and (topology.world_size > num_gpus or topology.num_hosts > 1):
        what = f"must be of this machine, which has {num_gpus} GPUs, to be measured"
        got = f"{topology.num_hosts} hosts of {topology.ranks_per_host}"
        hint = "Describe it: rankopt diagnose --collectives --out DIR writes its topology.yaml."
        problems.append(Problem(f"topology {topology.name}", what, got, hint))
    if plan is not None:
        problems += _plan_problems(request, plan)
    if problems:
        raise UsageError(problems=problems)


def _plan_problems(request: Request, plan: ShardPlan) -> list[Problem]:
    where, topology = f"plan of {plan.model}", request.topology
    problems = []
    if not plan.fits:
        problems.append(Problem(where, "does not fit", plan.reason))
    if plan.purpose != "training" or plan.precision != "fp32":
        got = f"{plan.purpose}, {plan.precision}"
        problems.append(Problem(where, "must be of training in fp32 to be measured", got))
    if (plan.world_size, plan.topology["device"]) != (topology.world_size, topology.device):
        what = f"must be for {topology.world_size} ranks on {topology.device}, as the topology is"
        got = f"{plan.world_size} on {plan.topology['device']}"
        problems.append(Problem(where, what, got))
    if plan.batch_size != request.batch_size:
        what = f"was made for {plan.batch_size} rows a rank; its times are of those"
        problems.append(Problem("--batch-size", what, request.batch_size))
    if plan.optimizer is not None and plan.optimizer != request.optimizer:
        what = f"must be the plan's, {plan.optimizer}"
        problems.append(Problem("--optimizer", what, request.optimizer))
    planned = {t.name: (t.num_rows, t.dim, t.ids_per_row) for t in plan.tables}
    tables = {t.name: (t.num_rows, t.dim, t.ids_per_row) for t in request.model.tables}
    wrong = [name for name in {**planned, **tables} if planned.get(name) != tables.get(name)]
    if wrong:
        shown = ", ".join(wrong[:5]) + (" and others" if len(wrong) > 5 else "")
        hint = "Plan the same model again, with the same --ids-per-row."
        problems.append(Problem(where, "has other tables than the model", shown, hint))
    return problems


def _alternatives(
    request: Request, given: ShardPlan | None, progress: Progress
) -> tuple[dict[str, ShardPlan], str, dict[str, str]]:
    """Return the plans by name, the chosen one's name, and which names mean the same plan."""
    choice = choose(request, progress)
    found: list[tuple[str, ShardPlan]] = []
    if given is not None:
        found.append((GIVEN, given))
    elif not choice.best.fits:
        hint = "See what would help: rankopt shard plan with the same arguments."
        problem = Problem(f"plan of {request.model.name}", choice.reason, hint=hint)
        raise UsageError(problems=[problem])
    else:
        best = next(item for item in choice.tried if item.solution is choice.best)
        found.append((best.setting.name, _written(request, choice, best)))
    found += [
        (_short(item.setting), _written(request, choice, item))
        for item in choice.tried
        if item.fits and item.setting.changes is None and _by_itself(item.setting, request)
    ]
    plans: dict[str, ShardPlan] = {}
    same: dict[str, str] = {}
    for name, plan in found:
        twin = next((n for n, other in plans.items() if _places(other) == _places(plan)), None)
        if twin is None:
            plans[name] = plan
        elif twin != name:
            same[name] = twin
    return plans, found[0][0], same


def _by_itself(setting: Setting, request: Request) -> bool:
    """Tell the alternatives of one way to shard; on one host two of them are the same."""
    if len(setting.sharding_types) != 1:
        return False
    twice = setting.sharding_types == ("table_row_wise",) and request.topology.num_hosts == 1
    return not twice or len(request.sharding_types) == 1


def _short(setting: Setting) -> str:
    return setting.sharding_types[0]


def _written(request: Request, choice: Choice, item: Tried) -> ShardPlan:
    if item.solution is None:
        raise ValueError(f"{item.setting.name} has no solution")
    return described(request, Choice(choice.tried, item.solution, item.setting.name), "")


def _places(plan: ShardPlan) -> tuple[object, ...]:
    return tuple((t.name, t.sharding_type, t.compute_kernel, t.shards) for t in plan.tables)


def _check_memory(request: Request, plans: Sequence[ShardPlan]) -> None:
    """Refuse what would not fit beside each other: all plans are held at once, to take turns."""
    if request.topology.device == "cuda":
        needed = sum(max(rank.hbm.total_bytes for rank in plan.ranks) for plan in plans)
        free = int(torch.cuda.mem_get_info(0)[0])
    else:
        needed = sum(rank.host_memory.total_bytes for plan in plans for rank in plan.ranks)
        free = _available_bytes()
    if needed > free * USABLE_SHARE:
        what = f"would hold {format_bytes(needed)} at once; {format_bytes(free)} are free here"
        hint = "Measure fewer with --sharding-types, or a model with fewer rows of the same widths."
        problem = Problem(f"{len(plans)} plans of {request.model.name}", what, hint=hint)
        raise UsageError(problems=[problem])


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable")


def _run(task: MeasureTask, world_size: int, detail: Progress) -> list[RankFile]:
    with tempfile.TemporaryDirectory(prefix="rankopt-measure-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(task.model_dump_json(), encoding="utf-8")
        run_local_ranks(
            "rankopt.sharding.measure_worker",
            world_size,
            [str(folder)],
            timeout_s=TIMEOUT_S,
            told=detail,
        )
        files = [folder / f"rank-{rank}.json" for rank in range(world_size)]
        return [RankFile.model_validate_json(file.read_bytes()) for file in files]


def _result(
    request: Request,
    task: MeasureTask,
    found: Sequence[RankFile],
    chosen: str,
    same: dict[str, str],
    reproduce: str | None,
) -> PlanMeasurement:
    model, topology = request.model, request.topology
    ranks: dict[str, list[RankPlan]] = {
        name: [rank.plans[name] for rank in found] for name in task.plans
    }
    first = task.plans[chosen]
    setting = Setting(chosen, (), (), "fp32", request.optimizer)
    dense = dense_use(model.dense_parameters, setting, topology)
    measured = [
        compare(name, plan, ranks[name], dense, chosen=name == chosen)
        for name, plan in task.plans.items()
    ]
    measured += [
        MeasuredPlan(name=name, chosen=False, sharding=measured_as.sharding, same_as=twin)
        for name, twin in same.items()
        for measured_as in measured
        if measured_as.name == twin
    ]
    notes = [*model.notes, *NOTES]
    if topology.num_hosts > 1:
        notes.append("The hosts of the topology were processes of this one machine.")
    if topology.dense_tflop_per_s is not None:
        notes.append("The dense layers' predicted compute was taken off the predicted steps.")
    if request.optimizer is None:
        raise ValueError("a measurement is of training")
    return PlanMeasurement(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model.name,
        source=model.source,
        topology_name=topology.name,
        topology=topology.model_dump(mode="json"),
        collectives_measured=bool(topology.measured),
        lookups_measured=topology.measured_lookups is not None,
        backend=task.backend,
        world_size=topology.world_size,
        batch_size=task.batch_size,
        optimizer=request.optimizer,
        communication=first.communication,
        zipf=task.zipf,
        num_tables=len(model.tables),
        table_bytes=first.table_bytes,
        dense_parameters=model.dense_parameters,
        num_blocks=task.num_blocks,
        num_steps=task.num_blocks * task.steps_per_block,
        plans=tuple(measured),
        ordering=order(task.plans, ranks),
        notes=tuple(notes),
        environment=collect_environment().model_dump(mode="json"),
        reproduce=reproduce or f"rankopt shard measure {model.source} --topology {topology.name}",
    )
