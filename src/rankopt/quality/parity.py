"""Paired quality of two arms on the same rows: changes, intervals, and non-inferiority.

Both arms saw the same rows, so what matters is the spread of their difference, which is far smaller
than that of either arm. Intervals come from the difference of the arms' influence functions, summed
by cluster (see `influence_interval`); for the AUC without clusters that is DeLong's paired test,
and for a metric of groups the paired comparison of the groups.

Shapes: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rankopt.errors import Problem, UsageError, nearest
from rankopt.quality.bootstrap import (
    CONFIDENCE,
    MIN_CLUSTERS,
    Codes,
    bootstrap_interval,
    influence_interval,
)
from rankopt.quality.grouped import same_order
from rankopt.quality.margins import (
    FEW_CLUSTERS,
    PairedChange,
    judge_change,
    limits_of,
    num_clusters_of,
)
from rankopt.quality.metrics import Array
from rankopt.quality.registry import KNOWN_NAMES, Metric, find_metric, metrics_to_show
from rankopt.quality.rows import check_rows, float_rows
from rankopt.review.schema import MetricParity, Verdict

NO_CHANGE = 1e-12
"""A change of a metric of groups below this is rounding."""


def compare_quality(
    control: ArrayLike,
    candidate: ArrayLike,
    labels: ArrayLike,
    *,
    clusters: NDArray[np.integer] | None = None,
    margins: Mapping[str, float] | None = None,
    seed: int = 0,
) -> dict[str, MetricParity]:
    """Compare two arms on one output, metric by metric, by non-inferiority against a margin.

    The metrics are those of single rows, with groups of several rows also GAUC, NDCG@10 and HR@10,
    and every other one that `margins` names. One that these rows leave undefined (labels of one
    class, no groups) has null figures with the reason, and is inconclusive.

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
        labels: 0 or 1 [N]; NaN where a row has no label of this output, as the conversion of a row
            that was not clicked. Such a row is not judged.
        clusters: the request or user of each row, as integers [N]; None judges by row.
        margins: metric name -> allowed harm, positive, in the unit of delta; a metric that is not
            named keeps its default.
        seed: of the bootstrap, used only for a metric without an influence function.

    Returns:
        Metric name -> result, metrics of rows before those of groups.

    Raises:
        DataError: lengths differ, there are no rows, labels are not 0/1, the control predicts a
            value that is not finite, or an arm predicts outside [0, 1].
        UsageError: a margin names no metric or is not positive.
    """
    given = _checked_margins(margins or {})
    control_N, candidate_N = float_rows(control), float_rows(candidate)
    labels_N = float_rows(labels)
    codes_N = None if clusters is None else np.asarray(clusters).astype(np.int64)
    check_rows(control_N, candidate_N, labels_N, codes_N)
    broken = _why_broken(candidate_N)
    rows = _Rows(control_N, candidate_N, labels_N, codes_N).where(~np.isnan(labels_N))
    return {
        metric.name: _compare(metric, rows, given.get(metric.name, metric.margin), broken, seed)
        for metric in metrics_to_show(rows.clusters, given)
    }


@dataclass(frozen=True)
class _Rows:
    """Both arms' predictions of the same rows, with their labels and groups."""

    control: Array
    candidate: Array
    labels: Array
    clusters: Codes | None

    def where(self, kept_N: NDArray[np.bool_]) -> _Rows:
        if kept_N.all():
            return self
        clusters_N = None if self.clusters is None else self.clusters[kept_N]
        return _Rows(self.control[kept_N], self.candidate[kept_N], self.labels[kept_N], clusters_N)

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    @property
    def num_clusters(self) -> int:
        return num_clusters_of(self.num_rows, self.clusters)


def _why_broken(candidate_N: Array) -> str | None:
    # Dropping the rows that were predicted NaN or inf would hide them.
    broken = int((~np.isfinite(candidate_N)).sum())
    if not broken:
        return None
    return (
        f"the candidate predicted NaN or inf for {broken:,} of {len(candidate_N):,} rows, where "
        "the control predicted numbers"
    )


def _compare(
    metric: Metric, rows: _Rows, margin: float, broken: str | None, seed: int
) -> MetricParity:
    undefined = metric.why_undefined(rows.labels, rows.clusters)
    if undefined is not None:
        return _without_figures(metric, rows, margin, "inconclusive", undefined)
    if metric.grouping is not None and rows.clusters is not None:
        rows = rows.where(metric.grouping.counted(rows.labels, rows.clusters))
    if broken is not None:
        control = metric.compute(rows.control, rows.labels, rows.clusters)
        return _without_figures(metric, rows, margin, "fail", broken, control)
    change = paired_change(
        metric, rows.control, rows.candidate, rows.labels, rows.clusters, seed=seed
    )
    limits = limits_of(metric, rows.control, rows.labels, rows.clusters, change, margin)
    return judge_change(metric, change, limits, margin, rows.clusters, rows.num_rows)


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
    have a change of exactly zero with the interval [0, 0], and so has a metric of groups where they
    order every group alike.
    """
    control = metric.compute(control_N, labels_N, clusters_N)
    candidate = metric.compute(candidate_N, labels_N, clusters_N)
    delta = metric.change(control, candidate)
    if _cannot_differ(metric, control_N, candidate_N, clusters_N):
        return PairedChange(control, candidate, 0.0, (0.0, 0.0))
    num_clusters = num_clusters_of(len(labels_N), clusters_N)
    if num_clusters < MIN_CLUSTERS:
        reason = f"all {len(labels_N)} rows are of one cluster, so there is no spread to judge by"
        return PairedChange(control, candidate, delta, None, reason)
    rarer = int(min(labels_N.sum(), len(labels_N) - labels_N.sum()))
    if rarer < 2:
        some = "a single row" if rarer else "no row"
        reason = f"one class has {some}, so there is no spread to judge by"
        return PairedChange(control, candidate, delta, None, reason)
    interval = _interval(metric, control_N, candidate_N, labels_N, clusters_N, delta, seed)
    if interval is None:
        reason = "the metric is undefined in many resamples of these rows"
        return PairedChange(control, candidate, delta, None, reason)
    if metric.grouping is not None and max(map(abs, interval)) < NO_CHANGE:
        # Groups were reordered and none of them moved the metric: that says how rare such a group
        # is at most, and a value in [0, 1] moves by 1 at most (Clopper and Pearson, 1934).
        most = 1 - ((1 - CONFIDENCE) / 2) ** (1 / num_clusters)
        return PairedChange(control, candidate, delta, (-most, most), rate=1.0)
    if interval[0] == interval[1] != 0 and num_clusters < FEW_CLUSTERS:
        reason = f"the change has no spread over only {num_clusters} clusters"
        return PairedChange(control, candidate, delta, None, reason)
    return PairedChange(control, candidate, delta, interval)


def _cannot_differ(
    metric: Metric, control_N: Array, candidate_N: Array, clusters_N: Codes | None
) -> bool:
    if np.array_equal(control_N, candidate_N):
        return True
    if metric.grouping is None or clusters_N is None:
        return False
    return same_order(control_N, candidate_N, clusters_N)


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
            clusters = None if clusters_N is None else clusters_N[rows]
            control = metric.compute(control_N[rows], labels, clusters)
            return metric.change(control, metric.compute(candidate_N[rows], labels, clusters))

        return bootstrap_interval(change_on, len(labels_N), clusters_N, seed=seed)
    before_N = metric.influence(control_N, labels_N, clusters_N)
    after_N = metric.influence(candidate_N, labels_N, clusters_N)
    if metric.delta == "relative":
        psi_N = (after_N - (1 + delta) * before_N) / metric.compute(control_N, labels_N, clusters_N)
    else:
        psi_N = after_N - before_N
    return influence_interval(delta, psi_N, clusters_N)


def _without_figures(
    metric: Metric,
    rows: _Rows,
    margin: float,
    verdict: Verdict,
    reason: str,
    control: float | None = None,
) -> MetricParity:
    return MetricParity(
        control=control,
        candidate=None,
        delta=None,
        ci_low=None,
        ci_high=None,
        margin=margin,
        direction=metric.direction,
        num_rows=rows.num_rows,
        num_clusters=rows.num_clusters,
        verdict=verdict,
        reason=reason,
    )


def _checked_margins(margins: Mapping[str, float]) -> dict[str, float]:
    problems = []
    for name, margin in margins.items():
        if find_metric(name) is None:
            hint = nearest(name, KNOWN_NAMES)
            problems.append(Problem(f"margins.{name}", "is not a known metric", hint=hint))
        elif not (math.isfinite(margin) and margin > 0):
            problems.append(Problem(f"margins.{name}", "must be a positive number", margin))
    if problems:
        raise UsageError(problems=problems)
    return {name: float(margin) for name, margin in margins.items()}
