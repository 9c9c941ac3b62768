from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from rankopt.quality.bootstrap import bootstrap_interval, cluster_totals, influence_interval


def test_gaussian_rows_give_the_t_interval() -> None:
    values = np.random.default_rng(0).normal(3, 2, 500)
    low, high = influence_interval(values.mean(), values - values.mean(), None)
    expected = stats.t.interval(0.95, 499, values.mean(), stats.sem(values))
    # Hall's correction moves each end by the sample skewness, which is small but not zero.
    assert (low, high) == pytest.approx(expected, abs=0.1 * (expected[1] - expected[0]))


def test_one_cluster_carrying_the_change_gives_an_interval_that_holds_zero() -> None:
    influence = np.zeros(1000)
    influence[7] = 50.0
    low, high = influence_interval(0.05, influence - 0.05, None)
    assert low < 0 < high


def test_no_spread_gives_a_point_and_tiny_influences_do_not_underflow() -> None:
    assert influence_interval(0.5, np.zeros(10), None) == (0.5, 0.5)
    values = np.random.default_rng(1).normal(0, 1, 100)
    values -= values.mean()
    low, high = influence_interval(0.0, values, None)
    tiny_low, tiny_high = influence_interval(0.0, values * 1e-150, None)
    assert (tiny_low * 1e150, tiny_high * 1e150) == pytest.approx((low, high))


def test_one_cluster_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two clusters"):
        influence_interval(0.0, np.ones(5), np.zeros(5, dtype=np.int64))


def test_skewed_sparse_changes_are_covered_better_than_by_a_t_interval() -> None:
    rng = np.random.default_rng(2)
    covered = by_t = 0
    num_runs = 400
    for _ in range(num_runs):
        values = np.where(rng.random(200) < 0.02, rng.exponential(1, 200), 0.0)
        low, high = influence_interval(values.mean(), values - values.mean(), None)
        covered += low <= 0.02 <= high
        by_t += abs(values.mean() - 0.02) <= stats.t.ppf(0.975, 199) * stats.sem(values)
    assert covered / num_runs >= 0.91
    assert by_t / num_runs <= 0.86


def test_cluster_totals_take_any_integers() -> None:
    codes = np.array([7, -1, 7, 7, 100])
    totals = cluster_totals(np.array([1.0, 2, 3, 4, 5]), codes)
    assert totals.tolist() == [2, 8, 5]
    assert cluster_totals(np.array([1.0, 2]), None).tolist() == [1, 2]


def test_bootstrap_agrees_with_the_linearised_interval_with_clusters() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 80, 800)
    values = rng.normal(0, 1, 800) + rng.normal(0, 2, 80)[codes]
    expected = influence_interval(values.mean(), values - values.mean(), codes)
    found = bootstrap_interval(lambda rows: float(values[rows].mean()), 800, codes, seed=1)
    assert found == pytest.approx(expected, abs=0.12 * (expected[1] - expected[0]))


def test_bootstrap_draws_whole_clusters() -> None:
    codes = np.array([5, 5, 5, 9, 9, 2])
    seen = set()

    def statistic(rows: np.ndarray) -> float:
        counts = np.bincount(rows, minlength=6)
        seen.add((counts[0] == counts[1] == counts[2], counts[3] == counts[4]))
        return float(len(rows))

    bootstrap_interval(statistic, 6, codes, num_resamples=50)
    assert seen == {(True, True)}


def test_bootstrap_coverage_of_a_median() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    num_runs = 150
    for run in range(num_runs):
        values = rng.exponential(1, 80)
        interval = bootstrap_interval(
            lambda rows, values=values: float(np.median(values[rows])),
            80,
            None,
            num_resamples=300,
            seed=run,
        )
        assert interval is not None
        covered += interval[0] <= np.log(2) <= interval[1]
    assert 0.89 <= covered / num_runs <= 0.99


def test_bootstrap_says_none_where_the_statistic_is_often_undefined() -> None:
    def undefined_without_row_zero(rows: np.ndarray) -> float:
        return 1.0 if 0 in rows else float("nan")

    assert bootstrap_interval(undefined_without_row_zero, 50, None) is None
    assert bootstrap_interval(len, 5, np.zeros(5, dtype=np.int64)) is None


def test_bootstrap_of_a_constant_is_a_point_and_seeds_repeat() -> None:
    assert bootstrap_interval(lambda rows: 2.0, 30, None) == (2.0, 2.0)
    values = np.random.default_rng(5).normal(0, 1, 40)
    first = bootstrap_interval(lambda rows: float(values[rows].mean()), 40, None, seed=9)
    again = bootstrap_interval(lambda rows: float(values[rows].mean()), 40, None, seed=9)
    assert first == again
