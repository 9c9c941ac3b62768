"""Join linear layers that follow one another into one `rankopt::mlp_int8`.

Between two layers of a chain nothing is written to memory, allocated or shared out to threads anew,
and the scores keep their bits: the operator's arithmetic is that of its layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from rankopt.passes.graph import arguments, replace_linear


def fuse_chains(module: GraphModule) -> int:
    """Replace every chain of two layers or more; return how many chains there were.

    A layer joins the one before where it alone reads that one's result. The activations, being in
    the layers' epilogues, come along.
    """
    # What a rewrite replaced still counts as a reader until it is gone.
    module.graph.eliminate_dead_code()
    chains = _find_chains(module)
    for chain in chains:
        _replace(module, chain)
    return len(chains)


def _find_chains(module: GraphModule) -> list[list[Node]]:
    chains: list[list[Node]] = []
    joined: set[Node] = set()
    for node in module.graph.nodes:
        if node in joined or not _is_layer(node):
            continue
        chain = [node]
        while (after := _next(chain[-1], _bits(chain))) is not None:
            chain.append(after)
        joined.update(chain)
        if len(chain) > 1:
            chains.append(chain)
    return chains


def _next(node: Node, bits: int | None) -> Node | None:
    """Return the layer that alone reads a layer's result, unless its activations differ in bits."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if not _is_layer(user) or arguments(user)[0] is not node:
        return None
    own = _bits([user])
    return user if own is None or bits is None or own == bits else None


def _is_layer(node: Node) -> bool:
    ops = torch.ops.rankopt
    return node.target in (ops.linear_int8.default, ops.linear_fp32.default)


def _bits(chain: list[Node]) -> int | None:
    """Return the activation bits of a chain's int8 layers; None where it has none."""
    for node in chain:
        if node.target is torch.ops.rankopt.linear_int8.default:
            bits: int = arguments(node)[6]
            return bits
    return None


def _replace(module: GraphModule, chain: list[Node]) -> None:
    # packed, scale, bias, negative_slope, num_outputs
    columns: tuple[list[Any], ...] = ([], [], [], [], [])
    for node in chain:
        values = arguments(node)[1:6]
        if node.target is torch.ops.rankopt.linear_fp32.default:
            values = (values[0], None, *values[1:])
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    with module.graph.inserting_before(chain[-1]):
        new = module.graph.call_function(
            torch.ops.rankopt.mlp_int8.default,
            (arguments(chain[0])[0], *columns, _bits(chain) or 8),
        )
    replace_linear(chain[-1], new)
    for node in reversed(chain[:-1]):
        module.graph.erase_node(node)
