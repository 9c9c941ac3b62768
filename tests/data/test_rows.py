from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankopt.data.encode import encode
from rankopt.data.rows import Rows, bag_counts
from rankopt.models.card import ModelCard

MakeCard = Callable[..., ModelCard]
NUM_ROWS = 23


@pytest.fixture(scope="module")
def card(make_card: MakeCard) -> ModelCard:
    feature = {"num_ids": 100, "max_length": 9}
    return make_card(
        {"name": "dense", "kind": "dense", "columns": ["x"]},
        {"name": "item", "kind": "ids", "columns": ["x"], "num_ids": 100},
        {"name": "bag", "kind": "ragged_ids", "column": "a", "weights_column": "wa", **feature},
        {
            "name": "kjt",
            "kind": "kjt",
            "features": [
                {"key": key, "column": key, "weights_column": f"w{key}", **feature}
                for key in ("a", "b", "c")
            ],
        },
        request_key="x",
    )


@pytest.fixture(scope="module")
def batch() -> Any:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"x": np.arange(NUM_ROWS), "label": np.arange(NUM_ROWS) % 2}
    for key in ("a", "b", "c"):
        lists = [rng.integers(0, 100, rng.integers(0, 6)) for _ in range(NUM_ROWS)]
        columns[key] = [list(values) for values in lists]
        columns[f"w{key}"] = [[value / 7 for value in values] for values in lists]
    return pa.RecordBatch.from_pydict(columns)


def same(found: Rows, expected: Rows) -> None:
    assert found.num_rows == expected.num_rows == len(found)
    assert list(found.features) == list(expected.features)
    for name, tensor in expected.features.items():
        assert torch.equal(found.features[name], tensor), name
    assert np.array_equal(found.labels["label"], expected.labels["label"])
    assert found.clusters is not None
    assert expected.clusters is not None
    assert np.array_equal(found.clusters, expected.clusters)


def test_bag_counts(card: ModelCard) -> None:
    assert bag_counts(card) == {"bag": 1, "kjt": 3}


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, NUM_ROWS), stop=st.integers(0, NUM_ROWS + 5))
def test_slicing_encoded_rows_is_encoding_sliced_rows(
    card: ModelCard, batch: Any, start: int, stop: int
) -> None:
    expected = encode(card, batch.slice(start, max(stop - start, 0)))
    same(encode(card, batch).slice(start, stop), expected)


@settings(max_examples=60, deadline=None)
@given(indices=st.lists(st.integers(0, NUM_ROWS - 1), max_size=40))
def test_taking_encoded_rows_is_encoding_taken_rows(
    card: ModelCard, batch: Any, indices: list[int]
) -> None:
    expected = encode(card, batch.take(pa.array(indices, pa.int64())))
    same(encode(card, batch).take(np.array(indices, dtype=np.int64)), expected)


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, NUM_ROWS), max_size=4))
def test_concat_undoes_slicing(card: ModelCard, batch: Any, cuts: list[int]) -> None:
    rows = encode(card, batch)
    bounds = [0, *sorted(cuts), NUM_ROWS]
    parts = [rows.slice(a, b) for a, b in pairwise(bounds)]
    same(Rows.concat(parts), rows)


def test_what_cannot_be_taken_or_joined(card: ModelCard, batch: Any) -> None:
    rows = encode(card, batch)
    for index in (-1, NUM_ROWS):
        with pytest.raises(IndexError, match=r"\[0, 23\)"):
            rows.take([index])
    with pytest.raises(ValueError, match="at least one part"):
        Rows.concat([])
