"""The new graph: what the rules put into it.

Shapes: R requests, B candidates.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from rankopt.passes.graph import aten


class Builder:
    """A graph under construction, and the module that holds its constants.

    The same call on the same arguments is one node.

    Args:
        root: the plain graph's module; constants are added to it.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.graph = Graph()
        self.index: Node | None = None
        self._made: dict[Any, Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Return the node of a call."""
        key = (target, _frozen(args), _frozen(kwargs))
        if key not in self._made:
            self._made[key] = self.graph.call_function(target, args, kwargs)
        return self._made[key]

    def read(self, path: str) -> Node:
        """Return the node that reads a constant."""
        if ("read", path) not in self._made:
            self._made["read", path] = self.graph.get_attr(path)
        return self._made["read", path]

    def constant(self, name: str, value: Tensor) -> Node:
        """Add a constant under a name that is free, dots and all."""
        *parents, leaf = name.split(".")
        owner = self.root
        for part in parents:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        free, count = leaf, 0
        while hasattr(owner, free):
            free, count = f"{leaf}_{count}", count + 1
        owner.register_buffer(free, value.detach().contiguous())
        return self.read(".".join([*parents, free]))

    def places(self, positions: Sequence[int]) -> Node:
        """Return a constant index."""
        key = ("places", tuple(positions))
        if key not in self._made:
            self._made[key] = self.constant("hoisted.places", torch.tensor(list(positions)))
        return self._made[key]

    def take(self, node: Node, axis: int, positions: Sequence[int]) -> Node:
        """Pick places of an axis; neighbours by a view."""
        start, stop = positions[0], positions[-1] + 1
        if tuple(positions) == tuple(range(start, stop)):
            return self.call(aten.slice.Tensor, node, axis, start, stop)
        return self.call(aten.index_select.default, node, axis, self.places(positions))

    def join(self, nodes: Sequence[Node], axis: int, places: Sequence[int]) -> Node:
        """Concatenate, and bring the entries to their places."""
        node = nodes[0] if len(nodes) == 1 else self.call(aten.cat.default, list(nodes), axis)
        order = sorted(range(len(places)), key=places.__getitem__)
        return node if order == list(range(len(places))) else self.take(node, axis, order)

    def reshape(self, node: Node, sizes: Sequence[int]) -> Node:
        """Reshape to sizes of which -1 is that of rows."""
        return self.call(aten.reshape.default, node, list(sizes))

    def expand(
        self, node: Node, sizes: Sequence[int], full: Sequence[int], *, candidate: bool = False
    ) -> Node:
        """Repeat a tensor along the axes where it has size 1."""
        if tuple(sizes) == tuple(full):
            return node
        shape: list[Any] = list(full)
        for axis, (own, wanted) in enumerate(zip(sizes, full, strict=True)):
            if own == 1 and wanted == -1:
                shape[axis] = self.num_candidates() if candidate else self.num_requests()
        return self.call(aten.expand.default, node, shape)

    def fill(self, value: float | bool, rank: int) -> Node:
        """Return a constant of one entry."""
        key = ("fill", value, type(value), rank)
        if key not in self._made:
            tensor = torch.full((1,) * rank, value)
            self._made[key] = self.constant("hoisted.fill", tensor)
        return self._made[key]

    def gather(self, node: Node, axis: int) -> Node:
        """Give each candidate its request's row."""
        return self.call(aten.index_select.default, node, axis, self._index())

    def num_candidates(self) -> Node:
        """Return the node of B."""
        return self.call(aten.sym_size.int, self._index(), 0)

    def num_requests(self) -> Node:
        """Return the node of R."""
        return self._made["requests"]

    def set_requests(self, node: Node, axis: int, groups: int) -> None:
        """Take R from an input that has a row, or `groups` of them, for each request."""
        size = self.call(aten.sym_size.int, node, axis)
        if groups > 1:
            size = self.call(operator.floordiv, size, groups)
        self._made["requests"] = size

    def _index(self) -> Node:
        if self.index is None:
            raise ValueError("the graph has no request_index yet")
        return self.index


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(_frozen(item) for item in value))
    # 1, 1.0 and True are equal keys and different arguments.
    return (type(value), value) if isinstance(value, bool | int | float) else value
