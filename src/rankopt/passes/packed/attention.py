"""Where tokens meet: heads, scores and what is done to them, weighted sums.

Shapes: as in `packed`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rankopt.passes.graph import arguments, aten, constant, fake
from rankopt.passes.packed.packing import Follow, Packing
from rankopt.passes.packed.values import Heads, Masked, Packed, PackingError, Scores, Value
from rankopt.passes.target import fuse_target

_TURNS = (aten.transpose.int, aten.permute.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)


def _turn(packing: Packing, node: Node) -> Value:
    source = arguments(node)[0]
    value = packing.values[source]
    axes = _axes(node)
    if isinstance(value, Heads):
        if axes == (0, 1, 3, 2):
            return replace(value, turned=not value.turned)
        if axes == (0, 2, 1, 3) and not value.turned:
            return value.packed
    elif isinstance(value, Packed) and not packing.is_flat(source):
        if axes == (0, 2, 1, 3):
            return Heads(value, int(fake(source).shape[2]))
        if axes == (0, 2, 3, 1):
            return Heads(value, int(fake(source).shape[2]), turned=True)
        if axes == (0, 2, 1):
            return Heads(value, 1, turned=True)
    raise packing.unknown(node)


def _product(packing: Packing, node: Node) -> Value | Node:
    left, right = (packing.known(each) for each in arguments(node)[:2])
    if isinstance(left, Masked) and left.row and isinstance(right, Packed):
        return _masked_sum(packing, left.packed, right, node)
    left, right = (Heads(v, 1) if isinstance(v, Packed) else v for v in (left, right))
    if not isinstance(right, Heads):
        raise packing.unknown(node)
    if isinstance(left, Heads) and not left.turned and right.turned:
        return Scores(left.packed, right.packed, left.num_heads)
    if isinstance(left, Scores) and not right.turned:
        attended = _attend(packing, left, right, node)
        return attended if fake(node).dim() == 3 else Heads(attended, right.num_heads)
    raise packing.unknown(node)


def on_scores(packing: Packing, node: Node, scores: Scores) -> Value:
    """Follow a scale or a bias."""
    left, right = arguments(node)[:2]
    first = packing.known(left) is scores
    other = right if first else left
    hidden = scores.causal is not None
    if node.kwargs or (hidden and not (scores.activated and scores.seen is not None)):
        raise packing.unknown(node)
    number = _number(packing.module, other)
    if number is not None and node.target is aten.mul.Tensor:
        return _scaled(packing, scores, number)
    if number is not None and node.target is aten.div.Tensor and first:
        return _scaled(packing, scores, 1.0 / number)
    bias = constant(packing.module, other)
    if bias is not None and node.target is aten.add.Tensor and not (scores.activated or hidden):
        bias = bias.reshape(-1, *bias.shape[-2:]).expand(scores.num_heads, -1, -1)
        return replace(scores, bias=bias if scores.bias is None else scores.bias + bias)
    raise packing.unknown(node)


def _scaled(packing: Packing, scores: Scores, number: float) -> Scores:
    if scores.activated:
        return replace(scores, weight_scale=scores.weight_scale * number)
    bias = None if scores.bias is None else scores.bias * number
    return replace(scores, score_scale=scores.score_scale * number, bias=bias)


def _shown(packing: Packing, values: Packed, seen: Packed) -> Packed:
    """Put zeros for the values of tokens that are not seen."""

    def shown(vectors: Node, flags: Node) -> Node:
        factor = packing.emitter.call(aten.to.dtype, flags, torch.float32)
        factor = packing.emitter.call(aten.unsqueeze.default, factor, 1)
        return packing.emitter.call(aten.mul.Tensor, vectors, factor)

    own = values.own
    if own is not None and seen.own is not None:
        own = shown(own, seen.own)
    return replace(values, tokens=shown(values.tokens, seen.tokens), own=own)


def _attend(packing: Packing, scores: Scores, values: Heads, node: Node) -> Packed:
    q, k, v = scores.queries, scores.keys, values.packed
    if scores.causal is None or scores.num_heads != values.num_heads:
        raise PackingError(f"{node.name} sums values without a mask")
    if len({(each.own is None, each.num_before) for each in (q, k, v)}) != 1:
        raise packing.unknown(node)
    if scores.seen is not None:
        v = _shown(packing, v, scores.seen)
    emitter, ragged = packing.emitter, packing.rectangle.ragged
    bias = _bias_by_distance(packing, scores, node)
    sizes = (scores.num_heads, q.num_before, packing.rectangle.num_slots)
    scales = (scores.score_scale, scores.weight_scale)
    side = packing.rectangle.align_right
    tokens = emitter.call(
        torch.ops.rankopt.hstu_attention.default,
        *(q.tokens, k.tokens, v.tokens, ragged.lengths, bias, *sizes),
        *(side, bool(scores.causal), *scales),
    )
    own = None
    if q.own is not None:
        own = emitter.call(
            torch.ops.rankopt.hstu_candidate_attention.default,
            *(q.own, k.tokens, v.tokens, k.own, v.own, ragged.lengths, None, bias),
            *(*sizes, side, *scales),
        )
    packing.notes.append(f"{ragged.name}: attention over {node.name} on present tokens only")
    return Packed(tokens, own, q.num_before)


def _bias_by_distance(packing: Packing, scores: Scores, node: Node) -> Node | None:
    """Store a bias [A, S, S] by the distance of key and query, [A, 2 S - 1]."""
    if scores.bias is None:
        return None
    num_places = packing.num_places(scores.queries)
    # The kernels count a place for the candidate's token whether it is there or not.
    num_positions = scores.queries.num_before + packing.rectangle.num_slots + 1
    table = scores.bias.new_zeros(scores.num_heads, 2 * num_positions - 1)
    at = torch.arange(num_places)
    distance = at[None, :] - at[:, None]
    used = distance <= 0 if scores.causal else torch.ones_like(distance, dtype=torch.bool)
    index = (distance + num_positions - 1)[used]
    table[:, index] = scores.bias[:, used]
    if not torch.equal(table[:, index], scores.bias[:, used]):
        raise PackingError(f"{node.name} adds a bias that depends on more than the distance")
    return packing.emitter.read(packing.emitter.add("attention_bias", table))


def _masked_sum(packing: Packing, weights: Packed, keys: Packed, node: Node) -> Node:
    """Sum weighted tokens of each row: [B, 1, H] times [B, H, D]."""
    ragged, emitter = packing.rectangle.ragged, packing.emitter
    num_slots = packing.rectangle.num_slots
    if keys.own is not None or keys.num_before:
        raise packing.unknown(node)
    summed = fuse_target(
        packing.module, emitter, weights.tokens, keys.tokens, ragged.lengths, num_slots
    )
    how = "its scores in the same call"
    if summed is None:
        how = "scores of present ids only"
        summed = emitter.call(
            torch.ops.rankopt.ragged_sum.default,
            *(weights.tokens, keys.tokens, ragged.lengths, num_slots),
        )
    packing.notes.append(f"{ragged.name}: weighted sum {node.name} over present ids, {how}")
    return emitter.call(aten.unsqueeze.default, summed, 1)


def _axes(node: Node) -> tuple[int, ...]:
    rank = fake(node).dim()
    if node.target is aten.permute.default:
        return tuple(axis % rank for axis in arguments(node)[1])
    first, second = (int(axis) % rank for axis in arguments(node)[1:3])
    axes = list(range(rank))
    axes[first], axes[second] = second, first
    return tuple(axes)


def _number(module: GraphModule, value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    held = constant(module, value)
    return float(held) if held is not None and held.numel() == 1 and held.dim() == 0 else None


FOLLOWED: dict[Any, Follow] = {
    **dict.fromkeys(_TURNS, _turn),
    **dict.fromkeys(_PRODUCTS, _product),
}
"""Operator -> what follows it."""
