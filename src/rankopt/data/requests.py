"""Rows by request: which ones belong together, and whether they agree in what a request shares.

Shapes: N rows, R requests, F features of a KeyedJaggedTensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rankopt.data.rows import Rows, bag_counts, bag_positions
from rankopt.errors import DataError, Problem
from rankopt.models.card import (
    DenseInput,
    IdsInput,
    Input,
    KjtFeature,
    KjtInput,
    ModelCard,
    PackedInput,
    RaggedIdsInput,
)

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestOrder:
    """Rows put request by request, each where its first row stands.

    Attributes:
        rows: int64 [N], the rows in the new order; those of a request keep theirs.
        starts: int64 [R + 1], where each request begins in it, and N.
    """

    rows: _Ints
    starts: _Ints

    @property
    def request(self) -> _Ints:
        """The number of each row's request, int64 [N], in the new order."""
        sizes = np.diff(self.starts)
        return np.repeat(np.arange(len(sizes)), sizes)

    def calls(self, batch_size: int) -> Iterator[tuple[int, int]]:
        """Cut the new order into calls, between requests where a whole one fits into a call."""
        begin, end = 0, len(self.rows)
        while begin < end:
            border = int(self.starts[np.searchsorted(self.starts, begin + batch_size, "right") - 1])
            stop = border if border > begin else begin + batch_size
            yield begin, stop
            begin = stop


def order_by_request(keys: _Ints) -> RequestOrder:
    """Put rows of equal keys side by side.

    Args:
        keys: int64 [N], such as `Rows.clusters`.
    """
    _, first, codes = np.unique(keys, return_index=True, return_inverse=True)
    place = np.empty_like(first)
    place[np.argsort(first)] = np.arange(len(first))
    request = place[codes]
    sizes = np.bincount(request, minlength=len(first))
    return RequestOrder(
        np.argsort(request, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    )


def refuse_unshared(
    card: ModelCard,
    batch: Any,
    rows: Rows,
    order: RequestOrder,
    source_name: str,
    row_numbers: _Ints,
) -> None:
    """Refuse rows of one request that differ in a request-level input.

    Args:
        card: says which inputs those are.
        batch: the `pyarrow.RecordBatch` that the rows were encoded from.
        rows: what the model would see, which is what is compared.
        order: from `order_by_request`.
        source_name: what messages call the data.
        row_numbers: where each row stands in its source.

    Raises:
        DataError: names each column with the first row that differs.
    """
    shared = [item for item in card.inputs if item.request_level]
    counts = bag_counts(card)
    features = {name: rows.features[name] for item in shared for name in item.tensor_names}
    bags = {item.name: counts[item.name] for item in shared if item.name in counts}
    given = Rows(features, {}, None, rows.num_rows, bags)
    first = np.empty_like(order.rows)
    first[order.rows] = order.rows[order.starts[order.request]]
    expected = given.take(first)
    problems = []
    for item in shared:
        for column, differs in _compare(item, given, expected):
            if not differs.any():
                continue
            row = int(np.argmax(differs))
            values = batch.column(batch.schema.get_field_index(column))
            other = int(first[row])
            problems.append(
                Problem(
                    f"{source_name}: column {column!r}, row {row_numbers[row]}",
                    f"is request-level and must be {values[other].as_py()!r}, as in row "
                    f"{row_numbers[other]} of the same {card.data.request_key}",
                    values[row].as_py(),
                    "Score such rows one by one: leave the form for requests out.",
                )
            )
    if problems:
        raise DataError(problems=problems)


def _compare(
    item: Input, given: Rows, expected: Rows
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Yield each data column of an input, and which rows [N] differ in it."""
    if isinstance(item, RaggedIdsInput | KjtInput):
        yield from _compare_bags(item, given, expected)
        return
    left, right = given.features[item.name], expected.features[item.name]
    differs = (left != right).reshape(given.num_rows, -1)
    for place in range(differs.shape[1]):
        yield _column_at(item, place), differs[:, place].numpy()


def _column_at(item: DenseInput | IdsInput | PackedInput, place: int) -> str:
    if not isinstance(item, PackedInput):
        return item.columns[place]
    column = item.columns[bisect_right(item.starts(), place) - 1]
    return str(column.name or column.length_of)


def _compare_bags(
    item: RaggedIdsInput | KjtInput, given: Rows, expected: Rows
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    features: tuple[RaggedIdsInput | KjtFeature, ...] = (
        item.features if isinstance(item, KjtInput) else (item,)
    )
    differ = {
        name: _unequal_bags(item.name, name, given.features, expected.features)
        .reshape(len(features), -1)
        .numpy()
        for name in item.tensor_names
        if not name.endswith(".lengths")
    }
    for index, feature in enumerate(features):
        yield feature.column, differ[f"{item.name}.values"][index]
        if feature.weights_column is not None:
            yield feature.weights_column, differ[f"{item.name}.weights"][index]


def _unequal_bags(
    name: str, values: str, given: dict[str, Tensor], expected: dict[str, Tensor]
) -> Tensor:
    """Tell which bags [F * N] differ in length or in any value."""
    lengths = [each[f"{name}.lengths"] for each in (given, expected)]
    starts = [each.cumsum(0) - each for each in lengths]
    unequal = lengths[0] != lengths[1]
    same = (~unequal).nonzero().squeeze(1)
    sizes = lengths[0][same]
    left, right = (
        each[values][bag_positions(begin[same], sizes)]
        for each, begin in zip((given, expected), starts, strict=True)
    )
    unequal[torch.repeat_interleave(same, sizes)[left != right]] = True
    return unequal
