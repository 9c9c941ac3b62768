"""Recognise the MLP of a target attention on packed pairs, and fuse it.

Shapes: B candidates, L pairs, D width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.kernels.attention import ScoreLayer, TargetNetwork
from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake


@dataclass
class _Chain:
    """Layers from the scores back to the pairs, last first."""

    layers: list[ScoreLayer] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    pairs: Node | None = None


def fuse_target(
    module: GraphModule,
    emitter: Emitter,
    scores: Node,
    keys: Node,
    lengths: Node,
    max_length: int,
) -> Node | None:
    """Emit `rankopt::target_attention` for scores [L] of keys [L, D]; None where they are others.

    The first layer may read the candidate, the key, their difference either way and their product,
    in any order: W [q; k; q - k; q * k] = (Wq + Wd) q + (Wk - Wd) k + Wp (q * k).
    """
    chain = _chain(module, scores)
    if chain is None or chain.pairs is None or len(chain.layers) < 2:
        return None
    dim = int(fake(keys).shape[1])
    first = chain.layers[-1]
    parts = _first_layer(first.weight, chain.pairs, keys, dim)
    if parts is None:
        return None
    query, weights = parts
    network = TargetNetwork(*weights, tuple(reversed(chain.layers)))
    packed = emitter.add(f"{chain.paths[-1].rpartition('.')[0]}.target_attention", network.pack())
    return emitter.call(
        torch.ops.rankopt.target_attention.default,
        *(query, keys, lengths, None, emitter.read(packed)),
        *(network.widths, network.activations, max_length),
    )


def _chain(module: GraphModule, scores: Node) -> _Chain | None:
    chain = _Chain()
    activation: tuple[str, Tensor | None] = ("none", None)
    node = scores
    while node.target is not aten.cat.default:
        if node.target is aten.linear.default:
            weight, bias = (constant(module, each) for each in (*arguments(node)[1:3], None)[:2])
            if weight is None or (len(node.args) > 2 and arguments(node)[2] and bias is None):
                return None
            if not chain.layers and (weight.shape[0] != 1 or activation[0] != "none"):
                return None
            chain.layers.append(ScoreLayer(weight, bias, *activation))
            chain.paths.append(str(arguments(node)[1].target))
            activation = ("none", None)
        elif node.target is not aten.reshape.default or chain.layers:
            found = _activation(module, node)
            if found is None or activation[0] != "none":
                return None
            activation = found
        if not node.args or not isinstance(node.args[0], Node):
            return None
        node = arguments(node)[0]
    chain.pairs = node
    return chain if activation[0] == "none" else None


def _activation(module: GraphModule, node: Node) -> tuple[str, Tensor | None] | None:
    if node.target is aten.relu.default:
        return "slope", torch.zeros(1)
    if node.target is aten.leaky_relu.default:
        slope = arguments(node)[1] if len(node.args) > 1 else 0.01
        return "slope", torch.tensor([float(slope)])
    if node.target is aten.prelu.default:
        weight = constant(module, arguments(node)[1])
        return None if weight is None else ("slope", weight)
    names: dict[Any, str] = {aten.sigmoid.default: "sigmoid", aten.silu.default: "silu"}
    return (names[node.target], None) if node.target in names else None


def _first_layer(
    weight: Tensor, pairs: Node, keys: Node, dim: int
) -> tuple[Node, tuple[Tensor, Tensor, Tensor]] | None:
    """Return the candidates [B, D], and what they, the keys and the products are multiplied by."""
    pieces: list[Node] = list(arguments(pairs)[0])
    if weight.shape[1] != dim * len(pieces):
        return None
    query = next((source for piece in pieces if (source := _repeated(piece))), None)
    if query is None:
        return None
    totals = [torch.zeros(len(weight), dim, dtype=torch.float64) for _ in range(3)]
    for piece, part in zip(pieces, weight.double().chunk(len(pieces), dim=1), strict=True):
        kind = _kind(piece, query, keys)
        if kind is None:
            return None
        for total, factor in zip(totals, kind, strict=True):
            total += factor * part
    of_query, of_key, of_product = (total.float() for total in totals)
    return query, (of_query, of_key, of_product)


def _kind(piece: Node, query: Node, keys: Node) -> tuple[int, int, int] | None:
    """Say how often candidate, key and product are in a piece of the pair."""
    if _repeated(piece) is query:
        return (1, 0, 0)
    if piece is keys:
        return (0, 1, 0)
    if len(piece.args) < 2 or piece.kwargs:
        return None
    left, right = arguments(piece)[:2]
    sides = [_repeated(left) is query, left is keys, _repeated(right) is query, right is keys]
    if sides in ([True, False, False, True], [False, True, True, False]):
        if piece.target is aten.mul.Tensor:
            return (0, 0, 1)
        if piece.target is aten.sub.Tensor:
            return (1, -1, 0) if sides[0] else (-1, 1, 0)
    return None


def _repeated(node: object) -> Node | None:
    """Return the rows that a list's ids repeat; None for anything else."""
    if not isinstance(node, Node) or node.target is not aten.index_select.default:
        return None
    source, dim, index = arguments(node)
    rows = torch.ops.rankopt.ragged_rows.default
    return source if dim == 0 and index.target is rows else None
