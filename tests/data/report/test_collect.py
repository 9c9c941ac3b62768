"""What is measured of columns, labels and requests, against planted truths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.report.frames import frame, reports
from rankopt.data.report.cells import (
    IdCells,
    share_cells,
)
from rankopt.data.report.collect import collect
from rankopt.data.report.requests import RequestTally
from rankopt.data.report.run import report_on
from rankopt.data.source import open_source
from rankopt.errors import DataError

# what is not there must not be found


def test_rows_of_the_same_kind_do_not_drift(same):
    for column in same["test"].columns:
        assert column.drift.psi < 3 * column.drift.noise + 1e-4, column
    assert all(column.drift is None for column in same["train"].columns)
    assert all(column.num_null == 0 for split in same.values() for column in split.columns)


def test_rare_ids_that_are_new_in_every_sample_do_not_drift(card):
    # Each id about once: most of the test's ids are unseen, as they would be in any other sample.
    rng = np.random.default_rng(0)
    wide = card.model_copy(
        update={"inputs": (card.inputs[1].model_copy(update={"num_ids": 1_000_000}),)}
    )

    def rows(num_rows: int) -> pd.DataFrame:
        plain = frame(num_rows, int(rng.integers(100)))
        return plain.assign(item=rng.integers(0, 1_000_000, num_rows))

    found = reports(wide, train=rows(40_000), test=rows(40_000))["test"].column("item")
    assert found.unseen_rate == pytest.approx(np.exp(-0.04), abs=0.005)
    assert found.drift.psi < 0.003


def test_requests_whose_rows_share_an_id_do_not_drift(card):
    def rows(seed: int) -> pd.DataFrame:
        plain = frame(20_000, seed)
        rng = np.random.default_rng(seed)
        return plain.assign(item=np.repeat(rng.integers(0, 1_000, 5_000), 4))

    found = reports(card, train=rows(1), test=rows(2))["test"].column("item")
    # Rows of a request count once here, so chance gives about four times as much.
    assert found.drift.psi < 4 * 3 * found.drift.noise


# planted


def test_planted_drift_is_found_where_it_is_and_as_large_as_it_is(card, same):
    found = reports(card, train=frame(40_000, 1), test=frame(20_000, 2, moved=0.5, shifted=3))[
        "test"
    ]
    # Of two normal distributions, 0.5 apart, by tenths of the one: from the exact shares.
    assert found.column("price").drift.psi == pytest.approx(psi_of_moved_normal(0.5), rel=0.1)
    assert found.column("item").drift.psi > 1
    for quiet in ("age", "bag"):
        drift = found.column(quiet).drift
        assert drift.psi < 3 * drift.noise + 1e-4


def psi_of_moved_normal(distance: float) -> float:
    from scipy.stats import norm

    edges = norm.ppf(np.linspace(0, 1, 11))
    p = np.diff(norm.cdf(edges - distance))
    return float(((p - 0.1) * np.log(p / 0.1)).sum())


def test_planted_nulls_are_counted(card):
    rows = frame(10_000, 1)
    rows.loc[rows.index % 10 == 0, "price"] = np.nan
    rows["item"] = rows["item"].astype("Int64")
    rows.loc[:24, "item"] = pd.NA
    rows.loc[:49, "bag"] = None
    found = reports(card, train=frame(10_000, 2), test=rows)["test"]
    assert (found.column("price").num_null, found.column("price").null_rate) == (1_000, 0.1)
    assert (found.column("item").num_null, found.column("item").num_values) == (25, 9_975)
    assert found.column("bag").num_null == 50
    assert found.column("price").drift.psi > 0.1
    assert found.column("price").drift.buckets[-1].label == "missing"
    assert found.column("price").drift.buckets[-1].num_values == 1_000


def test_a_missing_id_in_a_list_makes_its_row_null(card):
    rows = frame(2_000, 1)
    rows["bag"] = [[1, None] if row < 7 else [1] for row in range(2_000)]
    found = reports(card, train=rows)["train"].column("bag")
    assert (found.num_null, found.num_values) == (7, 2_000)


def test_ids_out_of_range_are_counted_and_mapped_as_the_card_says(card):
    rows = frame(1_000, 1).assign(item=np.arange(1_000) % 10)
    rows.loc[:29, "item"] = 5_000
    refused = reports(card, train=rows)["train"].column("item")
    assert (refused.num_out_of_range, refused.out_of_range_rate) == (30, 0.03)
    assert (refused.num_values, refused.cardinality) == (1_000, 10)
    clamped = card.model_copy(
        update={"inputs": (card.inputs[1].model_copy(update={"out_of_range": "clamp"}),)}
    )
    found = reports(clamped, train=rows)["train"].column("item")
    assert (found.num_out_of_range, found.cardinality) == (30, 11)


def test_cardinality_coverage_and_unseen_ids_are_exact(card):
    train = frame(1_000, 1).assign(item=np.arange(1_000) % 100)
    test = frame(1_000, 2).assign(item=np.repeat([3, 200, 300, 99], [700, 100, 100, 100]))
    found = reports(card, train=train, test=test)
    column = found["train"].column("item")
    assert (column.cardinality, column.coverage, column.exact) == (100, 0.1, True)
    assert column.unseen_rate is None
    column = found["test"].column("item")
    assert (column.cardinality, column.unseen_rate, column.unseen_ids_rate) == (4, 0.2, 0.5)


def test_lists_are_measured(card):
    rows = frame(1_000, 1)
    rows["bag"] = [[1] * (row % 5) for row in range(1_000)]
    column = reports(card, train=rows)["train"].column("bag")
    assert (column.mean_length, column.empty_rate, column.cut_rate) == (2.0, 0.2, 0.2)
    assert column.num_values == 2_000


def test_numbers_are_summarised(same):
    price = same["train"].column("price")
    values = frame(40_000, 1)["price"].to_numpy()
    assert price.mean == pytest.approx(values.mean(), abs=1e-5)
    assert price.std == pytest.approx(values.std(), rel=1e-5)
    assert (price.min, price.max) == pytest.approx((values.min(), values.max()), rel=1e-6)
    assert price.p99 == pytest.approx(np.quantile(values, 0.99), rel=0.01)
    assert price.median == pytest.approx(np.median(values), abs=0.01)
    assert same["train"].column("age").median == 1.0


def test_infinite_numbers_are_counted_apart(card):
    rows = frame(1_000, 1)
    rows.loc[:4, "price"] = np.inf
    rows.loc[5, "price"] = 1e300
    price = reports(card, train=rows)["train"].column("price")
    assert (price.num_invalid, price.num_null, price.num_values) == (6, 0, 994)
    assert price.max < 10


def test_label_rates_are_told_by_day(card):
    rows = frame(30_000, 1)
    rows["label"] = np.where(np.arange(30_000) < 10_000, 0, np.arange(30_000) % 2)
    found = reports(card, train=rows)["train"]
    days = [(rate.block, rate.num_rows, rate.rate) for rate in found.label_blocks]
    assert days == [
        ("2023-11-15", 10_000, 0.0),
        ("2023-11-16", 10_000, 0.5),
        ("2023-11-17", 10_000, 0.5),
    ]
    (total,) = found.labels
    assert (total.block, total.num_positive, total.rate) == (None, 10_000, 1 / 3)
    assert total.ci_low < 1 / 3 < total.ci_high


def test_rows_per_request(card):
    rows = frame(1_000, 1)
    rows["request"] = np.concatenate([np.zeros(100), np.repeat(np.arange(1, 451), 2)])
    rows = rows.sample(frac=1, random_state=0)  # rows of a request need not stand together
    found = reports(card, train=rows)["train"].requests
    assert (found.num_requests, found.exact, found.num_null) == (451, True, 0)
    assert (found.p50, found.p99, found.max) == (2, 2, 100)
    assert found.mean == pytest.approx(1_000 / 451)


def test_columns_beyond_the_budget_share_cells_and_say_so(card):
    cells = share_cells({"small": 10, "large": 10_000_000, "larger": 1 << 40}, 1_000)
    assert [cells[name].num_cells for name in ("small", "large", "larger")] == [10, 495, 495]
    assert [cells[name].exact for name in ("small", "large", "larger")] == [True, False, False]
    shared = IdCells(1_000_000, 4_096)
    found = np.unique(shared.of(np.arange(3_000)))
    assert shared.cardinality(len(found)) == pytest.approx(3_000, rel=0.05)

    train = frame(3_000, 1).assign(item=np.arange(3_000) % 500)
    test = frame(3_000, 2).assign(item=np.arange(3_000) % 1_000)
    sources = {"train": open_source(train), "test": open_source(test)}
    # 50 ids of lists and two columns of numbers leave 700 cells for 1,000 items.
    split = collect(card, sources, "train", max_id_cells=750)[1].column("item")
    assert split.exact is False
    assert split.cardinality == pytest.approx(1_000, rel=0.1)
    assert split.unseen_rate == pytest.approx(0.5, abs=0.05)


def test_too_many_requests_are_sampled_without_bias():
    tally = RequestTally("request", capacity=1_000)
    rng = np.random.default_rng(0)
    keys = np.repeat(rng.integers(0, 1 << 62, 20_000).astype(np.uint64), np.arange(20_000) % 4 + 1)
    rng.shuffle(keys)
    for part in np.array_split(keys, 50):
        tally.add(part, np.zeros(len(part), dtype=bool))
    found = tally.report()
    assert not found.exact
    assert found.max is None
    assert found.num_requests == pytest.approx(20_000, rel=0.15)
    assert found.mean == pytest.approx(2.5, rel=0.1)
    assert (found.p50, found.p99) == (2, 4)


def test_memory_does_not_grow_with_the_rows(card, tmp_path):
    rows = pa.Table.from_pandas(frame(40_000, 1))
    with pq.ParquetWriter(tmp_path / "a.parquet", rows.schema) as writer:
        for _ in range(20):
            writer.write_table(rows, row_group_size=20_000)
    source = open_source(tmp_path / "a.parquet")
    before, most = pa.total_allocated_bytes(), 0

    class Watched:
        name, num_rows = source.name, source.num_rows
        column_names = staticmethod(source.column_names)

        @staticmethod
        def batches(columns: Any = None, batch_rows: int = 1) -> Any:
            nonlocal most
            for batch in source.batches(columns, batch_rows):
                most = max(most, pa.total_allocated_bytes() - before)
                yield batch

    (found,) = collect(card, {"train": Watched()}, "train")
    assert found.num_rows == 800_000
    assert most < rows.nbytes * 6  # the file holds 20 times as much


def test_criteos_missing_fields_are_missing_and_not_zero(make_card, tmp_path):
    lines = ["\t".join(["1", *["" if row < 3 else "4"] * 13, *["" if row < 2 else "a"] * 26])
             for row in range(10)]  # fmt: skip
    (tmp_path / "day.txt").write_text("\n".join(lines) + "\n")
    card = make_card(
        {"name": "dense", "kind": "dense", "columns": ["I1"]},
        {"name": "ids", "kind": "ids", "columns": ["C1"], "num_ids": 100},
        format="criteo",
        test="day.txt",
        path=tmp_path / "card.yaml",
    )
    splits = report_on(card).splits
    assert sum(split.column("I1").num_null for split in splits) == 3
    assert sum(split.column("C1").num_null for split in splits) == 2


def test_a_column_of_a_wrong_type_is_named(card):
    rows = frame(100, 1).assign(price="cheap", item=[[1]] * 100, time="soon")
    with pytest.raises(DataError) as caught:
        collect(card, {"train": open_source(rows)}, None)
    told = str(caught.value)
    assert "column 'item': cannot be read as id; got 'list<" in told
    assert "column 'time': cannot be read as times" in told


def test_a_text_column_of_no_numbers_counts_as_invalid(card):
    rows = frame(100, 1).assign(price="cheap")
    price = reports(card, train=rows)["train"].column("price")
    assert (price.num_invalid, price.num_values, price.mean) == (100, 0, None)
