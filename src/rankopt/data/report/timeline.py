"""Label rates over time: by day where a column says when, by blocks of rows where none does."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankopt.data.columns import ColumnTypeError, plain, read_integers
from rankopt.data.report.schema import LabelRate

TimeUnit = Literal["s", "ms", "us", "ns"]

MAX_BLOCKS = 40
_FIRST_BLOCK_ROWS = 1_000
_SECONDS_PER_DAY = 86_400
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_EPOCH = datetime.date(1970, 1, 1)
_FIRST_DAY, _LAST_DAY = ((day - _EPOCH).days for day in (datetime.date.min, datetime.date.max))
_Z95 = 1.959964

_Ints = npt.NDArray[np.int64]


class Timeline:
    """Rows and ones of each label, by block.

    Args:
        labels: the label columns.
        by_day: whether `add` gets days; else rows are counted in blocks of equal length, which is
            doubled whenever there would be more than `MAX_BLOCKS`.
    """

    def __init__(self, labels: Sequence[str], *, by_day: bool) -> None:
        self._labels = tuple(labels)
        self._by_day = by_day
        self._block_rows = _FIRST_BLOCK_ROWS
        self._num_rows = 0
        self._counts: dict[int, _Ints] = {}

    def add(self, labels: Sequence[npt.NDArray[np.float64]], days: _Ints | None) -> None:
        """Count a batch: NaN is a missing label; a day below 0001-01-01 is none."""
        if not labels:
            return
        num_rows = len(labels[0])
        if days is None:
            blocks = np.arange(self._num_rows, self._num_rows + num_rows) // self._block_rows
        else:
            blocks = days
        self._num_rows += num_rows
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            found = np.array(
                [[np.isfinite(x[chosen]).sum(), np.nansum(x[chosen])] for x in labels], np.int64
            )
            self._counts[block] = self._counts.get(block, np.zeros_like(found)) + found
        while not self._by_day and len(self._counts) > MAX_BLOCKS:
            self._double()

    def totals(self) -> tuple[LabelRate, ...]:
        """Return the rates over all rows."""
        shape = (len(self._labels), 2)
        total = sum(self._counts.values(), np.zeros(shape, dtype=np.int64))
        return self._rates(None, total)

    def blocks(self) -> tuple[LabelRate, ...]:
        """Return the rates of each block, in order."""
        return tuple(
            rate
            for block in sorted(self._counts)
            for rate in self._rates(self._name(block), self._counts[block])
        )

    def _double(self) -> None:
        joined: dict[int, _Ints] = {}
        for block, found in self._counts.items():
            joined[block // 2] = joined.get(block // 2, np.zeros_like(found)) + found
        self._counts = joined
        self._block_rows *= 2

    def _name(self, block: int) -> str:
        if self._by_day:
            if not _FIRST_DAY <= block <= _LAST_DAY:
                return "no day"
            return (_EPOCH + datetime.timedelta(days=block)).isoformat()
        last = min((block + 1) * self._block_rows, self._num_rows) - 1
        return f"rows {block * self._block_rows:,} to {last:,}"

    def _rates(self, block: str | None, found: _Ints) -> tuple[LabelRate, ...]:
        rates = []
        for label, (num_rows, num_positive) in zip(self._labels, found.tolist(), strict=True):
            low, high = wilson(num_positive, num_rows) if num_rows else (None, None)
            rates.append(
                LabelRate(
                    label=label,
                    block=block,
                    num_rows=num_rows,
                    num_positive=num_positive,
                    rate=num_positive / num_rows if num_rows else None,
                    ci_low=low,
                    ci_high=high,
                )
            )
        return tuple(rates)


def wilson(num_positive: int, num_rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927)."""
    rate, spread = num_positive / num_rows, _Z95**2 / num_rows
    centre = (rate + spread / 2) / (1 + spread)
    half = (_Z95 / (1 + spread)) * np.sqrt(rate * (1 - rate) / num_rows + spread / num_rows / 4)
    return max(float(centre - half), 0.0), min(float(centre + half), 1.0)


NO_DAY = -(1 << 40)
"""The day of a row whose time is missing."""


def days_of(array: pa.Array, unit: TimeUnit) -> _Ints:
    """Return the days since 1970 of a column of times, dates, ISO text, or numbers since 1970.

    Args:
        array: the column.
        unit: of numbers.

    Raises:
        ColumnTypeError: it holds none of these.
    """
    array = plain(array)
    kind = array.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _dates(array)
    try:
        numbers = read_integers(array)
    except ColumnTypeError:
        raise ColumnTypeError(str(kind)) from None
    if not numbers.invalid.any():
        days = numbers.values // (_SECONDS_PER_DAY * _PER_SECOND[unit])
        return np.where(numbers.missing, NO_DAY, np.clip(days, NO_DAY, _LAST_DAY + 1))
    if text:
        try:
            return _dates(array.cast(pa.timestamp("us")))
        except pa.ArrowInvalid as error:
            raise ColumnTypeError(str(error).splitlines()[0]) from error
    # Numbers with fractions: seconds as floats.
    reals = np.asarray(array.cast(pa.float64()).fill_null(np.nan))
    with np.errstate(invalid="ignore"):
        days_real = np.floor(reals / (_SECONDS_PER_DAY * _PER_SECOND[unit]))
        known = np.isfinite(days_real) & (np.abs(days_real) < -NO_DAY)
    return np.where(known, days_real, NO_DAY).astype(np.int64)


def _dates(array: pa.Array) -> _Ints:
    days = array.cast(pa.date32(), safe=False).cast(pa.int32())
    return np.asarray(days.cast(pa.int64()).fill_null(NO_DAY))
