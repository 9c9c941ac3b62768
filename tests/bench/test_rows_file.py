from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.conftest import PlainRows
from rankopt.bench.rows_file import RowsFile, write_rows
from rankopt.errors import DataError, EnvironmentProblem


def make_bags(lengths_FN, seed=0):
    """Bags whose ids tell feature, row and position: the truth that windows are held against."""
    return [
        [[1_000_000 * f + 1_000 * n + i for i in range(length)] for n, length in enumerate(row)]
        for f, row in enumerate(lengths_FN)
    ]


def flat(bags):
    return [value for feature in bags for bag in feature for value in bag]


@given(data=st.data())
def test_windows_hold_the_same_bags_as_plain_lists(tmp_path_factory, data):
    num_rows = data.draw(st.integers(1, 9), "num_rows")
    num_features = data.draw(st.integers(1, 3), "num_features")
    lengths = data.draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows),
            min_size=num_features,
            max_size=num_features,
        ),
        "lengths",
    )
    start = data.draw(st.integers(0, num_rows - 1), "start")
    size = data.draw(st.integers(1, 12), "size")  # may go round the end, more than once
    bags = make_bags(lengths)
    features = {
        "dense": torch.arange(num_rows * 2, dtype=torch.float32).view(num_rows, 2),
        "user": torch.arange(num_rows),
        "bag.values": torch.tensor(flat(bags), dtype=torch.int64),
        "bag.weights": torch.tensor(flat(bags), dtype=torch.float32) / 7,
        "bag.lengths": torch.tensor(lengths, dtype=torch.int64).view(-1),
    }
    path = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    file = RowsFile(write_rows(PlainRows(features, num_rows), path))

    window = file.window(start, size)

    picked = [(start + offset) % num_rows for offset in range(size)]
    expected = [[feature[n] for n in picked] for feature in bags]
    assert window["user"].tolist() == picked
    assert window["dense"].tolist() == [features["dense"][n].tolist() for n in picked]
    assert window["bag.values"].tolist() == flat(expected)
    assert window["bag.lengths"].tolist() == [len(bag) for feature in expected for bag in feature]
    np.testing.assert_array_equal(
        window["bag.weights"].numpy(), np.asarray(flat(expected), dtype=np.float32) / np.float32(7)
    )


def test_no_rows_are_refused(tmp_path):
    with pytest.raises(DataError, match="no rows"):
        write_rows(PlainRows({"dense": torch.empty(0, 4)}, 0), tmp_path / "rows")


def test_a_folder_that_is_not_there_is_reported_without_leaving_a_part(tmp_path, rows):
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        write_rows(rows, tmp_path / "nowhere" / "rows")
