"""The order that writes in place impose on a graph, beside what flows along its edges.

An exported graph keeps `buffer[:, :8] = x` as a view and a copy into it: what reads the buffer
afterwards has no edge to the copy. Nodes that are moved must not pass each other there.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from rankopt.passes.graph import aten

Edges = Mapping[Node, frozenset[Node]]

# Without an alias in their schema, yet they return their input where nothing has to be done.
_SOMETIMES_VIEWS = {
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
}

_COPIES = {aten.lift_fresh_copy.default}


def memory_edges(graph: Graph) -> Edges:
    """Map nodes to earlier ones that they must stay behind because of a write in place."""
    root: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = defaultdict(list)
    writer: dict[Node, Node] = {}
    edges: dict[Node, set[Node]] = defaultdict(set)
    for node in graph.nodes:
        written = _written_by(node, root)
        for base in {root.get(source, source) for source in node.all_input_nodes}:
            if base in writer:
                edges[node].add(writer[base])
            if base in written:
                edges[node].update(readers.pop(base, ()))
                writer[base] = node
            else:
                readers[base].append(node)
        _follow(node, root)
    return {node: frozenset(behind - {node}) for node, behind in edges.items()}


def written_roots(graph: Graph) -> set[Node]:
    """Collect the values that something writes into, directly or through a view."""
    root: dict[Node, Node] = {}
    found: set[Node] = set()
    for node in graph.nodes:
        found |= _written_by(node, root)
        _follow(node, root)
    return found


def written_values(graph: Graph) -> set[Node]:
    """Collect those values and every one that they may be views of, on the way and besides.

    No schema is trusted here: some operators return their input and do not say so.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        for value in _written_arguments(node):
            source: object = value
            while isinstance(source, Node) and source not in found:
                found.add(source)
                viewed = source.op == "call_function" and source.target not in _COPIES
                source = source.args[0] if viewed and source.args else None
    return found


def _follow(node: Node, root: dict[Node, Node]) -> None:
    first = node.args[0] if node.args else None
    if isinstance(first, Node) and _may_alias(node):
        root[node] = root.get(first, first)


def _written_by(node: Node, root: Mapping[Node, Node]) -> set[Node]:
    return {root.get(value, value) for value in _written_arguments(node)}


def _written_arguments(node: Node) -> list[Node]:
    schema: Any = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    pairs = zip(schema.arguments, node.args, strict=False)
    values = [v for a, v in pairs if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in values if isinstance(value, Node)]


def _may_alias(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or node.target in _SOMETIMES_VIEWS:
        return True
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def sort(graph: Graph, edges: Edges) -> None:
    """Bring nodes behind what they read and behind their memory edges, moving as few as can be."""
    alive = set(graph.nodes)
    pending = list(reversed(graph.nodes))
    ready: set[Node] = set()
    waiting: dict[Node, list[Node]] = defaultdict(list)
    cursor: Node | None = None
    while pending:
        node = pending.pop()
        needed = [*node.all_input_nodes, *(each for each in edges.get(node, ()) if each in alive)]
        missing = [each for each in needed if each not in ready]
        if missing:
            waiting[missing[-1]].append(node)
            continue
        ready.add(node)
        if cursor is not None and cursor.next is not node:
            cursor.append(node)
        cursor = node
        pending.extend(reversed(waiting.pop(node, [])))
    if len(ready) != len(alive):
        raise ValueError("writes in place leave the graph no order that keeps them")
