"""Rows by request: their order, calls of whole requests, what rows of one must share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankopt.data.encode import encode
from rankopt.data.requests import order_by_request, refuse_unshared
from rankopt.data.source import open_source
from rankopt.errors import DataError
from rankopt.models.card import ModelCard


@given(st.lists(st.integers(-3, 4), min_size=1, max_size=40), st.integers(1, 12))
def test_requests_stand_together_in_the_order_of_their_first_rows(
    keys: list[int], batch_size: int
) -> None:
    order = order_by_request(np.array(keys, dtype=np.int64))
    assert sorted(order.rows) == list(range(len(keys)))
    wanted = [row for key in dict.fromkeys(keys) for row, k in enumerate(keys) if k == key]
    assert order.rows.tolist() == wanted
    assert [keys[row] for row in order.rows] == [
        list(dict.fromkeys(keys))[number] for number in order.request
    ]
    cuts = list(order.calls(batch_size))
    assert [begin for begin, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert cuts[-1][1] == len(keys)
    for begin, stop in cuts:
        assert 0 < stop - begin <= batch_size
        # A request is cut only where it does not fit into a call as a whole.
        if stop not in order.starts:
            assert stop - begin == batch_size
            assert begin == 0 or order.request[begin] == order.request[stop]


CARD = {
    "name": "shared",
    "factory": "made.in:tests",
    "inputs": [
        {"kind": "dense", "name": "dense", "columns": ["a", "b"], "request_level": True},
        {"kind": "ids", "name": "user", "columns": ["u"], "num_ids": 9, "request_level": True},
        {
            "kind": "ragged_ids", "name": "tags", "column": "t", "num_ids": 9, "max_length": 3,
            "weights_column": "w", "request_level": True,
        },
        {
            "kind": "kjt", "name": "bags", "request_level": True,
            "features": [
                {"key": "k0", "column": "k0", "num_ids": 9, "max_length": 2},
                {"key": "k1", "column": "k1", "num_ids": 9, "max_length": 2},
            ],
        },
        {
            "kind": "packed", "name": "wide", "request_level": True,
            "columns": [{"name": "p"}, {"name": "q", "num_ids": 9, "length": 3}],
        },
        {"kind": "ids", "name": "ad", "columns": ["x"], "num_ids": 9},
    ],
    "outputs": [{"label": "y"}],
    "data": {"request_key": "r"},
}  # fmt: skip


def frame() -> pd.DataFrame:
    rows = {
        "a": [1.0, 2.0], "b": [3.0, 4.0], "u": [5, 6], "t": [[1, 2], [3]], "w": [[0.5, 1.0], [2.0]],
        "k0": [[4], []], "k1": [[5, 6], [7]], "p": [0.5, 1.5], "q": [[1], [2, 3]],
    }  # fmt: skip
    pair = pd.DataFrame(rows)
    # Requests 0, 1, 0, 1: no two rows of one stand together.
    return pd.concat([pair, pair], ignore_index=True).assign(x=[1, 2, 3, 4], r=list("ABAB"))


def check(data: pd.DataFrame) -> None:
    card = ModelCard.model_validate(CARD)
    source = open_source(data)
    batch = next(iter(source.batches()))
    rows = encode(card, batch, with_labels=False)
    assert rows.clusters is not None
    order = order_by_request(rows.clusters)
    refuse_unshared(card, batch, rows, order, "here", 100 + np.arange(len(data)))


def test_rows_that_agree_are_let_through() -> None:
    check(frame())
    # What is cut away before the model sees it is of no matter.
    longer = frame()
    longer.at[2, "t"], longer.at[2, "w"] = [8, 7, 1, 2], [0.1, 0.1, 0.5, 1.0]
    with pytest.raises(DataError, match="'t', row 102"):
        check(longer)
    longer.at[0, "t"], longer.at[0, "w"] = [6, 7, 1, 2], [0.3, 0.1, 0.5, 1.0]
    check(longer)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("a", 9.0, "must be 1.0, as in row 100 of the same r; got 9.0"),
        ("b", 9.0, "must be 3.0"),
        ("u", 1, "must be 5"),
        ("t", [1, 3], r"must be \[1, 2\]"),
        ("w", [0.5, 1.5], r"must be \[0.5, 1.0\]"),
        ("k0", [5], r"must be \[4\]"),
        ("k0", [], r"must be \[4\]"),
        ("k1", [5], r"must be \[5, 6\]"),
        ("p", 0.25, "must be 0.5"),
        ("q", [1, 2], r"must be \[1\]"),
    ],
)
def test_a_difference_is_told_by_column_and_row(column: str, value: Any, expected: str) -> None:
    data = frame()
    data.at[2, column] = value
    with pytest.raises(DataError, match=f"here: column '{column}', row 102.*{expected}") as told:
        check(data)
    assert len(told.value.problems) == 1


def test_every_column_that_differs_is_listed() -> None:
    data = frame()
    data.at[3, "u"], data.at[3, "k1"] = 0, []
    with pytest.raises(DataError) as told:
        check(data)
    assert [str(p).split(":")[1] for p in told.value.problems] == [
        " column 'u', row 103",
        " column 'k1', row 103",
    ]
