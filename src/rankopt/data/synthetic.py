"""Make click logs of Criteo's shape whose best possible normalized entropy is known.

A planted teacher gives every row a probability and the label is drawn from it, so no model can
beat the teacher: `best_normalized_entropy` is the mean entropy of its probabilities over the
entropy of their mean. How close a trained model comes to it is a measure of the trainer, and a
change of NE caused by a pass can be told from the noise of labels.

Columns: `row_id`, `request_id`, `I1`.. float32, `C1`.. int64, `R1`.. lists, `label`,
`teacher_probability`. Ids follow a bounded power law and are scattered over their table, since
popular rows that lie side by side would flatter a cache. Every chunk has a seed of its own: a
chunk is the same whether it is read alone or after the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rankopt.data.cache import cached_folder, new_folder
from rankopt.data.teacher import Draws, Teacher

SPLITS = ("train", "validation", "test")
SUMMARY_FILE = "synthetic.json"

_FORMAT = 1
"""Raise it when the same options give other rows."""
_CALIBRATION_STREAM = len(SPLITS)
_CALIBRATION_ROWS = 65_536

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class SyntheticOptions(BaseModel):
    """What is made: `data.options` of a card whose source is synthetic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_train: int = Field(default=200_000, ge=1)
    num_validation: int = Field(default=40_000, ge=1)
    num_test: int = Field(default=60_000, ge=1)
    num_dense: int = Field(default=13, ge=0)
    num_tables: int = Field(default=26, ge=1)
    ids_per_table: int | tuple[int, ...] = 10_000
    """Ids lie in [0, ids_per_table); one figure for all tables, or one each."""
    zipf_exponent: float = Field(default=1.1, ge=0)
    """How fast popularity falls with rank; 0 is uniform."""
    num_ragged: int = Field(default=0, ge=0)
    ids_per_ragged: int = Field(default=10_000, ge=1)
    ragged_mean_length: float = Field(default=10.0, gt=0)
    ragged_max_length: int = Field(default=50, ge=1)
    candidates_per_request: int = Field(default=1, ge=1)
    """Rows of one request share the first `request_dense` and `request_tables` columns and all
    ragged ones."""
    request_dense: int = Field(default=0, ge=0)
    request_tables: int = Field(default=0, ge=0)
    latent_dim: int = Field(default=4, ge=1)
    num_interactions: int = Field(default=40, ge=0)
    """Pairs of tables whose latent vectors the teacher multiplies."""
    logit_std: float = Field(default=1.5, gt=0)
    """Spread of the teacher's logits: the larger, the lower the best NE."""
    click_rate: float = Field(default=0.25, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)
    chunk_rows: int = Field(default=65_536, ge=1)
    """Rows made at a time, and of a row group; rounded down to whole requests."""

    @model_validator(mode="after")
    def _consistent(self) -> SyntheticOptions:
        if isinstance(self.ids_per_table, tuple) and len(self.ids_per_table) != self.num_tables:
            raise ValueError(
                f"ids_per_table must be one number or one per table ({self.num_tables}); "
                f"got {len(self.ids_per_table)}"
            )
        if min(self.table_sizes) < 1:
            raise ValueError(f"ids_per_table must be positive; got {min(self.table_sizes)}")
        if self.request_dense > self.num_dense or self.request_tables > self.num_tables:
            raise ValueError("request_dense and request_tables cannot exceed the columns there are")
        return self

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """`ids_per_table` of each table."""
        if isinstance(self.ids_per_table, tuple):
            return self.ids_per_table
        return (self.ids_per_table,) * self.num_tables

    @property
    def requests_per_chunk(self) -> int:
        """Whole requests of a chunk."""
        return max(self.chunk_rows // self.candidates_per_request, 1)

    def num_rows(self, split: str) -> int:
        """Return the rows of a split."""
        sizes = dict(zip(SPLITS, (self.num_train, self.num_validation, self.num_test), strict=True))
        return sizes[split]

    def num_chunks(self, split: str) -> int:
        """Return the chunks of a split; the last may be short."""
        rows = self.requests_per_chunk * self.candidates_per_request
        return math.ceil(self.num_rows(split) / rows)


@dataclass(frozen=True)
class SplitSummary:
    """What one split holds.

    Attributes:
        num_rows: its rows.
        click_rate: share of labels that are 1.
        best_normalized_entropy: what the teacher reaches in expectation; no model does better.
        teacher_normalized_entropy: what the teacher reaches on the labels drawn.
    """

    num_rows: int
    click_rate: float
    best_normalized_entropy: float
    teacher_normalized_entropy: float


def synthetic_folder(options: SyntheticOptions | None = None) -> Path:
    """Return a cached folder of the three splits and `synthetic.json`.

    Raises:
        EnvironmentProblem: the cache cannot be written, or the disk is full.
    """
    chosen = options or SyntheticOptions()
    key = {"format": _FORMAT, "options": chosen.model_dump(mode="json")}

    def make(folder: Path) -> None:
        _write(chosen, folder)

    return cached_folder("synthetic", key, make)


def generate(options: SyntheticOptions, folder: str | Path) -> dict[str, SplitSummary]:
    """Write train.parquet, validation.parquet, test.parquet and synthetic.json.

    Args:
        options: what is made.
        folder: new, or empty; a failure leaves it as it was.

    Returns:
        The summary of each split, which synthetic.json holds as well.

    Raises:
        OutputExistsError: the folder holds something already.
        EnvironmentProblem: it cannot be written, or the disk is full.
    """
    with new_folder(Path(folder)) as unfinished:
        return _write(options, unfinished)


def read_chunk(options: SyntheticOptions, split: str, chunk: int) -> pa.RecordBatch:
    """Make one chunk of a split alone; it equals the same rows of the file.

    Raises:
        IndexError: there is no such chunk.
    """
    if not 0 <= chunk < options.num_chunks(split):
        raise IndexError(f"{split} has {options.num_chunks(split)} chunks; got {chunk}")
    return _Generator(options).chunk(split, chunk)


def _write(options: SyntheticOptions, folder: Path) -> dict[str, SplitSummary]:
    generator = _Generator(options)
    summaries = {}
    for split in SPLITS:
        tally = _Tally()
        with pq.ParquetWriter(folder / f"{split}.parquet", _schema(options)) as writer:
            for batch in generator.chunks(split):
                writer.write_batch(batch, row_group_size=batch.num_rows)
                tally.add(_numpy(batch, "teacher_probability"), _numpy(batch, "label"))
        summaries[split] = tally.summary()
    content = {
        "options": options.model_dump(mode="json"),
        "splits": {split: asdict(summary) for split, summary in summaries.items()},
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return summaries


def _numpy(batch: Any, column: str) -> _Floats:
    return np.asarray(batch.column(column), dtype=np.float64)


def _schema(options: SyntheticOptions) -> Any:
    fields = [("row_id", pa.int64()), ("request_id", pa.int64())]
    fields += [(f"I{index + 1}", pa.float32()) for index in range(options.num_dense)]
    fields += [(f"C{index + 1}", pa.int64()) for index in range(options.num_tables)]
    fields += [(f"R{index + 1}", pa.list_(pa.int64())) for index in range(options.num_ragged)]
    return pa.schema([*fields, ("label", pa.int8()), ("teacher_probability", pa.float64())])


class _Generator:
    """The teacher of some options and the chunks it labels."""

    def __init__(self, options: SyntheticOptions) -> None:
        self._options = options
        self._teacher = Teacher(
            table_sizes=options.table_sizes,
            ragged_sizes=(options.ids_per_ragged,) * options.num_ragged,
            num_dense=options.num_dense,
            latent_dim=options.latent_dim,
            num_interactions=options.num_interactions,
            seed=options.seed,
        )
        num_requests = max(_CALIBRATION_ROWS // options.candidates_per_request, 1)
        sample = self._draw(_CALIBRATION_STREAM, 0, num_requests)
        self._teacher.calibrate(sample, options.logit_std, options.click_rate)

    def chunks(self, split: str) -> Iterator[pa.RecordBatch]:
        for chunk in range(self._options.num_chunks(split)):
            yield self.chunk(split, chunk)

    def chunk(self, split: str, chunk: int) -> pa.RecordBatch:
        options, stream = self._options, SPLITS.index(split)
        draws = self._draw(stream, chunk, options.requests_per_chunk)
        probability = self._teacher.probability(draws)
        rng = np.random.default_rng([options.seed, stream, chunk, 1])
        label = (rng.random(len(probability)) < probability).astype(np.int8)
        first_row = chunk * len(probability)
        rows = np.arange(first_row, first_row + len(probability))
        arrays = [pa.array(rows), pa.array(rows // options.candidates_per_request)]
        arrays += [pa.array(column) for column in draws.dense.T.astype(np.float32)]
        arrays += [pa.array(ids) for ids in draws.ids]
        for values, lengths in draws.bags:
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(values)))
        arrays += [pa.array(label), pa.array(probability)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=_schema(options))
        return batch.slice(0, options.num_rows(split) - first_row)

    def _draw(self, stream: int, chunk: int, num_requests: int) -> Draws:
        """Draw the features of whole requests; the same for the same stream and chunk."""
        options, width = self._options, self._options.candidates_per_request
        rng = np.random.default_rng([options.seed, stream, chunk, 0])
        shared = [width] * options.request_dense + [1] * (options.num_dense - options.request_dense)
        dense = [
            np.repeat(rng.standard_normal(num_requests * (width // repeat)), repeat)
            for repeat in shared
        ]
        ids = []
        for index, size in enumerate(options.table_sizes):
            repeat = width if index < options.request_tables else 1
            drawn = self._zipf(rng, size, num_requests * (width // repeat), index)
            ids.append(np.repeat(drawn, repeat))
        bags = [self._bags(rng, index, num_requests) for index in range(options.num_ragged)]
        num_rows = num_requests * width
        stacked = np.stack(dense, axis=1) if dense else np.empty((num_rows, 0))
        return Draws(stacked, ids, bags)

    def _bags(self, rng: np.random.Generator, index: int, num_requests: int) -> tuple[_Ints, _Ints]:
        """Draw one bag a request, some empty, and repeat it for each of its candidates."""
        options = self._options
        lengths = rng.poisson(options.ragged_mean_length, num_requests)
        lengths = np.minimum(lengths, options.ragged_max_length).astype(np.int64)
        table = options.num_tables + index
        values = self._zipf(rng, options.ids_per_ragged, int(lengths.sum()), table)
        starts = np.repeat(np.cumsum(lengths) - lengths, options.candidates_per_request)
        lengths = np.repeat(lengths, options.candidates_per_request)
        shifts = starts - (np.cumsum(lengths) - lengths)
        return values[np.repeat(shifts, lengths) + np.arange(lengths.sum())], lengths

    def _zipf(self, rng: np.random.Generator, size: int, count: int, table: int) -> _Ints:
        """Draw ids by inverting the power law of a continuous rank in [1, size + 1)."""
        uniform, exponent = rng.random(count), self._options.zipf_exponent
        if abs(exponent - 1) < 1e-9:
            rank = (size + 1.0) ** uniform
        else:
            power = 1 - exponent
            rank = (1 + uniform * ((size + 1.0) ** power - 1)) ** (1 / power)
        ranks = np.clip(rank.astype(np.int64) - 1, 0, size - 1)
        return (ranks * _stride(size, table)) % size


def _stride(size: int, table: int) -> int:
    """Choose a step that visits every id once: about the golden part of the table, coprime."""
    stride = max(int(size * 0.618) + table, 1)
    while math.gcd(stride, size) != 1:
        stride += 1
    return stride


class _Tally:
    """Sums over chunks from which a split's summary follows."""

    def __init__(self) -> None:
        self._rows = 0
        self._clicks = self._probability = self._entropy = self._loss = 0.0

    def add(self, probability: _Floats, label: _Floats) -> None:
        positive, negative = np.log(probability), np.log1p(-probability)
        self._rows += len(label)
        self._clicks += float(label.sum())
        self._probability += float(probability.sum())
        self._entropy -= float((probability * positive + (1 - probability) * negative).sum())
        self._loss -= float(np.where(label == 1, positive, negative).sum())

    def summary(self) -> SplitSummary:
        rate = self._clicks / self._rows
        best = self._entropy / self._rows / _entropy(self._probability / self._rows)
        drawn = _entropy(rate)
        reached = self._loss / self._rows / drawn if drawn > 0 else math.nan
        return SplitSummary(self._rows, rate, best, reached)


def _entropy(rate: float) -> float:
    if rate in {0.0, 1.0}:
        return 0.0
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
