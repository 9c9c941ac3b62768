from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from rankopt.data.synthetic import (
    SPLITS,
    SyntheticOptions,
    generate,
    read_chunk,
    synthetic_folder,
)
from rankopt.errors import OutputExistsError

SMALL: dict[str, Any] = {
    "num_train": 2500,
    "num_validation": 700,
    "num_test": 1000,
    "num_tables": 4,
    "num_dense": 3,
    "num_ragged": 2,
    "ids_per_table": (50, 7, 9000, 1),
    "ids_per_ragged": 40,
    "num_interactions": 6,
    "chunk_rows": 640,
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> tuple[SyntheticOptions, Path]:
    options = SyntheticOptions(**SMALL, candidates_per_request=8, request_dense=2, request_tables=1)
    folder = tmp_path_factory.mktemp("synthetic") / "made"
    generate(options, folder)
    return options, folder


def test_columns_and_ranges(requests: tuple[SyntheticOptions, Path]) -> None:
    options, folder = requests
    names = ["row_id", "request_id", "I1", "I2", "I3", "C1", "C2", "C3", "C4", "R1", "R2"]
    for split in SPLITS:
        table = pq.read_table(folder / f"{split}.parquet")
        assert table.schema.names == [*names, "label", "teacher_probability"]
        assert table.num_rows == options.num_rows(split)
        assert table["row_id"].to_pylist() == list(range(table.num_rows))
        for index, size in enumerate(options.table_sizes, start=1):
            ids = table[f"C{index}"].to_numpy()
            assert ids.min() >= 0
            assert ids.max() < size
        lengths = [len(values) for values in table["R1"].to_pylist()]
        assert min(lengths) >= 0
        assert max(lengths) <= 50
        assert abs(np.mean(lengths) - 10) < 1
        assert set(table["label"].to_pylist()) == {0, 1}


def test_candidates_of_a_request_share_its_columns(
    requests: tuple[SyntheticOptions, Path],
) -> None:
    _, folder = requests
    table = pq.read_table(folder / "test.parquet").to_pandas()
    assert table["request_id"].tolist() == [row // 8 for row in range(1000)]
    for column in ("R1", "R2"):
        table[column] = table[column].map(tuple)
    distinct = table.groupby("request_id").nunique()
    for column in ("I1", "I2", "C1", "R1", "R2"):
        assert distinct[column].max() == 1, column
    for column in ("I3", "C3"):
        assert distinct[column].min() > 1, column


def test_a_chunk_read_alone_equals_the_file(requests: tuple[SyntheticOptions, Path]) -> None:
    options, folder = requests
    table = pq.read_table(folder / "train.parquet")
    assert options.num_chunks("train") == 4
    for chunk in (2, 0, 3):
        alone = pa.Table.from_batches([read_chunk(options, "train", chunk)])
        assert alone.equals(table.slice(chunk * 640, 640))
    with pytest.raises(IndexError, match="train has 4 chunks; got 4"):
        read_chunk(options, "train", 4)


def test_splits_and_seeds_differ(requests: tuple[SyntheticOptions, Path]) -> None:
    options, _ = requests
    first = read_chunk(options, "train", 0)
    for other in (
        read_chunk(options, "validation", 0),
        read_chunk(options, "train", 1),
        read_chunk(options.model_copy(update={"seed": 1}), "train", 0),
    ):
        assert first["I1"][:100] != other["I1"][:100]


def test_the_best_entropy_follows_from_the_teacher(
    requests: tuple[SyntheticOptions, Path],
) -> None:
    _, folder = requests
    summary = json.loads((folder / "synthetic.json").read_text())["splits"]
    for split in SPLITS:
        table = pq.read_table(folder / f"{split}.parquet")
        p = table["teacher_probability"].to_numpy()
        y = table["label"].to_numpy().astype(float)
        entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
        base = -(p.mean() * np.log(p.mean()) + (1 - p.mean()) * np.log(1 - p.mean()))
        assert summary[split]["best_normalized_entropy"] == pytest.approx(entropy / base)
        loss = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
        rate = y.mean()
        drawn = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        assert summary[split]["teacher_normalized_entropy"] == pytest.approx(loss / drawn)
        assert summary[split]["click_rate"] == pytest.approx(rate)
        assert summary[split]["num_rows"] == len(p)


@pytest.mark.parametrize("click_rate", [0.05, 0.25, 0.6])
def test_labels_are_drawn_from_the_teacher_at_the_rate_asked(click_rate: float) -> None:
    options = SyntheticOptions(num_tables=5, chunk_rows=40_000, click_rate=click_rate)
    chunk = read_chunk(options, "train", 0)
    p = chunk["teacher_probability"].to_numpy()
    y = chunk["label"].to_numpy()
    assert p.mean() == pytest.approx(click_rate, rel=0.05)
    for low, high in ((0.0, np.median(p)), (np.median(p), 1.0)):
        part = (p >= low) & (p <= high)
        noise = np.sqrt((p[part] * (1 - p[part])).sum()) / part.sum()
        assert abs(y[part].mean() - p[part].mean()) < 4 * noise


def test_more_signal_lowers_the_best_entropy(tmp_path: Path) -> None:
    sizes = {"num_train": 1, "num_validation": 1, "num_test": 8000, "num_tables": 3}
    best = [
        generate(SyntheticOptions(**sizes, logit_std=std, chunk_rows=8000), tmp_path / str(std))
        for std in (0.1, 1.0, 3.0)
    ]
    entropies = [summary["test"].best_normalized_entropy for summary in best]
    assert 0.99 < entropies[0] < 1
    assert entropies[0] > entropies[1] > entropies[2] > 0


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_popularity_follows_the_power_law(exponent: float) -> None:
    size, rows = 1000, 60_000
    options = SyntheticOptions(
        num_tables=1, ids_per_table=size, zipf_exponent=exponent, chunk_rows=rows
    )
    ids = read_chunk(options, "train", 0)["C1"].to_numpy()
    counts = np.sort(np.bincount(ids, minlength=size))[::-1] / rows
    # The continuous law gives a rank the integral of x^-exponent over [rank, rank + 1).
    edges = np.arange(1, size + 2, dtype=float)
    mass = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(mass) / (mass[-1] - mass[0])
    if exponent > 0:
        assert counts[0] == pytest.approx(expected[0], rel=0.1)
        assert counts[:10].sum() == pytest.approx(expected[:10].sum(), rel=0.05)
        popular = np.argsort(np.bincount(ids, minlength=size))[::-1][:10]
        assert np.abs(np.diff(popular)).min() > 1
    else:
        assert counts[0] < 3 / size


def test_a_folder_that_holds_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(OutputExistsError, match="already exists"):
        generate(SyntheticOptions(**SMALL), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_cache_keeps_what_was_made(cache: Path) -> None:
    options = SyntheticOptions(**SMALL)
    folder = synthetic_folder(options)
    assert folder.is_relative_to(cache)
    stamp = (folder / "test.parquet").stat().st_mtime_ns
    assert synthetic_folder(options) == folder
    assert (folder / "test.parquet").stat().st_mtime_ns == stamp
    assert synthetic_folder(options.model_copy(update={"seed": 3})) != folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids_per_table": (1, 2)}, "one number or one per table"),
        ({"ids_per_table": 0}, "must be positive"),
        ({"request_tables": 27}, "cannot exceed"),
        ({"click_rate": 1.0}, "less than 1"),
        ({"rows": 3}, "Extra inputs"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SyntheticOptions(**options)
