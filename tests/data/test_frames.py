from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from rankopt.data.encode import load_rows
from rankopt.data.source import FrameSource, RayDatasetSource, open_source
from rankopt.data.splits import open_splits
from rankopt.errors import DataError
from rankopt.models.card import ModelCard

NUM_ROWS = 500


def frame(as_arrays: bool = False) -> pd.DataFrame:
    make: Callable[[int], Any] = np.arange if as_arrays else lambda n: list(range(n))
    row = np.arange(NUM_ROWS)
    return pd.DataFrame(
        {
            "id": row % 50,
            "history": [make(k % 4) for k in row],
            "user": [f"user {k // 5}" for k in row],
            "label": row % 2,
        }
    )


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray
    import ray.data

    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    if started:
        ray.shutdown()


@pytest.fixture
def card(make_card: Callable[..., ModelCard]) -> ModelCard:
    return make_card(
        {"name": "id", "kind": "ids", "columns": ["id"], "num_ids": 50},
        {
            "name": "history",
            "kind": "ragged_ids",
            "column": "history",
            "num_ids": 50,
            "max_length": 2,
        },
        request_key="user",
    )


class TestFrame:
    def test_reads_again_without_touching_the_frame(self) -> None:
        data = frame()
        source = open_source(data)
        assert isinstance(source, FrameSource)
        assert source.num_rows == NUM_ROWS
        for _ in range(2):
            batches = list(source.batches(["history", "id"], 64))
            assert [b.num_rows for b in batches] == [64] * 7 + [NUM_ROWS - 7 * 64]
            joined = pa.Table.from_batches(batches).to_pydict()
            assert joined == {"history": data["history"].tolist(), "id": data["id"].tolist()}
        pd.testing.assert_frame_equal(data, frame())

    def test_missing_columns_and_twice_named_ones(self) -> None:
        with pytest.raises(DataError, match="Did you mean 'history'"):
            open_source(frame()).batches(["histroy"])
        twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
        with pytest.raises(DataError, match="stand twice"):
            open_source(twice)

    def test_mixed_types_name_the_column(self) -> None:
        mixed = pd.DataFrame({"a": pd.Series([1, "x", [2]], dtype=object)})
        with pytest.raises(DataError, match="DataFrame: column 'a', rows from 0: mixes types"):
            list(open_source(mixed).batches())

    def test_categories_and_nullable_numbers_encode(self, card: ModelCard) -> None:
        data = frame()
        plain = load_rows(card, open_source(data))
        data["user"] = data["user"].astype("category")
        data["id"] = data["id"].astype("Int64")
        data["label"] = data["label"].astype("bool")
        other = load_rows(card, open_source(data))
        assert torch.equal(other.features["id"], plain.features["id"])
        assert np.array_equal(other.labels["label"], plain.labels["label"])
        assert other.clusters is not None
        assert plain.clusters is not None
        assert np.array_equal(other.clusters, plain.clusters)


class TestRay:
    def test_encodes_as_the_frame_does(self, ray: Any, card: ModelCard) -> None:
        expected = load_rows(card, open_source(frame()))
        for as_arrays in (False, True):
            dataset = ray.data.from_pandas(frame(as_arrays)).repartition(5)
            before = dataset.context.execution_options.preserve_order
            source = open_source(dataset)
            assert isinstance(source, RayDatasetSource)
            assert source.column_names() == ("id", "history", "user", "label")
            for _ in range(2):
                rows = load_rows(card, source)
                for name, tensor in expected.features.items():
                    assert torch.equal(rows.features[name], tensor)
                assert np.array_equal(rows.labels["label"], expected.labels["label"])
            assert dataset.context.execution_options.preserve_order == before

    def test_is_parted_like_the_frame(self, ray: Any, card: ModelCard) -> None:
        of_frame = load_rows(card, open_splits(card, frame()).test)
        of_ray = load_rows(card, open_splits(card, ray.data.from_pandas(frame())).test)
        assert torch.equal(of_frame.features["id"], of_ray.features["id"])

    def test_missing_columns(self, ray: Any) -> None:
        with pytest.raises(DataError, match="Ray Dataset: column 'idd': is missing"):
            open_source(ray.data.from_pandas(frame())).batches(["idd"])
