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
        while (after := _next(chain)) is not None:
            chain.append(after)
        joined.update(chain)
        if len(chain) > 1:
            chains.append(chain)
    return chains


def _next(chain: list[Node]) -> Node | None:
    """Return the layer that alone reads a chain's result, unless its activations differ in bits."""
    last = chain[-1]
    if len(last.users) != 1:
        return None
    user = next(iter(last.users))
    if not _is_layer(user) or arguments(user)[0] is not last:
        return None
    return user if len(_bits([*chain, user])) < 2 else None


def _is_layer(node: Node) -> bool:
    ops = torch.ops.rankopt
    return node.target in (
        ops.linear_int8.default,
        ops.linear_fp16.default,
        ops.linear_fp32.default,
        ops.mlp_int8.default,
    )


def _bits(chain: list[Node]) -> set[int]:
    """Return the activation bits of a chain's int8 layers."""
    ops = torch.ops.rankopt
    position = {ops.linear_int8.default: 6, ops.mlp_int8.default: 7}
    return {arguments(node)[position[node.target]] for node in chain if node.target in position}


def _columns(node: Node) -> list[list[Any]]:
    """Return packed, scale, bias, slope, peak, num_outputs and activation of a node's layers."""
    ops, values = torch.ops.rankopt, arguments(node)
    if node.target is ops.mlp_int8.default:
        given = list(values[8]) if len(values) > 8 else []
        return [*map(list, values[1:7]), given or [0] * len(values[6])]
    if node.target in (ops.linear_fp16.default, ops.linear_fp32.default):
        values = (*values[:2], None, *values[2:5], None, *values[5:])
    packed, scale, bias, slope, num_outputs = values[1:6]
    activation = values[7] if len(values) > 7 else 0
    return [[packed], [scale], [bias], [slope], [None], [num_outputs], [activation]]


def _replace(module: GraphModule, chain: list[Node]) -> None:
    columns: list[list[Any]] = [[] for _ in range(7)]
    for node in chain:
        for column, more in zip(columns, _columns(node), strict=True):
            column.extend(more)
    bits = max(_bits(chain), default=8)
    with module.graph.inserting_before(chain[-1]):
        new = module.graph.call_function(
            torch.ops.rankopt.mlp_int8.default,
            (arguments(chain[0])[0], *columns[:6], bits, columns[6]),
        )
    replace_linear(chain[-1], new)
    for node in reversed(chain[:-1]):
        module.graph.erase_node(node)
