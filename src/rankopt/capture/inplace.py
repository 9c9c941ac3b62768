"""Turn what serving does not need into nothing, and writes in place into plain results.

Dropout outside training returns its input, and so do a cast to the type that a value has and, where
nothing is trained, detaching; checks of dtypes are made by the input contract before. An operator
that writes into a value which nobody else reads is the same as one that returns a new value; only
the second kind can be moved or dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, fake, schema_values
from rankopt.passes.order import written_roots, written_values

_DROPOUT = {
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
}
_CASTS = {aten.to.dtype, aten.to.device}


def drop_identities(emitter: Emitter) -> int:
    """Remove what returns its input, and checks of dtypes; returns how many dropouts."""
    removed = 0
    for node in list(emitter.graph.nodes):
        if node.target in _DROPOUT and (_is_off(node)):
            emitter.replace(node, arguments(node)[0])
            removed += 1
        elif node.target == aten._assert_tensor_metadata.default and not node.users:
            emitter.graph.erase_node(node)
        elif node.target == aten.detach_.default or _keeps_type(node):
            emitter.replace(node, arguments(node)[0])
    return removed


def _keeps_type(node: Node) -> bool:
    """Tell whether a node is a cast that returns the very value that it is given."""
    if node.target not in _CASTS:
        return False
    given = schema_values(node)
    before, after = fake(given["self"]), fake(node)
    plain = not given["copy"] and given["memory_format"] is None
    return plain and before.dtype == after.dtype and before.device == after.device


def _is_off(node: Node) -> bool:
    probability, train = arguments(node)[1], arguments(node)[2]
    return train is False or probability == 0


def own_inputs(emitter: Emitter) -> None:
    """Copy the inputs that the graph writes into: they are the caller's."""
    written = written_roots(emitter.graph)
    inputs = list(emitter.graph.find_nodes(op="placeholder"))
    for node in inputs:
        if node in written:
            with emitter.before(inputs[-1].next):
                copy = emitter.call(aten.clone.default, node)
            others = [user for user in node.users if user is not copy]
            for user in others:
                user.replace_input_with(node, copy)


def views_to_reshapes(emitter: Emitter) -> None:
    """Let views of results be reshapes: rewritten, a result may lie in memory otherwise."""
    written = written_values(emitter.graph)
    for node in emitter.graph.find_nodes(op="call_function", target=aten.view.default):
        if node not in written:
            node.target = aten.reshape.default


def plain_results(emitter: Emitter) -> int:
    """Replace operators that write into a value of their own by plain ones; returns how many."""
    changed = 0
    for node in list(emitter.graph.nodes):
        plain = _plain(node)
        if plain is None:
            continue
        with emitter.before(node):
            new = emitter.call(plain, *node.args, **node.kwargs)
        before, after = node.meta["val"], new.meta["val"]
        if after.dtype != before.dtype or str(after.shape) != str(before.shape):
            # In place, a result takes its target's dtype; a plain one need not.
            emitter.graph.erase_node(new)
            continue
        emitter.replace(node, new)
        changed += 1
    return changed


def _plain(node: Node) -> Any:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.startswith("_") or target.namespace != "aten":
        return None
    written = node.args[0] if node.args else None
    if not isinstance(written, Node) or not _is_owned(written):
        return None
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _is_owned(node: Node) -> bool:
    """Tell whether a node's value is new memory that its one reader alone knows."""
    target: Any = node.target
    if node.op != "call_function" or len(node.users) != 1:
        return False
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    # Returned as a view, or as the argument itself (`to`, `contiguous`, `reshape` may do either).
    maybe_view = {"to", "contiguous", "reshape", "flatten", "dropout", "type_as", "ravel"}
    name = target._schema.name.removeprefix("aten::")
    return name not in maybe_view and all(r.alias_info is None for r in target._schema.returns)
