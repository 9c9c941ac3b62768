"""The columns a card feeds to its module, each of which can be set on its own; and made-up rows.

Shapes: B rows, L ids of all rows together, F features of a KeyedJaggedTensor, W places of a packed
matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rankopt.models.card import (
    DenseInput,
    IdsInput,
    Input,
    KjtInput,
    ModelCard,
    PackedInput,
    RaggedIdsInput,
)

LIST_LENGTH = 2
"""Ids of each list in a made-up row, where the card allows that many."""


@dataclass(frozen=True)
class Column:
    """One column of the data, as it lies in the flat tensors.

    Attributes:
        where: the card's field, such as `inputs[0].columns[3]`.
        name: the column of the data.
        num_ids: ids lie in [0, num_ids); None for a real number and for a list's length.
        tensor: the flat tensor that holds it.
        places: first place and one past the last of a [B, W] tensor; None for a flat one.
        group: which feature of how many it is in a flat one.
        max_length: of the list whose length it holds; None for everything else.
        packed: whether it lies in a packed matrix, side by side with columns of other kinds.
    """

    where: str
    name: str
    num_ids: int | None
    tensor: str
    places: tuple[int, int] | None = None
    group: tuple[int, int] = (0, 1)
    max_length: int | None = None
    packed: bool = False

    @property
    def probes(self) -> tuple[float, ...]:
        """Values worth trying, the one most likely to be refused first."""
        if self.num_ids is not None:
            return (self.num_ids - 1, 0, min(1, self.num_ids - 1))
        if self.max_length is not None:
            return (self.max_length, 1)
        return (-2.5, 3.0, 0.0)

    def fill(self, features: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
        """Return the features with this column set to one value in every row."""
        tensor = features[self.tensor].clone()
        if self.places is not None:
            tensor[:, self.places[0] : self.places[1]] = value
        else:
            tensor[self._rows(features)] = value
        return {**features, self.tensor: tensor}

    def _rows(self, features: Mapping[str, Tensor]) -> slice:
        index, groups = self.group
        if groups == 1:
            return slice(None)
        lengths = features[self.tensor.removesuffix(".values") + ".lengths"]
        ends = [0, *lengths.view(groups, -1).sum(1).cumsum(0).tolist()]
        return slice(ends[index], ends[index + 1])


def columns_of(card: ModelCard) -> tuple[Column, ...]:
    """List every column that the card's inputs are made of, in the card's order."""
    return tuple(
        column
        for index, item in enumerate(card.inputs)
        for column in _columns(f"inputs[{index}]", item)
    )


def _columns(where: str, item: Input) -> list[Column]:
    if isinstance(item, DenseInput):
        return [
            Column(f"{where}.columns[{i}]", name, None, item.name, (i, i + 1))
            for i, name in enumerate(item.columns)
        ]
    if isinstance(item, IdsInput):
        if len(item.columns) == 1:
            places = (0, 1) if item.keep_width else None
            return [Column(f"{where}.num_ids", item.columns[0], item.ranges[0], item.name, places)]
        return [
            Column(f"{where}.columns[{i}]", name, num_ids, item.name, (i, i + 1))
            for i, (name, num_ids) in enumerate(zip(item.columns, item.ranges, strict=True))
        ]
    if isinstance(item, RaggedIdsInput):
        return [Column(f"{where}.num_ids", item.column, item.num_ids, f"{item.name}.values")]
    if isinstance(item, KjtInput):
        groups = len(item.features)
        return [
            Column(
                f"{where}.features[{i}].num_ids",
                feature.column,
                feature.num_ids,
                f"{item.name}.values",
                group=(i, groups),
            )
            for i, feature in enumerate(item.features)
        ]
    return _packed_columns(where, item)


def _packed_columns(where: str, item: PackedInput) -> list[Column]:
    columns = []
    for i, (part, start) in enumerate(zip(item.columns, item.starts(), strict=True)):
        of = item.list_of(part) if part.length_of is not None else None
        columns.append(
            Column(
                f"{where}.columns[{i}]",
                part.name or f"length of {part.length_of}",
                part.num_ids,
                item.name,
                (start, start + part.width),
                max_length=of.width if of else None,
                packed=True,
            )
        )
    return columns


def made_up_rows(
    card: ModelCard, num_rows: int, ceiling: int | None = None, *, num_empty: int = 0
) -> dict[str, Tensor]:
    """Make rows that keep the card, the same on every call.

    Args:
        card: says what goes in.
        num_rows: B.
        ceiling: ids lie below it, and real numbers in [0, 1); None takes ids from the whole
            range and real numbers from a normal distribution.
        num_empty: rows, from the first, whose lists are all empty.
    """
    generator = torch.Generator().manual_seed(0)
    features: dict[str, Tensor] = {}
    for item in card.inputs:
        features.update(_rows_of(item, num_rows, ceiling, num_empty, generator))
    return features


def _rows_of(
    item: Input, num_rows: int, ceiling: int | None, num_empty: int, generator: torch.Generator
) -> dict[str, Tensor]:
    if isinstance(item, DenseInput):
        return {item.name: _numbers((num_rows, len(item.columns)), ceiling, generator)}
    if isinstance(item, IdsInput):
        columns = [_ids(num_rows, upper, ceiling, generator) for upper in item.ranges]
        ids = torch.stack(columns, 1).to(getattr(torch, item.dtype))
        flat = len(columns) == 1 and not item.keep_width
        return {item.name: ids[:, 0].contiguous() if flat else ids}
    if isinstance(item, PackedInput):
        return {item.name: _packed_rows(item, num_rows, ceiling, num_empty, generator)}
    if isinstance(item, KjtInput):
        lists = [(feature.num_ids, feature.max_length) for feature in item.features]
    else:
        lists = [(item.num_ids, item.max_length)]
    lengths = torch.tensor([[min(longest, LIST_LENGTH)] * num_rows for _, longest in lists])
    lengths[:, :num_empty] = 0
    counts = lengths.sum(1).tolist()
    values = torch.cat(
        [
            _ids(count, upper, ceiling, generator)
            for (upper, _), count in zip(lists, counts, strict=True)
        ]
    )
    dtype = torch.int64 if isinstance(item, KjtInput) else getattr(torch, item.dtype)
    tensors = (values.to(dtype), lengths.flatten(), torch.ones(len(values)))
    # Weights come last, and only where the input has them.
    return dict(zip(item.tensor_names, tensors, strict=False))


def _packed_rows(
    item: PackedInput,
    num_rows: int,
    ceiling: int | None,
    num_empty: int,
    generator: torch.Generator,
) -> Tensor:
    matrix = torch.zeros(num_rows, item.num_places)
    for part, start in zip(item.columns, item.starts(), strict=True):
        stop = start + part.width
        if part.length_of is not None:
            matrix[:, start] = min(item.list_of(part).width, LIST_LENGTH)
            matrix[:num_empty, start] = part.at_least
        elif part.num_ids is None:
            matrix[:, start:stop] = _numbers((num_rows, 1), ceiling, generator)
        elif part.length is None:
            matrix[:, start] = _ids(num_rows, part.num_ids, ceiling, generator).float()
        else:
            matrix[:, start:stop] = part.padding_id
            count = min(part.length, LIST_LENGTH)
            first = start if part.pad_side == "end" else stop - count
            ids = _ids(num_rows * count, part.num_ids, ceiling, generator).view(num_rows, count)
            matrix[:, first : first + count] = ids.float()
            matrix[:num_empty, start:stop] = part.padding_id
    return matrix


def _ids(count: int, upper: int, ceiling: int | None, generator: torch.Generator) -> Tensor:
    """Draw ids; 0, often padding, only where there is no other."""
    limit = upper if ceiling is None else min(upper, ceiling)
    return torch.randint(min(1, limit - 1), limit, (count,), generator=generator)


def _numbers(shape: tuple[int, int], ceiling: int | None, generator: torch.Generator) -> Tensor:
    if ceiling is None:
        return torch.randn(shape, generator=generator)
    return torch.rand(shape, generator=generator)
