"""Parts of a source that can be read alone: row groups, files, ranges of a frame.

What deals rows out to ranks, shuffles them or takes up where it stopped reads the pieces it needs
and opens no other.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankopt.data.rowsource import BATCH_ROWS, ColumnSource, RowSource, numbered_batches

Numbered = Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64]]]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a source that can be read without those before them.

    Attributes:
        where: what messages about its rows call it.
        read: given columns and the most rows of a batch, reads its rows with their numbers.
        num_rows: None where only reading it would tell.
        size_bytes: what it takes on the disk; with `num_rows`, what tells changed data.
        count: counts its rows faster than reading a column would.
    """

    where: str
    read: Callable[[Sequence[str], int], Numbered]
    num_rows: int | None = None
    size_bytes: int | None = None
    count: Callable[[], int] | None = None


@runtime_checkable
class PiecewiseSource(Protocol):
    """A source that is made of pieces."""

    def pieces(self) -> tuple[Piece, ...]:
        """List the pieces, in the order of the rows."""
        ...


def pieces_of(source: RowSource) -> tuple[Piece, ...]:
    """List a source's pieces; one that is not made of any is a single piece."""
    if isinstance(source, PiecewiseSource):
        return source.pieces()

    def read(columns: Sequence[str], batch_rows: int) -> Numbered:
        return numbered_batches(source, columns, batch_rows)

    return (Piece(source.name, read, source.num_rows),)


def numbered(batches: Iterable[pa.RecordBatch], first_row: int = 0) -> Numbered:
    """Number the rows of batches that follow one another."""
    for batch in batches:
        yield batch, np.arange(first_row, first_row + batch.num_rows)
        first_row += batch.num_rows


class LineSource(ColumnSource):
    """Rows of text files; each file is a piece, since a line's place is known from those before."""

    def __init__(self, name: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        super().__init__(name, columns)
        self._files = tuple(files)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order of their rows."""
        return self._files

    def pieces(self) -> tuple[Piece, ...]:
        """List the files."""
        return tuple(map(self._piece, self._files))

    def _piece(self, file: Path) -> Piece:
        def read(columns: Sequence[str], batch_rows: int) -> Numbered:
            return numbered(self._read_file(file, self._chosen(columns), batch_rows))

        return Piece(str(file), read, size_bytes=file.stat().st_size)

    def _read(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            yield from self._read_file(file, columns, batch_rows)

    @abstractmethod
    def _read_file(
        self, file: Path, columns: list[str], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of one file; the columns are there."""


def count_rows(piece: Piece, columns: Sequence[str]) -> Piece:
    """Return the piece with its rows counted, by reading one column of it where need be."""
    if piece.num_rows is not None:
        return piece
    if piece.count is not None:
        return replace(piece, num_rows=piece.count())
    batches = piece.read(columns[:1], BATCH_ROWS)
    return replace(piece, num_rows=sum(batch.num_rows for batch, _ in batches))


def fingerprint(pieces: Sequence[Piece]) -> str:
    """Tell data from other data by the sizes of its pieces; paths may change."""
    sizes = [[piece.num_rows, piece.size_bytes] for piece in pieces]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]
