from __future__ import annotations

import numpy as np
import pytest

from rankopt.bench.peers.result import Comparison, SummaryRow
from rankopt.bench.peers.summary import compare_with_eager, geometric_means, rows_of, summarise
from rankopt.bench.samples import BlockRecord

NUM_BLOCKS = 8


def turns(batch_size, **p50_ns):
    """Blocks in which the whole machine is slower or faster, all arms alike."""
    records = []
    for block in range(NUM_BLOCKS):
        pace = 1 + 0.2 * (block % 3)
        for turn, (arm, base) in enumerate(p50_ns.items()):
            samples = np.full(10, round(base * pace), dtype=np.int64)
            records.append(BlockRecord(batch_size, block, arm, turn, samples, 1, 1, 0, 0.0))
    return records


def rows(records, failing=()):
    cells = {(record.arm, record.batch_size) for record in records}
    ok = {cell: cell not in failing for cell in cells}
    return rows_of("m", records, ok, {cell: {"setting": cell[0]} for cell in cells})


def test_the_best_peer_is_the_fastest_arm_and_ratios_are_those_of_the_rows():
    records = turns(1, eager=9_000, rankopt=1_000, aoti=2_000, onnxruntime_int8=3_000)
    records += turns(64, eager=9_000, rankopt=4_000, aoti=3_000, onnxruntime_int8=5_000)
    made = rows(records)
    assert {row.num_samples for row in made} == {10 * NUM_BLOCKS}
    [small, large] = summarise(made, records)
    assert (small.best_peer, small.ratio) == ("aoti", pytest.approx(2.0, rel=1e-3))
    assert (large.best_peer, large.ratio) == ("aoti", pytest.approx(0.75, rel=1e-3))
    assert small.ci_low < 2 < small.ci_high
    p50 = {(row.batch_size, row.arm): row.p50_ns for row in made}
    for row in (small, large):
        ratio = p50[row.batch_size, row.best_peer] / p50[row.batch_size, "rankopt"]
        assert ratio == pytest.approx(row.ratio)
    assert [row.ratio for row in compare_with_eager(made, records)] == pytest.approx(
        [9.0, 2.25], rel=1e-3
    )


def test_an_arm_that_does_not_hold_the_margin_is_shown_but_never_best():
    records = turns(1, eager=9_000, rankopt=1_000, aoti=2_000, fast=500)
    made = rows(records, failing={("fast", 1)})
    assert [row.arm for row in made if not row.quality_ok] == ["fast"]
    [row] = summarise(made, records)
    assert (row.best_peer, row.ratio) == ("aoti", pytest.approx(2.0, rel=1e-3))


def test_eager_is_a_peer_too():
    records = turns(1, eager=900, rankopt=1_000, aoti=2_000)
    [row] = summarise(rows(records), records)
    assert (row.best_peer, row.ratio) == ("eager", pytest.approx(0.9, rel=1e-3))


@pytest.mark.parametrize(
    ("arms", "failing", "best_peer", "reason"),
    [
        (("eager", "rankopt"), {("rankopt", 1)}, "eager", "rankopt does not hold the NE margin"),
        (("eager", "rankopt"), {("eager", 1)}, None, "no other arm holds the NE margin"),
        (("eager", "aoti"), set(), "eager", "rankopt was not run"),
        (("rankopt",), set(), None, "no other arm holds the NE margin"),
    ],
)
def test_a_cell_without_a_ratio_says_why(arms, failing, best_peer, reason):
    records = turns(1, **{arm: 1_000 * (index + 1) for index, arm in enumerate(arms)})
    [row] = summarise(rows(records, failing), records)
    assert (row.best_peer, row.reason) == (best_peer, reason)
    assert row.ratio is row.ci_low is row.ci_high is None


def test_means_are_geometric_and_leave_cells_without_a_ratio_out():
    def cell(batch_size, ratio):
        return Comparison(
            model="m", batch_size=batch_size, ratio=ratio, ci_low=ratio, ci_high=ratio
        )

    summary = [
        SummaryRow(**cell(size, ratio).model_dump(), best_peer="aoti")
        for size, ratio in ((1, 2.0), (1, 8.0), (64, 0.5), (64, None))
    ]
    means = {
        (mean.against, mean.batch_size): (mean.ratio, mean.num_cells)
        for mean in geometric_means(summary, [cell(1, 3.0)])
    }
    assert means == {
        ("best_peer", None): (pytest.approx(2.0), 3),
        ("best_peer", 1): (pytest.approx(4.0), 2),
        ("best_peer", 64): (pytest.approx(0.5), 1),
        ("eager", None): (pytest.approx(3.0), 1),
        ("eager", 1): (pytest.approx(3.0), 1),
    }
    assert geometric_means([], []) == []
