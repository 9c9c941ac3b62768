"""Every quality metric by the name that report.json and a recipe's gates use.

Adding a metric is its function in `metrics` or `grouped` and one entry here.

Shapes: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, Literal

import numpy as np

from rankopt.quality import grouped
from rankopt.quality.bootstrap import Codes
from rankopt.quality.grouped import GroupValues, Mask
from rankopt.quality.metrics import (
    Array,
    auc,
    auc_influence,
    calibration,
    calibration_influence,
    log_loss,
    log_loss_influence,
    normalized_entropy,
    normalized_entropy_influence,
)

MetricFunction = Callable[[Array, Array, Codes | None], float]
InfluenceFunction = Callable[[Array, Array, Codes | None], Array]


@dataclass(frozen=True)
class Grouping:
    """Which groups a ranking metric counts.

    Attributes:
        counted: from labels and groups, the rows whose group counts.
        lacking: what is said where no group counts.
        min_rows: a group smaller than this has the same value whatever its order.
    """

    counted: Callable[[Array, Codes], Mask]
    lacking: str
    min_rows: int = 2


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: the key in report.json and in a recipe's gates.
        title: the name in a sentence.
        direction: which way is better. A metric with a `target` is better nearer to it; its
            direction in a report is then the side on which it was judged.
        delta: candidate / control - 1 (`relative`) or candidate - control (`absolute`).
        margin: the harm allowed where no gate says otherwise, positive, in the unit of delta.
        compute: the metric, from probabilities, labels and groups.
        influence: the influence of each row; None has the bootstrap find the interval.
        target: the best value, for a metric that can miss it on either side.
        grouping: for a metric that needs groups, which of them it counts.
    """

    name: str
    title: str
    direction: Literal["higher", "lower"]
    delta: Literal["relative", "absolute"]
    margin: float
    compute: MetricFunction
    influence: InfluenceFunction | None = None
    target: float | None = None
    grouping: Grouping | None = None

    def change(self, control: float, candidate: float) -> float:
        """Return delta, in the unit the margin has."""
        return candidate / control - 1 if self.delta == "relative" else candidate - control

    def why_undefined(self, labels_N: Array, clusters_N: Codes | None) -> str | None:
        """Say why these rows have no value of this metric; None when they have one."""
        num_rows = len(labels_N)
        if not num_rows:
            return "no row has a label of this output"
        if labels_N.min() == labels_N.max():
            text = f"all {num_rows:,} labels are {labels_N[0]:.0f}"
            return f"{text}, and quality needs rows of both classes"
        if self.grouping is None:
            return None
        if clusters_N is None:
            return "rows have no groups to be ranked in: the model card names no request_key"
        if not has_groups(clusters_N):
            return "every group of the request_key is a single row, so there is no order in it"
        counted_N = self.grouping.counted(labels_N, clusters_N)
        if not counted_N.any():
            return self.grouping.lacking
        sizes = np.unique(clusters_N[counted_N], return_counts=True)[1]
        if sizes.max() < self.grouping.min_rows:
            return (
                f"no group with a positive row has {self.grouping.min_rows:,} rows or more, so its "
                "value is the same in any order"
            )
        return None


def has_groups(clusters_N: Codes | None) -> bool:
    """Tell whether any group holds more than one row, so that rows can be ranked in it."""
    return clusters_N is not None and len(np.unique(clusters_N)) < len(clusters_N)


def _by_row(function: Callable[[Array, Array], float]) -> MetricFunction:
    return lambda prob_N, labels_N, _: function(prob_N, labels_N)


def _influence_by_row(function: Callable[[Array, Array], Array]) -> InfluenceFunction:
    return lambda prob_N, labels_N, _: function(prob_N, labels_N)


def _by_group(
    name: str, title: str, values: Callable[[Array, Array, Codes], GroupValues], grouping: Grouping
) -> Metric:
    """Build a metric that is a mean over groups."""

    def grouped_values(prob_N: Array, labels_N: Array, clusters_N: Codes | None) -> GroupValues:
        codes_N = np.arange(len(labels_N)) if clusters_N is None else clusters_N
        return values(prob_N, labels_N, codes_N)

    return Metric(
        name,
        title,
        "higher",
        "absolute",
        0.001,
        lambda *rows: grouped_values(*rows).mean(),
        lambda *rows: grouped_values(*rows).influence(),
        grouping=grouping,
    )


METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        # NE +0.1 % is what ads ranking teams ship by. Base rates being equal on the same rows, log
        # loss moves by the same share.
        Metric(
            "ne",
            "normalized entropy",
            "lower",
            "relative",
            0.001,
            _by_row(normalized_entropy),
            _influence_by_row(normalized_entropy_influence),
        ),
        Metric(
            "log_loss",
            "log loss",
            "lower",
            "relative",
            0.001,
            _by_row(log_loss),
            _influence_by_row(log_loss_influence),
        ),
        Metric(
            "auc",
            "AUC",
            "higher",
            "absolute",
            0.001,
            _by_row(auc),
            _influence_by_row(auc_influence),
        ),
        Metric(
            "calibration",
            "calibration",
            "lower",
            "absolute",
            0.005,
            _by_row(calibration),
            _influence_by_row(calibration_influence),
            target=1.0,
        ),
        # A gain of 0.001 is what click prediction calls practically significant (Zhu et al., 2021,
        # "Open benchmarking for click-through rate prediction"), so that much may not be lost.
        _by_group(
            "gauc",
            "GAUC",
            grouped.gauc_values,
            Grouping(grouped.with_both_classes, "no group holds rows of both classes"),
        ),
    )
}
"""The metrics of a fixed name; `find_metric` also knows the families."""

_NO_POSITIVE = "no group holds a positive row"


def _ndcg_at(cutoff: int) -> Metric:
    return _by_group(
        f"ndcg@{cutoff}",
        f"NDCG@{cutoff}",
        partial(grouped.ndcg_values, cutoff=cutoff),
        Grouping(grouped.with_a_positive, _NO_POSITIVE),
    )


def _hit_rate_at(cutoff: int) -> Metric:
    return _by_group(
        f"hr@{cutoff}",
        f"hit rate@{cutoff}",
        partial(grouped.hit_values, cutoff=cutoff),
        Grouping(grouped.with_a_positive, _NO_POSITIVE, min_rows=cutoff + 1),
    )


FAMILIES: Final[Mapping[str, Callable[[int], Metric]]] = {"ndcg": _ndcg_at, "hr": _hit_rate_at}
"""Metrics of the best k rows, named `family@k` for any k from 1."""

SHOWN_FAMILIES: Final = ("ndcg@10", "hr@10")
"""Those of a report that no gate asks for."""

KNOWN_NAMES: Final = (*METRICS, *SHOWN_FAMILIES)
"""What an unknown name is compared with."""

_AT_CUTOFF = re.compile(r"([a-z_]+)@([1-9][0-9]{0,5})")


@cache
def _family_metric(name: str) -> Metric | None:
    found = _AT_CUTOFF.fullmatch(name)
    if found is None or found[1] not in FAMILIES:
        return None
    return FAMILIES[found[1]](int(found[2]))


def find_metric(name: str) -> Metric | None:
    """Look a metric up by its name, `ndcg@K` and `hr@K` for any K; None when there is none."""
    return METRICS.get(name) or _family_metric(name)


def metrics_to_show(clusters_N: Codes | None, named: Iterable[str] = ()) -> list[Metric]:
    """List the metrics of a report, in its order.

    Those of single rows always; those of groups where some group holds more than one row, or where
    a gate names one, since a gate is never dropped in silence.

    Args:
        clusters_N: the group of each row.
        named: metrics that a gate asks for; an unknown name is left out.
    """
    asked = set(named)
    grouped_too = has_groups(clusters_N)
    names = [
        name
        for name, metric in METRICS.items()
        if metric.grouping is None or grouped_too or name in asked
    ]
    at_cutoff = {name for name in asked if _family_metric(name) is not None}
    at_cutoff |= set(SHOWN_FAMILIES) if grouped_too else set()
    names += sorted(at_cutoff, key=_family_order)
    return [metric for metric in map(find_metric, names) if metric is not None]


def _family_order(name: str) -> tuple[int, int]:
    family, _, cutoff = name.partition("@")
    return list(FAMILIES).index(family), int(cutoff)
