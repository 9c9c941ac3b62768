"""Compute once what a graph computes from constants alone.

A weight that is transposed, sliced or scaled in `forward` becomes a constant of its own, so that
the passes see a plain weight. Nothing is stored twice that way: a result is kept only where it
replaces what it was computed from, or is small.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import LOOKUP_OPERATORS, aten, constant
from rankopt.passes.order import written_values

SMALL_BYTES = 1 << 20
"""Results up to this size may lie beside what they were computed from."""
SHARE_OF_TABLE = 4
"""A result that lies beside an embedding table must be this many times smaller than the table."""

# Larger than what they read: storing them would trade arithmetic for memory traffic.
_SPREADING = {
    aten.expand.default,
    aten.expand_as.default,
    aten.repeat.default,
    aten.broadcast_to.default,
    aten.repeat_interleave.self_int,
}


@dataclass
class _Component:
    """Constants, and the results that a graph reads of them, by what is computed."""

    sources: set[str] = field(default_factory=set)
    results: dict[str, list[Node]] = field(default_factory=dict)


def fold_constants(emitter: Emitter) -> int:
    """Replace every foldable result by a constant; returns how many."""
    known = _constant_nodes(emitter)
    folded = 0
    for component in _components(known):
        if not _worth(emitter, component, known):
            continue
        # Named after the largest: a weight and not its gain.
        path = min(component.sources, key=lambda name: (-_num_values(emitter, name), name))
        for expression, nodes in component.results.items():
            name = emitter.derive(path, expression, partial(_computed, emitter, nodes[0]))
            for node in nodes:
                with emitter.before(node):
                    new = emitter.read(name)
                emitter.replace(node, new)
            folded += 1
    emitter.graph.eliminate_dead_code()
    return folded


def _constant_nodes(emitter: Emitter) -> dict[Node, frozenset[str]]:
    """Map every node that depends on constants alone to the constants it depends on."""
    tainted = written_values(emitter.graph)
    known: dict[Node, frozenset[str]] = {}
    for node in emitter.graph.nodes:
        if node in tainted:
            continue
        if node.op == "get_attr" and constant(emitter.module, node) is not None:
            known[node] = frozenset([str(node.target)])
        elif _is_pure(node) and all(source in known for source in node.all_input_nodes):
            known[node] = frozenset().union(*(known[source] for source in node.all_input_nodes))
    return known


def _is_pure(node: Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "call_function"
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in _SPREADING:
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return bool(target._schema.returns) and target.namespace == "aten"


def _components(known: dict[Node, frozenset[str]]) -> list[_Component]:
    """Group the results that are read outside by the constants that they share."""
    components: list[_Component] = []
    expressions: dict[Node, str] = {}
    for node, sources in known.items():
        expressions[node] = _expression(node, expressions)
        outside = any(user not in known for user in node.users)
        if node.op == "get_attr" or not sources or not outside:
            continue
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        joined = [found for found in components if found.sources & sources]
        merged = _Component(set(sources))
        for found in joined:
            merged.sources |= found.sources
            merged.results |= found.results
            components.remove(found)
        merged.results.setdefault(expressions[node], []).append(node)
        components.append(merged)
    return components


def _expression(node: Node, known: dict[Node, str]) -> str:
    """Write out what a node computes, so that the same thing computed twice is stored once."""
    if node.op == "get_attr":
        return str(node.target)
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: _Quoted(known[source]))
    return f"{node.target}({args}, {kwargs})"


class _Quoted(str):
    """Text that is written without quotes, as the expression it stands for."""

    def __repr__(self) -> str:
        return str(self)


def _worth(emitter: Emitter, component: _Component, known: dict[Node, frozenset[str]]) -> bool:
    stored = sum(_size_bytes(nodes[0].meta["val"]) for nodes in component.results.values())
    freed, kept_tables = 0, []
    for path in component.sources:
        readers = emitter.readers(path)
        value = constant(emitter.module, readers[0])
        if value is None:
            return False
        users = [user for reader in readers for user in reader.users]
        if all(user in known for user in users):
            freed += _size_bytes(value)
        elif any(user.target in LOOKUP_OPERATORS for user in users):
            kept_tables.append(_size_bytes(value))
    if stored <= freed:
        return True
    return stored <= SMALL_BYTES and all(
        stored * SHARE_OF_TABLE <= size_bytes for size_bytes in kept_tables
    )


def _num_values(emitter: Emitter, path: str) -> int:
    value = constant(emitter.module, emitter.readers(path)[0])
    return 0 if value is None else int(value.numel())


def _size_bytes(value: Tensor) -> int:
    return int(value.numel()) * value.element_size()


def _computed(emitter: Emitter, node: Node, _source: Tensor) -> Tensor:
    return _evaluate(emitter, node)


def _evaluate(emitter: Emitter, node: Node) -> Tensor:
    """Run a constant part of the graph for real."""
    found: dict[Node, Any] = {}

    def value(of: Node) -> Any:
        if of not in found:
            if of.op == "get_attr":
                found[of] = constant(emitter.module, of)
            else:
                target: Any = of.target
                found[of] = target(*map_arg(of.args, value), **map_arg(of.kwargs, value))
        return found[of]

    with torch.no_grad():
        result: Tensor = value(node).detach().clone()
    return result
