"""Readers of what is already in Python: a pandas DataFrame, a Ray Dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankopt.data.pieces import Numbered, Piece, numbered
from rankopt.data.rowsource import BATCH_ROWS, ColumnSource, cut, refuse_twice_named
from rankopt.errors import DataError, Problem

if TYPE_CHECKING:
    import pandas as pd


class FrameSource(ColumnSource):
    """Rows of a pandas DataFrame; the frame is read, never changed or copied whole.

    Raises:
        DataError: two columns share a name.
    """

    def __init__(self, frame: pd.DataFrame, name: str = "DataFrame") -> None:
        self._frame = frame
        super().__init__(name, tuple(str(column) for column in frame.columns))
        refuse_twice_named(name, self._columns)

    @property
    def num_rows(self) -> int:
        return len(self._frame)

    def pieces(self) -> tuple[Piece, ...]:
        """List ranges of rows."""
        return tuple(map(self._piece, range(0, len(self._frame), BATCH_ROWS)))

    def _piece(self, start: int) -> Piece:
        stop = min(start + BATCH_ROWS, len(self._frame))

        def read(columns: Sequence[str], batch_rows: int) -> Numbered:
            return numbered(self._read(self._chosen(columns), batch_rows, start, stop), start)

        return Piece(self.name, read, stop - start)

    def _read(
        self, columns: list[str], batch_rows: int, first: int = 0, end: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        positions = [self._columns.index(column) for column in columns]
        end = len(self._frame) if end is None else end
        for start in range(first, end, batch_rows):
            piece = self._frame.iloc[start : min(start + batch_rows, end)]
            arrays = [
                self._array(piece.iloc[:, position], column, start)
                for position, column in zip(positions, columns, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=columns)

    def _array(self, values: pd.Series[Any], column: str, start: int) -> pa.Array:
        try:
            array = pa.Array.from_pandas(values)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            where = f"{self._name}: column {column!r}, rows from {start}"
            what = f"mixes types that have no common one ({str(error).splitlines()[0]})"
            raise DataError(problems=[Problem(where, what, hint="Give it one type.")]) from error
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


class RayDatasetSource(ColumnSource):
    """Rows of a Ray Dataset, pulled block by block and in the dataset's own order.

    Ray must be running, as it is wherever a Dataset could be made. Counting the rows would run the
    whole pipeline behind a lazy dataset.
    """

    def __init__(self, dataset: Any, name: str = "Ray Dataset") -> None:
        self._dataset = dataset
        # Asking for the names may run the first block of a lazy dataset, so it is asked once.
        super().__init__(name, tuple(str(column) for column in dataset.columns() or ()))

    def _read(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        chosen = self._dataset.select_columns(columns)
        # Blocks come as they finish unless order is asked for. The context is shared with the
        # caller's dataset, so what it said before is put back.
        options = chosen.context.execution_options
        before, options.preserve_order = options.preserve_order, True
        try:
            for table in chosen.iter_batches(batch_size=batch_rows, batch_format="pyarrow"):
                for batch in table.select(columns).combine_chunks().to_batches():
                    yield from cut(batch, batch_rows)
        finally:
            options.preserve_order = before
