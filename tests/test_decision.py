"""Keep or drop, from figures written by hand: `rankopt.passes.decision`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankopt.passes.decision import Gain, combine, decide, missed_gates, slow_byte_savers
from rankopt.review.gates import Gates
from rankopt.review.schema import LatencyRow, PassRecord

MIB = 1 << 20


def row(
    batch_size: int, speedup: float | None, low: float | None, high: float | None
) -> LatencyRow:
    return LatencyRow(
        batch_size=batch_size,
        control_p50_ns=1e6,
        candidate_p50_ns=1e6,
        control_p99_ns=None,
        candidate_p99_ns=None,
        speedup=speedup,
        ci_low=low,
        ci_high=high,
        num_samples=100,
        num_blocks=8,
    )


def gain(low: float, high: float) -> Gain:
    return combine([row(1, math.sqrt(low * high), low, high)])


def record(kind: str, *, kept: bool = True, ci_high: float | None = None) -> PassRecord:
    return PassRecord(kind=kind, changed=True, kept=kept, reason="", ci_high=ci_high)


def test_one_batch_size_keeps_its_own_interval() -> None:
    found = combine([row(1, 1.2, 1.2 / 1.1, 1.2 * 1.1)])
    assert (found.speedup, found.ci_low, found.ci_high) == pytest.approx((1.2, 1.2 / 1.1, 1.32))


def test_batch_sizes_weigh_the_same_whatever_their_milliseconds() -> None:
    # Twice as fast at one and half as fast at the other is no gain.
    found = combine([row(1, 2.0, 1.9, 2.1), row(512, 0.5, 0.45, 0.55)])
    assert found.speedup == pytest.approx(1.0)


def test_equal_intervals_of_four_rows_join_to_half_their_width() -> None:
    found = combine([row(size, 1.0, 1 / 1.2, 1.2) for size in (1, 2, 4, 8)])
    assert found.ci_high == pytest.approx(math.exp(math.log(1.2) / 2))
    assert found.ci_low == pytest.approx(1 / found.ci_high)


def test_the_joint_interval_covers_a_planted_speedup_in_95_of_100() -> None:
    generator = np.random.default_rng(0)
    truth, spreads = np.log([1.3, 0.9]), np.array([0.02, 0.05])
    covered = 0
    for _ in range(2_000):
        seen = truth + spreads * generator.standard_normal(2)
        rows = [
            row(size, math.exp(at), math.exp(at - 1.96 * s), math.exp(at + 1.96 * s))
            for size, at, s in zip((1, 512), seen, spreads, strict=True)
        ]
        found = combine(rows)
        covered += found.ci_low <= math.exp(truth.mean()) <= found.ci_high
    assert 0.94 < covered / 2_000 < 0.96


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1.001, 2)), min_size=1, max_size=5))
def test_the_joint_interval_holds_its_estimate_and_is_no_wider_than_the_widest(
    figures: list[tuple[float, float]],
) -> None:
    rows = [row(n, x, x / width, x * width) for n, (x, width) in enumerate(figures, start=1)]
    found = combine(rows)
    assert found.ci_low < found.speedup < found.ci_high
    assert found.ci_high / found.ci_low <= max(w for _, w in figures) ** 2 * (1 + 1e-9)


def test_a_row_without_an_interval_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="batch 7 has no speed-up with an interval"):
        combine([row(7, 1.2, None, None)])


@pytest.mark.parametrize(
    ("low", "high", "kept", "reason"),
    [
        (1.05, 1.20, True, "faster: "),
        (0.95, 1.10, True, "undecided and kept: "),
        (0.80, 0.95, False, "slower: "),
        (1.0, 1.10, True, "undecided and kept: "),  # right at one shows nothing
        (0.90, 1.0, True, "undecided and kept: "),
    ],
)
def test_a_pass_for_latency_is_dropped_only_when_shown_slower(
    low: float, high: float, kept: bool, reason: str
) -> None:
    decided, why = decide("latency", gain(low, high), 10 * MIB, 20 * MIB)
    assert decided is kept
    assert why.startswith(reason)
    assert "batch 1" in why


@pytest.mark.parametrize(
    ("low", "high", "speed"),
    [(1.05, 1.2, "is faster too"), (0.95, 1.1, "speed undecided"), (0.5, 0.6, "is slower")],
)
def test_a_pass_for_bytes_stays_however_slow(low: float, high: float, speed: str) -> None:
    kept, why = decide("bytes", gain(low, high), 8 * MIB, 2 * MIB)
    assert kept
    assert why.startswith(f"saves 75% of the bytes; {speed}")


@pytest.mark.parametrize("after", [8 * MIB, 9 * MIB])
def test_a_pass_for_bytes_that_saves_none_is_dropped_however_fast(after: int) -> None:
    kept, why = decide("bytes", gain(2.0, 3.0), 8 * MIB, after)
    assert not kept
    assert why.startswith("saves no bytes: 8 MiB before")


GATES = Gates.model_validate(
    {
        "latency": [
            {"batch_size": 1, "min_speedup": 3.0},
            {"batch_size": 512, "min_speedup": 1.5},
            {"batch_size": 512, "max_candidate_p99_ns": 10},
            {"batch_size": 64, "min_speedup": 9.0},
        ]
    }
)


def test_a_gate_is_missed_only_with_the_whole_interval() -> None:
    [missed] = missed_gates(GATES, [row(1, 2.5, 2.2, 2.9), row(512, 1.4, 1.2, 1.6)])
    assert missed == "2.50 [2.20, 2.90] at batch 1 against a gate of 3"
    assert missed_gates(GATES, [row(1, 2.5, 2.2, 3.0)]) == []
    assert len(missed_gates(GATES, [row(1, 1.0, 0.9, 1.1), row(512, 1.0, 0.9, 1.1)])) == 2
    assert missed_gates(GATES, []) == []
    assert missed_gates(Gates(), [row(1, 0.1, 0.1, 0.1)]) == []


def test_slow_byte_savers_are_those_kept_for_bytes_and_shown_slower() -> None:
    records = [
        record("slow and kept", ci_high=0.9),
        record("slow, dropped already", kept=False, ci_high=0.9),
        record("undecided", ci_high=1.05),
        record("for latency", ci_high=0.9),
        record("never timed"),
    ]
    purposes = ["bytes", "bytes", "bytes", "latency", "bytes"]
    assert slow_byte_savers(records, purposes) == [0]
