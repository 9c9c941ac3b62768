"""The settings that a plan is chosen from, and the choice.

First what keeps the model's arithmetic: everything in device memory, then host memory with a cache
of several sizes. fp16 rows change results a little, so they are chosen only where none of those
fits. Another optimizer is shown and never chosen without being asked for. Each way to shard is
then forced in turn on the setting that won.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rankopt.errors import Problem, UsageError
from rankopt.sharding.planner import SettingProblem, Solution, solve, uses_cache
from rankopt.sharding.setting import (
    CACHING_KERNELS,
    UVM_KERNELS,
    Communication,
    Kernel,
    Setting,
    ShardingType,
    supported_kernels,
    supported_types,
)
from rankopt.sharding.tables import ModelTables, Optimizer, Precision
from rankopt.sharding.topology import Topology
from rankopt.units import format_bytes, format_duration

LOAD_FACTORS = (0.05, 0.1, 0.2, 0.4)
DEFAULT_LOAD_FACTOR = 0.2
"""fbgemm's own."""
OPTIMIZER_NAMES: dict[Optimizer, str] = {
    "sgd": "SGD",
    "row_wise_adagrad": "row-wise Adagrad",
    "adagrad": "Adagrad",
    "adam": "Adam",
}

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        model: the tables.
        topology: over what.
        batch_size: rows of one rank.
        optimizer: of the tables; None: serving.
        precision: of the rows, where it is asked for; None: the model's, fp16 only if it must be.
        sharding_types: what may be chosen from.
        kernels: what may be chosen from; None: all.
        load_factors: cache sizes to try.
        communication: what pooled vectors are sent as.
    """

    model: ModelTables
    topology: Topology
    batch_size: int
    optimizer: Optimizer | None
    precision: Precision | None
    sharding_types: tuple[ShardingType, ...]
    kernels: tuple[Kernel, ...] | None
    load_factors: tuple[float, ...] = LOAD_FACTORS
    communication: Communication = "fp32"

    @property
    def rows(self) -> Precision:
        if self.precision is not None:
            return self.precision
        return "int8" if self.optimizer is None else self.model.precision


@dataclass(frozen=True)
class Tried:
    """One setting with what came of it.

    Attributes:
        setting: what was allowed.
        solution: None where torchrec offers no such sharding.
        problem: why not.
    """

    setting: Setting
    solution: Solution | None
    problem: str | None = None

    @property
    def fits(self) -> bool:
        return self.solution is not None and self.solution.fits


@dataclass(frozen=True)
class Choice:
    """Everything that was tried, and the one taken.

    Attributes:
        tried: in the order of trying.
        best: the plan, or the nearest miss.
        reason: why it and not another.
    """

    tried: tuple[Tried, ...]
    best: Solution
    reason: str


def choose(request: Request, progress: Tell) -> Choice:
    """Try every setting and take the fastest that keeps as much of the model as it can.

    Raises:
        UsageError: what is asked for leaves a table without any way to be sharded.
    """
    tried: list[Tried] = []
    for setting in settings(request):
        if any(item.fits for item in tried) and not _worth_a_look(setting, request):
            continue
        progress(f"planning: {setting.name}")
        tried.append(attempt(request, setting))
    if all(item.solution is None for item in tried):
        hint = "Allow more ways to shard, or more kernels."
        what = tried[0].problem or "leave no way to shard the tables"
        raise UsageError(problems=[Problem("--sharding-types", what, hint=hint)])
    best = _best(tried)
    if len(request.sharding_types) > 1:
        for setting in forced(request, best.setting):
            progress(f"planning: {setting.name}")
            tried.append(attempt(request, setting))
        # A search with fewer choices sometimes finds a better plan than a wider one.
        best = _best(tried)
    return Choice(tuple(tried), best, _reason(tried, best, request))


def attempt(request: Request, setting: Setting, topology: Topology | None = None) -> Tried:
    """Plan one setting."""
    try:
        over = topology or request.topology
        return Tried(setting, solve(request.model, over, setting, request.batch_size))
    except SettingProblem as problem:
        return Tried(setting, None, str(problem))


def settings(request: Request) -> list[Setting]:
    """List the settings to try, each with a name of its own."""
    allowed = supported_kernels(request.topology.device, request.optimizer)
    kernels = request.kernels or allowed
    rows, optimizer = request.rows, request.optimizer
    base = Setting(
        name="device memory" if request.topology.device == "cuda" else "memory",
        sharding_types=request.sharding_types,
        kernels=_without_host(kernels),
        precision=rows,
        optimizer=optimizer,
        communication=request.communication,
    )
    listed = _in_memories(base, kernels, request)
    if request.precision is None and rows != "fp16" and optimizer is not None:
        fp16 = replace(base, precision="fp16", changes="rows in fp16")
        listed += _in_memories(replace(fp16, name="fp16 rows"), kernels, request)
    if request.precision is None and optimizer is None:
        fp32 = replace(base, name="fp32 rows", precision="fp32", offered=False)
        listed.append(fp32)
    if optimizer in {"adagrad", "adam"}:
        light = replace(
            base,
            name="row-wise Adagrad",
            optimizer="row_wise_adagrad",
            kernels=_trainable(request, kernels),
            changes="row-wise Adagrad",
            offered=False,
        )
        middle = _middle(request.load_factors)
        factors = () if middle is None else (middle,)
        listed += _in_memories(light, kernels, replace(request, load_factors=factors))
    return [setting for setting in listed if setting.kernels]


def forced(request: Request, winner: Setting) -> list[Setting]:
    """List each way to shard alone, all else as in the setting that won."""
    return [
        replace(winner, name=f"{winner.name}, {kind} alone", sharding_types=(kind,))
        for kind in request.sharding_types
        if kind in supported_types(serving=winner.serving) or len(request.sharding_types) > 1
    ]


def _worth_a_look(setting: Setting, request: Request) -> bool:
    """Tell what is shown beside a plan that fits: of what changes the model, one of a kind."""
    if setting.changes is None or setting.load_factor is None:
        return True
    return setting.offered and setting.load_factor == _middle(request.load_factors)


def _middle(load_factors: Sequence[float]) -> float | None:
    """Return the factor nearest to fbgemm's own."""
    return min(load_factors, key=lambda f: abs(f - DEFAULT_LOAD_FACTOR), default=None)


def _in_memories(base: Setting, kernels: Sequence[Kernel], request: Request) -> list[Setting]:
    """Vary where the tables may lie: the device, then the host with caches, then without."""
    listed = [base]
    if any(kernel in CACHING_KERNELS for kernel in kernels):
        caching = tuple(kernel for kernel in kernels if kernel not in UVM_KERNELS)
        listed += [
            replace(base, name=f"{base.name} + cache {f:.0%}", kernels=caching, load_factor=f)
            for f in request.load_factors
        ]
    if any(kernel in UVM_KERNELS for kernel in kernels) and base.changes is None:
        uvm = tuple(kernel for kernel in kernels if kernel not in CACHING_KERNELS)
        listed.append(replace(base, name=f"{base.name} + host, no cache", kernels=uvm))
    return listed


def _without_host(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in kernels if kernel not in UVM_KERNELS | CACHING_KERNELS)


def _trainable(request: Request, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    if request.kernels is not None:
        return _without_host(kernels)
    return _without_host(supported_kernels(request.topology.device, "row_wise_adagrad"))


def _best(tried: Sequence[Tried]) -> Solution:
    for exact in (True, False):
        fitting = [
            item.solution
            for item in tried
            if item.solution is not None
            and item.solution.fits
            and item.setting.offered
            and (item.setting.changes is None) == exact
        ]
        if fitting:
            return min(fitting, key=lambda solution: solution.step_ns)
    known = [item.solution for item in tried if item.solution is not None]
    offered = [solution for solution in known if solution.setting.offered]
    exact_ones = [solution for solution in offered if solution.setting.changes is None]
    nearest = exact_ones or offered or known
    wide = [solution for solution in nearest if len(solution.setting.sharding_types) > 1]
    return min(wide or nearest, key=lambda s: s.fill(s.fullest))


def _reason(tried: Sequence[Tried], best: Solution, request: Request) -> str:
    if not best.fits:
        return _why_not(best)
    first = tried[0].solution
    step = format_duration(best.step_ns)
    words = [f"the fastest of the plans that keep the model's arithmetic: {step} a step"]
    if best.setting.changes is not None:
        words = [f"no plan with {request.rows} rows fits, and the fastest with"]
        words = [f"{words[0]} {best.setting.changes} takes {step} a step"]
    if first is not None and not first.fits and first.setting != best.setting:
        rows = "fp32" if request.rows == "fp32" else request.rows
        need, memory, has = shortage(first)
        words.append(
            f"{rows} tables in {first.setting.name} alone would need {format_bytes(need)} of "
            f"{memory} on rank {first.fullest.rank}, which has {format_bytes(has)}"
        )
    if uses_cache(best.shards) and best.setting.load_factor is not None:
        words.append(f"its caches hold {best.setting.load_factor:.0%} of their tables' rows")
    return "; ".join(words)


def _why_not(best: Solution) -> str:
    need, memory, has = shortage(best)
    return (
        f"no plan fits; the nearest, {best.setting.name}, needs {format_bytes(need)} of {memory} "
        f"on rank {best.fullest.rank}, which has {format_bytes(has)}"
    )


def shortage(solution: Solution) -> tuple[int, str, int]:
    """Return what the fullest rank needs, of which memory, and what it has."""
    topology, use = solution.topology, solution.fullest.use
    host = use.host.total / topology.host_bytes
    if topology.hbm_bytes and use.hbm.total / topology.hbm_bytes >= host:
        return use.hbm.total, "device memory", topology.hbm_bytes
    return use.host.total, "host memory", topology.host_bytes
