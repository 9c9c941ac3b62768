"""The A/B plan: how much to time, and when timing is good enough."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rankopt.errors import Problem, UsageError
from rankopt.problems import problems_of_validation
from rankopt.units import NS_PER_MS, NS_PER_S


class BenchPlan(BaseModel):
    """How arms are timed: blocks in turns, until the intervals are narrow enough.

    Example:
        ```yaml
        batch_sizes: [1, 64, 512]
        min_blocks: 12
        max_blocks: 40
        target_relative_width: 0.04
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_sizes: tuple[int, ...] = Field(default=(1, 64, 512), min_length=1)
    num_threads: int | None = Field(default=None, gt=0)
    """Threads of every arm that names none of its own; None: all physical cores this process may
    use."""
    num_interop_threads: int = Field(default=1, gt=0)
    omp_wait_policy: Literal["passive", "active"] | None = None
    """OpenMP's wait policy, the same in all arms; None leaves the library's default, which is what
    the models are served with."""
    min_blocks: int = Field(default=12, ge=4)
    """Blocks of every arm and batch size before timing may stop; even, so that orders mirror."""
    max_blocks: int = Field(default=40, ge=4)
    calls_per_block: int = Field(default=10, gt=0)
    """At least so many timed calls in a block."""
    block_duration_ns: int = Field(default=100 * NS_PER_MS, gt=0)
    """The fastest arm's blocks are made to last about this long."""
    max_block_duration_ns: int = Field(default=1 * NS_PER_S, gt=0)
    """The slowest arm's blocks are kept under it, as long as `calls_per_block` allows."""
    min_num_samples: int = Field(default=200, gt=0)
    """Timed calls of every arm at every batch size before timing may stop."""
    target_relative_width: float = Field(default=0.06, gt=0)
    """Timing stops once every speedup's half interval is below this share of the speedup. What
    differs between any two processes already accounts for 0.04 of it (`stats.PROCESS_SD`)."""
    max_duration_ns: int | None = Field(default=None, gt=0)
    """Blocks after `min_blocks` stop once a batch size has taken this long; None sets no limit."""
    warm_up_calls: int = Field(default=10, gt=0)
    warm_up_duration_ns: int = Field(default=300 * NS_PER_MS, ge=0)
    """Warm-up lasts at least this long and at least `warm_up_calls`."""
    lead_in_duration_ns: int = Field(default=20 * NS_PER_MS, ge=0)
    """Untimed calls at the head of every block: they refill the caches that the other arm took,
    and outlast the moment in which the other arm's threads still spin."""
    idle_cpu_limit: float = Field(default=0.01, gt=0)
    """Largest CPU time of an idle arm during a block, as a share of the block's wall time."""
    max_block_reruns: int = Field(default=3, ge=0)
    """Further tries for a block that an idle arm disturbed."""
    max_worker_restarts: int = Field(default=3, ge=0)
    """Dead workers replaced in one run, all arms together."""
    call_timeout_s: float = Field(default=1800.0, gt=0)
    """A worker that answers nothing for so long counts as dead."""
    quality_batch_size: int = Field(default=512, gt=0)
    """Rows of one call when predictions are made for the quality comparison."""
    seed: int = Field(default=0, ge=0)
    control: Literal["eager", "artifact"] = "eager"
    """What the control is when a card is given; an artifact folder is always an artifact."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> BenchPlan:
        found = []
        if bad := [size for size in self.batch_sizes if size < 1]:
            found.append(f"batch_sizes must be at least 1; got {bad}")
        if len(set(self.batch_sizes)) != len(self.batch_sizes):
            found.append(f"batch_sizes must differ; got {list(self.batch_sizes)}")
        if self.max_blocks < self.min_blocks:
            found.append(
                f"max_blocks must be at least min_blocks; got {self.max_blocks} < {self.min_blocks}"
            )
        if odd := [n for n in (self.min_blocks, self.max_blocks) if n % 2]:
            found.append(f"min_blocks and max_blocks must be even; got {odd}")
        if self.max_block_duration_ns < self.block_duration_ns:
            found.append("max_block_duration_ns must not be below block_duration_ns")
        if found:
            raise ValueError("; ".join(found))
        return self

    def at_least(self, rows: int) -> BenchPlan:
        """Return the plan with batch sizes below `rows` raised to it."""
        return self.model_copy(update={"batch_sizes": raised(self.batch_sizes, rows)})

    def num_calls(self, call_ns: Iterable[float]) -> int:
        """Choose the calls of a block, one number for all arms, so that all see the same rows.

        Args:
            call_ns: each arm's median warm-up call.
        """
        durations = list(call_ns)
        wanted = math.ceil(self.block_duration_ns / max(min(durations), 1))
        bearable = math.floor(self.max_block_duration_ns / max(*durations, 1))
        return max(self.calls_per_block, min(wanted, bearable))


def raised(batch_sizes: Iterable[int], least: int) -> tuple[int, ...]:
    """Raise batch sizes below `least` to it, each size once."""
    return tuple(dict.fromkeys(max(size, least) for size in batch_sizes))


def load_plan(path: str | Path) -> BenchPlan:
    """Read an A/B plan; a bare name is looked for in the `benchmarks` folder.

    Raises:
        UsageError: the file is missing, is not YAML, or breaks the schema; every problem is listed.
    """
    from rankopt.content import find, read_yaml

    file = find("benchmarks", path, error=UsageError)
    raw = read_yaml(file, UsageError)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise UsageError(problems=[Problem(str(file), "must be a mapping", type(raw).__name__)])
    try:
        return BenchPlan.model_validate(raw)
    except ValidationError as error:
        problems = problems_of_validation(str(file), error, BenchPlan)
        raise UsageError(problems=problems) from error


def physical_cores_available() -> int:
    """Count the physical cores this process may use: affinity, hyper-threads and quota applied."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not cpus:
        return os.cpu_count() or 1
    cores = {_core_of(cpu) for cpu in cpus}
    quota = _cgroup_quota()
    return max(1, min(len(cores), math.ceil(quota)) if quota else len(cores))


def _core_of(cpu: int) -> tuple[str, str]:
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (
            (folder / "physical_package_id").read_text().strip(),
            (folder / "core_id").read_text().strip(),
        )
    except OSError:
        return ("", str(cpu))


def _cgroup_quota() -> float | None:
    # A container limited to 2 CPUs of a 64-core host still sees 64 in its affinity.
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
