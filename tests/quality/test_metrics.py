from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from rankopt.quality.metrics import (
    LOG_LOSS_EPS,
    auc,
    auc_influence,
    calibration,
    calibration_curve,
    log_loss,
    midranks,
    normalized_entropy,
    prediction_change,
)
from rankopt.quality.registry import METRICS, find_metric, metrics_to_show

POINTWISE = [name for name, metric in METRICS.items() if metric.grouping is None]


def _rows(seed: int, num_rows: int = 400, digits: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logit = rng.normal(-1, 1.5, num_rows)
    labels = (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(float)
    return np.round(1 / (1 + np.exp(-logit - rng.normal(0, 0.5, num_rows))), digits), labels


# One digit leaves ten distinct scores, so that nearly every row is tied.
@pytest.mark.parametrize("digits", [6, 1])
@pytest.mark.parametrize("seed", range(5))
def test_auc_and_log_loss_agree_with_scikit_learn(seed: int, digits: int) -> None:
    prob, labels = _rows(seed, digits=digits)
    held = np.clip(prob, LOG_LOSS_EPS, 1 - LOG_LOSS_EPS)
    assert auc(prob, labels) == pytest.approx(sk.roc_auc_score(labels, prob), abs=1e-12)
    assert log_loss(prob, labels) == pytest.approx(sk.log_loss(labels, held), rel=1e-12)


def test_normalized_entropy_of_the_base_rate_is_one() -> None:
    labels = np.repeat([1.0, 0.0], [30, 70])
    assert normalized_entropy(np.full(100, 0.3), labels) == pytest.approx(1.0, abs=1e-12)


def test_normalized_entropy_is_below_one_for_a_model_that_knows_something() -> None:
    prob, labels = _rows(0)
    base = np.full(len(labels), labels.mean())
    expected = log_loss(prob, labels) / sk.log_loss(labels, base)
    assert normalized_entropy(prob, labels) == pytest.approx(expected, rel=1e-9)
    assert normalized_entropy(prob, labels) < 1


def test_saturated_wrong_prediction_costs_a_finite_amount() -> None:
    assert log_loss(np.array([0.0, 0.5]), np.array([1.0, 0.0])) == pytest.approx(
        (-np.log(LOG_LOSS_EPS) + np.log(2)) / 2
    )


def test_calibration_is_predicted_over_observed_clicks() -> None:
    labels = np.array([1.0, 0.0, 0.0, 1.0])
    assert calibration(np.array([0.5, 0.5, 0.5, 1.0]), labels) == pytest.approx(1.25)


def test_calibration_curve_bins_equal_counts_and_keeps_every_finite_row() -> None:
    prob, labels = _rows(1, num_rows=1000)
    points = calibration_curve(prob, labels, num_bins=10)
    assert len(points) == 10
    assert sum(point.num_rows for point in points) == 1000
    assert all(90 <= point.num_rows <= 110 for point in points)
    predicted = sum(point.mean_predicted * point.num_rows for point in points)
    observed = sum(point.observed_rate * point.num_rows for point in points)
    assert predicted == pytest.approx(prob.sum())
    assert observed == pytest.approx(labels.sum())


def test_calibration_curve_of_a_constant_is_one_point() -> None:
    labels = np.array([1.0, 0.0, 0.0, 1.0])
    (point,) = calibration_curve(np.full(4, 0.25), labels, num_bins=10)
    assert (point.mean_predicted, point.observed_rate, point.num_rows) == (0.25, 0.5, 4)


def test_prediction_change_counts_a_broken_row_as_the_most_a_probability_can_move() -> None:
    change = prediction_change(np.array([0.1, 0.2, 0.3]), np.array([0.1, 0.25, np.nan]))
    assert change.max_abs == 1.0
    assert change.mean_abs == pytest.approx(1.05 / 3)


@pytest.mark.parametrize("name", POINTWISE)
def test_influence_is_the_derivative_in_a_rows_weight(name: str) -> None:
    """Repeating one row among many copies of all rows moves the metric by influence / N."""
    metric = METRICS[name]
    prob, labels = _rows(3, num_rows=60, digits=2)
    assert metric.influence is not None
    copies = 400
    many_prob, many_labels = np.tile(prob, copies), np.tile(labels, copies)
    before = metric.compute(many_prob, many_labels, None)
    influence = metric.influence(many_prob, many_labels, None)
    assert influence.mean() == pytest.approx(0.0, abs=1e-9)
    for row in (0, 7, 23, 41):
        # One repeat is far below the class size, so sqrt(n / (n - 1)) in the AUC is 1 here.
        after = metric.compute(
            np.append(many_prob, prob[row]), np.append(many_labels, labels[row]), None
        )
        moved = (after - before) * len(many_prob)
        assert moved == pytest.approx(influence[row], rel=1e-2, abs=1e-3)


def test_fast_delong_equals_the_definition_over_all_pairs() -> None:
    prob, labels = _rows(4, num_rows=80, digits=1)
    positive, negative = prob[labels == 1], prob[labels == 0]
    wins = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
    variance = wins.mean(1).var(ddof=1) / len(positive) + wins.mean(0).var(ddof=1) / len(negative)
    psi = auc_influence(prob, labels)
    assert np.sum(psi**2) / len(psi) ** 2 == pytest.approx(variance, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_midranks_match_the_count_of_smaller_and_equal_values(values: list[int]) -> None:
    array = np.array(values, dtype=float)
    expected = [(array < v).sum() + ((array == v).sum() + 1) / 2 for v in array]
    assert midranks(array).tolist() == expected


def test_metrics_of_one_class_are_undefined_rather_than_wrong() -> None:
    prob, ones = np.array([0.2, 0.4]), np.ones(2)
    assert np.isnan(auc(prob, ones))
    assert np.isnan(normalized_entropy(prob, ones))
    assert np.isnan(calibration(prob, np.zeros(2)))


def test_no_finite_prediction_gives_no_points_and_no_rows_no_change() -> None:
    assert calibration_curve(np.full(3, np.nan), np.array([0.0, 1.0, 0.0])) == []
    change = prediction_change(np.array([]), np.array([]))
    assert (change.max_abs, change.mean_abs) == (0.0, 0.0)


def test_registry_states_direction_and_positive_margins() -> None:
    assert {name: metric.direction for name, metric in METRICS.items()} == {
        "ne": "lower",
        "log_loss": "lower",
        "auc": "higher",
        "calibration": "lower",
        "gauc": "higher",
    }
    assert METRICS["ne"].margin == 0.001
    assert all(metric.margin > 0 and metric.name == name for name, metric in METRICS.items())


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["ndcg", "hr"]), st.integers(1, 999_999))
def test_a_cutoff_may_be_any_whole_number_from_one(family: str, cutoff: int) -> None:
    metric = find_metric(f"{family}@{cutoff}")
    assert metric is not None
    assert metric.name == f"{family}@{cutoff}"
    assert (metric.direction, metric.delta, metric.margin) == ("higher", "absolute", 0.001)
    assert str(cutoff) in metric.title


@pytest.mark.parametrize(
    "name", ["ndcg", "hr@", "ndcg@0", "ndcg@05", "ndcg@-1", "hr@1.5", "NDCG@5", "auc@5", "ndcg@5 ",
             "hr@\u0665", "hr@1000000"],
)  # fmt: skip
def test_a_name_that_is_no_metric_is_not_found(name: str) -> None:
    assert find_metric(name) is None


def test_a_report_shows_grouped_metrics_where_there_are_groups() -> None:
    def names(clusters: np.ndarray | None, named: tuple[str, ...] = ()) -> list[str]:
        return [metric.name for metric in metrics_to_show(clusters, named)]

    pairs, single = np.array([3, 3, 5]), np.array([1, 2, 3])
    assert names(pairs) == [*POINTWISE, "gauc", "ndcg@10", "hr@10"]
    assert names(pairs, ("hr@5", "ndcg@20", "ndcg@5", "nonsense")) == [
        *POINTWISE, "gauc", "ndcg@5", "ndcg@10", "ndcg@20", "hr@5", "hr@10",
    ]  # fmt: skip
    assert names(None) == names(single) == POINTWISE
    assert names(None, ("gauc", "hr@5")) == [*POINTWISE, "gauc", "hr@5"]
