"""What a node of the plain graph is in the hoisted one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from rankopt.passes.hoisting.bodies import ROW, Axes, Body, Level


class GatherError(Exception):
    """A value of the requests is wanted per candidate, and nobody knows where its rows are."""

    def __init__(self, origin: Node) -> None:
        super().__init__(str(origin))
        self.origin = origin


class HoistError(Exception):
    """The graph as a whole cannot take requests and candidates apart; says why."""


@dataclass(frozen=True, eq=False)
class Fixed:
    """Depends on no input's data; the node of the plain graph that made it."""

    source: Node


@dataclass(frozen=True, eq=False)
class Size:
    """A size, or arithmetic on sizes."""

    source: Node


@dataclass(frozen=True, eq=False)
class Opaque:
    """A tensor whose rows are not tracked, such as the ids of ragged lists."""

    node: Node
    level: Level
    origin: Node


@dataclass(frozen=True, eq=False)
class Rows:
    """A tensor with one axis of rows.

    Attributes:
        axes: logical sizes, one of them ROW.
        dims: how many neighbouring axes each of its dims is made of.
        body: where its entries come from.
    """

    axes: Axes
    dims: tuple[int, ...]
    body: Body

    def group(self, dim: int) -> range:
        """Return the axes of a dim."""
        first = sum(self.dims[:dim])
        return range(first, first + self.dims[dim])


@dataclass(frozen=True, eq=False)
class Several:
    """What an operator with several results returned."""

    values: tuple[Value, ...]


Value = Fixed | Size | Opaque | Rows | Several


class RowSymbol:
    """The plain graph's symbol for its number of rows, and how sizes are written with it.

    Args:
        symbol: the symbol B.
    """

    def __init__(self, symbol: Any) -> None:
        self.symbol = symbol

    def factor(self, size: int | torch.SymInt) -> tuple[int, bool] | None:
        """Write a size as `k` or `k * B`: k, and whether B is in it; None where it is neither."""
        if isinstance(size, int):
            return size, False
        expression = size.node.expr
        if not expression.free_symbols:
            return int(expression), False
        if expression.free_symbols != {self.symbol}:
            return None
        quotient = expression / self.symbol
        return (int(quotient), True) if quotient.is_Integer else None

    def depends(self, size: object) -> bool:
        """Tell whether a size has B in it."""
        return isinstance(size, torch.SymInt) and self.symbol in size.node.expr.free_symbols


def tensor_of(node: Node) -> torch.Tensor | None:
    """Return the fake tensor of a node; None where it is something else."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def num_entries(axes: Sequence[int]) -> int:
    """Multiply sizes, that of rows left out."""
    return math.prod(size for size in axes if size != ROW)
