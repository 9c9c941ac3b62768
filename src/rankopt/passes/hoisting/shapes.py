"""Rules of operators that only move entries: the two parts move apart from each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from rankopt.passes.graph import arguments, aten, schema_values
from rankopt.passes.hoisting.bodies import (
    ROW,
    Axes,
    Body,
    Fill,
    Piece,
    insert_axis,
    joined,
    merge_axes,
    permute,
    remove_axis,
    split_axis,
    take,
)
from rankopt.passes.hoisting.builder import Builder
from rankopt.passes.hoisting.interpret import Interpreter
from rankopt.passes.hoisting.values import Rows, Several, Value, tensor_of

Entry = tuple[int, bool]


def reshape_to(build: Builder, value: Rows, sizes: Sequence[Entry]) -> Rows | None:
    """View a value with other dims; None where a joined axis or that of rows would be cut.

    Args:
        build: the new graph.
        value: what to view.
        sizes: each dim's factor, and whether the number of rows is in it.
    """
    axes, body = list(value.axes), value.body
    dims: list[int] = []
    at = 0
    for count, of_rows in sizes:
        first, product, seen = at, 1, False
        while (product, seen) != (count, of_rows) or (at == first and count == 1 and not of_rows):
            if count == 1 and not of_rows and (at >= len(axes) or axes[at] != 1):
                body, axes[at:at] = insert_axis(build, body, at), [1]
            if at >= len(axes):
                return None
            if axes[at] == ROW:
                seen = True
            elif count % (product * axes[at]) == 0:
                product *= axes[at]
            else:
                outer = count // product
                if outer == 1 or outer * product != count or axes[at] % outer:
                    return None
                cut = split_axis(build, body, at, (outer, axes[at] // outer))
                if cut is None:
                    return None
                body, axes[at : at + 1] = cut, [outer, axes[at] // outer]
                product *= outer
            at += 1
        dims.append(at - first)
    while at < len(axes) and axes[at] == 1:
        body = remove_axis(build, body, at)
        del axes[at]
    return Rows(tuple(axes), tuple(dims), body) if at == len(axes) else None


def atomic(build: Builder, value: Rows, dim: int) -> tuple[Rows, int] | None:
    """Make a dim of one axis; returns the value and the axis. None where rows are part of it."""
    group = value.group(dim)
    sizes = [value.axes[axis] for axis in group]
    if len(group) == 1:
        return value, group[0]
    if ROW in sizes:
        return None
    body = merge_axes(build, value.body, value.axes, group[0], len(group))
    axes = (*value.axes[: group[0]], math.prod(sizes), *value.axes[group[-1] + 1 :])
    dims = (*value.dims[:dim], 1, *value.dims[dim + 1 :])
    return Rows(axes, dims, body), group[0]


def _first(run: Interpreter, node: Node) -> tuple[Rows, int] | None:
    """Return the first argument and its rank."""
    value = run.as_rows(arguments(node)[0])
    return None if value is None else (value, len(value.dims))


def _entries(run: Interpreter, node: Node) -> list[Entry] | None:
    tensor = tensor_of(node)
    if tensor is None:
        return None
    found = [run.rows.factor(size) for size in tensor.shape]
    return [each for each in found if each is not None] if None not in found else None


def same(run: Interpreter, node: Node) -> Value | None:
    """Copies and views of the whole."""
    return run.values[arguments(node)[0]]


def reshape(run: Interpreter, node: Node) -> Value | None:
    """Any view, by the sizes that tracing found."""
    given, entries = _first(run, node), _entries(run, node)
    return None if given is None or entries is None else reshape_to(run.build, given[0], entries)


def expand(run: Interpreter, node: Node) -> Value | None:
    """Broadcasting stays a note on the axes; nothing is copied."""
    given, entries = _first(run, node), _entries(run, node)
    if given is None or entries is None:
        return None
    value, rank = given
    axes, body, dims = list(value.axes), value.body, list(value.dims)
    for _ in range(len(entries) - rank):
        body, axes, dims = insert_axis(run.build, body, 0), [1, *axes], [1, *dims]
    for dim, (count, of_rows) in enumerate(entries):
        axis = sum(dims[:dim])
        if dims[dim] == 1 and axes[axis] == 1 and count != 1:
            if of_rows:
                return None
            axes[axis] = count
    return Rows(tuple(axes), tuple(dims), body)


def transpose(run: Interpreter, node: Node) -> Value | None:
    """Swap two dims, or put all in another order."""
    given = _first(run, node)
    if given is None:
        return None
    value, rank = given
    order = list(range(rank))
    if node.target == aten.transpose.int:
        one, other = (dim % rank for dim in arguments(node)[1:3])
        order[one], order[other] = order[other], order[one]
    elif node.target == aten.permute.default:
        order = [dim % rank for dim in arguments(node)[1]]
    else:
        order.reverse()
    moved = [axis for dim in order for axis in value.group(dim)]
    axes = tuple(value.axes[axis] for axis in moved)
    dims = tuple(value.dims[dim] for dim in order)
    return Rows(axes, dims, permute(run.build, value.body, moved))


def _taken(run: Interpreter, value: Rows, dim: int, places: Sequence[int]) -> Rows | None:
    one = atomic(run.build, value, dim)
    if one is None or one[0].axes[one[1]] == ROW or not places:
        return None
    whole, axis = one
    axes = (*whole.axes[:axis], len(places), *whole.axes[axis + 1 :])
    return Rows(axes, whole.dims, take(run.build, whole.body, axis, places))


def _size_of(value: Rows, dim: int) -> int | None:
    sizes = [value.axes[axis] for axis in value.group(dim)]
    return None if ROW in sizes else math.prod(sizes)


def cut(run: Interpreter, node: Node) -> Value | None:
    """`slice` and `narrow`."""
    given = _first(run, node)
    if given is None:
        return None
    value, rank = given
    named = schema_values(node)
    dim = named["dim"] % rank
    size = _size_of(value, dim)
    if node.target == aten.slice.Tensor:
        bounds = (named["start"], named["end"], named["step"])
    else:
        start, length = named["start"], named["length"]
        bounds = (start, start + length if isinstance(length, int) else length, 1)
    if any(isinstance(bound, Node) for bound in bounds):
        return None
    if size is None:
        start, end, step = bounds
        whole = start in (None, 0) and step == 1 and (end is None or end >= 1 << 40)
        return value if whole else None
    return _taken(run, value, dim, range(size)[slice(*bounds)])


def select(run: Interpreter, node: Node) -> Value | None:
    """One place of a dim, which goes away."""
    given = _first(run, node)
    if given is None:
        return None
    value, rank = given
    dim, place = arguments(node)[1] % rank, arguments(node)[2]
    size = _size_of(value, dim)
    if size is None or not isinstance(place, int):
        return None
    return _without(run, _taken(run, value, dim, [place % size]), dim)


def _without(run: Interpreter, value: Rows | None, dim: int) -> Rows | None:
    if value is None:
        return None
    axis = value.group(dim)[0]
    axes = (*value.axes[:axis], *value.axes[axis + 1 :])
    dims = (*value.dims[:dim], *value.dims[dim + 1 :])
    return Rows(axes, dims, remove_axis(run.build, value.body, axis))


def index_select(run: Interpreter, node: Node) -> Value | None:
    """Places of a dim that a constant names."""
    given = _first(run, node)
    index = run.constant(arguments(node)[2])
    if given is None or index is None or index.dim() != 1:
        return None
    value, rank = given
    return _taken(run, value, arguments(node)[1] % rank, index.tolist())


def split(run: Interpreter, node: Node) -> Value | None:
    """`chunk`, `split` and `unbind`."""
    given = _first(run, node)
    results = node.meta.get("val")
    if given is None or not isinstance(results, list | tuple):
        return None
    value, rank = given
    dim = schema_values(node)["dim"] % rank
    unbound = node.target == aten.unbind.int
    if _size_of(value, dim) is None:
        return None
    pieces: list[Value] = []
    start = 0
    for result in results:
        length = 1 if unbound else result.shape[dim]
        if not isinstance(length, int):
            return None
        piece = _taken(run, value, dim, range(start, start + length))
        piece = _without(run, piece, dim) if unbound else piece
        if piece is None:
            return None
        pieces.append(piece)
        start += length
    return Several(tuple(pieces))


def getitem(run: Interpreter, node: Node) -> Value | None:
    """One of several results."""
    value = run.values[arguments(node)[0]]
    return value.values[arguments(node)[1]] if isinstance(value, Several) else None


def cat(run: Interpreter, node: Node) -> Value | None:
    """Side by side, unless along the rows."""
    pieces = list(arguments(node)[0])
    dim = arguments(node)[1] if len(node.args) > 1 else 0
    return _side_by_side(run, pieces, dim, stacked=False)


def stack(run: Interpreter, node: Node) -> Value | None:
    """Side by side along a dim of its own."""
    pieces = list(arguments(node)[0])
    dim = arguments(node)[1] if len(node.args) > 1 else 0
    return _side_by_side(run, pieces, dim, stacked=True)


def _side_by_side(
    run: Interpreter, pieces: Sequence[Node], dim: int, *, stacked: bool
) -> Value | None:
    values = [run.as_rows(piece) for piece in pieces]
    if any(value is None for value in values):
        return None
    parts: list[tuple[Rows, int]] = []
    for value in (value for value in values if value is not None):
        at = dim % (len(value.dims) + stacked)
        if stacked:
            first = sum(value.dims[:at])
            axes = (*value.axes[:first], 1, *value.axes[first:])
            dims = (*value.dims[:at], 1, *value.dims[at:])
            value = Rows(axes, dims, insert_axis(run.build, value.body, first))
        one = atomic(run.build, value, at)
        if one is None:
            return None
        parts.append(one)
    axis = parts[0][1]
    around = {(part.dims, _sized(part.axes, at)) for part, at in parts}
    if len(around) != 1 or any(at != axis for _, at in parts) or parts[0][0].axes[axis] == ROW:
        return None
    placed, start = [], 0
    for part, _ in parts:
        size = part.axes[axis]
        placed.append(Piece(tuple(range(start, start + size)), part.body))
        start += size
    first_part = parts[0][0]
    axes = (*first_part.axes[:axis], start, *first_part.axes[axis + 1 :])
    return Rows(axes, first_part.dims, joined(axis, start, placed))


def _sized(axes: Axes, axis: int) -> Axes:
    return (*axes[:axis], 0, *axes[axis + 1 :])


def pad(run: Interpreter, node: Node) -> Value | None:
    """Constants in front of or behind a dim."""
    given = _first(run, node)
    if given is None:
        return None
    value, rank = given
    named = schema_values(node)
    amounts, fill = named["pad"], named["value"] or 0.0
    if named.get("mode", "constant") != "constant":
        return None
    tensor = tensor_of(node)
    if tensor is None or any(not isinstance(each, int) or each < 0 for each in amounts):
        return None
    known = bool(fill) if tensor.dtype == torch.bool else fill
    for number in range(len(amounts) // 2):
        before, after = amounts[2 * number : 2 * number + 2]
        one = atomic(run.build, value, rank - 1 - number)
        if one is None or one[0].axes[one[1]] == ROW:
            return None
        value, axis = one
        size = value.axes[axis]
        total = before + size + after
        edges = (*range(before), *range(before + size, total))
        pieces = [Piece(tuple(range(before, before + size)), value.body)]
        if edges:
            pieces.append(Piece(edges, Fill(known)))
        body: Body = joined(axis, total, pieces)
        value = Rows((*value.axes[:axis], total, *value.axes[axis + 1 :]), value.dims, body)
    return value


SHAPE_RULES: dict[Any, Callable[[Interpreter, Node], Value | None]] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.unsqueeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.squeeze.default,
            aten.view_as.default,
        ),
        reshape,
    ),
    **dict.fromkeys((aten.expand.default, aten.expand_as.default), expand),
    **dict.fromkeys(
        (
            aten.contiguous.default,
            aten.clone.default,
            aten.detach.default,
            aten.alias.default,
            aten.lift_fresh_copy.default,
        ),
        same,
    ),
    **dict.fromkeys((aten.transpose.int, aten.permute.default, aten.t.default), transpose),
    **dict.fromkeys((aten.slice.Tensor, aten.narrow.default), cut),
    aten.select.int: select,
    aten.index_select.default: index_select,
    **dict.fromkeys(
        (
            aten.chunk.default,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unbind.int,
        ),
        split,
    ),
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.constant_pad_nd.default: pad,
    aten.pad.default: pad,
}
