"""Entries that are known without running anything: masks of constants, and what they blank out.

A causal mask is a constant, so the places that it masks are known although the other mask that it
is combined with is not. That is what lets the requests' tokens be computed without the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.passes.graph import arguments, aten, constant
from rankopt.passes.hoisting.bodies import ROW, Axes

MAX_ENTRIES = 1 << 22


@dataclass(frozen=True)
class Known:
    """Values, and where they are known. Dims along which rows differ have size 1."""

    values: Tensor
    where: Tensor

    def constant(self) -> float | bool | None:
        """Return the one value that stands everywhere; None where there is none."""
        if not bool(self.where.all()) or not self.values.numel():
            return None
        first = self.values.reshape(-1)[0]
        if not bool((self.values == first).all()):
            return None
        value: float | bool = first.item()
        return value

    def take(self, axis: int, positions: Sequence[int]) -> Known:
        """Return the entries at some places of an axis."""
        index = torch.tensor(list(positions))

        def cut(tensor: Tensor) -> Tensor:
            return tensor if tensor.shape[axis] == 1 else tensor.index_select(axis, index)

        return Known(cut(self.values), cut(self.where))

    def along(self, axes: Axes) -> Known | None:
        """View it by logical axes, aligned to the right; None where it does not fit them."""
        sizes = [1 if size == ROW else size for size in axes]

        def view(tensor: Tensor) -> Tensor | None:
            shape = [1] * (len(sizes) - tensor.dim()) + list(tensor.shape)
            if len(shape) == len(sizes) and all(
                own in (1, size) for own, size in zip(shape, sizes, strict=True)
            ):
                return tensor.reshape(shape)
            return tensor.reshape(sizes) if tensor.numel() == math.prod(sizes) else None

        values, where = view(self.values), view(self.where)
        return None if values is None or where is None else Known(values, where)


class KnownValues:
    """Known entries of a graph's nodes, found when asked for."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._found: dict[Node, Known | None] = {}

    def of(self, node: object) -> Known | None:
        """Return what is known of a node; None where nothing is."""
        if isinstance(node, bool | int | float):
            value = torch.tensor(node)
            return Known(value, torch.ones_like(value, dtype=torch.bool))
        if not isinstance(node, Node):
            return None
        if node not in self._found:
            self._found[node] = None
            self._found[node] = self._look(node)
        return self._found[node]

    def _look(self, node: Node) -> Known | None:
        value = constant(self._module, node)
        if value is not None:
            if value.numel() > MAX_ENTRIES:
                return None
            return Known(value, torch.ones_like(value, dtype=torch.bool))
        rule = _RULES.get(node.target)
        return rule(self, node) if rule is not None else None

    def both(self, node: Node) -> tuple[Known | None, Known | None]:
        """Return what is known of the first two arguments."""
        left, right = arguments(node)[:2]
        return self.of(left), self.of(right)


def _and(run: KnownValues, node: Node) -> Known | None:
    return _absorbing(run, node, False, torch.logical_and)


def _or(run: KnownValues, node: Node) -> Known | None:
    return _absorbing(run, node, True, torch.logical_or)


def _absorbing(
    run: KnownValues, node: Node, zero: bool, combine: Callable[[Tensor, Tensor], Tensor]
) -> Known | None:
    left, right = run.both(node)
    if left is None or right is None:
        one = left or right
        if one is None or one.values.dtype != torch.bool:
            return None
        return Known(one.values, one.where & (one.values == zero))
    if left.values.dtype != torch.bool or right.values.dtype != torch.bool:
        return None
    decided = (left.where & (left.values == zero)) | (right.where & (right.values == zero))
    values = torch.where(decided, zero, combine(left.values, right.values))
    return Known(values, decided | (left.where & right.where))


def _not(run: KnownValues, node: Node) -> Known | None:
    known = run.of(arguments(node)[0])
    if known is None or known.values.dtype != torch.bool:
        return None
    return Known(~known.values, known.where)


def _unsqueeze(run: KnownValues, node: Node) -> Known | None:
    known = run.of(arguments(node)[0])
    dim, rank = arguments(node)[1], arguments(node)[0].meta["val"].dim()
    if known is None:
        return None
    # Counted from the end, since dims of size 1 may be missing at the front.
    back = dim if dim < 0 else dim - rank - 1
    if back < -known.values.dim() - 1:
        return known
    return Known(known.values.unsqueeze(back), known.where.unsqueeze(back))


def _expand(run: KnownValues, node: Node) -> Known | None:
    return run.of(arguments(node)[0])


def _masked_fill(run: KnownValues, node: Node) -> Known | None:
    inside, mask = run.both(node)
    value = arguments(node)[2]
    filled = run.of(value)
    if mask is None or filled is None:
        return None
    return _chosen(mask, filled, inside)


def _where(run: KnownValues, node: Node) -> Known | None:
    mask = run.of(arguments(node)[0])
    chosen, other = run.of(arguments(node)[1]), run.of(arguments(node)[2])
    return None if mask is None else _chosen(mask, chosen, other)


def _chosen(mask: Known, if_true: Known | None, if_false: Known | None) -> Known:
    blank = Known(torch.zeros(()), torch.zeros((), dtype=torch.bool))
    yes, no = if_true or blank, if_false or blank
    picked = mask.values.bool()
    values = torch.where(picked, yes.values.double(), no.values.double())
    where = torch.where(picked, yes.where, no.where) & mask.where
    values, where = torch.broadcast_tensors(values, where)  # type: ignore[no-untyped-call]
    return Known(values, where)


def _scaled(run: KnownValues, node: Node) -> Known | None:
    left, right = run.both(node)
    if left is None or right is None:
        return None
    target: Any = node.target
    values = target(left.values.double(), right.values.double())
    return Known(values, (left.where & right.where).expand(values.shape))


_RULES: dict[Any, Callable[[KnownValues, Node], Known | None]] = {
    aten.bitwise_and.Tensor: _and,
    aten.logical_and.default: _and,
    aten.__and__.Tensor: _and,
    aten.bitwise_or.Tensor: _or,
    aten.logical_or.default: _or,
    aten.__or__.Tensor: _or,
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.masked_fill.Scalar: _masked_fill,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.mul.Tensor: _scaled,
    aten.div.Tensor: _scaled,
}
