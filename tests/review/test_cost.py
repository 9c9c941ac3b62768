from __future__ import annotations

import numpy as np
import pytest

from rankopt.bench.samples import BlockRecord
from rankopt.review.cost import MIN_BLOCKS, BlockTimes, closed_loop_cost

SECOND = 1_000_000_000


def blocks(rows_per_s: float, num_blocks: int = 20, noise: float = 0.0, seed: int = 0):
    random = np.random.default_rng(seed)
    times = [1_000 / rows_per_s * SECOND * (1 + noise * random.normal()) for _ in range(num_blocks)]
    return BlockTimes([1_000] * num_blocks, times)


def test_dollars_follow_from_throughput_and_price():
    # 1,000,000 rows at 10,000 a second take 100 s; at $3.60 an hour that is $0.10.
    cost = closed_loop_cost(3.6, 512, blocks(10_000), blocks(40_000))
    assert cost.control_usd_per_million == pytest.approx(0.1)
    assert cost.candidate_usd_per_million == pytest.approx(0.025)
    assert cost.ratio == pytest.approx(0.25)
    assert cost.control_qps == pytest.approx(10_000)
    assert (cost.load_model, cost.batch_size, cost.reason) == ("closed-loop", 512, None)


def test_blocks_are_read_from_the_records_of_a_run():
    def record(arm: str, batch_size: int, block: int, wall_ns: int) -> BlockRecord:
        latency_ns = np.full(5, wall_ns // 5)
        return BlockRecord(batch_size, block, arm, 0, latency_ns, wall_ns, wall_ns, 0, None)

    records = [
        record("candidate", 64, 1, 2_000),
        record("control", 64, 0, 9_000),
        record("candidate", 8, 0, 7_000),
        record("candidate", 64, 0, 1_000),
    ]
    blocks = BlockTimes.of(records, "candidate", 64)
    assert list(blocks.num_rows) == [320, 320]
    assert list(blocks.duration_ns) == [1_000, 2_000]
    assert not BlockTimes.of(records, "candidate", 1).usable()


def test_no_price_leaves_dollars_null_with_the_reason_but_keeps_the_ratio():
    cost = closed_loop_cost(None, 512, blocks(10_000), blocks(40_000))
    assert cost.price_per_hour is None
    assert cost.control_usd_per_million is None
    assert cost.candidate_usd_per_million is None
    assert cost.candidate_usd_low is None
    assert cost.reason == "no hourly price was given"
    assert cost.ratio == pytest.approx(0.25)


@pytest.mark.parametrize(
    "control",
    [
        None,
        BlockTimes([], []),
        BlockTimes([10], [0.0]),
        BlockTimes([0], [5.0]),
        BlockTimes([10], [float("nan")]),
        BlockTimes([10, 10], [5.0]),
    ],
)
def test_what_was_not_measured_is_null_with_the_reason(control):
    cost = closed_loop_cost(3.6, 512, control, blocks(40_000))
    assert cost.ratio is None
    assert cost.candidate_usd_per_million is None
    assert "was not measured" in (cost.reason or "")


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    held = 0
    for seed in range(40):
        cost = closed_loop_cost(
            3.6, 512, blocks(10_000, 24, 0.1, seed), blocks(20_000, 24, 0.1, seed + 1_000)
        )
        assert cost.ratio_low < cost.ratio < cost.ratio_high
        assert cost.candidate_usd_low < cost.candidate_usd_per_million < cost.candidate_usd_high
        held += cost.ratio_low <= 0.5 <= cost.ratio_high
    assert 34 <= held <= 40


def test_drift_that_hits_both_arms_cancels_out_of_the_ratio():
    drift = np.linspace(1, 2, 20)
    control = BlockTimes([1_000] * 20, list(drift * SECOND))
    candidate = BlockTimes([1_000] * 20, list(drift * SECOND / 2))
    cost = closed_loop_cost(None, 1, control, candidate)
    assert cost.ratio_high - cost.ratio_low == pytest.approx(0, abs=1e-12)
    assert cost.ratio == pytest.approx(0.5)


def test_too_few_blocks_give_a_value_and_no_interval():
    few = MIN_BLOCKS - 1
    cost = closed_loop_cost(3.6, 1, blocks(10_000, few), blocks(20_000, few))
    assert cost.ratio == pytest.approx(0.5)
    assert cost.ratio_low is None
    assert cost.candidate_usd_low is None
    uneven = closed_loop_cost(3.6, 1, blocks(10_000, 20), blocks(20_000, 21))
    assert uneven.ratio_low is None
