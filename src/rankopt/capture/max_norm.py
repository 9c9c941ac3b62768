"""Scale the rows of max_norm tables once, instead of at every lookup."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import LOOKUP_OPERATORS, arguments, aten, constant, owner

_ROWS_AT_ONCE = 1 << 20


def fold_max_norm(emitter: Emitter) -> tuple[list[str], list[str]]:
    """Scale the rows of max_norm tables once, where the model does so at every lookup.

    `embedding_renorm_` writes into the table while scoring: each row that is looked up is scaled
    down to the largest norm allowed, so what a lookup returns is the scaled row. Scaling all rows
    beforehand returns the same and writes nothing.

    Returns:
        The tables that were scaled, and those that were not because some lookup reads plain rows.
    """
    writers: dict[str, list[Node]] = {}
    for node in emitter.graph.find_nodes(op="call_function", target=aten.embedding_renorm_.default):
        source = arguments(node)[0]
        while source.op == "call_function" and source.target == aten.detach.default:
            source = arguments(source)[0]
        if constant(emitter.module, source) is not None:
            writers.setdefault(str(source.target), []).append(node)
    scaled, refused = [], []
    for path, nodes in writers.items():
        settings = {tuple(arguments(node)[2:4]) for node in nodes}
        if len(settings) > 1 or not _every_lookup_scales(emitter, path, nodes):
            refused.append(owner(path))
            continue
        max_norm, norm_type = settings.pop()
        weight = constant(emitter.module, emitter.readers(path)[0])
        if weight is None:
            continue
        emitter.overwrite(path, _scaled(weight, max_norm, norm_type))
        for node in nodes:
            _remove_writer(emitter, node)
        scaled.append(owner(path))
    return scaled, refused


def _every_lookup_scales(emitter: Emitter, path: str, writers: list[Node]) -> bool:
    scaled_ids = {_plain_ids(arguments(node)[1]) for node in writers}
    for reader in emitter.readers(path):
        for user in reader.users:
            if user.target in LOOKUP_OPERATORS:
                if _plain_ids(arguments(user)[1]) not in scaled_ids:
                    return False
            elif user.target != aten.detach.default and user not in writers:
                return False
    return True


def _plain_ids(node: Node) -> Node:
    while node.target in (aten.contiguous.default, aten.reshape.default, aten.view.default):
        node = arguments(node)[0]
    return node


def _scaled(weight: Tensor, max_norm: float, norm_type: float) -> Tensor:
    rows = weight.clone()
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        ids = torch.arange(start, min(start + _ROWS_AT_ONCE, len(rows)))
        torch.embedding_renorm_(rows, ids, max_norm, norm_type)
    return rows


def _remove_writer(emitter: Emitter, node: Node) -> None:
    source = arguments(node)[0]
    emitter.replace(node, source)
    while source.op == "call_function" and not source.users:
        source, unread = arguments(source)[0], source
        emitter.graph.erase_node(unread)
