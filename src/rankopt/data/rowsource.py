"""What every reader of rows promises, and the checks they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankopt.errors import DataError, Problem, nearest

BATCH_ROWS = 65_536


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be read again and again, a batch at a time, in the same order.

    No reader holds more than a few batches, so a source may be larger than memory.
    """

    @property
    def name(self) -> str:
        """What an error message calls it: the path, or `DataFrame`."""
        ...

    @property
    def num_rows(self) -> int | None:
        """How many rows there are; None where only reading them all would tell."""
        ...

    def column_names(self) -> tuple[str, ...]:
        """Name every column, in file order."""
        ...

    def batches(
        self, columns: Sequence[str] | None = None, batch_rows: int = BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows from the first one on, at most `batch_rows` at a time.

        Args:
            columns: the columns wanted, in the order wanted; None reads all of them.
            batch_rows: the most rows of one batch.

        Raises:
            DataError: a column is missing (at the call), or the file is damaged (when met).
        """
        ...


class ColumnSource(ABC):
    """A source whose columns are known before its rows are read."""

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self._name = name
        self._columns = tuple(columns)

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_rows(self) -> int | None:
        return None

    def column_names(self) -> tuple[str, ...]:
        return self._columns

    def batches(
        self, columns: Sequence[str] | None = None, batch_rows: int = BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        return self._read(self._chosen(columns), batch_rows)

    def _chosen(self, columns: Iterable[str] | None) -> list[str]:
        return choose_columns(self._name, columns, self._columns)

    @abstractmethod
    def _read(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Read all rows; the columns are there."""


@runtime_checkable
class NumberedSource(Protocol):
    """A source that leaves rows out and still knows where those it hands out stand."""

    def numbered_batches(
        self, columns: Sequence[str], batch_rows: int
    ) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64]]]:
        """Read as `batches` does, with each row's number in the data the user gave."""
        ...


@runtime_checkable
class FilesSource(Protocol):
    """A source that reads files."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order of their rows."""
        ...


@runtime_checkable
class FillsMissing(Protocol):
    """A source that puts values in the place of missing ones, and can be told not to."""

    def keeping_missing(self) -> RowSource:
        """Return the same rows with what is missing left missing."""
        ...


def numbered_batches(
    source: RowSource, columns: Sequence[str], batch_rows: int
) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64]]]:
    """Read a source with the number of each row, counted from 0, for messages."""
    if isinstance(source, NumberedSource):
        yield from source.numbered_batches(columns, batch_rows)
        return
    first_row = 0
    for batch in source.batches(columns, batch_rows):
        yield batch, np.arange(first_row, first_row + batch.num_rows)
        first_row += batch.num_rows


def choose_columns(
    source_name: str, wanted: Iterable[str] | None, present: Sequence[str]
) -> list[str]:
    """Return the wanted columns once each; all of them for None.

    Raises:
        DataError: some are missing; every one is listed with its nearest names.
    """
    if wanted is None:
        return list(present)
    chosen = list(dict.fromkeys(wanted))
    known = set(present)
    problems = [
        Problem(f"{source_name}: column {name!r}", "is missing", hint=nearest(name, present))
        for name in chosen
        if name not in known
    ]
    if problems:
        raise DataError(problems=problems)
    return chosen


def refuse_twice_named(source_name: str, names: Sequence[str]) -> None:
    """Refuse a header in which a name stands twice: which column was meant cannot be told.

    Raises:
        DataError: some name stands twice.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what = "every column must have its own name; these stand twice"
        raise DataError(problems=[Problem(source_name, what, twice, "Rename one of each.")])


def input_files(path: str | Path, suffixes: Sequence[str] | None) -> tuple[Path, ...]:
    """List the files of a source: the file itself, or a folder's files in name order.

    Args:
        path: a file or a folder.
        suffixes: endings that a folder's files must have; None takes every visible file.

    Raises:
        DataError: nothing is there, or a file is empty.
    """
    root = Path(path)
    if not root.exists():
        raise DataError(problems=[_missing(root)])
    files = [root]
    if root.is_dir():
        visible = (f for f in root.rglob("*") if f.is_file() and not f.name.startswith((".", "_")))
        files = sorted(
            f for f in visible if suffixes is None or f.name.lower().endswith(tuple(suffixes))
        )
    if not files:
        hint = f"Expected files ending in {', '.join(suffixes)}." if suffixes else None
        raise DataError(problems=[Problem(str(root), "holds no data file", hint=hint)])
    empty = [
        Problem(str(f), "is empty (0 bytes)", hint="Write it again.")
        for f in files
        if f.stat().st_size == 0
    ]
    if empty:
        raise DataError(problems=empty)
    return tuple(files)


def _missing(path: Path) -> Problem:
    parent = path.parent
    hint = "Check the path."
    if parent.is_dir():
        names = [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")]
        hint = f"In {parent}: {nearest(path.name, names)}"
    elif not parent.exists():
        hint = f"The folder {parent} does not exist either."
    return Problem(str(path), "no such file or folder", hint=hint)


def unreadable(where: str, kind: str, error: Exception, hint: str) -> DataError:
    """Make the error for a file that the reader of its format refused."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return DataError(problems=[Problem(where, f"is not readable as {kind}: {reason}", hint=hint)])


def cut(batch: Any, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Hand out a batch in pieces of at most `batch_rows`; an empty one gives none."""
    for start in range(0, batch.num_rows, batch_rows):
        yield batch.slice(start, batch_rows)
