"""Ranking metrics over groups: how well each request's or user's rows are ordered.

Each is a weighted mean over groups of a value in [0, 1] that depends only on the order of scores
within the group, so groups are the unit of its error and a group's influence is exact. Rows of
equal score have no order: a value is then its expectation over all orders of them, so that a model
which scores everything alike gains nothing from the order of the rows in a file (McSherry and
Najork, 2008, "Computing information retrieval performance measures efficiently in the presence of
tied scores").

Shapes: N rows, G groups, B runs of equal score within a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from rankopt.quality.bootstrap import Codes
from rankopt.quality.metrics import Array

Mask = NDArray[np.bool_]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class GroupValues:
    """A metric's value and weight in each group; the metric is the weighted mean.

    Attributes:
        group_of_row: [N], 0 to G - 1.
        values: [G], of no matter where the weight is 0.
        weights: [G], 0 for a group that does not count.
    """

    group_of_row: Places
    values: Array
    weights: Array

    def mean(self) -> float:
        """Return the metric; NaN when no group counts."""
        total = float(self.weights.sum())
        return float(self.weights @ self.values) / total if total else float("nan")

    def influence(self) -> Array:
        """Influence of each row; a group's own is spread evenly over its rows.

        The metric is a ratio of sums over groups, so a group moves it by its weight times the
        distance of its value from the mean (Cochran, 1977, "Sampling techniques", ch. 6). Rows of a
        group always come together: only the sum over a group has a meaning.
        """
        distance_G = self.weights * (self.values - self.mean()) / self.weights.sum()
        share_G = distance_G * len(self.group_of_row) / np.bincount(self.group_of_row)
        return np.asarray(share_G[self.group_of_row])


def gauc(prob_N: Array, labels_N: Array, clusters_N: Codes) -> float:
    """AUC within each group that holds both classes, weighted by the group's impressions.

    Zhu et al. (2017), "Optimized cost per click in Taobao display advertising"; Zhou et al. (2018),
    "Deep interest network for click-through rate prediction". NaN without such a group.
    """
    return gauc_values(prob_N, labels_N, clusters_N).mean()


def ndcg(prob_N: Array, labels_N: Array, clusters_N: Codes, cutoff: int) -> float:
    """Mean over the groups with a positive row of DCG@k over the best possible DCG@k.

    Gain 1 for a positive row, discount 1 / log2(rank + 1): Jarvelin and Kekalainen (2002),
    "Cumulated gain-based evaluation of IR techniques". NaN without such a group.
    """
    return ndcg_values(prob_N, labels_N, clusters_N, cutoff).mean()


def hit_rate(prob_N: Array, labels_N: Array, clusters_N: Codes, cutoff: int) -> float:
    """Share of the groups with a positive row whose k best-scored rows hold a positive one.

    HR@k as in He et al. (2017), "Neural collaborative filtering", for groups of any number of
    positives; also called success@k. A group of k rows or fewer always hits. NaN without a group
    that has a positive row.
    """
    return hit_values(prob_N, labels_N, clusters_N, cutoff).mean()


def gauc_values(prob_N: Array, labels_N: Array, clusters_N: Codes) -> GroupValues:
    """Return the AUC of each group, weighted by its rows where it holds both classes."""
    runs = _Runs.of(prob_N, labels_N, clusters_N)
    negatives_B = runs.sizes - runs.positives
    negatives_G = runs.group_sizes - runs.group_positives
    up_to_B = np.cumsum(negatives_B) - (np.cumsum(negatives_G) - negatives_G)[runs.groups]
    beaten_B = negatives_G[runs.groups] - up_to_B + negatives_B / 2
    pairs_G = runs.group_positives * negatives_G
    wins_G = runs.sum_by_group(runs.positives * beaten_B)
    counts_G = pairs_G > 0
    value_G = np.divide(wins_G, pairs_G, out=np.zeros_like(wins_G), where=counts_G)
    return GroupValues(runs.group_of_row, value_G, np.where(counts_G, runs.group_sizes, 0.0))


def ndcg_values(prob_N: Array, labels_N: Array, clusters_N: Codes, cutoff: int) -> GroupValues:
    """Return the NDCG@k of each group, weighted 1 where it holds a positive row."""
    runs = _Runs.of(prob_N, labels_N, clusters_N)
    depth = min(cutoff, int(runs.group_sizes.max(initial=1)))
    # best_R[r] is the DCG of r positives in the first r places.
    best_R = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, depth + 2)))])

    def best(places: Array) -> Array:
        return np.asarray(best_R[np.minimum(places, depth).astype(np.intp)])

    # Every row of a run stands at each of the run's places equally often.
    places_B = best(runs.starts + runs.sizes) - best(runs.starts)
    gained_G = runs.sum_by_group(runs.positives / runs.sizes * places_B)
    counts_G = runs.group_positives > 0
    ideal_G = best(runs.group_positives)
    value_G = np.divide(gained_G, ideal_G, out=np.zeros_like(gained_G), where=counts_G)
    return GroupValues(runs.group_of_row, value_G, counts_G.astype(np.float64))


def hit_values(prob_N: Array, labels_N: Array, clusters_N: Codes, cutoff: int) -> GroupValues:
    """Return the chance that each group's k best rows hold a positive; see `hit_rate`.

    It is 0 or 1 unless a run of equal scores crosses the cut-off.
    """
    runs = _Runs.of(prob_N, labels_N, clusters_N)
    places_B = np.clip(cutoff - runs.starts, 0, runs.sizes)
    missed_G = np.ones(len(runs.group_sizes))
    # Only one run of a group can cross the cut-off, so the product is over zeros, ones and it.
    np.multiply.at(missed_G, runs.groups, _chance_of_none(places_B, runs.sizes, runs.positives))
    return GroupValues(
        runs.group_of_row, 1 - missed_G, (runs.group_positives > 0).astype(np.float64)
    )


def with_both_classes(labels_N: Array, clusters_N: Codes) -> Mask:
    """Mark the rows of groups that hold both classes."""
    group_N, size_G, positives_G = _count(labels_N, clusters_N)
    return np.asarray(((positives_G > 0) & (positives_G < size_G))[group_N])


def with_a_positive(labels_N: Array, clusters_N: Codes) -> Mask:
    """Mark the rows of groups that hold a positive row."""
    group_N, _, positives_G = _count(labels_N, clusters_N)
    return np.asarray((positives_G > 0)[group_N])


def same_order(control_N: Array, candidate_N: Array, clusters_N: Codes) -> bool:
    """Tell whether two arms order, and tie, the rows of every group alike."""

    def places(prob_N: Array) -> Array:
        runs = _Runs.of(prob_N, np.zeros(len(prob_N)), clusters_N)
        place_N = np.empty(len(prob_N))
        place_N[runs.order] = np.repeat(runs.starts, runs.sizes.astype(np.intp))
        return place_N

    return np.array_equal(places(control_N), places(candidate_N))


@dataclass(frozen=True)
class _Runs:
    """Rows by group and, within it, from the best score down, cut into runs of equal score.

    Counts are float64: they are exact, and their products do not overflow.
    """

    group_of_row: Places
    order: Places
    """The rows, sorted."""
    group_sizes: Array
    group_positives: Array
    groups: Places
    """The group of each run."""
    starts: Array
    """How many rows of the group score higher than the run."""
    sizes: Array
    positives: Array

    @classmethod
    def of(cls, prob_N: Array, labels_N: Array, clusters_N: Codes) -> _Runs:
        group_N, size_G, positives_G = _count(labels_N, clusters_N)
        order_N = np.lexsort((-prob_N, group_N))
        group, prob = group_N[order_N], prob_N[order_N]
        opens = np.ones(len(prob), dtype=bool)
        opens[1:] = (group[1:] != group[:-1]) | (prob[1:] != prob[:-1])
        first_B = np.flatnonzero(opens)
        group_B = group[first_B]
        before_G = np.cumsum(size_G) - size_G
        return cls(
            group_of_row=group_N,
            order=order_N,
            group_sizes=size_G,
            group_positives=positives_G,
            groups=group_B,
            starts=first_B - before_G[group_B],
            sizes=np.diff(first_B, append=len(prob)).astype(np.float64),
            positives=np.add.reduceat(labels_N[order_N], first_B),
        )

    def sum_by_group(self, values_B: Array) -> Array:
        sums = np.bincount(self.groups, weights=values_B, minlength=len(self.group_sizes))
        return np.asarray(sums, dtype=np.float64)


def _count(labels_N: Array, clusters_N: Codes) -> tuple[Places, Array, Array]:
    _, group_N, size_G = np.unique(clusters_N, return_inverse=True, return_counts=True)
    positives_G = np.asarray(np.bincount(group_N, weights=labels_N), dtype=np.float64)
    return group_N, size_G.astype(np.float64), positives_G


def _chance_of_none(places_B: Array, size_B: Array, positives_B: Array) -> Array:
    """Chance that no positive falls into the first places of a run, its rows in random order.

    Hypergeometric: C(size - positives, places) / C(size, places).
    """
    negatives_B = size_B - positives_B
    possible = places_B <= negatives_B
    left_B = np.where(possible, negatives_B - places_B, 0.0)
    log_B = (
        gammaln(negatives_B + 1)
        - gammaln(left_B + 1)
        - gammaln(size_B + 1)
        + gammaln(size_B - places_B + 1)
    )
    # Where no positive or no place is in the run the logarithms cancel only almost.
    exact = (positives_B == 0) | (places_B == 0)
    return np.asarray(np.where(exact, 1.0, np.where(possible, np.exp(log_B), 0.0)))
