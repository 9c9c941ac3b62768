"""Readers of parquet and csv, from a file or a folder of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from rankopt.data.pieces import LineSource, Numbered, Piece, numbered
from rankopt.data.rowsource import (
    ColumnSource,
    cut,
    input_files,
    refuse_twice_named,
    unreadable,
)
from rankopt.errors import DataError, Problem

PARQUET_SUFFIXES = (".parquet", ".pq")
CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")

_READ_BUFFER_BYTES = 1 << 20
_PARQUET_HINT = "A copy that was cut short reads like this: write or copy it again."


class ParquetSource(ColumnSource):
    """Rows of a parquet file, or of a folder's parquet files in name order.

    Footers are read at once, so that a truncated file is found before work begins.

    Raises:
        DataError: nothing is there, a file is truncated, or files differ in their columns.
    """

    def __init__(self, path: str | Path) -> None:
        self._files = input_files(path, PARQUET_SUFFIXES)
        self._groups: list[_RowGroup] = []
        columns: tuple[str, ...] = ()
        for index, file in enumerate(self._files):
            with _parquet(file) as reader:
                names = tuple(reader.schema_arrow.names)
                self._groups += _row_groups(file, reader.metadata, self.num_rows)
            refuse_twice_named(str(file), names)
            if index == 0:
                columns = names
            elif set(names) != set(columns):
                differing = sorted(set(names) ^ set(columns))
                what = f"must have the columns of {self._files[0].name}; these differ"
                raise DataError(problems=[Problem(str(file), what, differing)])
        super().__init__(str(path), columns)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order of their rows."""
        return self._files

    @property
    def num_rows(self) -> int:
        return self._groups[-1].stop_row if self._groups else 0

    def pieces(self) -> tuple[Piece, ...]:
        """List the row groups of all files."""
        return tuple(self._piece(group) for group in self._groups if group.num_rows)

    def _piece(self, group: _RowGroup) -> Piece:
        def read(columns: Sequence[str], batch_rows: int) -> Numbered:
            chosen = self._chosen(columns)
            batches = _read_groups(group.file, chosen, batch_rows, [group.index])
            return numbered(batches, group.first_row)

        return Piece(self.name, read, group.num_rows, group.size_bytes)

    def _read(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            yield from _read_groups(file, columns, batch_rows)


@dataclass(frozen=True)
class _RowGroup:
    file: Path
    index: int
    first_row: int
    num_rows: int
    size_bytes: int

    @property
    def stop_row(self) -> int:
        return self.first_row + self.num_rows


def _row_groups(file: Path, metadata: Any, first_row: int) -> Iterator[_RowGroup]:
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        yield _RowGroup(file, index, first_row, group.num_rows, group.total_byte_size)
        first_row += group.num_rows


def _read_groups(
    file: Path, columns: list[str], batch_rows: int, row_groups: list[int] | None = None
) -> Iterator[pa.RecordBatch]:
    with _parquet(file) as reader:
        try:
            for batch in reader.iter_batches(
                batch_size=batch_rows, columns=columns, row_groups=row_groups
            ):
                yield batch.select(columns)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(str(file), "parquet", error, _PARQUET_HINT) from error


def _parquet(file: Path) -> Any:
    """Open a parquet file so that pages are read as they are needed.

    Arrow's own default, pre_buffer, fetches whole row groups ahead.
    """
    try:
        return pq.ParquetFile(file, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(str(file), "parquet", error, _PARQUET_HINT) from error


class CsvOptions(BaseModel):
    """How a csv file is written: `data.options` of a card whose format is csv."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Between fields; None is a tab for `.tsv`, else a comma."""
    list_delimiter: str = Field(default="|", min_length=1)
    """Between the ids of one list."""
    list_columns: tuple[str, ...] = ()
    """Columns that hold lists; the inputs of a card that take lists are added to these."""
    null_values: tuple[str, ...] = ("", "NULL", "null", "NaN", "nan")
    """Fields that stand for a missing value."""
    block_bytes: int = Field(default=4 << 20, ge=1 << 10)
    """How much of the file is parsed at a time; a line must fit."""


class CsvSource(LineSource):
    """Rows of a csv file with a header line, or of a folder's csv files in name order.

    Columns come as strings and list columns as lists of strings; `encode` reads the numbers.
    Guessing types instead would go by the first block: a column that is whole numbers there and
    has a fraction later would fail far into the file.

    Raises:
        DataError: nothing is there, no header, or files differ in their columns.
    """

    def __init__(self, path: str | Path, options: CsvOptions | None = None) -> None:
        self._options = options or CsvOptions()
        files = input_files(path, CSV_SUFFIXES)
        columns = self._header(files[0])
        for file in files[1:]:
            if self._header(file) != columns:
                what = f"must have the header of {files[0].name}: {list(columns)}"
                raise DataError(problems=[Problem(str(file), what, list(self._header(file)))])
        super().__init__(str(path), columns, files)

    def _read_file(
        self, file: Path, columns: list[str], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        try:
            with self._open(file, columns) as reader:
                for block in reader:
                    yield from cut(self._with_lists(block), batch_rows)
        except (pa.ArrowException, OSError) as error:
            hint = "Mend the line, or set delimiter and block_bytes in data.options."
            raise unreadable(str(file), "csv", error, hint) from error

    def _with_lists(self, block: Any) -> Any:
        lists = self._options.list_columns
        arrays = [
            pc.split_pattern(block.column(i), self._options.list_delimiter)
            if name in lists
            else block.column(i)
            for i, name in enumerate(block.schema.names)
        ]
        return pa.RecordBatch.from_arrays(arrays, names=block.schema.names)

    def _header(self, file: Path) -> tuple[str, ...]:
        try:
            with self._open(file, None) as reader:
                names = tuple(reader.schema.names)
        except (pa.ArrowException, OSError) as error:
            hint = "The first line must name the columns."
            raise unreadable(str(file), "csv", error, hint) from error
        refuse_twice_named(str(file), names)
        return names

    def _open(self, file: Path, columns: list[str] | None) -> Any:
        options = self._options
        tab = ".tsv" in file.suffixes
        return pacsv.open_csv(
            file,
            # One thread: only then does Arrow name the row of a line it cannot parse.
            read_options=pacsv.ReadOptions(block_size=options.block_bytes, use_threads=False),
            parse_options=pacsv.ParseOptions(
                delimiter=options.delimiter or ("\t" if tab else ","), newlines_in_values=True
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(columns or (), pa.string()),
                include_columns=columns or [],
                strings_can_be_null=True,
                null_values=list(options.null_values),
            ),
        )
