"""Operators that move features or tokens: taken apart, joined, given another form, picked out.

Shapes: as in `packed`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from torch.fx import Node

from rankopt.passes.graph import arguments, aten, fake
from rankopt.passes.packed.packing import EXPANDS, Follow, Packing
from rankopt.passes.packed.values import Packed, PackingError, Slices, Value

_SPLITS = (aten.chunk.default, aten.split.Tensor)
_RESHAPES = (
    aten.reshape.default,
    aten.view.default,
    aten.flatten.using_ints,
    aten.view_as.default,
    aten.squeeze.dim,
)


def _slice(packing: Packing, node: Node) -> Value:
    source = arguments(node)[0]
    packed = packing.packed(source, node)
    packing.require_vector(source, node)
    dim, *bounds = (*arguments(node)[1:], None, None, None)[:4]
    if int(dim) % fake(source).dim() != fake(source).dim() - 1 or bounds[2] not in (None, 1):
        raise packing.unknown(node)
    return packing.each(
        packed, lambda t: packing.emitter.call(node.target, t, 1, bounds[0], bounds[1])
    )


def _cat(packing: Packing, node: Node) -> Value:
    pieces: Sequence[Any] = arguments(node)[0]
    dim = int(arguments(node)[1]) if len(node.args) > 1 else 0
    rank = fake(node).dim()
    dim = dim + rank if dim < 0 else dim
    if dim == rank - 1 and rank == (2 if packing.is_flat(node) else 3):
        like = next(p for p in map(packing.known, pieces) if p is not None)
        if not isinstance(like, Packed):
            raise packing.unknown(node)
        sides = [packing.operand(piece, like, node) for piece in pieces]
        if not all(isinstance(side, Packed) for side in sides):
            raise packing.unknown(node)
        tokens = packing.emitter.call(aten.cat.default, [side.tokens for side in sides], 1)
        own = None
        if like.own is not None:
            own = packing.emitter.call(aten.cat.default, [side.own for side in sides], 1)
        return Packed(tokens, own, like.num_before)
    if dim == 1 and (rank == 3 or (rank == 2 and not packing.is_flat(node))):
        return _sequence(packing, pieces, node)
    raise packing.unknown(node)


def _sequence(packing: Packing, pieces: Sequence[Any], node: Node) -> Value:
    """Join context tokens, the ids and a token of the candidate's own."""
    places = [index for index, piece in enumerate(pieces) if packing.known(piece) is not None]
    ids = packing.packed(pieces[places[0]], node)
    if len(places) != 1 or ids.own is not None or ids.num_before:
        raise packing.unknown(node)
    before, after = pieces[: places[0]], pieces[places[0] + 1 :]
    widths = [fake(piece).shape[1] for piece in (*before, *after)]
    if not all(isinstance(width, int) for width in widths) or len(after) > 1:
        raise packing.unknown(node)
    if after and widths[-1] != 1:
        raise PackingError(f"{widths[-1]} places follow the ids, and one is understood")
    tokens = ids.tokens
    num_before = sum(widths[: len(before)])
    if before:
        joined = before[0] if len(before) == 1 else _call_cat(packing, list(before), 1)
        flat = packing.emitter.call(aten.flatten.using_ints, joined, 0, 1)
        tokens = _call_cat(packing, [flat, tokens], 0)
    own = packing.emitter.call(aten.squeeze.dim, after[0], 1) if after else None
    return Packed(tokens, own, num_before, fill=ids.fill)


def _call_cat(packing: Packing, pieces: list[Node], dim: int) -> Node:
    return packing.emitter.call(aten.cat.default, pieces, dim)


def _split(packing: Packing, node: Node) -> Value:
    source = arguments(node)[0]
    packed = packing.packed(source, node)
    packing.require_vector(source, node)
    dim = int(arguments(node)[2]) if len(node.args) > 2 else 0
    if dim not in (-1, fake(source).dim() - 1):
        raise packing.unknown(node)
    bounds, at = [], 0
    for part in node.meta["val"]:
        bounds.append((at, at + int(part.shape[-1])))
        at = bounds[-1][1]
    return Slices(packed, tuple(bounds))


def _part(packing: Packing, node: Node) -> Value:
    value = packing.values[arguments(node)[0]]
    if not isinstance(value, Slices):
        raise packing.unknown(node)
    begin, end = value.bounds[arguments(node)[1]]
    return packing.each(
        value.whole, lambda t: packing.emitter.call(aten.slice.Tensor, t, 1, begin, end)
    )


def _reshape(packing: Packing, node: Node) -> Value:
    """Follow a change of form; tokens themselves stay [T, width]."""
    source = arguments(node)[0]
    if source not in packing.values:
        raise packing.unknown(node)
    packed = packing.packed(source, node)
    shape = fake(node).shape
    flat = packing.is_flat(node)
    if not flat and shape[1] != packing.num_places(packed):
        raise packing.unknown(node)
    if flat and str(shape[0]) != str(packing.num_rows * packing.num_places(packed)):
        raise packing.unknown(node)
    before, after = packing.features(source), packing.features(node)
    if prod(before) != prod(after):
        raise packing.unknown(node)
    if bool(before) == bool(after):
        return packed
    shape_of = [-1] if not after else [-1, prod(after)]
    return packing.each(packed, lambda t: packing.emitter.call(aten.reshape.default, t, shape_of))


def _expand(packing: Packing, node: Node) -> Value:
    """Follow rows that are repeated to the size of packed tokens."""
    source = arguments(node)[0]
    like = packing.known(arguments(node)[1]) if node.target is aten.expand_as.default else None
    if source in packing.values or not isinstance(like, Packed):
        raise packing.unknown(node)
    rows = packing.rows_of(node)
    if rows is None or fake(node).shape[1] != packing.num_places(like):
        raise packing.unknown(node)
    return packing.repeat(rows, like, node)


def _select(packing: Packing, node: Node) -> Node:
    source, dim, index = arguments(node)[:3]
    packed = packing.packed(source, node)
    places = packing.num_places(packed)
    if dim != 1 or packing.is_flat(source) or index not in (-1, places - 1):
        raise PackingError(f"{node.name} reads place {index}, and only the last is understood")
    if packed.own is None:
        raise PackingError(f"{node.name} reads a place that may hold no id")
    return packed.own


FOLLOWED: dict[Any, Follow] = {
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    **dict.fromkeys(_SPLITS, _split),
    operator.getitem: _part,
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(EXPANDS, _expand),
    aten.select.int: _select,
}
"""Operator -> what follows it."""
