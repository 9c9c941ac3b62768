"""Recognise the MLP of a target attention, and fuse it on packed pairs.

Shapes: B candidates, L pairs, H places of a rectangle, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.kernels.attention import ScoreLayer, TargetNetwork
from rankopt.passes.dice import read_dice
from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake

RowsOf = Callable[[object], Node | None]
"""Returns what a node repeats for every key of a candidate; None for anything else."""


@dataclass(frozen=True, eq=False)
class Target:
    """A target attention's scores, as a graph computes them.

    Attributes:
        query: the candidates, as the reader of repeated rows gives them.
        network: the MLP; path: the name of its first weight.
    """

    query: Node
    network: TargetNetwork
    path: str

    def emit_weights(self, emitter: Emitter) -> Node:
        """Register the packed network beside the layer it is made of, and read it."""
        name = f"{self.path.rpartition('.')[0]}.target_attention"
        return emitter.read(emitter.add(name, self.network.pack()))


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
    """Emit `rankopt::target_attention` for scores [L] of keys [L, D]; None for other scores."""
    target = read_target(module, scores, keys, _repeated)
    if target is None:
        return None
    network = target.network
    return emitter.call(
        torch.ops.rankopt.target_attention.default,
        *(target.query, keys, lengths, None, target.emit_weights(emitter)),
        *(network.widths, network.activations, max_length),
    )


def read_target(module: GraphModule, scores: Node, keys: Node, rows_of: RowsOf) -> Target | None:
    """Read the MLP that scores pairs of a candidate and a key; None where it is something else.

    The first layer may read the candidate, the key, their difference either way and their product,
    in any order: W [q; k; q - k; q * k] = (Wq + Wd) q + (Wk - Wd) k + Wp (q * k).

    Shapes: scores [L] or [..., H] in any form; keys [L, D] or [B, H, D].
    """
    chain = _chain(module, scores)
    if chain is None or chain.pairs is None or len(chain.layers) < 2:
        return None
    dim = int(fake(keys).shape[-1])
    first = chain.layers[-1]
    parts = _first_layer(first.weight, chain.pairs, keys, dim, rows_of)
    if parts is None:
        return None
    query, weights = parts
    network = TargetNetwork(*weights, tuple(reversed(chain.layers)))
    return Target(query, network, chain.paths[-1])


def _chain(module: GraphModule, scores: Node) -> _Chain | None:
    chain = _Chain()
    activation = ScoreLayer(torch.empty(0))
    node = scores
    while node.target is not aten.cat.default:
        if node.target is aten.linear.default:
            weight, bias = (constant(module, each) for each in (*arguments(node)[1:3], None)[:2])
            if weight is None or (len(node.args) > 2 and arguments(node)[2] and bias is None):
                return None
            if not chain.layers and (weight.shape[0] != 1 or activation.activation != "none"):
                return None
            chain.layers.append(replace(activation, weight=weight, bias=bias))
            chain.paths.append(str(arguments(node)[1].target))
            activation = ScoreLayer(torch.empty(0))
        elif not (_keeps_order(node) if chain.layers else _keeps_scores(node)):
            gate = _gate(module, node)
            if gate is None or activation.activation != "none":
                return None
            node, activation = gate
            continue
        if not node.args or not isinstance(node.args[0], Node):
            return None
        node = arguments(node)[0]
    chain.pairs = node
    return chain if activation.activation == "none" else None


_RESHAPES = {
    aten.reshape.default,
    aten.view.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
}


def _keeps_order(node: Node) -> bool:
    """Tell whether vectors of features stay whole and in their order."""
    if node.target not in _RESHAPES:
        return False
    before, after = fake(arguments(node)[0]).shape, fake(node).shape
    return len(after) > 0 and str(before[-1]) == str(after[-1]) and before[-1] != 1


def _keeps_scores(node: Node) -> bool:
    """Tell whether single numbers stay in their order."""
    if node.target in _RESHAPES:
        return True
    return node.target is aten.transpose.int and _sizes(arguments(node)[0]) == _sizes(node)


def _sizes(node: Node) -> list[str]:
    """Return the sizes that are not 1, for comparison."""
    return [str(size) for size in fake(node).shape if str(size) != "1"]


def _gate(module: GraphModule, node: Node) -> tuple[Node, ScoreLayer] | None:
    """Return what an activation reads, and the activation as a layer without its weight."""
    none = torch.empty(0)
    found = _activation(module, node)
    if found is not None and isinstance(node.args[0], Node):
        return arguments(node)[0], ScoreLayer(none, None, *found)
    dice = read_dice(module, node)
    if dice is None:
        return None
    vectors = (dice.slope, dice.scale, dice.shift)
    return dice.linear, ScoreLayer(none, None, dice.activation, *vectors)


def _activation(module: GraphModule, node: Node) -> tuple[str, Tensor | None] | None:
    if node.target is aten.relu.default:
        return "slope", torch.zeros(1)
    if node.target is aten.leaky_relu.default:
        slope = arguments(node)[1] if len(node.args) > 1 else 0.01
        return "slope", torch.tensor([float(slope)])
    if node.target is aten.prelu.default:
        weight = constant(module, arguments(node)[1])
        # A slope per channel reads dim 1: the features only where there are two dims.
        if weight is None or (weight.numel() > 1 and fake(node).dim() != 2):
            return None
        return "slope", weight
    names: dict[Any, str] = {aten.sigmoid.default: "sigmoid", aten.silu.default: "silu"}
    return (names[node.target], None) if node.target in names else None


def _first_layer(
    weight: Tensor, pairs: Node, keys: Node, dim: int, rows_of: RowsOf
) -> tuple[Node, tuple[Tensor, Tensor, Tensor]] | None:
    """Return the candidates, and what they, the keys and the products are multiplied by."""
    pieces: list[Node] = list(arguments(pairs)[0])
    rank = fake(pairs).dim()
    along = int(arguments(pairs)[1]) % rank if len(pairs.args) > 1 else 0
    if along != rank - 1 or any(fake(piece).shape[-1] != dim for piece in pieces):
        return None
    query = next((source for piece in pieces if (source := rows_of(piece))), None)
    if query is None:
        return None
    totals = [torch.zeros(len(weight), dim, dtype=torch.float64) for _ in range(3)]
    for piece, part in zip(pieces, weight.double().chunk(len(pieces), dim=1), strict=True):
        kind = _kind(piece, query, keys, rows_of)
        if kind is None:
            return None
        for total, factor in zip(totals, kind, strict=True):
            total += factor * part
    of_query, of_key, of_product = (total.float() for total in totals)
    return query, (of_query, of_key, of_product)


def _kind(piece: Node, query: Node, keys: Node, rows_of: RowsOf) -> tuple[int, int, int] | None:
    """Say how often candidate, key and product are in a piece of the pair."""
    if rows_of(piece) is query:
        return (1, 0, 0)
    if piece is keys:
        return (0, 1, 0)
    if len(piece.args) < 2 or piece.kwargs:
        return None
    left, right = arguments(piece)[:2]
    sides = [rows_of(left) is query, left is keys, rows_of(right) is query, right is keys]
    if sides in ([True, False, False, True], [False, True, True, False]):
        if piece.target is aten.mul.Tensor:
            return (0, 0, 1)
        if piece.target is aten.sub.Tensor:
            return (1, -1, 0) if sides[0] else (-1, 1, 0)
    return None


def _repeated(node: object) -> Node | None:
    """Return the rows [B, D] that a list's ids repeat; None for anything else."""
    if not isinstance(node, Node) or node.target is not aten.index_select.default:
        return None
    source, dim, index = arguments(node)
    rows = torch.ops.rankopt.ragged_rows.default
    return source if dim == 0 and index.target is rows else None
