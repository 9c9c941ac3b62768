"""Where a training step goes: the phases, and what a run found of each, as frozen values.

Nanoseconds and bytes; None means that it was not measured, and a note says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rankopt.units import format_bytes, format_duration

Phase = Literal[
    "data_wait",
    "host_to_device",
    "input_distribution",
    "lookup",
    "forward",
    "backward",
    "optimizer_dense",
    "optimizer_tables",
    "optimizer_both",
    "communication",
    "checkpoint",
    "other",
]

TITLES: Mapping[Phase, str] = {
    "data_wait": "data wait",
    "host_to_device": "host to device",
    "input_distribution": "input distribution",
    "lookup": "lookup",
    "forward": "dense forward",
    "backward": "backward",
    "optimizer_dense": "optimizer, dense",
    "optimizer_tables": "optimizer, tables",
    "optimizer_both": "optimizer, dense and tables in one",
    "communication": "exposed communication",
    "checkpoint": "checkpoint",
    "other": "other",
}
"""Phase -> its name for people, in the order of a step."""

PHASES: tuple[Phase, ...] = tuple(TITLES)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PhaseRow(_Frozen):
    """The mean of one phase; the rows of a breakdown add up to its `wall_ns`."""

    phase: Phase
    mean_ns: float
    share: float


class DenseUse(_Frozen):
    """The matrix products of the dense part against the machine's peak.

    Attributes:
        flops: of one batch, forward and backward; a multiply and an add are two. What activation
            checkpointing computes again is no useful work and stands apart.
        recomputed_flops: that part.
        time_ns: of forward and backward, lookups and exposed communication left out.
        peak_per_s: of fp32, or of bf16 under autocast, all threads of the run.
        mfu: model FLOPs utilisation, `flops_per_s` over `peak_per_s`.
        reason: why something is None.
    """

    flops: int | None = None
    recomputed_flops: int | None = None
    num_rows: int | None = None
    time_ns: float | None = None
    flops_per_s: float | None = None
    peak: Literal["fp32", "bf16"] = "fp32"
    peak_per_s: float | None = None
    mfu: float | None = None
    reason: str | None = None


class SparseUse(_Frozen):
    """The bytes that lookups and table updates must move against the memory's rate.

    Attributes:
        lookup_bytes: of one batch: ids, offsets and weights of ids, a row per id, the result.
        update_bytes: of one batch: ids and the gradient of each result, and per distinct id its
            row and its optimizer state, read and written.
        lookup_ns: time of the lookups.
        update_ns: time of the tables' optimizer.
        bytes_per_s: of what was both counted and timed.
        peak_per_s: reading in order from memory, all threads, out of the smallest buffer measured
            that holds the tables and their state.
        utilization: `bytes_per_s` over `peak_per_s`; above 1 where ids repeat and rows stay in the
            cache.
        reason: why something is None.
    """

    lookup_bytes: int | None = None
    update_bytes: int | None = None
    num_ids: int | None = None
    num_distinct_ids: int | None = None
    lookup_ns: float | None = None
    update_ns: float | None = None
    bytes_per_s: float | None = None
    peak_per_s: float | None = None
    utilization: float | None = None
    reason: str | None = None


class StepBreakdown(_Frozen):
    """Where the time of a run's steps goes: `steps.breakdown` of metrics.json.

    Attributes:
        num_sampled: steps that were watched; waits and checkpoints are of all steps.
        wall_ns: mean time of a step with its wait and its share of checkpoints; None where no step
            was watched.
        phases: what it consists of, in the order of a step; `other` is the rest.
        measured_with: `profiler` where collectives had to be told from what hides them.
        sampled_p50_ns: median of the watched steps, without wait.
        plain_p50_ns: of the others, to be held against it.
        trace: the name of the Chrome trace beside metrics.json.
    """

    num_sampled: int
    rank: int = 0
    world_size: int = 1
    wall_ns: float | None = None
    phases: tuple[PhaseRow, ...] = ()
    measured_with: Literal["clock", "profiler"] = "clock"
    sampled_p50_ns: float | None = None
    plain_p50_ns: float | None = None
    dense: DenseUse = DenseUse()
    sparse: SparseUse = SparseUse()
    trace: str | None = None
    notes: tuple[str, ...] = ()

    def mean_ns(self, phase: Phase) -> float:
        """Return the mean of one phase; 0 where it did not occur."""
        return sum(row.mean_ns for row in self.phases if row.phase == phase)


def typical(breakdowns: Sequence[StepBreakdown]) -> StepBreakdown | None:
    """Return the one whose step is the median: its phases belong to one run and add up."""
    known = [item for item in breakdowns if item.wall_ns is not None]
    known.sort(key=lambda item: item.wall_ns or 0.0)
    return known[(len(known) - 1) // 2] if known else None


def breakdown_of(metrics: Mapping[str, Any]) -> StepBreakdown | None:
    """Read the breakdown in a run's metrics; None where an earlier version wrote them."""
    raw = metrics["steps"].get("breakdown")
    return None if raw is None else StepBreakdown.model_validate(raw)


def breakdown_lines(found: StepBreakdown) -> list[str]:
    """Write a breakdown as a small table for a terminal."""
    if found.wall_ns is None:
        return [f"where a step goes: {'; '.join(found.notes) or 'not measured'}"]
    lines = [
        f"where {format_duration(found.wall_ns)} of a step go "
        f"({found.num_sampled:,} steps watched):"
    ]
    shown = [row for row in found.phases if row.mean_ns]
    width = max((len(TITLES[row.phase]) for row in shown), default=0)
    lines += [
        f"  {TITLES[row.phase]:<{width}}  {format_duration(row.mean_ns):>8}  {row.share:>6.1%}"
        for row in shown
    ]
    return [*lines, f"  {dense_text(found.dense)}", f"  {sparse_text(found.sparse)}"]


def dense_text(use: DenseUse) -> str:
    """Say how fast the dense part computes."""
    if use.flops_per_s is None:
        return f"dense: {use.reason}"
    speed = f"dense: {use.flops_per_s / 1e9:.3g} GFLOP/s"
    if use.mfu is None or use.peak_per_s is None:
        return f"{speed} ({use.reason})"
    return f"{speed}, {use.mfu:.0%} of the {use.peak} peak of {use.peak_per_s / 1e9:.3g}"


def sparse_text(use: SparseUse) -> str:
    """Say how fast lookups and updates move their bytes."""
    if use.bytes_per_s is None:
        return f"tables: {use.reason}"
    what = "lookups and updates" if use.update_ns and use.update_bytes else "lookups"
    speed = f"tables: {what} at {format_bytes(use.bytes_per_s)}/s"
    if use.utilization is None or use.peak_per_s is None:
        return f"{speed} ({use.reason})"
    return f"{speed}, {use.utilization:.0%} of {format_bytes(use.peak_per_s)}/s of memory"
