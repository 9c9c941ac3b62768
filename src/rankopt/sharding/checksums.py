"""Checksums of tables that do not depend on how the tables are cut.

Each value counts as its bits, an unsigned number, times an odd 64-bit number drawn from its row and
one drawn from its column; the products are added modulo 2^64, twice with different draws. So a rank
can sum what it holds, whatever that is, and the sums of all parts add up to the sum of the table.
One wrong value always changes the sum; several leave it as it was with a chance of about 2^-64.
It finds damage, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_ROWS = 65_536
"""Rows that are summed together; blocks start at multiples of it, whatever the part."""

_WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_VALUES = 1 << 17
_MODULUS = 1 << 64


@dataclass(frozen=True)
class Checksum:
    """The two sums; parts are added with `+`."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum(
            (self.first + other.first) % _MODULUS, (self.second + other.second) % _MODULUS
        )

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"

    @staticmethod
    def parse(text: str) -> Checksum:
        """Read what `str` wrote."""
        return Checksum(int(text[:16], 16), int(text[16:], 16))


def checksum(values: Tensor, row_offset: int = 0, column_offset: int = 0) -> Checksum:
    """Sum a part of a table.

    Args:
        values: [rows, columns] of any plain dtype, on any device.
        row_offset: the table's row that the part's first row is.
        column_offset: the same of columns.
    """
    rows, columns = values.shape
    words = 2 if values.is_complex() else 1
    by_column = _odd(np.arange(columns * words) + column_offset * words, (1, 2))
    totals = np.zeros(2, np.uint64)
    step = max(1, _CHUNK_VALUES // max(1, columns * words))
    for start in range(0, rows, step):
        bits = _bits(values[start : start + step])
        by_row = _odd(np.arange(len(bits)) + (row_offset + start), (3, 4))
        totals += (by_row * (bits @ by_column)).sum(axis=0, dtype=np.uint64)
    return Checksum(int(totals[0]), int(totals[1]))


def block_checksums(values: Tensor, row_offset: int = 0, column_offset: int = 0) -> list[Checksum]:
    """Sum a part block by block; the first and last blocks may be covered in part."""
    return [
        checksum(values[start - row_offset : stop - row_offset], start, column_offset)
        for start, stop in blocks(row_offset, len(values))
    ]


def blocks(row_offset: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Cut rows at the multiples of `BLOCK_ROWS`; yields start and stop."""
    start, end = row_offset, row_offset + num_rows
    while start < end:
        stop = min(end, (start // BLOCK_ROWS + 1) * BLOCK_ROWS)
        yield start, stop
        start = stop


def _bits(values: Tensor) -> NDArray[np.uint64]:
    plain = values.detach().cpu().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain).flatten(1)
    whole = plain.view(_INTEGERS[plain.element_size()]).numpy()
    if plain.element_size() == 8:
        return whole.view(np.uint64)
    return whole.view(_WORDS[plain.element_size()]).astype(np.uint64)


def _odd(positions: NDArray[np.int64], seeds: tuple[int, int]) -> NDArray[np.uint64]:
    """Draw two odd numbers for each position: splitmix64's finaliser."""
    drawn = np.empty((len(positions), len(seeds)), np.uint64)
    for column, seed in enumerate(seeds):
        mixed = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64(seed * 0xD1B54A32D192ED03 % _MODULUS)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        drawn[:, column] = mixed | np.uint64(1)
    return drawn
