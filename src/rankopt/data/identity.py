"""Which rows a source holds: a hash of its files' bytes, or of the values where there are no files.

Values are hashed column by column, so that neither the order of columns nor the size of batches
counts, and by what they are, so that a frame and a parquet file of the same rows agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankopt.data.pieces import count_rows, pieces_of
from rankopt.data.rowsource import BATCH_ROWS, FilesSource, RowSource
from rankopt.data.splits import HashSplitSource
from rankopt.hashes import sha256_files

Hashed = Literal["bytes", "values"]

_FORMATS = {
    "ParquetSource": "parquet",
    "CsvSource": "csv",
    "CriteoSource": "criteo",
    "FrameSource": "DataFrame",
    "RayDatasetSource": "Ray Dataset",
}


def whole_source(source: RowSource) -> RowSource:
    """Return the source that a hash split takes its rows from; any other is whole itself."""
    return whole_source(source.source) if isinstance(source, HashSplitSource) else source


def format_of(source: RowSource) -> str:
    """Name what a source reads."""
    name = type(whole_source(source)).__name__
    return _FORMATS.get(name, name)


def hashed_as(source: RowSource) -> Hashed:
    """Say what a hash of the source is made of unless asked for otherwise."""
    return "bytes" if isinstance(whole_source(source), FilesSource) else "values"


def hash_rows(source: RowSource, columns: Sequence[str], hashed: Hashed) -> str:
    """Hash all rows that a source is made of, those that a hash split leaves out too.

    Args:
        source: the rows.
        columns: those that count where values are hashed.
        hashed: `bytes` of the files in their order, or `values`.
    """
    whole = whole_source(source)
    if hashed == "bytes" and isinstance(whole, FilesSource):
        return sha256_files(whole.files)
    return hash_values(whole, columns)


def num_rows(source: RowSource, columns: Sequence[str]) -> int:
    """Count a source's rows, by reading one column where only that tells."""
    return sum(count_rows(piece, columns).num_rows or 0 for piece in pieces_of(source))


def hash_values(source: RowSource, columns: Sequence[str]) -> str:
    """Hash the values of columns, streaming."""
    hashes = {name: _ColumnHash() for name in sorted(set(columns))}
    for batch in source.batches(list(hashes), BATCH_ROWS):
        for name, column in hashes.items():
            column.add(batch.column(batch.schema.get_field_index(name)))
    lines = [f"{name} {column.digest()}" for name, column in hashes.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _ColumnHash:
    """A hash of one column: where it is missing, how long its lists or texts are, its values."""

    def __init__(self) -> None:
        self._parts = {part: hashlib.sha256() for part in ("null", "length", "value")}
        self._kind = ""
        self._inner: _ColumnHash | None = None

    def add(self, array: Any) -> None:
        """Take the values of a batch."""
        if isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        kind = array.type
        self._feed("null", np.asarray(array.is_null()).astype(np.uint8))
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            self._kind = "list"
            lengths = pc.list_value_length(array).fill_null(0)
            self._feed("length", np.asarray(lengths).astype(np.int64))
            self._inner = self._inner or _ColumnHash()
            self._inner.add(array.flatten())
        elif pa.types.is_floating(kind):
            self._add_numbers(array.cast(pa.float64()).fill_null(0.0), "float")
        elif pa.types.is_null(kind):
            self._kind = self._kind or "null"
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            self._add_numbers(array.cast(pa.int64(), safe=False).fill_null(0), "int")
        else:
            text = array.cast(pa.large_string()).fill_null("")
            self._kind = "text"
            self._feed("length", np.asarray(pc.binary_length(text)).astype(np.int64))
            self._parts["value"].update("".join(text.to_pylist()).encode())

    def digest(self) -> str:
        """Join the parts."""
        inner = "" if self._inner is None else self._inner.digest()
        parts = [self._kind, *(part.hexdigest() for part in self._parts.values()), inner]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def _add_numbers(self, array: Any, kind: str) -> None:
        self._kind = kind
        self._feed("value", np.asarray(array))

    def _feed(self, part: str, values: Any) -> None:
        self._parts[part].update(np.ascontiguousarray(values).tobytes())
