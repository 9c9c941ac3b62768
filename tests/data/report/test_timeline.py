"""Rows by day and by block."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.report.frames import DAY
from rankopt.data.columns import ColumnTypeError
from rankopt.data.report.timeline import MAX_BLOCKS, NO_DAY, Timeline, days_of, wilson


@given(st.lists(st.integers(0, 9_000), max_size=12))
def test_blocks_of_rows_stay_few_and_lose_no_row(sizes):
    timeline = Timeline(["label"], by_day=False)
    for size in sizes:
        timeline.add([np.ones(size)], None)
    blocks = timeline.blocks()
    assert len(blocks) <= MAX_BLOCKS
    assert sum(block.num_rows for block in blocks) == sum(sizes)
    assert all(block.rate == 1 for block in blocks)
    if blocks:
        assert blocks[0].block.startswith("rows 0 to ")
        assert blocks[-1].block.endswith(f" {sum(sizes) - 1:,}")


def test_the_interval_of_a_share_is_wilsons():
    from statsmodels.stats.proportion import proportion_confint

    for positive, rows in ((0, 10), (3, 10), (10, 10), (250, 100_000)):
        expected = proportion_confint(positive, rows, method="wilson")
        assert wilson(positive, rows) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (pa.array([0, DAY, None]), "s"),
        (pa.array([5, DAY * 1000 + 5, None]), "ms"),
        (pa.array([5.5, DAY + 0.5, None]), "s"),
        (pa.array(["0", "86400", None]), "s"),
        (pa.array(["1970-01-01", "1970-01-02 10:00:00", None]), "s"),
        (pa.array([1, DAY * 1_000_000, None], pa.timestamp("us")), "s"),
        (pa.array([1, DAY * 1_000, None], pa.timestamp("ms", "UTC")), "s"),
        (pa.array([0, 1, None], pa.date32()), "s"),
    ],
)
def test_days_are_read_out_of_every_kind_of_time(values, unit):
    assert days_of(values, unit).tolist() == [0, 1, NO_DAY]


def test_what_is_no_time_is_refused():
    with pytest.raises(ColumnTypeError):
        days_of(pa.array(["yesterday"]), "s")
    with pytest.raises(ColumnTypeError):
        days_of(pa.array([[1]]), "s")
