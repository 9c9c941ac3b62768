"""Limits that a card sets, and the files that the verb writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from data.report.frames import frame
from rankopt.data.report.limits import DataLimits
from rankopt.data.report.run import refuse_broken_limits, report_on
from rankopt.data.report.write import write_data_report
from rankopt.data.splits import Splits, open_splits
from rankopt.errors import DataError, UsageError
from rankopt.models.card import load_card

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


def test_splits_by_hash_are_reported_as_the_card_parts_them(planted):
    raw = yaml.safe_load(planted.read_text())
    del raw["data"]["validation"], raw["data"]["limits"]
    planted.write_text(yaml.safe_dump(raw))
    card = load_card(planted)
    report = report_on(card)
    assert report.split("validation").num_rows + report.split("test").num_rows == 4_000
    assert report.split("test").requests.num_requests < 1_000
    assert open_splits(card).validation is not None
