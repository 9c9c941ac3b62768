"""Concatenations whose pieces lie beside each other in each row, which a lookup can write itself.

`stack`, `cat` along a later dim and reshapes of them only say how the values of a row are called:
in memory a row is its pieces, one after the other.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from rankopt.passes.graph import arguments, aten, fake
from rankopt.passes.id_sources import keeps_rows, row_width


@dataclass(frozen=True)
class Joined:
    """A concatenation and what each row of it is made of.

    Attributes:
        root: the node.
        leaves: pieces in order: lookups, and others.
        spans: first column and width of every node on the way.
    """

    root: Node
    leaves: tuple[Node, ...]
    spans: dict[Node, tuple[int, int]]


def parts_of(node: Node) -> list[Node] | None:
    """Return what a row of `node` is made of, in order; None for anything but a concatenation."""
    if node.op != "call_function" or node.target not in (aten.cat.default, aten.stack.default):
        return None
    given = arguments(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    dim: Any = given[1] if len(given) > 1 else node.kwargs.get("dim", 0)
    dim %= value.dim()
    in_front = value.shape[1:dim]
    if dim == 0 or any(str(size) != "1" for size in in_front):
        return None
    parts = list(given[0])
    if any(not isinstance(part.meta.get("val"), torch.Tensor) for part in parts):
        return None  # put there since the graph was traced
    if node.target == aten.cat.default:
        # As ever, a piece of shape [0] is nothing.
        parts = [part for part in parts if fake(part).dim() > 1]
    return parts if all(fake(part).dtype == value.dtype for part in parts) else None


def joined(root: Node, stops: Collection[Node]) -> Joined | None:
    """Take a concatenation apart, down to `stops` and to what is neither join nor reshape."""
    leaves: list[Node] = []
    spans: dict[Node, tuple[int, int]] = {}

    def visit(node: Node, start: int) -> int | None:
        width = row_width(node)
        if width is None:
            return None
        spans[node] = (start, width)
        if node not in stops and keeps_rows(node):
            return visit(arguments(node)[0], start)
        parts = None if node in stops else parts_of(node)
        if parts is None:
            if width:
                leaves.append(node)
            return start + width
        for part in parts:
            end = visit(part, start)
            if end is None:
                return None
            start = end
        return start

    if parts_of(root) is None or visit(root, 0) is None:
        return None
    return Joined(root, tuple(leaves), spans)


def readers_of(graph: Graph, sources: Collection[Node]) -> set[Node]:
    """Collect the nodes that depend on any of `sources`, those among them."""
    found = set(sources)
    for node in graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def choose_joins(
    graph: Graph, lookups: Collection[Node], rows: str, tainted: Set[Node]
) -> list[Joined]:
    """Choose concatenations that calls can write, the one of most lookups first.

    Each lookup stands in one of them at most, once. What stands beside them must not depend on any
    lookup (`tainted`), or a call could wait for itself.
    """
    candidates = []
    for order, node in enumerate(graph.nodes):
        if parts_of(node) is None or str(fake(node).shape[0]) != rows:
            continue
        found = joined(node, lookups)
        if found is None:
            continue
        own = [leaf for leaf in found.leaves if leaf in lookups]
        beside = [leaf for leaf in found.leaves if leaf not in lookups]
        once = len(own) == len(set(own)) >= 2
        if once and all(_can_stand_beside(leaf, rows, tainted) for leaf in beside):
            candidates.append((len(own), order, found))
    chosen: list[Joined] = []
    taken: set[Node] = set()
    for _, _, found in sorted(candidates, key=lambda item: item[:2], reverse=True):
        own_leaves = {leaf for leaf in found.leaves if leaf in lookups}
        if not own_leaves & taken:
            chosen.append(found)
            taken |= own_leaves
    return chosen


def _can_stand_beside(leaf: Node, rows: str, tainted: Set[Node]) -> bool:
    value = fake(leaf)
    same_rows = value.dim() >= 1 and str(value.shape[0]) == rows
    return value.dtype == torch.float32 and same_rows and leaf not in tainted


def span_of(found: Joined, places: Mapping[Node, tuple[int, int]]) -> tuple[int, int] | None:
    """Return where a concatenation lies in a result that holds its pieces: first column, width."""
    begin = end = None
    for leaf in found.leaves:
        if leaf not in places or (end is not None and places[leaf][0] != end):
            return None
        start, width = places[leaf]
        begin = start if begin is None else begin
        end = start + width
    return None if begin is None or end is None else (begin, end - begin)
