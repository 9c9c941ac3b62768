"""Paired quality of two arms on the same rows: changes, intervals, and non-inferiority.

Both arms saw the same rows, so what matters is the spread of their difference, which is far smaller
than that of either arm. Intervals come from the difference of the arms' influence functions, summed
by cluster (see `influence_interval`); for the AUC without clusters that is DeLong's paired test.

Shapes: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rankopt.errors import Problem, UsageError, nearest
from rankopt.quality.bootstrap import (
    MIN_CLUSTERS,
    Codes,
    bootstrap_interval,
    influence_interval,
)
from rankopt.quality.metrics import METRICS, Array, Metric
from rankopt.quality.rows import check_rows, float_rows
from rankopt.review.schema import MetricParity, Verdict

FEW_CLUSTERS = 10
"""Below this many clusters a report says so, and a change without any spread decides nothing."""

MAX_ROWS_FACTOR = 1000
"""A verdict that would need more than this many times the rows is called undecidable."""


@dataclass(frozen=True)
class PairedChange:
    """A metric in both arms, its change and the two-sided 95 % interval of the change.

    The interval is None, with a reason, where the rows cannot give one.
    """

    control: float
    candidate: float
    delta: float
    interval: tuple[float, float] | None
    reason: str | None = None


@dataclass(frozen=True)
class _Limits:
    """The changes a metric may make: harmless inside `keep`, harmful outside `lose`.

    They differ only for a metric with a target, where they are the narrowest and the widest
    reading of how far the control itself is off.
    """

    keep: tuple[float, float]
    lose: tuple[float, float]


def compare_quality(
    control: ArrayLike,
    candidate: ArrayLike,
    labels: ArrayLike,
    *,
    clusters: NDArray[np.integer] | None = None,
    margins: Mapping[str, float] | None = None,
    seed: int = 0,
) -> dict[str, MetricParity]:
    """Compare two arms on every registered metric, by non-inferiority against a margin.

    A metric passes when the harmful end of its interval is within the margin, fails when the whole
    interval is beyond it, and is otherwise inconclusive, with the number of rows that would decide.
    A metric that got better passes or is inconclusive, never fails.

    Calibration can be missed on either side of 1. A change harms when it takes the candidate
    further from 1 than the control was, by more than the margin; a control that over-predicts
    beyond its own 95 % interval gives the candidate that much room downwards, and one whose side of
    1 is not known gives none. Its `direction` names the side that was judged: `lower` where a rise
    harms, `higher` where a fall does.

    Args:
        control: probabilities [N] of the control.
        candidate: probabilities [N] of the candidate, same rows.
        labels: 0 or 1 [N].
        clusters: the request or user of each row, as integers [N]; None judges by row.
        margins: metric name -> allowed harm, positive, in the unit of delta; a metric that is not
            named keeps the margin in `METRICS`.
        seed: of the bootstrap, used only for a metric without an influence function.

    Returns:
        Metric name -> result, in the order of `METRICS`.

    Raises:
        DataError: lengths differ, labels are not 0/1 or of one class, the control predicts a value
            that is not finite, or an arm predicts outside [0, 1].
        UsageError: a margin names no metric or is not positive.
    """
    allowed = _checked_margins(margins or {})
    control_N, candidate_N = float_rows(control), float_rows(candidate)
    labels_N = float_rows(labels)
    codes_N = None if clusters is None else np.asarray(clusters).astype(np.int64)
    check_rows(control_N, candidate_N, labels_N, codes_N)
    broken = int((~np.isfinite(candidate_N)).sum())
    result = {}
    for name, metric in METRICS.items():
        if broken:
            result[name] = _broken_arm(metric, control_N, labels_N, codes_N, allowed[name], broken)
            continue
        change = paired_change(metric, control_N, candidate_N, labels_N, codes_N, seed=seed)
        limits = _limits(metric, control_N, labels_N, codes_N, change, allowed[name])
        result[name] = _judge(metric, change, limits, allowed[name], codes_N, len(labels_N))
    return result


def paired_change(
    metric: Metric,
    control_N: Array,
    candidate_N: Array,
    labels_N: Array,
    clusters_N: Codes | None = None,
    *,
    seed: int = 0,
) -> PairedChange:
    """Estimate a metric's change between two arms and its two-sided 95 % interval.

    A relative change is the ratio of two means, linearised: psi = (psi_candidate - ratio *
    psi_control) / control (Cochran, 1977, "Sampling techniques", ch. 6). Arms that predict the same
    have a change of exactly zero with the interval [0, 0].
    """
    control = metric.compute(control_N, labels_N)
    candidate = metric.compute(candidate_N, labels_N)
    delta = metric.change(control, candidate)
    if np.array_equal(control_N, candidate_N):
        return PairedChange(control, candidate, 0.0, (0.0, 0.0))
    num_clusters = _num_clusters(len(labels_N), clusters_N)
    if num_clusters < MIN_CLUSTERS:
        reason = f"all {len(labels_N)} rows are of one cluster, so there is no spread to judge by"
        return PairedChange(control, candidate, delta, None, reason)
    rarer = int(min(labels_N.sum(), len(labels_N) - labels_N.sum()))
    if rarer < 2:
        reason = "one class has a single row, so there is no spread to judge by"
        return PairedChange(control, candidate, delta, None, reason)
    interval = _interval(metric, control_N, candidate_N, labels_N, clusters_N, delta, seed)
    if interval is None:
        reason = "the metric is undefined in many resamples of these rows"
        return PairedChange(control, candidate, delta, None, reason)
    if interval[0] == interval[1] != 0 and num_clusters < FEW_CLUSTERS:
        reason = f"the change has no spread over only {num_clusters} clusters"
        return PairedChange(control, candidate, delta, None, reason)
    return PairedChange(control, candidate, delta, interval)


def _interval(
    metric: Metric,
    control_N: Array,
    candidate_N: Array,
    labels_N: Array,
    clusters_N: Codes | None,
    delta: float,
    seed: int,
) -> tuple[float, float] | None:
    if metric.influence is None:

        def change_on(rows: NDArray[np.intp]) -> float:
            labels = labels_N[rows]
            control = metric.compute(control_N[rows], labels)
            return metric.change(control, metric.compute(candidate_N[rows], labels))

        return bootstrap_interval(change_on, len(labels_N), clusters_N, seed=seed)
    before_N = metric.influence(control_N, labels_N)
    after_N = metric.influence(candidate_N, labels_N)
    if metric.delta == "relative":
        psi_N = (after_N - (1 + delta) * before_N) / metric.compute(control_N, labels_N)
    else:
        psi_N = after_N - before_N
    return influence_interval(delta, psi_N, clusters_N)


def _limits(
    metric: Metric,
    control_N: Array,
    labels_N: Array,
    clusters_N: Codes | None,
    change: PairedChange,
    margin: float,
) -> _Limits:
    if metric.target is None:
        bounds = (-margin, math.inf) if metric.direction == "higher" else (-math.inf, margin)
        return _Limits(bounds, bounds)
    off_low = off_high = change.control - metric.target
    if metric.influence is not None and _num_clusters(len(labels_N), clusters_N) >= MIN_CLUSTERS:
        psi_N = metric.influence(control_N, labels_N)
        off_low, off_high = influence_interval(off_low, psi_N, clusters_N)
    # With the control off by e, |e + delta| <= |e| + margin is a range of delta: from -margin - 2e
    # (e > 0) or -margin, to margin or margin - 2e (e < 0). e lies in [off_low, off_high].
    return _Limits(
        keep=(-margin - 2 * max(off_low, 0.0), margin + 2 * max(-off_high, 0.0)),
        lose=(-margin - 2 * max(off_high, 0.0), margin + 2 * max(-off_low, 0.0)),
    )


def _judge(
    metric: Metric,
    change: PairedChange,
    limits: _Limits,
    margin: float,
    clusters_N: Codes | None,
    num_rows: int,
) -> MetricParity:
    verdict: Verdict = "inconclusive"
    reason = change.reason
    rows_to_decide = None
    if change.interval is not None:
        verdict = _verdict(change.interval, limits)
        if verdict == "inconclusive":
            rows_to_decide = _rows_to_decide(change, limits, num_rows)
        reason = _reason(metric, change, verdict, margin, rows_to_decide)
    num_clusters = _num_clusters(num_rows, clusters_N)
    if change.interval is not None and num_clusters < FEW_CLUSTERS and verdict != "pass":
        reason = f"{reason}; only {num_clusters} clusters, so the interval is wide"
    return MetricParity(
        control=change.control,
        candidate=change.candidate,
        delta=change.delta,
        ci_low=change.interval[0] if change.interval else None,
        ci_high=change.interval[1] if change.interval else None,
        margin=margin,
        direction=_direction(metric, change, limits),
        num_rows=num_rows,
        num_clusters=num_clusters,
        verdict=verdict,
        reason=reason,
        rows_to_decide=rows_to_decide,
    )


def _verdict(interval: tuple[float, float], limits: _Limits) -> Verdict:
    low, high = interval
    if limits.keep[0] <= low and high <= limits.keep[1]:
        return "pass"
    if high < limits.lose[0] or low > limits.lose[1]:
        return "fail"
    return "inconclusive"


def _direction(metric: Metric, change: PairedChange, limits: _Limits) -> Literal["higher", "lower"]:
    """Name the side that was judged: the one whose limit was passed, else away from the target."""
    if metric.target is None:
        return metric.direction
    if change.interval is not None and _verdict(change.interval, limits) != "pass":
        above = change.interval[1] - limits.keep[1]
        below = limits.keep[0] - change.interval[0]
        return "lower" if above >= below else "higher"
    return "lower" if change.control >= metric.target else "higher"


def _rows_to_decide(change: PairedChange, limits: _Limits, num_rows: int) -> int | None:
    """Say how many rows would bring the interval to one side of the margin.

    Half-widths shrink as 1 / sqrt(rows) at the same rows per cluster. None where the change sits
    so near the margin that no sample of a usable size would do.
    """
    if change.interval is None:
        return None
    low, high = change.interval
    keep_low, keep_high = limits.keep
    if keep_low <= change.delta <= keep_high:
        # Heading for a pass: each end must come inside its limit.
        factors = [
            _rows_factor(change.delta - low, change.delta - keep_low),
            _rows_factor(high - change.delta, keep_high - change.delta),
        ]
    elif change.delta > keep_high:
        factors = [_rows_factor(change.delta - low, change.delta - keep_high)]
    else:
        factors = [_rows_factor(high - change.delta, keep_low - change.delta)]
    factor = max(factors)
    if factor > MAX_ROWS_FACTOR:
        return None
    # Two digits: it is an extrapolation, and must not look like more.
    rows = max(factor, 1.0) * num_rows
    digit = 10 ** max(math.floor(math.log10(rows)) - 1, 0)
    return max(int(math.ceil(rows / digit) * digit), num_rows + 1)


def _rows_factor(half_width: float, distance: float) -> float:
    if half_width == 0:
        return 0.0
    return (half_width / distance) ** 2 if distance > 0 else math.inf


def _reason(
    metric: Metric,
    change: PairedChange,
    verdict: Verdict,
    margin: float,
    rows_to_decide: int | None,
) -> str | None:
    if verdict == "pass" or change.interval is None:
        return None
    low, high = change.interval
    text = (
        f"{metric.title} changed by {_amount(metric, change.delta)} (95 % interval "
        f"{_amount(metric, low)} to {_amount(metric, high)})"
    )
    allowed = _amount(metric, margin).lstrip("+")
    if verdict == "fail":
        return f"{text}, beyond the margin of {allowed}"
    text = f"{text}, which does not settle the margin of {allowed}"
    if rows_to_decide is None:
        return f"{text}; the change sits at the margin, so more rows would hardly decide it"
    return f"{text}; about {rows_to_decide:,} rows would decide it"


def _amount(metric: Metric, value: float) -> str:
    return f"{value * 100:+.3g} %" if metric.delta == "relative" else f"{value:+.3g}"


def _broken_arm(
    metric: Metric,
    control_N: Array,
    labels_N: Array,
    clusters_N: Codes | None,
    margin: float,
    broken: int,
) -> MetricParity:
    """Fail a metric of an arm that predicted NaN or inf: dropping such rows would hide them."""
    num_rows = len(labels_N)
    return MetricParity(
        control=metric.compute(control_N, labels_N),
        candidate=None,
        delta=None,
        ci_low=None,
        ci_high=None,
        margin=margin,
        direction=metric.direction,
        num_rows=num_rows,
        num_clusters=_num_clusters(num_rows, clusters_N),
        verdict="fail",
        reason=(
            f"the candidate predicted NaN or inf for {broken:,} of {num_rows:,} rows, where the "
            "control predicted numbers"
        ),
    )


def _num_clusters(num_rows: int, clusters_N: Codes | None) -> int:
    return num_rows if clusters_N is None else len(np.unique(clusters_N))


def _checked_margins(margins: Mapping[str, float]) -> dict[str, float]:
    problems = []
    for name, margin in margins.items():
        if name not in METRICS:
            hint = nearest(name, METRICS)
            problems.append(Problem(f"margins.{name}", "is not a known metric", hint=hint))
        elif not (math.isfinite(margin) and margin > 0):
            problems.append(Problem(f"margins.{name}", "must be a positive number", margin))
    if problems:
        raise UsageError(problems=problems)
    return {name: float(margins.get(name, metric.margin)) for name, metric in METRICS.items()}
