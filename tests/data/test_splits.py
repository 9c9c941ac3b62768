from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rankopt.data.encode import load_rows
from rankopt.data.source import RowSource
from rankopt.data.splits import HashSplitSource, Splits, open_splits
from rankopt.errors import CardError, DataError
from rankopt.models.card import ModelCard

MakeCard = Callable[..., ModelCard]
NUM_ROWS = 3000
IDS = {"name": "id", "kind": "ids", "columns": ["id"], "num_ids": NUM_ROWS}
HISTORY = {
    "name": "history",
    "kind": "ragged_ids",
    "column": "history",
    "num_ids": 100,
    "max_length": 5,
}


def frame() -> pd.DataFrame:
    row = pd.Series(range(NUM_ROWS))
    return pd.DataFrame({"id": row, "user": row // 10, "label": row % 2, "history": "1|2"})


def ids(source: RowSource | None, batch_rows: int = 1000) -> list[int]:
    assert source is not None
    batches = source.batches(["id"], batch_rows)
    return [int(value) for batch in batches for value in batch.column(0).to_pylist()]


def check_parted(splits: Splits, by_user: bool) -> None:
    validation, test = ids(splits.validation), ids(splits.test)
    assert sorted(validation + test) == list(range(NUM_ROWS))
    assert validation == sorted(validation)
    num_units = NUM_ROWS // 10 if by_user else NUM_ROWS
    assert abs(len(validation) / NUM_ROWS - 0.3) < 4 * (0.3 * 0.7 / num_units) ** 0.5
    shared = {value // 10 for value in validation} & {value // 10 for value in test}
    assert bool(shared) is not by_user


class TestOverride:
    @pytest.mark.parametrize("key", [None, "user"])
    def test_one_file_is_parted_by_request_or_row(
        self, make_card: MakeCard, tmp_path: Path, key: str | None
    ) -> None:
        frame().to_parquet(tmp_path / "x.parquet")
        card = make_card(IDS, request_key=key)
        splits = open_splits(card, tmp_path / "x.parquet")
        assert splits.train is None
        check_parted(splits, by_user=key is not None)
        assert splits.description["validation"]["name"].endswith("(validation part)")
        assert ("'user'" in splits.description["split"]) is (key is not None)
        json.dumps(splits.description)

    @pytest.mark.parametrize("key", [None, "user"])
    def test_the_parting_hangs_on_nothing_else(
        self, make_card: MakeCard, tmp_path: Path, key: str | None
    ) -> None:
        frame().to_parquet(tmp_path / "x.parquet", row_group_size=70)
        frame().to_csv(tmp_path / "x.csv", index=False)
        card = make_card(IDS, request_key=key)
        expected = ids(open_splits(card, frame()).validation)
        for data in (tmp_path / "x.parquet", str(tmp_path / "x.csv")):
            assert ids(open_splits(card, data).validation, batch_rows=17) == expected

    def test_the_key_is_not_handed_out_unasked(self, make_card: MakeCard) -> None:
        test = open_splits(make_card(IDS, request_key="user"), frame()).test
        assert next(test.batches(["id"])).schema.names == ["id"]
        assert next(test.batches(["user", "id"])).schema.names == ["user", "id"]
        assert test.num_rows is None

    def test_a_key_that_is_not_there(self, make_card: MakeCard) -> None:
        with pytest.raises(DataError, match=r"column 'usr': is missing.*'user'"):
            open_splits(make_card(IDS, request_key="usr"), frame())

    def test_a_folder_of_splits(self, make_card: MakeCard, tmp_path: Path) -> None:
        frame()[:100].to_csv(tmp_path / "train.csv", index=False)
        frame()[100:150].to_csv(tmp_path / "validation.csv", index=False)
        frame()[150:].to_csv(tmp_path / "test.csv", index=False)
        splits = open_splits(make_card(IDS), tmp_path)
        assert ids(splits.train) == list(range(100))
        assert ids(splits.validation) == list(range(100, 150))
        assert ids(splits.test) == list(range(150, NUM_ROWS))

    def test_a_folder_without_validation_parts_its_test(
        self, make_card: MakeCard, tmp_path: Path
    ) -> None:
        frame()[:10].to_parquet(tmp_path / "train.parquet")
        (tmp_path / "test").mkdir()
        frame()[:2000].to_parquet(tmp_path / "test" / "0.parquet")
        frame()[2000:].to_parquet(tmp_path / "test" / "1.parquet")
        splits = open_splits(make_card(IDS, request_key="user"), tmp_path)
        assert ids(splits.train) == list(range(10))
        check_parted(splits, by_user=True)

    def test_a_folder_of_parts_is_one_source(self, make_card: MakeCard, tmp_path: Path) -> None:
        frame()[:2000].to_parquet(tmp_path / "0.parquet")
        frame()[2000:].to_parquet(tmp_path / "1.parquet")
        check_parted(open_splits(make_card(IDS, request_key="user"), tmp_path), by_user=True)

    def test_a_folder_without_test_rows(self, make_card: MakeCard, tmp_path: Path) -> None:
        frame().to_parquet(tmp_path / "train.parquet")
        with pytest.raises(DataError, match="holds train but no test rows"):
            open_splits(make_card(IDS), tmp_path)

    def test_overrides_a_card_of_another_format(self, make_card: MakeCard, tmp_path: Path) -> None:
        frame().to_parquet(tmp_path / "x.parquet")
        frame().to_csv(tmp_path / "x.csv", index=False)
        of_csv = make_card(IDS, format="csv", test="none.csv", options={"delimiter": ";"})
        check_parted(open_splits(of_csv, tmp_path / "x.parquet"), by_user=False)
        of_data_set = make_card(IDS, source="movielens", options={"history_length": 3})
        check_parted(open_splits(of_data_set, tmp_path / "x.csv"), by_user=False)

    @pytest.mark.parametrize("key", [None, "user"])
    def test_messages_count_rows_of_the_whole_file(
        self, make_card: MakeCard, tmp_path: Path, key: str | None
    ) -> None:
        card = make_card(IDS, request_key=key)
        row = ids(open_splits(card, frame()).test)[1234]
        data = frame()
        data.loc[row, "id"] = -5
        data.to_csv(tmp_path / "x.csv", index=False)
        splits = open_splits(card, tmp_path / "x.csv")
        with pytest.raises(DataError, match=rf"column 'id', row {row}: .* got '-5'"):
            load_rows(card, splits.test)


class TestCardFiles:
    def test_paths_are_relative_to_the_card(self, make_card: MakeCard, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        for name, (a, b) in {"a": (0, 9), "b": (9, 20), "c": (20, 50)}.items():
            frame()[a:b].to_csv(tmp_path / "data" / f"{name}.txt", index=False, sep=";")
        card = make_card(
            IDS,
            HISTORY,
            path=tmp_path / "card.yaml",
            format="csv",
            train="data/a.txt",
            validation="data/b.txt",
            test="data/c.txt",
            options={"delimiter": ";"},
        )
        splits = open_splits(card)
        assert ids(splits.train) == list(range(9))
        assert ids(splits.validation) == list(range(9, 20))
        assert ids(splits.test) == list(range(20, 50))
        rows = load_rows(card, splits.test)
        assert rows.features["history.values"].tolist() == [1, 2] * 30

    def test_all_broken_files_are_named_at_once(self, make_card: MakeCard, tmp_path: Path) -> None:
        (tmp_path / "test.parquet").touch()
        card = make_card(
            IDS, path=tmp_path / "card.yaml", train="train.parquet", test="test.parquet"
        )
        with pytest.raises(DataError) as caught:
            open_splits(card)
        assert len(caught.value.problems) == 2

    def test_no_test_rows(self, make_card: MakeCard) -> None:
        with pytest.raises(CardError, match=r"data\.test: names no rows to judge"):
            open_splits(make_card(IDS, train="x.parquet"))

    @pytest.mark.parametrize("source", ["movielens", "synthetic"])
    def test_unknown_options(self, make_card: MakeCard, source: str) -> None:
        card = make_card(IDS, source=source, options={"sed": 1})
        with pytest.raises(CardError, match=r"data\.options: sed: is not a known key"):
            open_splits(card)

    def test_criteo_takes_the_ranges_of_the_card(self, make_card: MakeCard, tmp_path: Path) -> None:
        fields = [str(value) for value in [0, *range(13)]] + [format(50, "x")] * 26
        lines = ["\t".join([str(label), *fields[1:]]) + "\n" for label in (0, 1)]
        (tmp_path / "day_0").write_text("".join(lines))
        features: list[dict[str, Any]] = [{"key": "b", "column": "C2", "num_ids": 9}]
        card = make_card(
            {"name": "a", "kind": "ids", "columns": ["C1", "C26"], "num_ids": [7, 100]},
            {"name": "k", "kind": "kjt", "features": features},
            path=tmp_path / "card.yaml",
            format="criteo",
            validation="day_0",
            test="day_0",
        )
        rows = load_rows(card, open_splits(card).test)
        assert rows.features["a"].tolist() == [[50 % 7, 50]] * 2
        assert rows.features["k.values"].tolist() == [50 % 9] * 2


class TestMade:
    def test_synthetic(self, make_card: MakeCard) -> None:
        options = {"num_train": 200, "num_validation": 100, "num_test": 150, "num_tables": 2}
        card = make_card(
            {"name": "c", "kind": "ids", "columns": ["C1", "C2"], "num_ids": 10_000},
            source="synthetic",
            request_key="request_id",
            options=options,
        )
        splits = open_splits(card)
        assert splits.train is not None
        assert (splits.train.num_rows, splits.test.num_rows) == (200, 150)
        assert load_rows(card, splits.test).features["c"].shape == (150, 2)
        assert splits.description["origin"] == "synthetic"


def test_a_part_that_holds_nothing_yields_nothing(make_card: MakeCard) -> None:
    from rankopt.data.source import FrameSource

    part = HashSplitSource(FrameSource(frame()), None, 0.5, 0.5, "none")
    assert list(part.batches(["id"])) == []
    assert part.column_names() == ("id", "user", "label", "history")
