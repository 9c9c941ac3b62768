from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankopt.data.encode import Rows, encode, iter_rows, load_rows
from rankopt.data.source import FrameSource
from rankopt.errors import DataError
from rankopt.models.card import ModelCard

MakeCard = Callable[..., ModelCard]

DENSE = {"name": "dense", "kind": "dense", "columns": ["x", "y"]}
IDS = {"name": "item", "kind": "ids", "columns": ["item"], "num_ids": 10}
HISTORY = {
    "name": "history",
    "kind": "ragged_ids",
    "column": "history",
    "num_ids": 10,
    "max_length": 3,
}
KJT = {
    "name": "kjt",
    "kind": "kjt",
    "features": [
        {"key": "a", "column": "a", "num_ids": 10},
        {"key": "b", "column": "b", "num_ids": 10, "max_length": 4},
    ],
}


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def values(rows: Rows, name: str) -> list[Any]:
    listed: list[Any] = rows.features[name].tolist()
    return listed


class TestTensors:
    def test_dense(self, make_card: MakeCard) -> None:
        rows = encode(make_card(DENSE), batch(x=[1, 2], y=[0.5, -1.0], label=[0, 1]))
        assert rows.features["dense"].dtype == torch.float32
        assert values(rows, "dense") == [[1.0, 0.5], [2.0, -1.0]]
        assert rows.labels["label"].dtype == np.float64
        assert rows.labels["label"].tolist() == [0.0, 1.0]

    def test_fill_stands_in_for_missing(self, make_card: MakeCard) -> None:
        card = make_card(DENSE | {"fill": -1.0})
        rows = encode(card, batch(x=[None, 2.0], y=[math.nan, 1.0], label=[0, 1]))
        assert values(rows, "dense") == [[-1.0, -1.0], [2.0, 1.0]]

    def test_one_id_column_is_flat_unless_kept_wide(self, make_card: MakeCard) -> None:
        data = batch(item=[3, 4], label=[0, 1])
        assert values(encode(make_card(IDS), data), "item") == [3, 4]
        wide = encode(make_card(IDS | {"keep_width": True}), data)
        assert values(wide, "item") == [[3], [4]]
        assert wide.features["item"].dtype == torch.int64

    def test_a_range_for_each_id_column(self, make_card: MakeCard) -> None:
        card = make_card(IDS | {"columns": ["a", "b"], "num_ids": [5, 10]})
        assert values(encode(card, batch(a=[4], b=[9], label=[1])), "item") == [[4, 9]]
        with pytest.raises(DataError, match=r"column 'a'.*\[0, 5\)"):
            encode(card, batch(a=[5], b=[9], label=[1]))

    def test_long_lists_keep_their_last_ids(self, make_card: MakeCard) -> None:
        lists = [[1, 2, 3, 4, 5], [], None, [6], [7, 8, 9]]
        rows = encode(make_card(HISTORY), batch(history=lists, label=[0, 1, 0, 1, 0]))
        assert values(rows, "history.values") == [3, 4, 5, 6, 7, 8, 9]
        assert values(rows, "history.lengths") == [3, 0, 0, 1, 3]

    def test_weights_are_cut_with_their_ids(self, make_card: MakeCard) -> None:
        card = make_card(HISTORY | {"weights_column": "w"})
        data = batch(history=[[1, 2, 3, 4], [5]], w=[[0.1, 0.2, 0.3, 0.4], [0.5]], label=[0, 1])
        rows = encode(card, data)
        assert values(rows, "history.weights") == pytest.approx([0.2, 0.3, 0.4, 0.5])
        assert rows.features["history.weights"].dtype == torch.float32

    def test_kjt_is_feature_major_and_takes_single_ids(self, make_card: MakeCard) -> None:
        data = batch(a=[1, 2, 3], b=[[4, 5], None, [6]], label=[0, 1, 1])
        rows = encode(make_card(KJT), data)
        assert values(rows, "kjt.values") == [1, 2, 3, 4, 5, 6]
        assert values(rows, "kjt.lengths") == [1, 1, 1, 2, 0, 1]

    def test_all_null_lists(self, make_card: MakeCard) -> None:
        rows = encode(make_card(HISTORY), batch(history=[[], []], label=[0, 1]))
        assert values(rows, "history.values") == []
        assert rows.features["history.values"].dtype == torch.int64

    @pytest.mark.parametrize(
        "column",
        [
            pa.array([3, 9], pa.int8()),
            pa.array([3, 9], pa.uint64()),
            pa.array([3.0, 9.0]),
            pa.array([3.0, 9.0], pa.float16()),
            pa.array(["3", " 9.0 "]),
            pa.array(["+3", "9"], pa.large_string()),
            pa.array(["3", "9"]).dictionary_encode(),
            pa.array([3, 9]).cast(pa.decimal128(22, 2)),
        ],
        ids=lambda array: str(array.type),
    )
    def test_ids_of_any_type_that_holds_whole_numbers(
        self, make_card: MakeCard, column: pa.Array
    ) -> None:
        assert values(encode(make_card(IDS), batch(item=column, label=[0, 1])), "item") == [3, 9]

    @pytest.mark.parametrize(
        "column",
        [
            pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)),
            pa.array([[1, 2], [3, 4]], pa.large_list(pa.int16())),
            pa.array(["1|2", "3|4"]),
            pa.array([["1", "2"], ["3", "4"]]),
            pa.array([[9], [1, 2], [3, 4]])[1:],
        ],
        ids=str,
    )
    def test_lists_of_any_type(self, make_card: MakeCard, column: pa.Array) -> None:
        rows = encode(make_card(HISTORY), batch(history=column, label=[0, 1]))
        assert values(rows, "history.values") == [1, 2, 3, 4]

    def test_a_null_list_over_values_is_empty(self, make_card: MakeCard) -> None:
        hidden = pa.ListArray.from_arrays(
            pa.array([0, 2, 4], pa.int32()), pa.array([1, 99, 3, 4]), mask=pa.array([True, False])
        )
        rows = encode(make_card(HISTORY), batch(history=hidden, label=[0, 1]))
        assert values(rows, "history.values") == [3, 4]
        assert values(rows, "history.lengths") == [0, 2]

    def test_without_labels_neither_label_nor_key_is_needed(self, make_card: MakeCard) -> None:
        card = make_card(IDS, request_key="user")
        rows = encode(card, batch(item=[1]), with_labels=False)
        assert (rows.labels, rows.clusters) == ({}, None)


class TestProblems:
    def problems(self, card: ModelCard, data: pa.RecordBatch, **options: Any) -> list[str]:
        with pytest.raises(DataError) as caught:
            encode(card, data, **options)
        return [str(problem) for problem in caught.value.problems]

    def test_everything_wrong_with_a_batch_is_said_at_once(self, make_card: MakeCard) -> None:
        card = make_card(DENSE, IDS, HISTORY)
        data = batch(
            x=[1.0, None, math.nan],
            y=[0.0, math.inf, 1.0],
            item=[3, 12, -1],
            history=[[1], [2, None], [10]],
            label=[0, 1, 2],
        )
        found = self.problems(card, data, source_name="x.parquet", row_numbers=np.arange(100, 103))
        text = "\n".join(found)
        assert len(found) == 6
        assert "x.parquet: column 'x', row 101: must not be missing or NaN" in text
        assert "2 values of these 3 rows break this" in text
        assert "column 'y', row 101: must be finite in float32; got inf" in text
        assert "column 'item', row 101: must hold ids in [0, 10); got 12" in text
        assert "column 'history', row 101: holds a missing id" in text
        assert "column 'history', row 102: must hold ids in [0, 10); got 10" in text
        assert "column 'label', row 102: is a label, which must be 0 or 1; got 2" in text

    def test_missing_columns_name_the_nearest(self, make_card: MakeCard) -> None:
        found = self.problems(make_card(DENSE, IDS), batch(x=[1.0], items=[1], label=[1]))
        assert len(found) == 2
        assert "column 'y': is missing" in found[0]
        assert "column 'item': is missing" in found[1]
        assert "Did you mean 'items'?" in found[1]

    @pytest.mark.parametrize(
        ("column", "row", "got"),
        [
            (pa.array([1.0, 2.5]), 1, "2.5"),
            (pa.array([math.inf, 1.0]), 0, "inf"),
            (pa.array(["1", "two"]), 1, "'two'"),
            (pa.array([1, 1 << 63], pa.uint64()), 1, str(1 << 63)),
            (pa.array([1.0, 1e300]), 1, "1e+300"),
        ],
    )
    def test_ids_that_are_no_whole_numbers(
        self, make_card: MakeCard, column: pa.Array, row: int, got: str
    ) -> None:
        (found,) = self.problems(make_card(IDS), batch(item=column, label=[0, 1]))
        assert f"column 'item', row {row}: must be a whole number; got {got}." in found

    def test_a_null_id_is_no_empty_bag(self, make_card: MakeCard) -> None:
        (found,) = self.problems(make_card(KJT), batch(a=[1, None], b=[[1], None], label=[0, 1]))
        assert "column 'a', row 1: holds a missing id" in found

    def test_types_that_hold_no_numbers(self, make_card: MakeCard) -> None:
        structs = pa.array([{"k": 1}])
        data = batch(x=structs, y=[1.0], item=structs, history=structs, label=structs)
        found = self.problems(make_card(DENSE, IDS, HISTORY), data)
        assert len(found) == 4
        assert all("got 'type struct<k: int64>'" in text for text in found)

    def test_text_that_is_no_number(self, make_card: MakeCard) -> None:
        data = batch(x=["1e3", "n/a"], y=["nan", "-.5"], label=["0", "1"])
        found = self.problems(make_card(DENSE), data)
        assert any("column 'x', row 1: must be a number; got 'n/a'" in text for text in found)
        assert any("column 'y', row 0: must not be missing" in text for text in found)

    def test_weights_must_match_their_ids(self, make_card: MakeCard) -> None:
        card = make_card(HISTORY | {"weights_column": "w"})
        data = batch(history=[[1], [2, 3]], w=[[1.0], [1.0]], label=[0, 1])
        (found,) = self.problems(card, data)
        assert "column 'w', row 1: must have as many weights as 'history' has ids" in found
        data = batch(history=[[1], [2, 3]], w=[[1.0], [1.0, None]], label=[0, 1])
        (found,) = self.problems(card, data)
        assert "column 'w', row 1: holds a weight that is missing or NaN" in found

    def test_labels_must_be_there(self, make_card: MakeCard) -> None:
        (found,) = self.problems(make_card(IDS), batch(item=[1, 2], label=[None, 1]))
        assert "row 0: is a label, which must not be missing" in found

    def test_the_request_key_must_be_there(self, make_card: MakeCard) -> None:
        card = make_card(IDS, request_key="user")
        for user in ([1, None], [1.0, math.nan], ["a", None]):
            (found,) = self.problems(card, batch(item=[1, 2], label=[0, 1], user=user))
            assert "column 'user', row 1: is the request key" in found

    def test_the_request_key_must_be_one_value(self, make_card: MakeCard) -> None:
        card = make_card(IDS, request_key="user")
        structs = pa.array([{"k": 1}])
        (found,) = self.problems(card, batch(item=[1], label=[0], user=structs))
        assert "column 'user': must be text or a number, being the request key" in found

    def test_lists_of_no_numbers(self, make_card: MakeCard) -> None:
        for history, got in (([["a"]], "got 'a'"), ([[[1]]], "got 'type list<item: list")):
            (found,) = self.problems(make_card(HISTORY), batch(history=history, label=[0]))
            assert "column 'history'" in found
            assert "must hold whole numbers" in found
            assert got in found


class TestSources:
    def frame(self, num_rows: int = 100) -> pd.DataFrame:
        row = np.arange(num_rows)
        history = [list(range(k % 4)) for k in row]
        return pd.DataFrame(
            {"item": row % 10, "history": history, "label": row % 2, "user": row // 7}
        )

    def test_batches_join_to_the_whole(self, make_card: MakeCard) -> None:
        card = make_card(IDS, HISTORY, request_key="user")
        source = FrameSource(self.frame())
        whole = load_rows(card, source)
        parts = Rows.concat(list(iter_rows(card, source, batch_rows=13)))
        for name, tensor in whole.features.items():
            assert torch.equal(tensor, parts.features[name])
        assert whole.clusters is not None
        assert whole.clusters.tolist() == (np.arange(100) // 7).tolist() or (
            len(set(zip(whole.clusters, np.arange(100) // 7, strict=True))) == 15
        )
        assert sorted(set(whole.clusters.tolist())) == list(range(15))

    def test_row_numbers_count_through_the_source(self, make_card: MakeCard) -> None:
        frame = self.frame()
        frame.loc[42, "item"] = 77
        with pytest.raises(DataError, match=r"DataFrame: column 'item', row 42: .*got 77"):
            list(iter_rows(make_card(IDS), FrameSource(frame), batch_rows=10))

    @pytest.mark.parametrize("limit", [1, 10, 99, 100, 1000])
    def test_limit(self, make_card: MakeCard, limit: int) -> None:
        source = FrameSource(self.frame())
        rows = load_rows(make_card(IDS), source, limit=limit, with_labels=False)
        assert rows.num_rows == min(limit, 100)
        assert values(rows, "item") == [k % 10 for k in range(min(limit, 100))]

    def test_no_rows(self, make_card: MakeCard) -> None:
        with pytest.raises(DataError, match="DataFrame: holds no rows"):
            load_rows(make_card(IDS), FrameSource(self.frame(0)))

    def test_one_class(self, make_card: MakeCard) -> None:
        frame = self.frame().assign(label=1)
        with pytest.raises(DataError, match="must hold both 0 and 1; all 100 labels are 1"):
            load_rows(make_card(IDS), FrameSource(frame))
        assert load_rows(make_card(IDS), FrameSource(frame), with_labels=False).num_rows == 100


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_lists_come_out_as_python_would_cut_them(
    make_card: MakeCard, data: st.DataObject
) -> None:
    bag = st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=6))
    lists = data.draw(st.lists(bag, min_size=1, max_size=20))
    array = pa.array(lists, pa.list_(pa.int64()))
    rows = encode(make_card(HISTORY), batch(history=array), with_labels=False)
    expected = [(values or [])[-3:] for values in lists]
    assert values(rows, "history.lengths") == [len(kept) for kept in expected]
    assert values(rows, "history.values") == [value for kept in expected for value in kept]
