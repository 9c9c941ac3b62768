"""Hashes that stay the same between runs, machines and file formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_INT64_BOUND = float(1 << 63)
_FNV_PRIME = np.uint64(0x100000001B3)


def stable_hash(keys: Any) -> npt.NDArray[np.uint64]:
    """Hash each value of an Arrow array by its text: 64-bit FNV-1a, then mixed.

    The number 7, the number 7.0 and the text "7" hash alike, so that rows land in the same split
    whether they came from parquet, csv or pandas. Null hashes like empty text.

    Returns:
        One hash a row, [N].
    """
    if pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_decode()
    if pa.types.is_floating(keys.type):
        keys = _text_of_floats(keys.cast(pa.float64()))
    text = keys.cast(pa.large_string()).fill_null("")
    num_rows = len(text)
    if num_rows == 0:
        return np.empty(0, dtype=np.uint64)
    offsets = np.frombuffer(text.buffers()[1], dtype=np.int64)[text.offset :][: num_rows + 1]
    data = text.buffers()[2]
    letters = np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, dtype=np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    hashes = np.full(num_rows, _FNV_OFFSET)
    # By letter position rather than by row: a key has few letters, a batch has many rows.
    for position in range(int(lengths.max())):
        rows = np.flatnonzero(lengths > position)
        hashes[rows] = (hashes[rows] ^ letters[starts[rows] + position]) * _FNV_PRIME
    return mix(hashes)


def _text_of_floats(keys: Any) -> Any:
    """Write whole numbers as integers are written: Arrow's own text turns to exponents."""
    whole = pc.and_(pc.equal(pc.floor(keys), keys), pc.less(pc.abs(keys), _INT64_BOUND))
    integers = pc.if_else(whole, keys, 0.0).cast(pa.int64())
    return pc.if_else(whole, integers.cast(pa.string()), keys.cast(pa.string()))


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread numbers over all 64 bits (the finaliser of splitmix64), one to one."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def as_fraction(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Turn hashes into numbers in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) / float(1 << 53)
