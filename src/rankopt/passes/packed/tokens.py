"""Operators that treat tokens alike: element by element, and layers over a token's features.

Shapes: as in `packed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from rankopt.passes.graph import arguments, aten, constant, fake, schema_values
from rankopt.passes.packed.attention import on_scores
from rankopt.passes.packed.packing import Follow, Packing
from rankopt.passes.packed.values import Packed, Scores, Value

_UNARY = (
    aten.silu.default,
    aten.relu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.gelu.default,
    aten.neg.default,
    aten.square.default,
    aten.leaky_relu.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.hardtanh.default,
    aten.elu.default,
    aten.to.dtype,
    aten.prelu.default,
)
_BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def _embedding(packing: Packing, node: Node) -> Value:
    table, ids, *rest = node.args
    if constant(packing.module, table) is None:
        raise packing.unknown(node)
    packed = packing.packed(ids, node)
    return packing.each(packed, lambda t: packing.emitter.call(node.target, table, t, *rest))


def _unary(packing: Packing, node: Node) -> Value:
    value = packing.values[arguments(node)[0]]
    if isinstance(value, Scores):
        ready = value.causal is None or value.seen is not None
        if node.target is not aten.silu.default or value.activated or not ready:
            raise packing.unknown(node)
        return replace(value, activated=True)
    packed = packing.packed(arguments(node)[0], node)
    if node.target is aten.prelu.default:
        slope = constant(packing.module, arguments(node)[1])
        # A slope per channel would read dim 1, which is the place in a rectangle.
        if slope is None or (slope.numel() > 1 and fake(node).dim() != 2):
            raise packing.unknown(node)
    rest = node.args[1:]
    made = packing.each(
        packed, lambda t: packing.emitter.call(node.target, t, *rest, **node.kwargs)
    )
    whole = fake(node).dtype in {torch.int32, torch.int64}
    return replace(made, fill=packed.fill) if node.target is aten.to.dtype and whole else made


def _binary(packing: Packing, node: Node) -> Value:
    left, right = arguments(node)[:2]
    for value in (packing.known(left), packing.known(right)):
        if isinstance(value, Scores):
            return on_scores(packing, node, value)
    if node.kwargs:
        raise packing.unknown(node)
    like = next(v for v in (packing.known(left), packing.known(right)) if v is not None)
    if not isinstance(like, Packed):
        raise packing.unknown(node)
    sides = [packing.operand(side, like, node) for side in (left, right)]

    def made(pick: Callable[[Packed], Any]) -> Node:
        picked = [pick(side) if isinstance(side, Packed) else side for side in sides]
        return packing.emitter.call(node.target, *picked)

    tokens = made(lambda side: side.tokens)
    own = None if like.own is None else made(lambda side: side.own)
    return Packed(tokens, own, like.num_before)


def _linear(packing: Packing, node: Node) -> Value:
    packed = packing.packed(arguments(node)[0], node)
    packing.require_vector(arguments(node)[0], node)
    rest = node.args[1:]
    return packing.each(packed, lambda t: packing.emitter.call(node.target, t, *rest))


def _layer_norm(packing: Packing, node: Node) -> Value:
    packed = packing.packed(arguments(node)[0], node)
    packing.require_vector(arguments(node)[0], node)
    if len(arguments(node)[1]) != 1:
        raise packing.unknown(node)
    rest = node.args[1:]
    return packing.each(packed, lambda t: packing.emitter.call(node.target, t, *rest))


def _batch_norm(packing: Packing, node: Node) -> Value:
    packed = packing.packed(arguments(node)[0], node)
    if schema_values(node)["training"] or not packing.is_flat(arguments(node)[0]):
        raise packing.unknown(node)
    rest = node.args[1:]
    return packing.each(packed, lambda t: packing.emitter.call(node.target, t, *rest))


FOLLOWED: dict[Any, Follow] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    aten.embedding.default: _embedding,
    aten.linear.default: _linear,
    aten.layer_norm.default: _layer_norm,
    aten.batch_norm.default: _batch_norm,
}
"""Operator -> what follows it."""
