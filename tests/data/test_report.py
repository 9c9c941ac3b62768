"""The data report against planted truths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rankopt.data.columns import ColumnTypeError
from rankopt.data.report.cells import (
    IdCells,
    real_cells,
    real_value,
    share_cells,
    stability_index,
)
from rankopt.data.report.collect import collect
from rankopt.data.report.limits import DataLimits
from rankopt.data.report.requests import RequestTally
from rankopt.data.report.run import refuse_broken_limits, report_on
from rankopt.data.report.timeline import MAX_BLOCKS, NO_DAY, Timeline, days_of, wilson
from rankopt.data.report.write import write_data_report
from rankopt.data.source import open_source
from rankopt.data.splits import Splits, open_splits
from rankopt.errors import DataError, UsageError
from rankopt.models.card import ModelCard, load_card

MakeCard = Callable[..., ModelCard]
DAY = 86_400
START = 1_700_006_400  # 2023-11-15, 00:00 UTC


@pytest.fixture(scope="module")
def card(make_card: MakeCard) -> ModelCard:
    return make_card(
        {"name": "dense", "kind": "dense", "columns": ["price", "age"], "fill": 0.0},
        {"name": "item", "kind": "ids", "columns": ["item"], "num_ids": 1_000},
        {"name": "bag", "kind": "ragged_ids", "column": "bag", "num_ids": 50, "max_length": 3},
        request_key="request",
        time_column="time",
    )


def frame(num_rows: int, seed: int, **planted: Any) -> pd.DataFrame:
    """Draw rows; `planted` moves prices, shifts ids, or raises the label rate."""
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.zipf(1.5, num_rows) - 1, 899)
    return pd.DataFrame(
        {
            "price": rng.standard_normal(num_rows) * planted.get("spread", 1.0)
            + planted.get("moved", 0.0),
            "age": rng.integers(0, 3, num_rows).astype(float),
            "item": (ranks + planted.get("shifted", 0)) % 1_000,
            "bag": lists(rng, num_rows),
            "request": np.arange(num_rows) // 4 + seed * 1_000_000,
            "time": START + np.arange(num_rows) * 3 * DAY // num_rows,
            "label": (rng.random(num_rows) < planted.get("rate", 0.2)).astype(int),
        }
    )


def lists(rng: np.random.Generator, num_rows: int) -> Any:
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 6, num_rows))]).astype(np.int32)
    values = pa.array(rng.integers(0, 50, offsets[-1]))
    array = pa.ListArray.from_arrays(offsets, values)
    return pd.Series(array, dtype=pd.ArrowDtype(array.type))


def reports(card: ModelCard, **frames: pd.DataFrame) -> dict[str, Any]:
    sources = {name: open_source(rows) for name, rows in frames.items()}
    found = collect(card, sources, next(iter(sources)))
    return {split.name: split for split in found}


@pytest.fixture(scope="module")
def same(card: ModelCard) -> dict[str, Any]:
    return reports(card, train=frame(40_000, 1), test=frame(20_000, 2))


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


# the parts


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_cells_rise_with_their_numbers_and_tell_them_to_a_percent(values):
    array = np.sort(np.array(values, dtype=np.float32))
    cells = real_cells(array)
    assert (np.diff(cells) >= 0).all()
    for value, cell in zip(array.tolist(), cells.tolist(), strict=True):
        assert real_value(cell) == pytest.approx(value, rel=0.008, abs=1.2e-38)


def test_the_stability_index_is_what_it_says():
    reference, values = np.array([500, 300, 200]), np.array([400, 300, 300])
    index, noise = stability_index(reference * 1_000, values * 1_000)
    p, q = np.array([0.4, 0.3, 0.3]), np.array([0.5, 0.3, 0.2])
    assert index == pytest.approx(((p - q) * np.log(p / q)).sum(), rel=1e-5)
    assert noise == pytest.approx(2 * (1e-6 + 1e-6))
    assert stability_index(reference, reference)[0] == 0
    assert stability_index(reference, values * 0) is None


def test_the_noise_is_the_mean_of_the_index_of_draws_of_one_kind():
    rng = np.random.default_rng(0)
    shares = [0.1] * 10
    draws = [
        stability_index(rng.multinomial(4_000, shares), rng.multinomial(2_000, shares))
        for _ in range(400)
    ]
    assert np.mean([index for index, _ in draws]) == pytest.approx(draws[0][1], rel=0.1)


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


# limits and files


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Write a card with limits, and three splits of which test breaks most of them."""
    test = frame(4_000, 3, moved=1.0, rate=0.5)
    test.loc[test.index % 20 == 0, "price"] = np.nan
    test["item"] = (test["item"] + 500) % 1_000
    for name, rows in (
        ("train", frame(8_000, 1)), ("validation", frame(4_000, 2)), ("test", test),
    ):  # fmt: skip
        rows.to_parquet(tmp_path / f"{name}.parquet")
    raw = {
        "name": "planted",
        "factory": "rankopt.models.deepfm:DeepFM",
        "config": {"num_ids": [1_000], "num_dense": 2, "embedding_dim": 4, "deep_mlp": [4]},
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": ["price", "age"], "fill": 0.0},
            {
                "name": "sparse",
                "kind": "ids",
                "columns": ["item"],
                "num_ids": 1_000,
                "keep_width": True,
            },
        ],
        "outputs": [{"name": "click", "label": "label"}],
        "data": {
            **{name: f"{name}.parquet" for name in ("train", "validation", "test")},
            "request_key": "request",
            "time_column": "time",
            "limits": {
                "max_null_rate": {"price": "1%"},
                "max_unseen_ids": "5%",
                "max_psi": {"price": 0.25},
                "label_rate": ["10%", 0.3],
            },
        },
        "train": {"epochs": 1, "batch_size": 500},
    }
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "card.yaml"


def test_broken_limits_name_column_found_and_allowed(planted):
    report = report_on(load_card(planted))
    assert (report.verdict, report.reference) == ("fail", "train")
    broken = {(b.split, b.limit): b for b in report.breaches}
    assert set(broken) == {
        ("test", "max_null_rate.price"),
        ("test", "max_unseen_ids"),
        ("test", "max_psi.price"),
        ("test", "label_rate"),
    }
    null = broken["test", "max_null_rate.price"]
    assert (null.column, null.got, null.allowed) == (
        "price",
        "5% (200 of 4,000 rows)",
        "at most 1%",
    )


def test_training_refuses_before_it_begins(planted, cli, tmp_path):
    result = cli("train", planted, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
    assert (
        "data.limits.max_null_rate.price: test, column 'price': share of rows without a value must "
        "be at most 1%, and is 5% (200 of 4,000 rows)"
    ) in result.stderr
    assert "label_rate: test, column 'label': share of ones must be between 10% and 30%" in (
        result.stderr
    )
    assert "Traceback" not in result.stderr


def test_training_goes_on_where_the_limits_are_kept(planted, cli, tmp_path):
    raw = yaml.safe_load(planted.read_text())
    raw["data"]["test"] = "validation.parquet"
    planted.write_text(yaml.safe_dump(raw))
    result = cli("train", planted, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    again = load_card(tmp_path / "out" / "card.yaml")
    assert again.data.limits == load_card(planted).data.limits


def test_the_verb_writes_what_it_found_and_fails_where_a_limit_does(planted, cli, tmp_path):
    result = cli("data", "report", planted, "--out", tmp_path / "out")
    assert result.exit_code == 1, result.stderr
    assert "limits: fail" in result.stdout
    assert "max_null_rate.price" in result.stdout
    written = json.loads((tmp_path / "out" / "data.json").read_text())
    assert written["verdict"] == "fail"
    assert [split["name"] for split in written["splits"]] == ["train", "validation", "test"]
    markdown = (tmp_path / "out" / "data.md").read_text()
    assert "| test | price | max_null_rate.price |" in markdown
    assert "2023-11-15" in markdown
    page = (tmp_path / "out" / "data.html").read_text()
    assert "Broken limits" in page
    assert "Drift of price" in page
    again = cli("data", "report", planted, "--out", tmp_path / "out")
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_rows_given_are_compared_whole_with_the_cards_train_split(planted, cli, tmp_path):
    fresh = tmp_path / "fresh.parquet"
    frame(3_000, 9).drop(columns="label").to_parquet(fresh)
    result = cli("data", "report", planted, "--data", fresh, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 3, result.stderr
    told = json.loads(result.stdout)
    assert told["reference"] == "train"
    assert [(s["name"], s["num_rows"]) for s in told["splits"]] == [
        ("train", 8_000), ("data", 3_000),
    ]  # fmt: skip
    assert told["splits"][1]["labels"] == []
    assert told["verdict"] == "inconclusive"
    assert told["not_judged"] == ["data.limits.label_rate: data has no labels"]


def test_a_reference_of_ones_own(planted, tmp_path):
    card = load_card(planted)
    report = report_on(card, reference=str(tmp_path / "test.parquet"))
    assert report.reference == "reference"
    assert report.split("test").column("price").drift.psi == 0
    assert report.split("train").column("price").drift.psi > 0.5
    by_split = report_on(card, reference="validation")
    assert by_split.split("validation").column("price").drift is None
    assert by_split.split("train").column("price").drift.psi < 0.1
    with pytest.raises(UsageError, match=r"must be a split that there is \(data\), or a path"):
        report_on(card.model_copy(update={"data": type(card.data)()}), frame(100, 1), "validation")
    with pytest.raises(DataError, match="no such file"):
        report_on(card, reference="validaton")


def test_without_a_train_split_nothing_is_compared_and_that_is_said(card, tmp_path):
    bare = card.model_copy(update={"data": card.data.model_copy(update={"limits": DataLimits()})})
    report = report_on(bare, frame(500, 1))
    assert (report.reference, report.verdict) == (None, "pass")
    assert "There is no train split" in report.notes[0]
    write_data_report(report, tmp_path)
    assert "Every limit of the card is kept" in (tmp_path / "data.md").read_text()
    limits = DataLimits(max_psi=0.1)
    strict = card.model_copy(update={"data": card.data.model_copy(update={"limits": limits})})
    report = report_on(strict, frame(500, 1))
    assert (report.verdict, report.not_judged) == (
        "inconclusive",
        ("data.limits.max_psi: there is no reference",),
    )


def test_rows_without_limits_are_not_read_before_training(card):
    class Unreadable:
        name, num_rows = "unreadable", None

        def column_names(self) -> tuple[str, ...]:
            raise AssertionError("was looked at")

        def batches(self, columns: Any = None, batch_rows: int = 1) -> Any:
            raise AssertionError("was read")

    refuse_broken_limits(card, Splits(Unreadable(), None, Unreadable(), {}))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_null_rate": "much"}, "must be a share such as 1% or 0.01"),
        ({"max_null_rate": 2}, "less than or equal to 1"),
        ({"label_rate": [0.5, 0.1]}, r"label_rate must be \[low, high\]"),
        ({"max_nulls": 1}, "Extra inputs"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    with pytest.raises(ValidationError, match=message):
        DataLimits.model_validate(limits)


def test_a_limit_of_a_column_that_nothing_reads_is_refused(make_card):
    inputs = {"name": "item", "kind": "ids", "columns": ["item"], "num_ids": 9}
    with pytest.raises(
        ValidationError, match=r"column 'itm', which no input .* Did you mean 'item'"
    ):
        make_card(inputs, limits={"max_psi": {"itm": 0.1}})
    make_card(inputs, limits={"max_psi": {"item": 0.1}, "label_rate": {"label": [0, 1]}})


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


def test_splits_by_hash_are_reported_as_the_card_parts_them(planted):
    raw = yaml.safe_load(planted.read_text())
    del raw["data"]["validation"], raw["data"]["limits"]
    planted.write_text(yaml.safe_dump(raw))
    card = load_card(planted)
    report = report_on(card)
    assert report.split("validation").num_rows + report.split("test").num_rows == 4_000
    assert report.split("test").requests.num_requests < 1_000
    assert open_splits(card).validation is not None
