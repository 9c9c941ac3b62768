"""Criteo's layout: label, 13 integers, 26 hexadecimal categories, separated by tabs, no header."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rankopt.data.pieces import Numbered, Piece, numbered
from rankopt.data.rowsource import BATCH_ROWS, choose_columns, cut, input_files, unreadable
from rankopt.errors import DataError, Problem

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, NUM_INTEGERS + 1))
CATEGORIES = tuple(f"C{i}" for i in range(1, NUM_CATEGORIES + 1))

_MAX_HEX_DIGITS = 16
_NOT_HEX = 255
_NIBBLE = np.full(256, _NOT_HEX, dtype=np.uint8)
"""The value of each hexadecimal digit, by its byte."""
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _NIBBLE[list(_digits)] = np.arange(16)


class CriteoOptions(BaseModel):
    """How Criteo's lines are read: `data.options` of a card whose format is criteo."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_ids: int | tuple[int, ...] = 100_000
    """A category becomes int(hex) % num_ids; one figure for all columns, or one for each of 26.
    `open_splits` takes the card's ranges when this is not given."""
    log_transform: bool = True
    """Integers become sign(x) * log1p(|x|), as in the DLRM paper's preprocessing."""
    short_lines: Literal["error", "pad"] = "error"
    """A line with fewer fields is refused, or its absent fields count as missing."""
    labelled: bool = True
    """False for a test file without the label column."""
    block_bytes: int = Field(default=4 << 20, ge=1 << 10)

    @model_validator(mode="after")
    def _ranges(self) -> CriteoOptions:
        if isinstance(self.num_ids, tuple) and len(self.num_ids) != NUM_CATEGORIES:
            raise ValueError(
                f"num_ids must be one number or {NUM_CATEGORIES}; got {len(self.num_ids)}"
            )
        if min(self.ranges) < 1:
            raise ValueError(f"num_ids must be positive; got {min(self.ranges)}")
        return self

    @property
    def ranges(self) -> tuple[int, ...]:
        """`num_ids` of each category column."""
        if isinstance(self.num_ids, tuple):
            return self.num_ids
        return (self.num_ids,) * NUM_CATEGORIES


class CriteoSource:
    """Rows of Criteo files: columns `label` int64, `I1`..`I13` float32, `C1`..`C26` int64.

    A missing integer is 0, after the transform as before it; a missing category is id 0.

    Raises:
        DataError: nothing is there. While reading: a line with too many or too few fields, or a
            field that is no number; the message names the line, counted from 1.
    """

    def __init__(self, path: str | Path, options: CriteoOptions | None = None) -> None:
        self._path = Path(path)
        self._options = options or CriteoOptions()
        self._files = input_files(path, None)
        self._keep_missing = False
        self._columns = ((LABEL,) if self._options.labelled else ()) + INTEGERS + CATEGORIES

    @property
    def name(self) -> str:
        return str(self._path)

    def keeping_missing(self) -> CriteoSource:
        """Return the same rows with missing values as nulls."""
        source = CriteoSource(self._path, self._options)
        source._keep_missing = True
        return source

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order of their rows."""
        return self._files

    @property
    def num_rows(self) -> int | None:
        return None

    def column_names(self) -> tuple[str, ...]:
        return self._columns

    def batches(
        self, columns: Sequence[str] | None = None, batch_rows: int = BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        return self._read(choose_columns(self.name, columns, self._columns), batch_rows)

    def pieces(self) -> tuple[Piece, ...]:
        """List the files: a line's place is known only from those before it."""
        return tuple(map(self._piece, self._files))

    def _piece(self, file: Path) -> Piece:
        def read(columns: Sequence[str], batch_rows: int) -> Numbered:
            chosen = choose_columns(self.name, columns, self._columns)
            return numbered(self._read_file(file, chosen, batch_rows))

        def count() -> int:
            return sum(block.num_rows for block in self._blocks(file))

        return Piece(str(file), read, size_bytes=file.stat().st_size, count=count)

    def _read(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            yield from self._read_file(file, columns, batch_rows)

    def _read_file(
        self, file: Path, columns: list[str], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        first_line = 1
        for block in self._blocks(file):
            for piece in cut(block, batch_rows):
                lines = piece.column(0)
                yield self._parse(lines, columns, str(file), first_line)
                first_line += len(lines)

    def _blocks(self, file: Path) -> Iterator[Any]:
        """Read a file as blocks of whole lines."""
        try:
            with _open_lines(file, self._options.block_bytes) as reader:
                yield from reader
        except (pa.ArrowException, OSError) as error:
            hint = "Expected tab-separated text in UTF-8."
            raise unreadable(str(file), "Criteo lines", error, hint) from error

    def _parse(
        self, lines: Any, columns: Sequence[str], where: str, first_line: int
    ) -> pa.RecordBatch:
        width = len(self._columns)
        fields = pc.split_pattern(self._whole(lines, where, first_line), "\t").flatten()
        arrays = []
        for column in columns:
            position = self._columns.index(column)
            text = fields.take(pa.array(np.arange(position, len(fields), width)))
            place = _Place(where, column, first_line)
            missing = np.asarray(pc.equal(text, "")) if self._keep_missing else None
            if column in CATEGORIES:
                values = _hex_values(text, place)
                num_ids = np.uint64(self._options.ranges[CATEGORIES.index(column)])
                arrays.append(pa.array((values % num_ids).astype(np.int64), mask=missing))
            elif column == LABEL:
                arrays.append(_integers(text, place))
            else:
                arrays.append(pa.array(self._dense(_integers(text, place)), mask=missing))
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _dense(self, integers: Any) -> npt.NDArray[np.float32]:
        values = np.asarray(integers.fill_null(0), dtype=np.float64)
        if self._options.log_transform:
            values = np.sign(values) * np.log1p(np.abs(values))
        return values.astype(np.float32)

    def _whole(self, lines: Any, where: str, first_line: int) -> Any:
        """Return the lines with all their tabs, or refuse them.

        Raises:
            DataError: a line has too many fields, or too few where that is an error.
        """
        width = len(self._columns)
        num_fields = pc.count_substring(lines, "\t").to_numpy(zero_copy_only=False) + 1
        wrong = num_fields != width
        if not wrong.any():
            return lines
        may_pad = self._options.short_lines == "pad"
        refused = np.flatnonzero(num_fields > width if may_pad else wrong)
        if len(refused):
            first = int(refused[0])
            what = f"must have {width} fields separated by tabs"
            hint = f"{len(refused)} lines near it break this."
            if num_fields[first] < width:
                hint += " short_lines: pad in data.options reads absent fields as missing."
            line = f"{where}: line {first_line + first}"
            raise DataError(problems=[Problem(line, what, int(num_fields[first]), hint)])
        absent = pa.array(width - num_fields)
        tabs = pc.binary_repeat(pa.repeat("\t", len(lines)), absent)
        return pc.binary_join_element_wise(lines, tabs, "")


class _Place:
    """Where a column of a block stands, for messages."""

    def __init__(self, where: str, column: str, first_line: int) -> None:
        self.where, self.column, self.first_line = where, column, first_line

    def refuse(self, bad: npt.NDArray[np.bool_], text: Any, what: str) -> None:
        positions = np.flatnonzero(bad)
        if len(positions):
            first = int(positions[0])
            where = f"{self.where}: line {self.first_line + first}, column {self.column!r}"
            raise DataError(problems=[Problem(where, what, text[first].as_py())])


def _open_lines(file: Path, block_bytes: int) -> Any:
    """Open a text file as one column of whole lines, blank ones too, so that numbers hold."""
    return pacsv.open_csv(
        file,
        read_options=pacsv.ReadOptions(
            column_names=["line"], block_size=block_bytes, use_threads=False
        ),
        parse_options=pacsv.ParseOptions(
            delimiter="\x01", quote_char=False, escape_char=False, ignore_empty_lines=False
        ),
        convert_options=pacsv.ConvertOptions(column_types={"line": pa.string()}),
    )


def _integers(text: Any, place: _Place) -> Any:
    """Read whole numbers; an empty field is null."""
    filled = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    try:
        return filled.cast(pa.int64())
    except pa.ArrowInvalid:
        good = pc.match_substring_regex(filled, r"^[+-]?[0-9]{1,18}$").fill_null(True)
        bad = ~good.to_numpy(zero_copy_only=False)
        place.refuse(bad, text, "must be a whole number of at most 18 digits, or empty")
        # Arrow reads no leading plus sign; the pattern allows one.
        return pc.replace_substring_regex(filled, r"^\+", "").cast(pa.int64())


def _hex_values(text: Any, place: _Place) -> npt.NDArray[np.uint64]:
    """Read hexadecimal numbers of up to 16 digits; an empty field is 0."""
    lengths = pc.binary_length(text).to_numpy(zero_copy_only=False)
    what = f"must be at most {_MAX_HEX_DIGITS} hexadecimal digits, or empty"
    place.refuse(lengths > _MAX_HEX_DIGITS, text, what)
    width = max(int(lengths.max(initial=0)), 1)
    padded = pc.ascii_lpad(text, width, "0")
    # All rows have the same width now, so the text buffer is a matrix of bytes.
    digits = np.frombuffer(padded.buffers()[2], dtype=np.uint8, count=len(text) * width)
    nibbles = _NIBBLE[digits.reshape(-1, width)]
    place.refuse((nibbles == _NOT_HEX).any(axis=1), text, what)
    values = np.zeros(len(text), dtype=np.uint64)
    for column in range(width):
        values = (values << np.uint64(4)) | nibbles[:, column]
    return values
