"""report.json: what an A/B found, as frozen values.

Field names are a contract with people's scripts. Units stand in the names; None means that it was
not measured, and a reason stands beside it.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rankopt.train.breakdown.phases import StepBreakdown

Verdict = Literal["pass", "fail", "inconclusive"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _not_finite_is_missing(cls, value: Any) -> Any:
        # JSON has no NaN, and a NaN compares as neither within nor beyond a limit: as None it is
        # what it means, not measured, and no gate can pass on it.
        if isinstance(value, int):  # it may be too large for a float
            return value
        return None if isinstance(value, Real) and not math.isfinite(value) else value


class MetricParity(_Frozen):
    """One quality metric on the same rows of both arms.

    `delta` is candidate / control - 1 for NE and log loss, candidate - control for the rest; the
    interval is the two-sided 95 % one of `delta`; `margin` is positive and in the same unit.
    """

    control: float | None
    candidate: float | None
    delta: float | None
    ci_low: float | None
    ci_high: float | None
    margin: float | None
    direction: Literal["higher", "lower"]
    num_rows: int
    num_clusters: int
    """A metric of groups counts the groups that have a value, and their rows."""
    verdict: Verdict
    reason: str | None = None
    rows_to_decide: int | None = None
    """About how many rows, counted as in `num_rows`, would settle an inconclusive metric."""


class PredictionChange(_Frozen):
    """How far single predictions (probabilities) moved between the arms."""

    max_abs: float | None
    mean_abs: float | None


class LatencyRow(_Frozen):
    """Paired latency at one batch size; speedup = control p50 / candidate p50, 95 % interval."""

    batch_size: int
    control_p50_ns: float
    candidate_p50_ns: float
    control_p99_ns: float | None
    candidate_p99_ns: float | None
    speedup: float | None
    ci_low: float | None
    ci_high: float | None
    num_samples: int
    """Timed calls of each arm."""
    num_blocks: int
    verdict: Verdict | None = None
    """None when no gate asks about this batch size."""
    control_p50_low_ns: float | None = None
    control_p50_high_ns: float | None = None
    candidate_p50_low_ns: float | None = None
    candidate_p50_high_ns: float | None = None
    candidate_p99_low_ns: float | None = None
    candidate_p99_high_ns: float | None = None
    """95 % intervals of each arm's own percentile; a p99 limit is judged by its interval."""


class BaselineRow(_Frozen):
    """The candidate against a further arm of the same interleaved run."""

    arm: str
    batch_size: int
    arm_p50_ns: float
    candidate_p50_ns: float
    speedup: float | None
    ci_low: float | None
    ci_high: float | None
    num_samples: int
    verdict: Verdict | None = None


class Size(_Frozen):
    """Bytes of every stored copy of parameters and tables; compiled code apart."""

    control_bytes: int | None
    candidate_bytes: int | None
    control_code_bytes: int | None
    candidate_code_bytes: int | None
    candidate_resident_bytes: int | None = None


class Cost(_Frozen):
    """Closed-loop cost at the plan's batch size; null with a reason where not measured."""

    price_per_hour: float | None = None
    slo_p99_ns: float | None = None
    control_usd_per_million: float | None = None
    candidate_usd_per_million: float | None = None
    batch_size: int | None = None
    load_model: Literal["closed-loop", "open-loop"] = "closed-loop"
    reason: str | None = None
    """Why a figure is null."""
    control_qps: float | None = None
    candidate_qps: float | None = None
    """Predictions a second, from which the dollars follow."""
    candidate_usd_low: float | None = None
    candidate_usd_high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    """Candidate's cost over control's, with 95 % intervals; it needs no price."""
    num_blocks: int = 0


class MeasuredChoice(_Frozen):
    """What a pass chose for one layer by timing variants on the machine it ran on."""

    chosen: str
    ratios: dict[int, dict[str, float]] = Field(default_factory=dict)
    """Batch size -> variant -> its time over that of the chosen one."""


class PassRecord(_Frozen):
    """What the pipeline saw of one pass."""

    kind: str
    changed: bool
    kept: bool
    reason: str
    bytes_before: int | None = None
    bytes_after: int | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    batch_size: int | None = None
    duration_ns: int | None = None
    max_abs_drift: float | None = None
    """Largest change of an output against the graph before the pass, same rows."""
    details: tuple[str, ...] = ()
    """What was left alone and why, such as a table that would grow."""
    choices: dict[str, MeasuredChoice] = Field(default_factory=dict)
    """Layer -> what was chosen for it by timing, for passes that choose so."""


class CalibrationPoint(_Frozen):
    """Rows of one bin of predicted probability."""

    mean_predicted: float | None
    observed_rate: float | None
    num_rows: int


class GateResult(_Frozen):
    """What one gate of the recipe found."""

    gate: str
    """Where it stands in the recipe's gates, such as `latency[batch_size=512].min_speedup`."""
    verdict: Verdict
    reason: str


class TrainingCost(_Frozen):
    """What training by one arm cost: medians over its runs, of memory the largest."""

    samples_per_s: float
    step_p50_ns: float
    data_wait_share: float
    """Of steps and waits together; evaluations left out."""
    peak_memory_bytes: int
    num_rows_seen: list[int]
    """Of each run."""
    breakdown: StepBreakdown | None = None
    """Where a step goes, of the run whose step is the median."""


class Report(_Frozen):
    """One A/B, joined into one verdict.

    A draft carries verdict `inconclusive` and no reasons; `rankopt.review.judge` fills both.
    """

    verdict: Verdict = "inconclusive"
    reasons: list[str] = Field(default_factory=list)
    gates: list[GateResult] = Field(default_factory=list)
    quality: dict[str, MetricParity]
    latency: list[LatencyRow]
    baselines: list[BaselineRow] = Field(default_factory=list)
    size: Size
    cost: Cost
    passes: list[PassRecord]
    training: dict[str, TrainingCost] = Field(default_factory=dict)
    """Arm -> cost, where two ways of training were compared."""
    capture: tuple[str, ...] = ()
    """How the model became a graph: what was left eager, which branches were assumed, what was
    rewritten. Empty when it was exported as it is."""
    outputs: tuple[str, ...] = ()
    """Names of the card's outputs. With several, `quality` has `output.metric` for each."""
    prediction_change: dict[str, PredictionChange] = Field(default_factory=dict)
    calibration_curve: dict[str, dict[str, list[CalibrationPoint]]] = Field(default_factory=dict)
    """Output name -> arm -> bins."""
    scatter: dict[str, list[tuple[float, float]]] = Field(default_factory=dict)
    """Output name -> sampled (control, candidate) probabilities; pairs that are not finite are
    left out here, and show in `prediction_change`."""
    statistics_unit: str = "row"
    """`request_key` of the card, or `row` when it names none."""
    model: str
    recipe: str | None = None
    objective: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    """source, split, num_rows, positives."""
    environment: dict[str, Any]
    reproduce: str
    made_at: str

    @field_validator("scatter", mode="after")
    @classmethod
    def _finite_pairs(
        cls, value: dict[str, list[tuple[float, float]]]
    ) -> dict[str, list[tuple[float, float]]]:
        return {
            name: [pair for pair in pairs if all(map(math.isfinite, pair))]
            for name, pairs in value.items()
        }
