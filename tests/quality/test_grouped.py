"""Metrics of groups against their definitions, and how often their intervals hold the truth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from rankopt.quality.grouped import gauc, gauc_values, hit_rate, ndcg, ndcg_values, same_order
from rankopt.quality.parity import paired_change
from rankopt.quality.registry import find_metric

NAMES = ("gauc", "ndcg@3", "hr@2")


def _groups(seed: int, num_groups: int = 40, digits: int = 6) -> tuple[np.ndarray, ...]:
    """Draw scores, labels and shuffled groups of 1 to 12 rows; some hold one class only."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 13, num_groups)
    clusters = np.repeat(rng.permutation(num_groups) * 7 - 50, sizes)
    rng.shuffle(clusters)
    prob = rng.random(len(clusters))
    labels = (rng.random(len(clusters)) < 0.35 * prob + 0.1).astype(float)
    return np.round(prob, digits), labels, clusters


def _each(*rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    prob, labels, clusters = rows
    return [(prob[clusters == g], labels[clusters == g]) for g in np.unique(clusters)]


# One digit leaves ten scores, so that ties are everywhere.
@pytest.mark.parametrize("digits", [6, 1, 0])
@pytest.mark.parametrize("seed", range(3))
def test_gauc_and_ndcg_agree_with_scikit_learn_group_by_group(seed: int, digits: int) -> None:
    rows = _groups(seed, digits=digits)
    mixed = [(p, y) for p, y in _each(*rows) if 0 < y.sum() < len(y)]
    expected = np.average(
        [sk.roc_auc_score(y, p) for p, y in mixed], weights=[len(y) for _, y in mixed]
    )
    assert gauc(*rows) == pytest.approx(expected, abs=1e-12)
    for cutoff in (1, 3, 10, 500):
        # scikit-learn refuses a group of one row; with its one place it has the best order.
        found = [
            sk.ndcg_score(y[None], p[None], k=cutoff) if len(y) > 1 else 1.0
            for p, y in _each(*rows)
            if y.any()
        ]
        assert ndcg(*rows, cutoff) == pytest.approx(np.mean(found), abs=1e-12)


def _mean_over_orders(prob: np.ndarray, labels: np.ndarray, cutoff: int) -> float:
    """Average the hit over every order of the rows that sorts the scores downwards."""
    hits = [
        labels[list(order)][:cutoff].any()
        for order in itertools.permutations(range(len(prob)))
        if (np.diff(prob[list(order)]) <= 0).all()
    ]
    return float(np.mean(hits))


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_hit_rate_is_its_mean_over_all_orders_of_equal_scores(
    rows: list[tuple[int, bool]], cutoff: int
) -> None:
    prob = np.array([score for score, _ in rows], dtype=float)
    labels = np.array([label for _, label in rows], dtype=float)
    found = hit_rate(prob, labels, np.zeros(len(rows), dtype=np.int64), cutoff)
    if labels.any():
        assert found == pytest.approx(_mean_over_orders(prob, labels, cutoff), abs=1e-12)
    else:
        assert np.isnan(found)


@pytest.mark.parametrize("seed", range(3))
def test_hit_rate_of_untied_scores_counts_groups(seed: int) -> None:
    rows = _groups(seed)
    for cutoff in (1, 2, 5):
        hits = [y[np.argsort(-p)][:cutoff].any() for p, y in _each(*rows) if y.any()]
        assert hit_rate(*rows, cutoff) == pytest.approx(np.mean(hits), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_constant_scores_gain_nothing_from_the_order_of_rows(name: str) -> None:
    metric = find_metric(name)
    assert metric is not None
    _, labels, clusters = _groups(4)
    constant = np.full(len(labels), 0.3)
    best_first = np.lexsort((-labels, clusters))
    worst_first = np.lexsort((labels, clusters))
    values = [
        metric.compute(constant, labels[order], clusters[order])
        for order in (best_first, worst_first)
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    if name == "gauc":
        assert values[0] == 0.5


def test_order_of_groups_and_scale_of_scores_do_not_matter() -> None:
    prob, labels, clusters = _groups(5)
    # Each group's scores moved by its own amount: no order within a group changes.
    shifted = prob + np.unique(clusters, return_inverse=True)[1]
    picked = np.random.default_rng(0).permutation(len(prob))
    for name in NAMES:
        metric = find_metric(name)
        assert metric is not None
        expected = metric.compute(prob, labels, clusters)
        assert metric.compute(shifted, labels, -clusters) == pytest.approx(expected, abs=1e-12)
        again = metric.compute(prob[picked], labels[picked], clusters[picked])
        assert again == pytest.approx(expected, abs=1e-12)


def test_a_perfect_order_is_one_and_a_reversed_one_is_worst() -> None:
    _, labels, clusters = _groups(6)
    assert gauc(labels, labels, clusters) == 1.0
    assert gauc(1 - labels, labels, clusters) == 0.0
    assert ndcg(labels, labels, clusters, 3) == pytest.approx(1.0, abs=1e-12)
    assert hit_rate(labels, labels, clusters, 1) == 1.0
    assert ndcg(1 - labels, labels, clusters, 3) < 0.6


def test_groups_of_one_class_weigh_nothing_where_they_cannot_count() -> None:
    prob = np.array([0.1, 0.9, 0.8, 0.7, 0.2, 0.3])
    labels = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    clusters = np.array([1, 1, 2, 2, 3, 3])
    assert gauc_values(prob, labels, clusters).weights.tolist() == [2, 0, 0]
    assert ndcg_values(prob, labels, clusters, 1).weights.tolist() == [1, 1, 0]
    assert np.isnan(gauc(prob[2:], labels[2:], clusters[2:]))
    assert np.isnan(ndcg(prob[4:], labels[4:], clusters[4:], 1))


@pytest.mark.parametrize("name", NAMES)
def test_influence_of_a_group_is_the_derivative_in_its_weight(name: str) -> None:
    """Repeating one group among many copies of all groups moves the metric by influence / N."""
    metric = find_metric(name)
    assert metric is not None
    assert metric.influence is not None
    prob, labels, clusters = _groups(7, num_groups=15, digits=1)
    copies = 300
    many_prob, many_labels = np.tile(prob, copies), np.tile(labels, copies)
    many_clusters = np.concatenate([clusters + 1000 * copy for copy in range(copies)])
    before = metric.compute(many_prob, many_labels, many_clusters)
    influence = metric.influence(many_prob, many_labels, many_clusters)
    assert influence.mean() == pytest.approx(0.0, abs=1e-9)
    for group in np.unique(clusters):
        rows = clusters == group
        after = metric.compute(
            np.append(many_prob, prob[rows]),
            np.append(many_labels, labels[rows]),
            np.append(many_clusters, np.full(rows.sum(), -9999)),
        )
        moved = (after - before) * len(many_prob)
        assert moved == pytest.approx(influence[: len(prob)][rows].sum(), rel=1e-2, abs=1e-3)


def test_same_order_sees_ties_and_swaps_within_groups_only() -> None:
    clusters = np.array([0, 0, 1, 1])
    prob = np.array([0.1, 0.2, 0.3, 0.4])
    assert same_order(prob, np.array([0.8, 0.9, 0.1, 0.2]), clusters)
    assert not same_order(prob, np.array([0.2, 0.1, 0.3, 0.4]), clusters)
    assert not same_order(prob, np.array([0.1, 0.1, 0.3, 0.4]), clusters)


def _impressions(
    rng: np.random.Generator, num_groups: int, drift: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw both arms over groups whose taste and whose damage differ from one to the next."""
    sizes = 2 + rng.poisson(6, num_groups)
    clusters = np.repeat(np.arange(num_groups), sizes)
    num_rows = len(clusters)
    logit = rng.normal(-1, 1, num_rows)
    liking = rng.normal(0, 1, num_groups)[clusters]
    labels = (rng.random(num_rows) < 1 / (1 + np.exp(-logit - liking))).astype(float)
    damage = drift * rng.exponential(1, num_groups)[clusters] * rng.normal(0, 1, num_rows)
    return logit, logit + damage, labels, clusters


# 1,000 runs of each measured 93.8 to 96.6 %, and 98.4 % or more where so few groups change that a
# sample may hold none; 400 runs have a standard error of 1.1 %.
@pytest.mark.parametrize(
    ("num_groups", "drift"),
    [(300, 0.3), (40, 0.3), (300, 0.03)],
    ids=["300 groups", "40 groups", "rare changes"],
)
def test_intervals_cover_what_they_say(num_groups: int, drift: float) -> None:
    metrics = [find_metric(name) for name in NAMES]
    control, candidate, labels, clusters = _impressions(np.random.default_rng(99), 150_000, drift)
    truth = [
        m.compute(candidate, labels, clusters) - m.compute(control, labels, clusters)
        for m in metrics
    ]
    rng = np.random.default_rng(5)
    num_runs = 400
    covered = np.zeros(len(metrics))
    for _ in range(num_runs):
        rows = _impressions(rng, num_groups, drift)
        for index, metric in enumerate(metrics):
            low, high = paired_change(metric, *rows).interval
            covered[index] += low <= truth[index] <= high
    shares = dict(zip(NAMES, covered / num_runs, strict=True))
    assert all(share >= 0.925 for share in shares.values()), shares
    if (num_groups, drift) == (300, 0.3):
        assert all(share <= 0.985 for share in shares.values()), shares
