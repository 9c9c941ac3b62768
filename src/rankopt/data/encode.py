"""Turn rows into the flat tensors a card names, checking every value on the way.

Shapes: N rows of a batch, C columns of an input, L ids of all bags together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from rankopt.data.columns import (
    ColumnTypeError,
    Lists,
    Numbers,
    read_integers,
    read_lists,
    read_reals,
)
from rankopt.data.hashing import stable_hash
from rankopt.data.rows import Rows, bag_counts, bag_positions
from rankopt.data.rowsource import BATCH_ROWS, RowSource, choose_columns, numbered_batches
from rankopt.errors import DataError, Problem
from rankopt.models.card import (
    DenseInput,
    IdsInput,
    KjtFeature,
    KjtInput,
    ModelCard,
    PackedInput,
    RaggedIdsInput,
)
from rankopt.models.id_ranges import into_range
from rankopt.models.inputs import OutOfRange, PackedColumn
from rankopt.models.serving import pad

__all__ = ["Rows", "encode", "iter_rows", "load_rows", "wanted_columns"]

_Mask = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]
_ID_TYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


def load_rows(
    card: ModelCard,
    source: RowSource,
    *,
    limit: int | None = None,
    with_labels: bool = True,
    refuse_one_class: bool = True,
) -> Rows:
    """Read and encode a source, or its first `limit` rows, into memory.

    `clusters` are renumbered 0, 1, ... in the order of their codes.

    Raises:
        DataError: no rows, labels all of one class (unless `refuse_one_class` is off), or whatever
            `encode` refuses.
    """
    parts: list[Rows] = []
    left = limit
    for part in iter_rows(card, source, min(limit or BATCH_ROWS, BATCH_ROWS), with_labels):
        kept = part if left is None else part.slice(0, left)
        parts.append(kept)
        if left is not None:
            left -= kept.num_rows
            if left <= 0:
                break
    rows = Rows.concat(parts)
    if with_labels and refuse_one_class:
        _refuse_one_class(rows, source.name)
    if rows.clusters is None:
        return rows
    _, codes = np.unique(rows.clusters, return_inverse=True)
    return Rows(rows.features, rows.labels, codes.astype(np.int64), rows.num_rows, rows.bags)


def iter_rows(
    card: ModelCard, source: RowSource, batch_rows: int = BATCH_ROWS, with_labels: bool = True
) -> Iterator[Rows]:
    """Read and encode a source a batch at a time.

    Raises:
        DataError: no rows, or whatever `encode` refuses.
    """
    columns = wanted_columns(card, source.column_names(), source.name, with_labels)
    num_rows = 0
    for batch, numbers in numbered_batches(source, columns, batch_rows):
        if batch.num_rows:
            num_rows += batch.num_rows
            yield encode(
                card,
                batch,
                with_labels=with_labels,
                source_name=source.name,
                row_numbers=numbers,
            )
    if num_rows == 0:
        problem = Problem(source.name, "holds no rows", hint="Give data with at least one row.")
        raise DataError(problems=[problem])


def encode(
    card: ModelCard,
    batch: Any,
    *,
    with_labels: bool = True,
    source_name: str = "data",
    row_numbers: _Ints | None = None,
) -> Rows:
    """Encode a `pyarrow.RecordBatch` as the card's tensors.

    Without labels the request key, too, is read only where the batch has it.

    Args:
        card: what the columns mean.
        batch: the rows.
        with_labels: whether the label columns must be there.
        source_name: what messages call the data.
        row_numbers: where each row stands in its source, for messages; from 0 on when None.

    Raises:
        DataError: a column is missing; a value is missing, not a number, out of the card's range,
            or a label is not 0 or 1. Everything wrong with the batch is listed, each with its
            first row, counted from 0.
    """
    columns = wanted_columns(card, batch.schema.names, source_name, with_labels)
    numbers = np.arange(batch.num_rows) if row_numbers is None else row_numbers
    reader = _Reader(batch, source_name, numbers)
    features: dict[str, Tensor] = {}
    for item in card.inputs:
        if isinstance(item, DenseInput):
            features[item.name] = reader.dense(item)
        elif isinstance(item, IdsInput):
            features[item.name] = reader.ids(item)
        elif isinstance(item, RaggedIdsInput):
            bag = reader.bag(item, item.column, item.max_length, item.weights_column)
            features.update(_tensors(item.name, [bag], _ID_TYPES[item.dtype]))
        elif isinstance(item, PackedInput):
            features[item.name] = reader.packed(item)
        else:
            features.update(_tensors(item.name, reader.bags(item)))
    labels = {name: reader.label(name) for name in card.labels} if with_labels else {}
    key = card.data.request_key
    clusters = reader.key(key) if key in columns else None
    if reader.problems:
        raise DataError(problems=reader.problems)
    return Rows(features, labels, clusters, batch.num_rows, bag_counts(card))


def wanted_columns(
    card: ModelCard, present: Any, source_name: str, with_labels: bool = True
) -> list[str]:
    """List the columns that a card needs: inputs, labels, and the request key.

    Raises:
        DataError: a column is missing.
    """
    names = list(card.data_columns)
    key = card.data.request_key
    if with_labels:
        names += card.labels
    if key is not None and (with_labels or key in present):
        names.append(key)
    return choose_columns(source_name, names, tuple(present))


def _refuse_one_class(rows: Rows, source_name: str) -> None:
    problems = []
    for column, label in rows.labels.items():
        if label.min() == label.max():
            where = f"{source_name}: column {column!r}"
            what = f"must hold both 0 and 1; all {rows.num_rows} labels are {int(label[0])}"
            hint = "Neither AUC nor NE exists for one class: give rows of both."
            problems.append(Problem(where, what, hint=hint))
    # One task of several may be too rare for these rows: its gates are then inconclusive.
    if problems and len(problems) == len(rows.labels):
        raise DataError(problems=problems)


_Bag = tuple[_Ints, _Ints, npt.NDArray[np.float32] | None]
"""Values, lengths and weights of one feature."""


def _tensors(name: str, bags: list[_Bag], id_type: torch.dtype = torch.int64) -> dict[str, Tensor]:
    values = np.concatenate([values for values, _, _ in bags])
    tensors = {
        f"{name}.values": torch.from_numpy(values).to(id_type),
        f"{name}.lengths": torch.from_numpy(np.concatenate([lengths for _, lengths, _ in bags])),
    }
    weights = [w for _, _, w in bags if w is not None]
    if weights:
        tensors[f"{name}.weights"] = torch.from_numpy(np.concatenate(weights))
    return tensors


class _Reader:
    """One batch, and what was found wrong with it so far."""

    def __init__(self, batch: Any, source_name: str, row_numbers: _Ints) -> None:
        self.problems: list[Problem] = []
        self._batch = batch
        self._source_name = source_name
        self._row_numbers = row_numbers

    def dense(self, item: DenseInput) -> Tensor:
        columns = [self._reals(column, item.fill, item.name) for column in item.columns]
        return torch.from_numpy(np.stack(columns, axis=1))

    def ids(self, item: IdsInput) -> Tensor:
        out = np.zeros((self._batch.num_rows, len(item.columns)), dtype=np.int64)
        for index, (column, num_ids) in enumerate(zip(item.columns, item.ranges, strict=True)):
            out[:, index] = self._ids(column, num_ids, item.out_of_range)
        narrow = out.shape[1] == 1 and not item.keep_width
        return torch.from_numpy(out[:, 0] if narrow else out).to(_ID_TYPES[item.dtype])

    def packed(self, item: PackedInput) -> Tensor:
        out = torch.zeros(self._batch.num_rows, item.num_places)
        lengths: dict[str | None, Tensor] = {}
        placed = list(zip(item.columns, item.starts(), strict=True))
        for column, start in placed:
            if column.name is not None:
                place, lengths[column.name] = self._packed_column(column, item.name)
                out[:, start : start + column.width] = place
        for column, start in placed:
            if column.length_of is not None:
                out[:, start] = lengths[column.length_of].clamp(min=column.at_least).float()
        return out

    def _packed_column(self, column: PackedColumn, owner: str) -> tuple[Tensor, Tensor]:
        """Return what fills a column's places [N, width], and the lengths of its lists [N]."""
        name = str(column.name)
        if column.num_ids is None:
            values: npt.NDArray[Any] = self._reals(name, column.fill, owner)
        elif column.length is None:
            values = self._ids(name, column.num_ids, column.out_of_range)
        else:
            ids, counts, _ = self.bag(column, name, column.length, None)
            lengths = torch.tensor(counts)
            places = pad(
                torch.tensor(ids), lengths, column.length, column.padding_id, column.pad_side
            )
            return places.float(), lengths
        place = torch.from_numpy(values.astype(np.float32))[:, None]
        return place, torch.ones(len(values), dtype=torch.int64)

    def _reals(self, column: str, fill: float | None, owner: str) -> npt.NDArray[np.float32]:
        out = np.zeros(self._batch.num_rows, dtype=np.float32)
        numbers = self._numbers(column, read_reals, "must be a number")
        if numbers is None:
            return out
        values = numbers.values
        if fill is None:
            hint = f"Fill it, or give input {owner!r} a `fill` in the card."
            self._note(column, numbers.missing, None, "must not be missing or NaN", hint)
        else:
            values = np.where(numbers.missing, fill, values)
        with np.errstate(over="ignore"):
            out[:] = values
        bad = np.isinf(out) & ~numbers.invalid
        self._note(column, bad, None, "must be finite in float32")
        return out

    def _ids(self, column: str, num_ids: int, policy: OutOfRange) -> _Ints:
        numbers = self._numbers(column, read_integers, "must be a whole number")
        if numbers is None:
            return np.zeros(self._batch.num_rows, dtype=np.int64)
        return self._checked_ids(column, numbers, num_ids, policy)

    def bags(self, item: KjtInput) -> list[_Bag]:
        return [self.bag(f, f.column, f.max_length, f.weights_column) for f in item.features]

    def bag(
        self,
        ids: RaggedIdsInput | KjtFeature | PackedColumn,
        column: str,
        max_length: int,
        weights_column: str | None,
    ) -> _Bag:
        nothing = np.zeros(self._batch.num_rows, dtype=np.int64)
        lists = self._lists(column)
        if lists is None:
            return nothing[:0], nothing, None
        numbers = self._numbers(column, read_integers, "must hold whole numbers", lists)
        if numbers is None:
            return nothing[:0], nothing, None
        values = self._checked_ids(column, numbers, ids.num_ids or 0, ids.out_of_range, lists)
        lengths = lists.lengths
        weights = self._weights(weights_column, column, lists) if weights_column else None
        if not (lengths > max_length).any():
            return values, lengths, weights
        kept = np.minimum(lengths, max_length)
        starts = torch.from_numpy(np.cumsum(lengths) - kept)
        positions = bag_positions(starts, torch.from_numpy(kept)).numpy()
        return values[positions], kept, None if weights is None else weights[positions]

    def label(self, column: str) -> npt.NDArray[np.float64]:
        numbers = self._numbers(column, read_reals, "must be 0 or 1")
        if numbers is None:
            return np.zeros(self._batch.num_rows)
        self._note(column, numbers.missing, None, "is a label, which must not be missing")
        allowed = (numbers.values == 0) | (numbers.values == 1)
        bad = ~allowed & ~numbers.missing & ~numbers.invalid
        self._note(column, bad, None, "is a label, which must be 0 or 1")
        return numbers.values.astype(np.float64)

    def key(self, column: str) -> _Ints:
        array = self._column(column)
        missing = array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
        self._note(column, missing, None, "is the request key, which must not be missing")
        try:
            return stable_hash(array).view(np.int64)
        except (pa.ArrowException, NotImplementedError):
            self._wrong_type(column, "must be text or a number, being the request key")
            return np.zeros(len(array), dtype=np.int64)

    def _weights(self, column: str, ids_column: str, ids: Lists) -> npt.NDArray[np.float32] | None:
        lists = self._lists(column)
        if lists is None:
            return None
        differ = lists.lengths != ids.lengths
        self._note(column, differ, None, f"must have as many weights as {ids_column!r} has ids")
        numbers = self._numbers(column, read_reals, "must hold numbers", lists)
        if numbers is None or differ.any():
            return None
        self._note(column, numbers.missing, lists, "holds a weight that is missing or NaN")
        with np.errstate(over="ignore"):
            weights = numbers.values.astype(np.float32)
        self._note(column, np.isinf(weights), lists, "must hold weights finite in float32")
        return weights

    def _checked_ids(
        self,
        column: str,
        numbers: Numbers,
        num_ids: int,
        policy: OutOfRange,
        lists: Lists | None = None,
    ) -> _Ints:
        hint = "Use the id kept for unknown values."
        self._note(column, numbers.missing, lists, "holds a missing id", hint)
        ids: _Ints = numbers.values
        if policy != "error":
            return into_range(torch.tensor(ids), num_ids, policy).numpy()
        usable = ~numbers.missing & ~numbers.invalid
        outside = ((ids < 0) | (ids >= num_ids)) & usable
        hint = (
            "Map it to a known id, give the input an out_of_range in the card, or raise num_ids "
            "there and train again."
        )
        self._note(column, outside, lists, f"must hold ids in [0, {num_ids})", hint)
        return ids

    def _numbers(
        self,
        column: str,
        read: Callable[[Any], Numbers],
        what: str,
        lists: Lists | None = None,
    ) -> Numbers | None:
        array = self._column(column) if lists is None else lists.values
        try:
            numbers = read(array)
        except ColumnTypeError:
            self._wrong_type(column, what)
            return None
        self._note(column, numbers.invalid, lists, what)
        return numbers

    def _lists(self, column: str) -> Lists | None:
        try:
            return read_lists(self._column(column))
        except ColumnTypeError:
            self._wrong_type(column, "must hold a list of ids, or one id, in each row")
            return None

    def _column(self, column: str) -> Any:
        return self._batch.column(self._batch.schema.get_field_index(column))

    def _wrong_type(self, column: str, what: str) -> None:
        where = f"{self._source_name}: column {column!r}"
        self.problems.append(Problem(where, what, f"type {self._column(column).type}"))

    def _note(
        self, column: str, bad: _Mask, lists: Lists | None, what: str, hint: str | None = None
    ) -> None:
        """Record a problem if any value is bad: its first row, its value, how many there are."""
        positions = np.flatnonzero(bad)
        if not len(positions):
            return
        first = int(positions[0])
        row = first
        array = self._column(column)
        if lists is not None:
            array = lists.values
            row = int(np.searchsorted(np.cumsum(lists.lengths), first, side="right"))
        where = f"{self._source_name}: column {column!r}, row {self._row_numbers[row]}"
        count = len(positions)
        told = (
            f"{count} values of these {self._batch.num_rows} rows break this."
            if count > 1
            else None
        )
        hints = " ".join(text for text in (told, hint) if text)
        got = array[first].as_py()
        self.problems.append(Problem(where, what, got, hints or None))
