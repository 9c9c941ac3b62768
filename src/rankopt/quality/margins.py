"""Judge a metric's change against its margin: pass, fail, or how many rows would decide.

Shapes: N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rankopt.quality.bootstrap import MIN_CLUSTERS, Codes, influence_interval
from rankopt.quality.metrics import Array
from rankopt.quality.registry import Metric
from rankopt.review.schema import MetricParity, Verdict

FEW_CLUSTERS = 10
"""Below this many clusters a report says so, and a change without any spread decides nothing."""

MAX_ROWS_FACTOR = 1000
"""A verdict that would need more than this many times the rows is called undecidable."""


@dataclass(frozen=True)
class PairedChange:
    """A metric in both arms, its change and the two-sided 95 % interval of the change.

    The interval is None, with a reason, where the rows cannot give one. Its width falls as the
    number of rows to the power of -1 / `rate`: 2 for a mean, 1 for a bound on something never seen.
    """

    control: float
    candidate: float
    delta: float
    interval: tuple[float, float] | None
    reason: str | None = None
    rate: float = 2.0


@dataclass(frozen=True)
class Limits:
    """The changes a metric may make: harmless inside `keep`, harmful outside `lose`.

    They differ only for a metric with a target, where they are the narrowest and the widest
    reading of how far the control itself is off.
    """

    keep: tuple[float, float]
    lose: tuple[float, float]


def limits_of(
    metric: Metric,
    control_N: Array,
    labels_N: Array,
    clusters_N: Codes | None,
    change: PairedChange,
    margin: float,
) -> Limits:
    """Work out what a margin allows; see `compare_quality` for a metric with a target."""
    if metric.target is None:
        bounds = (-margin, math.inf) if metric.direction == "higher" else (-math.inf, margin)
        return Limits(bounds, bounds)
    off_low = off_high = change.control - metric.target
    if metric.influence is not None and num_clusters_of(len(labels_N), clusters_N) >= MIN_CLUSTERS:
        psi_N = metric.influence(control_N, labels_N, clusters_N)
        off_low, off_high = influence_interval(off_low, psi_N, clusters_N)
    # With the control off by e, |e + delta| <= |e| + margin is a range of delta: from -margin - 2e
    # (e > 0) or -margin, to margin or margin - 2e (e < 0). e lies in [off_low, off_high].
    return Limits(
        keep=(-margin - 2 * max(off_low, 0.0), margin + 2 * max(-off_high, 0.0)),
        lose=(-margin - 2 * max(off_high, 0.0), margin + 2 * max(-off_low, 0.0)),
    )


def judge_change(
    metric: Metric,
    change: PairedChange,
    limits: Limits,
    margin: float,
    clusters_N: Codes | None,
    num_rows: int,
) -> MetricParity:
    """Lay out a change with its verdict and, where it does not pass, the reason."""
    verdict: Verdict = "inconclusive"
    reason = change.reason
    rows_to_decide = None
    if change.interval is not None:
        verdict = _verdict(change.interval, limits)
        if verdict == "inconclusive":
            rows_to_decide = _rows_to_decide(change, limits, num_rows)
        reason = _reason(metric, change, verdict, margin, rows_to_decide)
    num_clusters = num_clusters_of(num_rows, clusters_N)
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


def _verdict(interval: tuple[float, float], limits: Limits) -> Verdict:
    low, high = interval
    if limits.keep[0] <= low and high <= limits.keep[1]:
        return "pass"
    if high < limits.lose[0] or low > limits.lose[1]:
        return "fail"
    return "inconclusive"


def _direction(metric: Metric, change: PairedChange, limits: Limits) -> Literal["higher", "lower"]:
    """Name the side that was judged: the one whose limit was passed, else away from the target."""
    if metric.target is None:
        return metric.direction
    if change.interval is not None and _verdict(change.interval, limits) != "pass":
        above = change.interval[1] - limits.keep[1]
        below = limits.keep[0] - change.interval[0]
        return "lower" if above >= below else "higher"
    return "lower" if change.control >= metric.target else "higher"


def _rows_to_decide(change: PairedChange, limits: Limits, num_rows: int) -> int | None:
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
            _rows_factor(change, change.delta - low, change.delta - keep_low),
            _rows_factor(change, high - change.delta, keep_high - change.delta),
        ]
    elif change.delta > keep_high:
        factors = [_rows_factor(change, change.delta - low, change.delta - keep_high)]
    else:
        factors = [_rows_factor(change, high - change.delta, keep_low - change.delta)]
    factor = max(factors)
    if factor > MAX_ROWS_FACTOR:
        return None
    # Two digits: it is an extrapolation, and must not look like more.
    rows = max(factor, 1.0) * num_rows
    digit = 10 ** max(math.floor(math.log10(rows)) - 1, 0)
    return max(int(math.ceil(rows / digit) * digit), num_rows + 1)


def _rows_factor(change: PairedChange, half_width: float, distance: float) -> float:
    if half_width == 0:
        return 0.0
    return (half_width / distance) ** change.rate if distance > 0 else math.inf


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
        return f"{text}; more than {MAX_ROWS_FACTOR:,} times these rows would be needed"
    return f"{text}; about {rows_to_decide:,} rows would decide it"


def _amount(metric: Metric, value: float) -> str:
    return f"{value * 100:+.3g} %" if metric.delta == "relative" else f"{value:+.3g}"


def num_clusters_of(num_rows: int, clusters_N: Codes | None) -> int:
    """Count clusters; without any each row is its own."""
    return num_rows if clusters_N is None else len(np.unique(clusters_N))
