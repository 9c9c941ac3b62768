"""Cells that miss a goal, what bounds them, and how they are told."""

from __future__ import annotations

import pytest

from rankopt.bench.peers.goals import Goal, Goals, missed_goals, nearest_limit
from rankopt.bench.peers.report import (
    breakdown_table,
    dense_text,
    limit_text,
    lookup_text,
    mean_text,
    missed_text,
    parts_text,
)
from rankopt.bench.peers.result import (
    Comparison,
    NotBrokenDown,
    PeerResult,
    SummaryRow,
    TimeBreakdown,
)
from rankopt.bench.peers.suite import load_suite
from rankopt.bench.peers.summary import geometric_means
from rankopt.cli.bench import _show
from rankopt.diagnose.schema import PartRow, Timing
from rankopt.errors import UsageError

GOALS = Goals(
    best_peer=Goal(geometric_mean=1.6, ci_low=1.0, up_to_batch=512), eager=Goal(geometric_mean=3.0)
)


def cell(batch_size, ratio, low=None, peer="aoti", reason=None):
    low = None if ratio is None else low or ratio
    return SummaryRow(
        model="m",
        batch_size=batch_size,
        ratio=ratio,
        ci_low=low,
        ci_high=ratio,
        best_peer=peer,
        reason=reason,
    )


def against_eager(batch_size, ratio):
    return Comparison(model="m", batch_size=batch_size, ratio=ratio, ci_low=ratio, ci_high=ratio)


def part(name, share, bound, *, operations=None, bytes_share=None, rate=None):
    time = Timing(p50_ns=share * 1000, ci_low_ns=None, ci_high_ns=None, num_samples=9)
    return PartRow(
        part=name,
        time=time,
        share=share,
        num_operators=0 if name == "framework overhead" else 1,
        operations_per_s=rate if operations is not None else None,
        bytes_per_s=rate if bytes_share is not None else None,
        of_operations_peak=operations,
        of_bytes_peak=bytes_share,
        bound=bound,
    )


def times(batch_size, *parts):
    whole = Timing(p50_ns=1000.0, ci_low_ns=None, ci_high_ns=None, num_samples=9)
    return TimeBreakdown(
        model="m",
        batch_size=batch_size,
        setting={"recipe": "r"},
        whole=whole,
        parts=parts,
        unexplained_share=0.05,
        notes=(),
    )


DENSE = part("dense", 0.5, "operations", operations=0.62, rate=1.4e12)
LOOKUP = part("lookup", 0.25, "bytes", bytes_share=0.4, rate=12.5e9)
OVERHEAD = part("framework overhead", 0.2, "overhead")


def judge(summary, eager=(), breakdown=(), goals=GOALS):
    means = geometric_means(summary, eager, goals)
    return missed_goals(goals, summary, eager, means, breakdown)


def test_an_interval_below_its_goal_is_missed_with_what_bounds_it():
    summary = [cell(1, 1.2, low=0.9), cell(512, 4.0), cell(2048, 2.0, low=0.5)]
    [missed] = judge(summary, breakdown=[times(1, DENSE, LOOKUP, OVERHEAD), times(512, LOOKUP)])
    assert (missed.batch_size, missed.peer, missed.wanted) == (1, "aoti", {"ci_low": 1.0})
    assert (missed.bound, missed.bound_share) == ("operations", 0.5)
    assert (missed.largest_part, missed.largest_of_limit) == ("dense", 0.62)
    assert missed_text(missed) == (
        "m, batch 1, against aoti: 1.20 [0.90, 1.20], wanted an interval from 1; bound by "
        "operations (50% of a call); largest part dense (50%, at 62% of its nearest limit)"
    )


def test_a_mean_that_is_missed_lists_the_cells_below_it():
    summary = [cell(1, 1.5), cell(64, 1.5), cell(512, 1.7)]
    missed = judge(summary)
    assert [(row.batch_size, row.wanted) for row in missed] == [
        (1, {"geometric_mean": 1.6}),
        (64, {"geometric_mean": 1.6}),
    ]
    assert judge([*summary, cell(2048, 9.0)]) == []
    assert missed_text(missed[0]).endswith(
        "wanted for the mean 1.6; what bounds it was not looked into"
    )


def test_eager_has_goals_of_its_own():
    missed = judge([cell(1, 2.0)], [against_eager(1, 2.5)])
    assert [(row.against, row.peer, row.wanted) for row in missed] == [
        ("eager", "eager", {"geometric_mean": 3.0})
    ]


def test_a_cell_without_a_ratio_misses_unless_there_is_nothing_to_compare_with():
    lost = cell(1, None, reason="rankopt does not hold the NE margin")
    alone = cell(1, None, peer=None, reason="no other arm holds the NE margin")
    [missed] = judge([lost, alone])
    assert missed.wanted == {"ci_low": 1.0, "geometric_mean": 1.6}
    assert ": rankopt does not hold the NE margin, wanted" in missed_text(missed)


def test_nothing_asked_is_nothing_missed():
    assert judge([cell(1, 0.1)], [against_eager(1, 0.1)], goals=Goals()) == []
    [mean, *_] = geometric_means([cell(1, 0.5)], [])
    assert mean.goal is None
    assert mean_text(mean) == "0.50"


@pytest.mark.parametrize(("ratio", "said"), [(1.6, "met"), (1.5, "missed")])
def test_a_mean_says_whether_its_goal_is_met(ratio, said):
    means = geometric_means([cell(1, ratio)], [], GOALS)
    assert [mean.goal for mean in means] == [1.6, None]
    assert mean_text(means[0]) == f"{ratio:.2f} (goal 1.6, {said})"


def test_parts_of_one_kind_of_limit_count_together():
    row = times(1, DENSE, part("attention", 0.2, "overhead"), OVERHEAD, part("quantise", 0.15,
                "overhead"))  # fmt: skip
    assert nearest_limit(row) == ("overhead", pytest.approx(0.55))
    # A part that came out below zero takes nothing from the others.
    below = times(1, LOOKUP, part("framework overhead", -0.3, "bytes"))
    assert nearest_limit(below) == ("bytes", 0.25)


def result_of(*rows, **more):
    return PeerResult(
        made_at="",
        environment={},
        command="",
        suite={},
        rows=(),
        summary=(),
        against_eager=(),
        geometric_means=(),
        not_run=(),
        settings=(),
        notes=(),
        time_breakdown=rows,
        **more,
    )


def test_the_table_has_a_column_for_each_part_there_is():
    rows = (times(1, DENSE, LOOKUP, OVERHEAD), times(512, DENSE))
    result = result_of(*rows)
    heading, first, second = breakdown_table(result)
    assert heading[3:6] == ("lookup", "dense", "framework overhead")
    assert first[3:6] == ("25%", "50%", "20%")
    assert second[3:6] == ("", "50%", "")
    assert first[6:] == (
        "1,400 GOP/s, 62% of peak", "12.5 GB/s, 40% of peak", "operations (50%)"
    )  # fmt: skip
    assert second[7] == lookup_text(rows[1]) == ""
    assert parts_text(rows[0]) == "dense 50%, lookup 25%, framework overhead 20%"
    assert (dense_text(rows[0]), limit_text(rows[1])) == (first[6], "operations (50%)")


def test_the_shipped_suite_asks_for_its_goals_and_a_slip_is_told(tmp_path):
    suite = load_suite("peers")
    assert (suite.goals, suite.breakdown) == (GOALS, True)
    file = tmp_path / "suite.yaml"
    file.write_text(
        "models: [{name: m, card: m}]\narms: [eager]\ngoals: {best_peer: {ci_lo: 1, ci_low: -1}}\n"
    )
    with pytest.raises(UsageError) as raised:
        load_suite(file)
    assert "goals.best_peer.ci_lo: is not a known key" in str(raised.value)
    assert "goals.best_peer.ci_low: input should be greater than 0" in str(raised.value)


def test_the_command_line_shows_parts_goals_and_what_could_not_be_looked_into(capsys, tmp_path):
    rows = (times(1, DENSE, LOOKUP, OVERHEAD),)
    summary = [cell(1, 1.2, low=0.9)]
    means = geometric_means(summary, [], GOALS)
    missed = missed_goals(GOALS, summary, [], means, rows)
    failed = NotBrokenDown(model="m", batch_sizes=(512,), error="too large")
    result = result_of(*rows, missed_goals=missed, not_broken_down=(failed,))
    _show(result.model_copy(update={"geometric_means": tuple(means)}), tmp_path / "peers.json")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "m  batch 1  1 us  dense 50%, lookup 25%, framework overhead 20%  1,400 GOP/s, 62% of peak"
        "  12.5 GB/s, 40% of peak  operations (50%)"
    )
    assert lines[1] == "time not broken down: m: batch 512: too large"
    assert lines[2] == "geometric mean against best_peer: 1.20 (goal 1.6, missed)"
    assert lines[3].startswith("goal missed: m, batch 1, against aoti: 1.20 [0.90, 1.20], wanted ")
