from __future__ import annotations

import math

import numpy as np
import pytest

from rankopt.bench import stats
from rankopt.bench.stats import (
    SpeedupEstimate,
    claimed_differences,
    decide,
    paired_speedup,
    percentile_with_support,
    stability_notes,
)
from rankopt.errors import DataError
from rankopt.quality.parity import compare_quality
from rankopt.review.schema import LatencyRow

Blocks = list[np.ndarray]


def _noise(
    rng: np.random.Generator,
    num_blocks: int,
    *,
    lag_one: float = 0.0,
    bursts: bool = False,
    heavy: bool = False,
) -> np.ndarray:
    """Draw log ratios of unit spread: AR(1), 3 degrees of freedom, one-armed bursts of 8 sigma."""
    shocks = rng.standard_normal(num_blocks)
    if heavy:
        shocks = rng.standard_t(3, num_blocks) / math.sqrt(3)
    noise = np.empty(num_blocks)
    noise[0] = shocks[0]
    for k in range(1, num_blocks):
        noise[k] = lag_one * noise[k - 1] + math.sqrt(1 - lag_one**2) * shocks[k]
    if bursts:
        hit = rng.random(num_blocks) < 0.15
        noise += hit * rng.choice([-1, 1], num_blocks) * rng.exponential(8, num_blocks)
    return noise


def _blocks(log_ratio_K: np.ndarray, speedup: float = 1.0) -> tuple[Blocks, Blocks]:
    control = list(1e6 * speedup * np.exp(log_ratio_K)[:, None])
    return control, [np.array([1e6])] * len(log_ratio_K)


def _machine(
    seed: int, speedup: float, *, num_blocks: int = 16, num_calls: int = 30
) -> tuple[Blocks, Blocks]:
    """Time two arms on a machine that slows by half, jumps between two speeds and is hit at times.

    Slowing and jumps hit both arms of a block; two blocks of each arm run three times slower,
    which is within the fifth at each end that trimming takes.
    """
    rng = np.random.default_rng(seed)
    drift = np.linspace(1.0, 1.5, num_blocks) * rng.choice([1.0, 1.7], num_blocks)
    bursts = [rng.choice(num_blocks, 2, replace=False) for _ in range(2)]
    arms: tuple[Blocks, Blocks] = ([], [])
    for k in range(num_blocks):
        for arm, hit, base_ns in zip(arms, bursts, (1e6 * speedup, 1e6), strict=True):
            calls = base_ns * drift[k] * np.exp(rng.gamma(1, 0.03, num_calls))
            arm.append(calls * (3.0 if k in hit else 1.0))
    return arms


@pytest.mark.parametrize("speedup", [0.8, 1.0, 1.15, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_planted_speedup_survives_drift_jumps_and_bursts(seed: int, speedup: float) -> None:
    estimate = paired_speedup(*_machine(seed, speedup))
    assert estimate.ci_low <= speedup <= estimate.ci_high
    assert estimate.speedup == pytest.approx(speedup, rel=0.03)
    assert estimate.ci_low < estimate.speedup < estimate.ci_high
    assert (estimate.num_blocks, estimate.num_samples) == (16, 480)


def test_more_bursts_than_trimming_takes_widen_the_interval_rather_than_mislead() -> None:
    control, candidate = _machine(0, 1.0)
    hit = [block * (3.0 if k % 3 == 0 else 1.0) for k, block in enumerate(control)]
    estimate = paired_speedup(hit, candidate)
    assert estimate.ci_low <= 1.0 <= estimate.ci_high
    assert estimate.ci_high / estimate.ci_low > 1.5


def test_p50s_are_of_the_typical_block_and_their_ratio_is_the_speedup() -> None:
    control, candidate = _machine(1, 2.0)
    estimate = paired_speedup(control, candidate)
    assert estimate.control_p50_ns / estimate.candidate_p50_ns == pytest.approx(
        estimate.speedup, rel=1e-12
    )
    assert estimate.candidate_p50_ns == pytest.approx(
        float(np.median([np.median(block) for block in candidate])), rel=0.15
    )
    steady = paired_speedup([np.full(9, 4000)] * 8, [np.full(9, 1000)] * 8)
    assert steady.control_p50_ns == pytest.approx(4000)
    assert steady.candidate_p50_ns == pytest.approx(1000)


def test_pooled_medians_would_have_been_fooled() -> None:
    """Half the blocks slow: the pooled median falls on either side of the gap by chance."""
    slow = np.repeat([1.0, 1.7], 8)
    control = [np.full(10, 1e6 * s) for s in slow]
    candidate = [np.full(10 + int(s > 1), 1e6 * s) for s in slow]
    pooled = np.median(np.concatenate(control)) / np.median(np.concatenate(candidate))
    assert abs(pooled - 1) > 0.15
    assert paired_speedup(control, candidate).speedup == pytest.approx(1.0)


def test_swapping_the_arms_inverts_the_estimate() -> None:
    control, candidate = _machine(2, 1.4)
    there, back = paired_speedup(control, candidate), paired_speedup(candidate, control)
    assert back.speedup == pytest.approx(1 / there.speedup)
    assert (back.ci_low, back.ci_high) == pytest.approx((1 / there.ci_high, 1 / there.ci_low))


def test_blocks_that_agree_leave_only_the_spread_between_processes() -> None:
    control, candidate = [np.full(5, 2000)] * 10, [np.full(5, 1000)] * 10
    exact = paired_speedup(control, candidate, process_sd=0.0)
    assert exact.ci_low == exact.speedup == exact.ci_high == pytest.approx(2.0)
    one = paired_speedup(control, candidate, process_sd=0.01)
    assert math.log(one.ci_high / one.speedup) == pytest.approx(1.96 * 0.01, rel=1e-3)
    four = paired_speedup(control, candidate, process_sd=0.01, num_process_pairs=4)
    assert math.log(four.ci_high / four.speedup) == pytest.approx(1.96 * 0.005, rel=1e-3)


def test_larger_family_widens_every_interval() -> None:
    control, candidate = _machine(3, 1.2)
    one = paired_speedup(control, candidate)
    five = paired_speedup(control, candidate, family_size=5)
    assert five.ci_low < one.ci_low
    assert five.ci_high > one.ci_high
    assert five.speedup == one.speedup


NOISES = {
    "independent": {},
    "correlated": {"lag_one": 0.3, "heavy": True},
    "correlated with bursts": {"lag_one": 0.3, "bursts": True},
}


@pytest.mark.parametrize("num_blocks", [8, 12, 30])
@pytest.mark.parametrize("noise", list(NOISES))
def test_intervals_cover_without_help_from_the_process_spread(noise: str, num_blocks: int) -> None:
    """Asked for 99 %, the level a panel of five needs; the standard error of 500 runs is 0.5 %."""
    rng = np.random.default_rng(7)
    num_runs = 500
    covered = 0
    for _ in range(num_runs):
        log_ratio = 0.03 * _noise(rng, num_blocks, **NOISES[noise])
        centre, half_width = stats._trimmed_mean_interval(log_ratio, 0.99)
        covered += abs(centre) <= half_width
    assert covered / num_runs >= 0.97


def test_a_plain_t_interval_would_under_cover_correlated_blocks() -> None:
    rng = np.random.default_rng(8)
    num_runs, num_blocks = 500, 20
    plain = ours = 0
    for _ in range(num_runs):
        values = _noise(rng, num_blocks, lag_one=0.6)
        plain += abs(values.mean()) <= 2.093 * values.std(ddof=1) / math.sqrt(num_blocks)
        centre, half_width = stats._trimmed_mean_interval(values, 0.95)
        ours += abs(centre) <= half_width
    assert plain / num_runs <= 0.75
    assert ours / num_runs >= 0.88


def test_panel_of_an_a_a_claims_a_difference_in_at_most_three_of_twenty() -> None:
    """Same predictions in both arms, five batch sizes, processes that differ by 1 % for life.

    Timing stops as the A/B's does: once the interval is narrow, whatever it says.
    """
    rng = np.random.default_rng(9)
    prob = rng.uniform(0.05, 0.95, 300)
    labels = (rng.random(300) < prob).astype(float)
    quality = compare_quality(prob, prob.copy(), labels)
    alarms = []
    for _ in range(100):
        rows = []
        for batch_size in (1, 8, 64, 512, 2048):
            noise = 0.02 * _noise(rng, 40, lag_one=0.3, bursts=True, heavy=True)
            control, candidate = _blocks(noise + 0.01 * rng.standard_normal())
            for num_blocks in range(12, 41, 4):
                estimate = paired_speedup(
                    control[:num_blocks], candidate[:num_blocks], family_size=5
                )
                if estimate.ci_high - estimate.ci_low <= 0.06 * estimate.speedup:
                    break
            rows.append(_row(batch_size, estimate))
        alarms.append(bool(claimed_differences(quality, rows)))
    groups = np.array(alarms).reshape(5, 20).sum(1)
    assert groups.max() <= 3, groups
    assert np.mean(alarms) <= 0.1


def _row(batch_size: int, estimate: SpeedupEstimate) -> LatencyRow:
    return LatencyRow(
        batch_size=batch_size,
        control_p50_ns=estimate.control_p50_ns,
        candidate_p50_ns=estimate.candidate_p50_ns,
        control_p99_ns=None,
        candidate_p99_ns=None,
        speedup=estimate.speedup,
        ci_low=estimate.ci_low,
        ci_high=estimate.ci_high,
        num_samples=estimate.num_samples,
        num_blocks=estimate.num_blocks,
    )


def test_planted_slowdown_and_damage_are_claimed() -> None:
    rng = np.random.default_rng(10)
    slow = paired_speedup(*_blocks(0.01 * _noise(rng, 16), speedup=0.9), family_size=3)
    prob = rng.uniform(0.05, 0.95, 2000)
    labels = (rng.random(2000) < prob).astype(float)
    damaged = compare_quality(prob, rng.permutation(prob), labels)
    claims = claimed_differences(damaged, [_row(64, slow)])
    assert {"ne", "log_loss", "auc", "latency at batch 64"} <= set(claims)
    broken = prob.copy()
    broken[0] = np.nan
    claims = claimed_differences(compare_quality(prob, broken, labels), [])
    assert set(claims) == {"ne", "log_loss", "auc", "calibration"}


@pytest.mark.parametrize(
    ("ci_low", "ci_high", "verdict"),
    [
        (1.2, 1.4, "pass"),
        (1.15, 1.4, "pass"),
        (1.1, 1.4, "inconclusive"),
        (1.0, 1.15, "inconclusive"),
        (1.0, 1.14, "fail"),
    ],
)
def test_decide_holds_the_whole_interval_against_the_threshold(
    ci_low: float, ci_high: float, verdict: str
) -> None:
    estimate = SpeedupEstimate((ci_low + ci_high) / 2, ci_low, ci_high, 10, 100, 2e6, 1e6)
    assert decide(estimate, 1.15) == verdict


@pytest.mark.parametrize(
    ("num_samples", "quantile", "reported"),
    [
        (999, 0.99, False),
        (1000, 0.99, True),
        (20, 0.99, False),
        (19, 0.5, False),
        (20, 0.5, True),
        (10_000, 0.999, True),
        (9_999, 0.999, False),
    ],
)
def test_percentile_is_reported_only_where_samples_support_it(
    num_samples: int, quantile: float, reported: bool
) -> None:
    assert (percentile_with_support(np.arange(1, num_samples + 1), quantile) is not None) == (
        reported
    )


def test_percentile_interval_covers_the_true_p99() -> None:
    rng = np.random.default_rng(11)
    truth = math.log(100)
    covered = 0
    for _ in range(400):
        found = percentile_with_support(rng.exponential(1, 1200), 0.99)
        assert found is not None
        assert found.ci_low_ns <= found.value_ns <= found.ci_high_ns
        covered += found.ci_low_ns <= truth <= found.ci_high_ns
    assert 0.93 <= covered / 400 <= 0.99


def test_notes_name_drift_spread_and_few_blocks() -> None:
    steady = [np.linspace(990, 1010, 11)] * 12
    assert stability_notes(steady, steady) == ()
    rising = [block * factor for block, factor in zip(steady, np.linspace(1, 1.3, 12), strict=True)]
    (drift,) = stability_notes(rising, steady)
    assert "control drifted by +2" in drift
    wide = [np.linspace(500, 2000, 11)] * 12
    (spread,) = stability_notes(steady, wide)
    assert "candidate's calls spans 800 ns to 1.7 us" in spread
    (few,) = stability_notes(steady[:4], steady[:4])
    assert "only 4 blocks" in few
    assert paired_speedup(steady[:4], steady[:4]).notes == (few,)


def test_bad_blocks_are_refused() -> None:
    good = [np.array([1.0, 2.0])] * 4
    with pytest.raises(DataError, match="4 blocks of the control and 3 of the candidate"):
        paired_speedup(good, good[:3])
    with pytest.raises(DataError, match="at least 3 blocks; got 2"):
        paired_speedup(good[:2], good[:2])
    with pytest.raises(DataError, match="block 1 of the candidate holds no samples"):
        paired_speedup(good, [good[0], np.array([]), good[0], good[0]])
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(DataError, match="block 2 of the control"):
            paired_speedup([good[0], good[0], np.array([bad]), good[0]], good)
