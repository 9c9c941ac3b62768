"""Read numbers and lists out of Arrow columns of whatever type a file gave them.

Shapes: N rows of a batch, L values of all its lists together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

LIST_DELIMITER = "|"
"""Between the ids of a list that stands in a text column."""

_WHOLE_NUMBER = r"^[+-]?[0-9]{1,18}(\.0*)?$"
_REAL_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_NO_NUMBER = r"(?i)^[+-]?(nan|inf|infinity)$"
_INT64_BOUND = float(1 << 63)


class ColumnTypeError(Exception):
    """A column's type can hold nothing of what is asked; `str()` names the type."""


@dataclass(frozen=True)
class Numbers:
    """One number a row; `missing` and `invalid` mark the rows whose `values` mean nothing."""

    values: npt.NDArray[Any]
    missing: npt.NDArray[np.bool_]
    invalid: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Lists:
    """One list a row: `values` as one Arrow array [L], `lengths` int64 [N]."""

    values: Any
    lengths: npt.NDArray[np.int64]


def plain(array: Any) -> Any:
    """Undo chunks, dictionaries and extension types, which say nothing about the values."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = _storage(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array


def read_integers(array: Any) -> Numbers:
    """Read whole numbers as int64; floats and text that hold whole numbers count.

    Raises:
        ColumnTypeError: the column holds no numbers.
    """
    array = plain(array)
    kind = array.type
    missing = _nulls(array)
    if _is_text(kind):
        return _integers_of_text(array, missing)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        if pa.types.is_uint64(kind):
            big = pc.greater(array, pa.scalar((1 << 63) - 1, pa.uint64())).fill_null(False)
            invalid = big.to_numpy(zero_copy_only=False)
            array = pc.if_else(big, pa.scalar(0, kind), array)
        else:
            invalid = np.zeros(len(array), dtype=np.bool_)
        values = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        return Numbers(values, missing, invalid)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        reals = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
        missing = missing | np.isnan(reals)
        with np.errstate(invalid="ignore"):
            whole = (np.floor(reals) == reals) & (np.abs(reals) < _INT64_BOUND)
        values = np.where(whole, reals, 0).astype(np.int64)
        return Numbers(values, missing, ~whole & ~missing)
    raise ColumnTypeError(str(kind))


def read_reals(array: Any) -> Numbers:
    """Read real numbers as float64; NaN counts as missing.

    Raises:
        ColumnTypeError: the column holds no numbers.
    """
    array = plain(array)
    kind = array.type
    invalid = np.zeros(len(array), dtype=np.bool_)
    if _is_text(kind):
        text = pc.utf8_trim_whitespace(array)
        good = pc.or_(
            pc.match_substring_regex(text, _REAL_NUMBER),
            pc.match_substring_regex(text, _NO_NUMBER),
        )
        good = good.fill_null(True)
        invalid = ~good.to_numpy(zero_copy_only=False)
        text = pc.if_else(good, text, pa.scalar(None, text.type))
        values = pc.replace_substring_regex(text, r"^\+", "").cast(pa.float64())
    elif _is_number(kind):
        # Arrow casts a boolean only to whole numbers and floats of 32 bits and more.
        values = array.cast(pa.float64())
    else:
        raise ColumnTypeError(str(kind))
    reals = values.to_numpy(zero_copy_only=False)
    return Numbers(reals, np.isnan(reals) & ~invalid, invalid)


def read_lists(array: Any) -> Lists:
    """Read one list a row: a null list is empty, a single value a list of one.

    Text is split at `|`; empty text is an empty list. A single value that is null stays a list of
    one null, which its reader refuses: a missing id is not an empty bag.

    Raises:
        ColumnTypeError: the column holds neither lists nor single values.
    """
    array = plain(array)
    kind = array.type
    if _is_text(kind):
        empty = pc.equal(array, "")
        array = pc.split_pattern(
            pc.if_else(empty, pa.scalar(None, kind), array), pattern=LIST_DELIMITER
        )
    elif pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.large_list(kind.value_type))
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        if _is_number(kind):
            return Lists(array, np.ones(len(array), dtype=np.int64))
        raise ColumnTypeError(str(kind))
    lengths = pc.list_value_length(array).fill_null(0).cast(pa.int64())
    return Lists(pc.list_flatten(array), lengths.to_numpy(zero_copy_only=False))


def _integers_of_text(array: Any, missing: npt.NDArray[np.bool_]) -> Numbers:
    text = pc.utf8_trim_whitespace(array)
    invalid = np.zeros(len(text), dtype=np.bool_)
    try:
        values = text.cast(pa.int64())
    except pa.ArrowInvalid:  # a plus sign, 3.0, or no number: told apart only when there is one
        good = pc.match_substring_regex(text, _WHOLE_NUMBER).fill_null(True)
        invalid = ~good.to_numpy(zero_copy_only=False)
        text = pc.if_else(good, text, pa.scalar(None, text.type))
        digits = pc.replace_substring_regex(text, r"^\+|\.0*$", "")
        values = digits.cast(pa.int64())
    return Numbers(values.fill_null(0).to_numpy(zero_copy_only=False), missing, invalid)


def _storage(array: Any) -> Any:
    """Return what an extension array is made of.

    Ray keeps a column of numpy vectors of unequal length as a struct of `data` and `shape`.
    """
    storage = array.storage
    if not pa.types.is_struct(storage.type):
        return storage
    names = {field.name for field in storage.type}
    if names != {"data", "shape"}:
        return storage
    num_dims = pc.list_value_length(pc.struct_field(storage, "shape"))
    is_flat = pc.all(pc.equal(num_dims, 1)).as_py()
    return pc.struct_field(storage, "data") if is_flat else storage


def _nulls(array: Any) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def _is_text(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_number(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )
