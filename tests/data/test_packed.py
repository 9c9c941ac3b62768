"""A packed matrix: every place holds what the card says, and bad values are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rankopt.artifact.contract import contract_of, encode_contract, explain, random_features
from rankopt.artifact.rows import one_row
from rankopt.data.encode import encode
from rankopt.errors import DataError
from rankopt.kernels.build import load_kernels
from rankopt.models.card import ModelCard

COLUMNS: list[dict[str, Any]] = [
    {"name": "user", "num_ids": 50},
    {"name": "price", "fill": -1.0},
    {"name": "seen", "num_ids": 7, "length": 3},
    {"length_of": "seen", "at_least": 1},
    {"name": "last", "num_ids": 7, "length": 2, "pad_side": "start", "padding_id": 6},
]


def card_of(columns: list[dict[str, Any]]) -> ModelCard:
    return ModelCard.model_validate(
        {
            "name": "m",
            "factory": "m:M",
            "inputs": [{"kind": "packed", "name": "X", "columns": columns}],
            "outputs": [{"name": "click", "label": "label"}],
        }
    )


CARD = card_of(COLUMNS)


def batch_of(**changes: Any) -> pa.RecordBatch:
    columns = {
        "user": [3, 49, 0],
        "price": [0.5, None, 2.0],
        "seen": [[1, 2], [], [3, 4, 5, 6]],
        "last": [[1], [2, 3, 4], []],
        "label": [0, 1, 0],
    }
    return pa.RecordBatch.from_pydict(columns | changes)


def test_every_place_holds_what_the_card_says() -> None:
    rows = encode(CARD, batch_of())
    assert rows.features["X"].dtype == torch.float32
    assert rows.features["X"].tolist() == [
        [3, 0.5, 1, 2, 0, 2, 6, 1],
        [49, -1, 0, 0, 0, 1, 3, 4],
        [0, 2, 4, 5, 6, 3, 6, 6],
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"user": [3, 50, 0]}, "column 'user', row 1: must hold ids in [0, 50)"),
        ({"seen": [[1], [7], []]}, "column 'seen', row 1: must hold ids in [0, 7)"),
        ({"user": ["a", "b", "c"]}, "column 'user', row 0: must be a whole number"),
        ({"price": ["x", "y", "z"]}, "column 'price', row 0: must be a number"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError) as caught:
        encode(CARD, batch_of(**changes))
    assert told in str(caught.value)


def fits(features: dict[str, torch.Tensor], card: ModelCard = CARD) -> bool:
    load_kernels()
    contract = contract_of(card)
    inputs = [features[entry.name] for entry in contract]
    return bool(torch.ops.rankopt.inputs_fit(inputs, encode_contract(contract), 100))


def test_made_up_rows_keep_the_contract_and_its_lists() -> None:
    contract = contract_of(CARD)
    for seed in range(20):
        features = random_features(contract, 9, torch.Generator().manual_seed(seed))
        assert fits(features)
        assert explain(contract, features, 100) == []
        matrix = features["X"].numpy()
        for row in matrix:
            length = int(row[5])
            assert 1 <= length <= 3
            assert (row[2 + length : 5] == 0).all()


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ((1, 0), 50.0, "user"),
        ((1, 0), -1.0, "user"),
        ((1, 0), 2.5, "user"),
        ((1, 0), float("nan"), "user"),
        ((0, 3), 7.0, "seen[1]"),
        ((2, 5), 4.0, "length of seen"),
    ],
)
def test_a_call_with_a_bad_place_is_refused_by_name(
    place: tuple[int, int], value: float, named: str
) -> None:
    contract = contract_of(CARD)
    features = random_features(contract, 4, torch.Generator().manual_seed(0))
    features["X"][place] = value
    assert not fits(features)
    (problem,) = explain(contract, features, 100)
    assert problem.where == f"input X[{place[0]}, {place[1]}] ({named})"


def test_real_numbers_may_be_anything() -> None:
    contract = contract_of(CARD)
    features = random_features(contract, 4, torch.Generator().manual_seed(0))
    features["X"][:, 1] = torch.tensor([float("inf"), -1e30, float("nan"), 0.0])
    assert fits(features)


def test_a_matrix_of_another_width_is_refused() -> None:
    contract = contract_of(CARD)
    narrow = {"X": torch.zeros(4, 7)}
    assert not fits(narrow)
    assert "must have shape [B, 8]" in str(explain(contract, narrow, 100)[0])


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
def test_ids_of_every_type_are_checked(dtype: str) -> None:
    raw = {"kind": "ids", "name": "user", "num_ids": 9, "dtype": dtype}
    seen = {
        "kind": "ragged_ids", "name": "seen", "column": "seen", "num_ids": 9, "max_length": 3,
        "dtype": dtype,
    }  # fmt: skip
    card = CARD.model_copy(
        update={
            "inputs": ModelCard.model_validate(CARD.model_dump() | {"inputs": [raw, seen]}).inputs
        }
    )
    features = random_features(contract_of(card), 6, torch.Generator().manual_seed(1), fill=0.9)
    assert fits(features, card)
    for name in ("user", "seen.values"):
        for bad in (9, -1):
            broken = {key: value.clone() for key, value in features.items()}
            broken[name][1] = bad
            assert not fits(broken, card)


def test_one_row_of_a_matrix_is_that_row() -> None:
    contract = contract_of(CARD)
    features = random_features(contract, 4, torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(one_row(contract, features, 2)["X"][0], features["X"][2])
