"""What a peer bench writes: one row per model, batch size and arm, and what follows from them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from rankopt.diagnose.schema import Bound, Part, PartRow, Timing
from rankopt.review.schema import MetricParity


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PeerRow(_Frozen):
    """One arm at one batch size of one model."""

    model: str
    batch_size: int
    arm: str
    p50_ns: float
    """In the typical block; two arms' ratio is that of the paired estimate."""
    p50_low_ns: float | None
    """95 % interval of the median of all calls, pooled."""
    p50_high_ns: float | None
    quality_ok: bool
    """The NE of every output is no worse than eager's by more than the margin, by its interval."""
    num_samples: int
    num_blocks: int
    setting: dict[str, Any]
    """Of the arm's settings the one that was fastest at this batch size."""


class Comparison(_Frozen):
    """rankopt against one arm at one batch size: that arm's p50 over rankopt's, 95 % interval."""

    model: str
    batch_size: int
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    reason: str | None = None
    """Why there is no ratio."""


class SummaryRow(Comparison):
    """rankopt against the fastest other arm whose quality holds."""

    best_peer: str | None


class GeometricMean(_Frozen):
    """Of a set of ratios."""

    against: str
    """`best_peer` or `eager`."""
    batch_size: int | None
    """None: all batch sizes."""
    ratio: float
    num_cells: int
    goal: float | None = None
    """What the suite asks of it; for all batch sizes together only."""


class TriedSetting(_Frozen):
    """One setting of one arm, and what became of it."""

    model: str
    arm: str
    setting: dict[str, Any]
    chosen_for: tuple[int, ...]
    """Batch sizes at which the counted run used it."""
    p50_ns: dict[int, float]
    """Batch size -> p50 of the search; empty where there was no choice."""
    quality: dict[str, MetricParity]
    """Output -> its NE beside eager's."""
    quality_ok: bool | None
    error: str | None = None


class NotRun(_Frozen):
    """An arm without a result for a model."""

    model: str
    arm: str
    error: str


class TimeBreakdown(_Frozen):
    """Where the time of one call of rankopt's arm goes, timed after the arms and without them.

    Attributes:
        whole: one call in the process that looked into it; its own time, not that of `rows`.
        parts: largest first; with `unexplained_share` they make the whole.
        setting: of the arm, at this batch size.
    """

    model: str
    batch_size: int
    setting: dict[str, Any]
    whole: Timing
    parts: tuple[PartRow, ...]
    unexplained_share: float
    notes: tuple[str, ...]


class ModelPeaks(_Frozen):
    """What the machine could do when a model was looked into: bytes or operations a second."""

    model: str
    isa: str
    num_threads: int
    int8_per_s: float
    fp32_per_s: float
    bf16_per_s: float | None
    read_bytes_per_s: dict[int, float]
    """Size of the buffer that is read in order -> rate."""


class NotBrokenDown(_Frozen):
    """A model's batch sizes whose time could not be looked into."""

    model: str
    batch_sizes: tuple[int, ...]
    error: str


class MissedGoal(Comparison):
    """A cell that misses what the suite asks, and what bounds rankopt there.

    Attributes:
        against: `best_peer` or `eager`.
        peer: the arm that rankopt is compared with.
        wanted: of `ci_low` and `geometric_mean`, those that are missed.
        bound: what most of the call's time is nearest to; None where it was not looked into.
        bound_share: that time's share of the call.
        largest_of_limit: how much of the largest part's time its nearest limit explains.
    """

    against: str
    peer: str
    wanted: dict[str, float]
    bound: Bound | None = None
    bound_share: float | None = None
    largest_part: Part | None = None
    largest_share: float | None = None
    largest_of_limit: float | None = None


class ModelResult(_Frozen):
    """Everything measured on one model."""

    model: str
    rows: tuple[PeerRow, ...]
    summary: tuple[SummaryRow, ...]
    against_eager: tuple[Comparison, ...]
    not_run: tuple[NotRun, ...]
    settings: tuple[TriedSetting, ...]
    notes: tuple[str, ...]
    measured_at: str
    time_breakdown: tuple[TimeBreakdown, ...] = ()
    peaks: ModelPeaks | None = None
    not_broken_down: tuple[NotBrokenDown, ...] = ()


class PeerResult(_Frozen):
    """The whole file."""

    made_at: str
    environment: dict[str, Any]
    command: str
    suite: dict[str, Any]
    rows: tuple[PeerRow, ...]
    summary: tuple[SummaryRow, ...]
    against_eager: tuple[Comparison, ...]
    geometric_means: tuple[GeometricMean, ...]
    not_run: tuple[NotRun, ...]
    settings: tuple[TriedSetting, ...]
    notes: tuple[str, ...]
    time_breakdown: tuple[TimeBreakdown, ...] = ()
    """One for each model and batch size that rankopt ran."""
    peaks: tuple[ModelPeaks, ...] = ()
    not_broken_down: tuple[NotBrokenDown, ...] = ()
    missed_goals: tuple[MissedGoal, ...] = ()
