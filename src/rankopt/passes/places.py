"""Target attention over places of a rectangle: score those that a mask shows, and no others.

Where the tokens of a history cannot be taken apart from their padding (ids that come padded or in a
packed matrix, lists that are joined, masks that look at the ids), the graph's own mask says which
places count, whatever it is made of. The sum, the mask, the softmax and the MLP behind the scores
become one operator that reads the mask.

Shapes: B candidates, H places, D width of a vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.kernels.attention import TargetNetwork
from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake
from rankopt.passes.target import Target, read_target

_VIEWS = {
    aten.reshape.default,
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.flatten.using_ints,
}
_EXPANDS = {aten.expand.default, aten.expand_as.default, aten.repeat.default}
_CASTS = {aten.to.dtype, aten._to_copy.default}
_NOT = {aten.bitwise_not.default, aten.logical_not.default}


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """A sum of keys [B, H, D], each times its own weight.

    Attributes:
        node: the sum, [B, D] or [B, 1, D].
        weights: B * H numbers in any form, rows of B behind each other.
    """

    node: Node
    weights: Node
    keys: Node


@dataclass(frozen=True, eq=False)
class Weights:
    """How weights come from scores, step by step back from the sum.

    Attributes:
        node: what is left to be explained.
        softmax: a row's weights are the shares of its scores.
        factor: what scores were multiplied by.
        mask: true where a score counts; hides: true where it does not.
        fill: the score of the other places.
    """

    node: Node
    softmax: bool = False
    factor: float = 1.0
    mask: Node | None = None
    hides: bool = False
    fill: float = 0.0


def fuse_places(module: GraphModule, emitter: Emitter) -> tuple[list[str], list[str]]:
    """Fuse every target attention over a rectangle.

    Returns:
        One sentence per attention that was fused, and one per weighted sum that was not.
    """
    done: list[str] = []
    refused: list[str] = []
    for node in list(module.graph.nodes):
        found = _weighted_sum(node)
        if found is None:
            continue
        weights = _weights(module, found)
        target = read_target(module, weights.node, found.keys, _rows_of)
        if target is None or not _is_candidate(target.query, found.keys):
            refused.append(f"{node.name}: {_why(weights)}")
            continue
        with emitter.before(node):
            new = _emit(module, emitter, found, weights, target)
        emitter.replace(node, new)
        how = "softmax over" if weights.softmax else "sum over"
        what = "masked places" if weights.mask is not None else "its places"
        done.append(f"{node.name}: {how} {what}, its scores in the same call")
    return done, refused


def _is_candidate(query: Node, keys: Node) -> bool:
    """Tell whether there is one vector a row, as wide as a key."""
    ours, theirs = _shape(query), _shape(keys)
    return [ours[0], ours[-1]] == [theirs[0], theirs[-1]]


def _why(weights: Weights) -> str:
    """Say what stops the way from the weights to the MLP."""
    if weights.softmax or weights.mask is not None or weights.node.target is aten.linear.default:
        return "its scores are not an MLP of candidate and id that is understood"
    return f"its weights come from {weights.node.name}, which is not understood"


def _emit(
    module: GraphModule, emitter: Emitter, found: WeightedSum, weights: Weights, target: Target
) -> Node:
    dim = int(fake(found.keys).shape[2])
    network = _scaled(target.network, weights.factor)
    target = replace(target, network=network)
    query = emitter.call(aten.reshape.default, target.query, [-1, dim])
    summed = emitter.call(
        torch.ops.rankopt.masked_target_attention.default,
        *(query, found.keys, _mask(module, emitter, found, weights), target.emit_weights(emitter)),
        *(network.widths, network.activations, weights.softmax, weights.fill),
    )
    return (
        summed if fake(found.node).dim() == 2 else emitter.call(aten.unsqueeze.default, summed, 1)
    )


def _scaled(network: TargetNetwork, factor: float) -> TargetNetwork:
    """Multiply the scores by a number."""
    *before, last = network.layers
    bias = None if last.bias is None else last.bias.double() * factor
    weight = (last.weight.double() * factor).float()
    scaled = replace(last, weight=weight, bias=None if bias is None else bias.float())
    return network if factor == 1.0 else replace(network, layers=(*before, scaled))


def _mask(module: GraphModule, emitter: Emitter, found: WeightedSum, weights: Weights) -> Node:
    """Emit the mask [B, H]; without one, leave out places whose key is a row of zeros."""
    places = int(fake(found.keys).shape[1])
    if weights.mask is not None:
        mask = emitter.call(aten.reshape.default, weights.mask, [-1, places])
        return emitter.call(aten.logical_not.default, mask) if weights.hides else mask
    sources = [] if weights.softmax else _lookups(module, found.keys)
    if sources:
        seen = [emitter.call(aten.ne.Scalar, ids, row) for ids, row in sources]
        mask = seen[0]
        for each in seen[1:]:
            mask = emitter.call(aten.logical_or.default, mask, each)
        return mask
    first = emitter.call(aten.select.int, found.keys, 2, 0)
    return emitter.call(aten.ones_like.default, first, dtype=torch.bool)


# The sum.


def _weighted_sum(node: Node) -> WeightedSum | None:
    if node.target in {aten.matmul.default, aten.bmm.default}:
        weights, keys = arguments(node)[:2]
        if not _is_rectangle(keys) or fake(weights).dim() != 3:
            return None
        fits = _shape(weights) == [_shape(keys)[0], "1", _shape(keys)[1]]
        return WeightedSum(node, weights, keys) if fits else None
    if node.target is not aten.sum.dim_IntList or list(arguments(node)[1]) not in ([1], [-2]):
        return None
    product = arguments(node)[0]
    if node.kwargs or product.target is not aten.mul.Tensor or not _is_rectangle(product):
        return None
    for weights, keys in (arguments(product)[:2], arguments(product)[1::-1]):
        if not isinstance(weights, Node) or not isinstance(keys, Node):
            return None
        if _shape(keys) == _shape(product) and _shape(weights) == [*_shape(keys)[:2], "1"]:
            return WeightedSum(node, weights, keys)
    return None


def _is_rectangle(node: object) -> bool:
    """Tell [B, H, D] of real numbers, H and D known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() != 3 or value.dtype != torch.float32:
        return False
    sizes: tuple[Any, ...] = tuple(value.shape)
    return not isinstance(sizes[0], int) and all(isinstance(size, int) for size in sizes[1:])


def _shape(node: Node) -> list[str]:
    return [str(size) for size in fake(node).shape]


# From weights back to scores.


def _weights(module: GraphModule, found: WeightedSum) -> Weights:
    weights = Weights(found.weights)
    while True:
        step = _step(module, weights, [str(size) for size in fake(found.keys).shape[:2]])
        if step is None:
            return weights
        weights = step


def _step(module: GraphModule, at: Weights, places: list[str]) -> Weights | None:
    """Go back by one operator; None where that is not one of these."""
    node = at.node
    if node.target in _VIEWS or (node.target is aten.transpose.int and _is_line(node, places)):
        source = arguments(node)[0]
        return replace(at, node=source) if _is_line(source, places) else None
    if node.target is aten.softmax.int and not at.softmax and at.mask is None:
        source, dim = arguments(node)[:2]
        along = int(dim) % fake(node).dim()
        whole = _is_line(node, places) and _shape(node)[along] == places[1]
        if not whole or at.factor != 1.0 or along == 0 or (len(node.args) > 2 and node.args[2]):
            return None
        return replace(at, node=source, softmax=True)
    scaled = _scale(module, node)
    if scaled is not None:
        return replace(at, node=scaled[0], factor=at.factor * scaled[1])
    if at.mask is not None or not _is_line(node, places):
        return None
    masked = _masked(module, node)
    if masked is None or (not at.softmax and masked.fill != 0.0):
        return None
    fill = _as_float32(masked.fill * at.factor if masked.fill else 0.0)
    return replace(masked, softmax=at.softmax, factor=at.factor, fill=fill)


def _is_line(node: Node, places: list[str]) -> bool:
    """Tell whether a node holds one number for each place of each row, row by row."""
    sizes = [size for size in _shape(node) if size != "1"]
    return sizes == [size for size in places if size != "1"]


def _scale(module: GraphModule, node: Node) -> tuple[Node, float] | None:
    if node.target not in {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}:
        return None
    left, right = arguments(node)[:2]
    number = _number(module, right)
    if number is not None and isinstance(left, Node) and not node.kwargs:
        if node.target in {aten.div.Tensor, aten.div.Scalar}:
            return (left, 1.0 / number) if number else None
        return left, number
    number = _number(module, left)
    if number is not None and node.target is aten.mul.Tensor and isinstance(right, Node):
        return right, number
    return None


def _masked(module: GraphModule, node: Node) -> Weights | None:
    """Read a choice between scores and one number."""
    given = arguments(node)
    if node.target is aten.masked_fill.Scalar:
        return _chosen(node, given[0], given[1], float(given[2]), hides=True)
    if node.target is aten.masked_fill.Tensor:
        fill = _filled(module, given[2])
        return None if fill is None else _chosen(node, given[0], given[1], fill, hides=True)
    if node.target in {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf}:
        mask, yes, no = given
        for scores, other, hides in ((yes, no, False), (no, yes, True)):
            fill = _filled(module, other)
            if fill is not None and isinstance(scores, Node):
                return _chosen(node, scores, mask, fill, hides=hides)
        return None
    if node.target is aten.mul.Tensor:
        for scores, other in (given[:2], given[1::-1]):
            if isinstance(other, Node) and other.target in _CASTS:
                mask = arguments(other)[0]
                if isinstance(scores, Node) and fake(mask).dtype == torch.bool:
                    return _chosen(node, scores, mask, 0.0, hides=False)
    return None


def _chosen(node: Node, scores: Node, mask: Node, fill: float, *, hides: bool) -> Weights | None:
    """Take a mask that has a value of its own for every score."""
    if _shape(mask) != _shape(node) or _shape(scores) != _shape(node) or math.isnan(fill):
        return None
    if fake(mask).dtype != torch.bool:
        return None
    while mask.target in _NOT:
        mask, hides = arguments(mask)[0], not hides
    return Weights(scores, mask=mask, hides=hides, fill=fill)


def _filled(module: GraphModule, value: object) -> float | None:
    """Return the one number that a tensor is full of."""
    number = _number(module, value)
    if number is not None or not isinstance(value, Node):
        return number
    if value.target in {aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default}:
        return 0.0
    if value.target in {aten.ones_like.default, aten.ones.default, aten.new_ones.default}:
        return 1.0
    if value.target in {aten.full_like.default, aten.full.default}:
        return _number(module, arguments(value)[1])
    if value.target is aten.new_full.default:
        return _number(module, arguments(value)[2])
    if value.target in _EXPANDS | _VIEWS:
        return _filled(module, arguments(value)[0])
    scaled = _scale(module, value)
    if scaled is not None:
        full = _filled(module, scaled[0])
        return None if full is None else full * scaled[1]
    return None


def _number(module: GraphModule, value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    held = constant(module, value)
    return float(held) if held is not None and held.dim() == 0 else None


def _as_float32(value: float) -> float:
    """Round as a tensor of scores would, to infinity too."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


# Candidates and keys.


def _rows_of(node: object) -> Node | None:
    """Return what [B, H, D] repeats for every place, a [B, D] or [B, 1, D]; None without."""
    at = node
    if not isinstance(at, Node) or not isinstance(at.meta.get("val"), Tensor):
        return None
    while at.target in _EXPANDS or at.target is aten.repeat_interleave.self_int:
        at = arguments(at)[0]
    shape: tuple[Any, ...] = tuple(fake(at).shape)
    if len(shape) != 3 or shape[1] != 1 or fake(at).dtype != torch.float32:
        return None
    if at.target is aten.unsqueeze.default and arguments(at)[1] in (1, -2):
        at = arguments(at)[0]
    return at


def _lookups(module: GraphModule, keys: Node) -> list[tuple[Node, int]]:
    """Return the ids [B, H] that keys are looked up by, each with an id whose row is all zeros.

    A place where every id is such a one adds nothing to a sum. Nothing where that is not so.
    """
    node = keys
    while True:
        if node.target in {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim}:
            source = arguments(node)[0]
            if [s for s in _shape(source) if s != "1"] != [s for s in _shape(node) if s != "1"]:
                return []
        elif node.target is aten.select.int:
            source = arguments(node)[0]
            if fake(source).shape[int(arguments(node)[1])] != 1:
                return []
        elif node.target is aten.cat.default and len(arguments(node)[0]) == 1:
            source = arguments(node)[0][0]
        else:
            break
        node = source
    if node.target is aten.cat.default:
        if int((*arguments(node)[1:], 0)[0]) % fake(node).dim() != fake(node).dim() - 1:
            return []
        pieces = [_lookups(module, piece) for piece in arguments(node)[0]]
        return [each for piece in pieces for each in piece] if all(pieces) else []
    if node.target is not aten.embedding.default or len(node.args) < 3:
        return []
    ids, row = arguments(node)[1:3]
    table = constant(module, arguments(node)[0])
    if table is None or int(row) < 0 or fake(ids).dim() != 2 or bool(table[int(row)].any()):
        return []
    return [(ids, int(row))]
