"""Flags of ids, masks made of them, and what they hide.

Shapes: as in `packed`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from rankopt.passes.graph import arguments, aten
from rankopt.passes.packed.packing import Follow, Packing
from rankopt.passes.packed.values import Flags, Masked, PackingError, Pairs, Scores, Value
from rankopt.passes.rectangles import masks_absent, masks_pairs, shows_earlier

_COMPARED = (aten.eq.Scalar, aten.ne.Scalar)
_NOT = (aten.bitwise_not.default, aten.logical_not.default)
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor)


def _flag(packing: Packing, node: Node) -> Value:
    """Compare ids with one id."""
    source, number = arguments(node)[:2]
    packed = packing.packed(source, node)
    if packed.fill is None:
        raise packing.unknown(node)
    flags = packing.each(packed, lambda t: packing.emitter.call(node.target, t, number))
    return Flags(flags, (packed.fill == number) is (node.target is aten.eq.Scalar))


def _negate(packing: Packing, node: Node) -> Value:
    value = packing.values[arguments(node)[0]]
    if isinstance(value, Pairs):
        return replace(value, hides=not value.hides)
    if not isinstance(value, Flags):
        raise packing.unknown(node)
    flags = packing.each(value.packed, lambda t: packing.emitter.call(node.target, t))
    return Flags(flags, not value.absent)


def _both(packing: Packing, node: Node) -> Value:
    """Show a key where it is shown, and to those after it alone."""
    left, right = arguments(node)[:2]
    pairs, other = (left, right) if left in packing.values else (right, left)
    value = packing.known(pairs)
    if not isinstance(value, Pairs) or value.hides or other in packing.values:
        raise packing.unknown(node)
    places = packing.num_places(value.keys.packed)
    if not shows_earlier(packing.rectangle, other, places):
        raise packing.unknown(node)
    return replace(value, causal=True)


def _unsqueeze(packing: Packing, node: Node) -> Value:
    value = packing.values[arguments(node)[0]]
    dim = arguments(node)[1]
    if isinstance(value, Masked) and not value.row and dim in (1, -2):
        return replace(value, row=True)
    if isinstance(value, Pairs) and dim == 1:
        return value
    if isinstance(value, Flags) and dim == 1:
        return Pairs(value)
    if isinstance(value, Flags) and dim in (-1, 2):
        return packing.each(value.packed, lambda t: packing.emitter.call(node.target, t, 1))
    raise packing.unknown(node)


def _mask(packing: Packing, node: Node) -> Value:
    source, mask, fill = arguments(node)[:3]
    value = packing.values.get(source)
    pairs = packing.known(mask)
    if isinstance(value, Scores) and isinstance(pairs, Pairs):
        return _mask_pairs(packing, node, value, pairs)
    if not packing.rectangle.probe.knows_places(mask):
        raise PackingError(f"{node.name} hides places by more than the lengths")
    if mask in packing.values or float(fill) != 0.0:
        raise PackingError(f"{node.name} fills masked places with {fill}, not with 0")
    if isinstance(value, Scores) and value.activated:
        packed = value.queries
        absent, later = masks_pairs(
            packing.rectangle, mask, packed.num_before, int(packed.own is not None)
        )
        if not absent:
            raise PackingError(f"{node.name} does not hide just the keys where no id stands")
        if packed.own is not None and not later:
            raise PackingError("earlier tokens see the candidate's")
        return replace(value, causal=later)
    packed = packing.packed(source, node)
    if packed.own is not None or packed.num_before or not masks_absent(packing.rectangle, mask):
        raise PackingError(f"{node.name} does not hide just the places where no id stands")
    if packing.features(node):
        raise packing.unknown(node)
    return Masked(packed)


def _mask_pairs(packing: Packing, node: Node, scores: Scores, pairs: Pairs) -> Scores:
    """Hide keys by their ids and by order, after the activation or before one that gives 0."""
    fill = torch.tensor(float(arguments(node)[2]))
    weight = fill if scores.activated else torch.nn.functional.silu(fill)
    if float(weight) != 0.0:
        raise PackingError(f"{node.name} fills hidden pairs with {float(fill):g}, a weight too")
    if not pairs.hides or pairs.keys.absent or scores.causal is not None:
        raise PackingError(f"{node.name} does not hide just the keys where no id stands")
    if scores.queries.own is not None and not pairs.causal:
        raise PackingError("earlier tokens see the candidate's")
    return replace(scores, causal=pairs.causal, seen=pairs.keys.packed)


FOLLOWED: dict[Any, Follow] = {
    **dict.fromkeys(_COMPARED, _flag),
    **dict.fromkeys(_NOT, _negate),
    **dict.fromkeys(_AND, _both),
    aten.unsqueeze.default: _unsqueeze,
    aten.masked_fill.Scalar: _mask,
}
"""Operator -> what follows it."""
