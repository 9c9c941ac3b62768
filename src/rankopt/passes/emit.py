"""Put new nodes and constants into an exported graph, so that the next rewrite can read them.

A node that is inserted by hand has no shape until the graph is traced again. `Emitter` runs every
new node on fake tensors as it is made, so a rewrite may build on the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from rankopt.passes.graph import constant


class Emitter:
    """Insert nodes with their fake values, and constants under names that tell where they are from.

    Attributes:
        module: the graph, changed in place.
        graph: its graph.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self._mode = _fake_mode(module)
        self._derived: dict[tuple[str, str], str] = {}
        self._sources: dict[str, str] = {}

    @contextlib.contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Insert the nodes of the block in front of `node`."""
        with self.graph.inserting_before(node):
            yield

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add one operator at the insertion point."""
        node = self.graph.call_function(target, args, kwargs)
        with self._mode, torch.no_grad():
            node.meta["val"] = target(
                *map_arg(args, self._value),
                **{k: map_arg(v, self._value) for k, v in kwargs.items()},
            )
        return node

    def read(self, path: str) -> Node:
        """Add a node that reads a constant."""
        node = self.graph.get_attr(path)
        value = constant(self.module, node)
        if value is not None:
            node.meta["val"] = self._mode.from_tensor(value, static_shapes=True)
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Let all readers of `old` read `new`, and remove `old`.

        Removed at once: dead in-place operators count as side effects and would stay.
        """
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.graph.erase_node(old)

    def derive(self, path: str, key: str, make: Callable[[Tensor], Tensor]) -> str:
        """Return the name of a constant computed from another, made when it is first asked for."""
        if (path, key) not in self._derived:
            source = constant(self.module, self._reader(path))
            if source is None:
                raise ValueError(f"{path} is no constant of this graph")
            value = make(source)
            unchanged = value.data_ptr() == source.data_ptr() and value.shape == source.shape
            name = path
            if not (unchanged and value.stride() == source.stride()):
                name = self.add(path, value.contiguous())
                self._sources[name] = self._sources.get(path, path)
            self._derived[path, key] = name
        return self._derived[path, key]

    def add(self, path: str, value: Tensor) -> str:
        """Register a constant beside the one at `path`, under a name that is free."""
        parent, _, leaf = path.rpartition(".")
        owner = self.module.get_submodule(parent)
        free, count = leaf, 0
        while hasattr(owner, free):
            free, count = f"{leaf}_{count}", count + 1
        owner.register_buffer(free, value.detach())
        return f"{parent}.{free}" if parent else free

    def overwrite(self, path: str, value: Tensor) -> None:
        """Put another tensor under a name. The old one may be the user's own and stays whole."""
        parent, _, leaf = path.rpartition(".")
        owner = self.module.get_submodule(parent)
        delattr(owner, leaf)
        value = value.detach().contiguous()
        if value.is_floating_point():
            owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        else:
            owner.register_buffer(leaf, value)
        for reader in self.readers(path):
            reader.meta["val"] = self._mode.from_tensor(value, static_shapes=True)

    def readers(self, path: str) -> list[Node]:
        """Return the nodes that read a constant and are read themselves."""
        found = self.graph.find_nodes(op="get_attr", target=path)
        return [node for node in found if node.users]

    def num_users(self, path: str) -> int:
        """Count the nodes that use a constant."""
        return sum(len(reader.users) for reader in self.readers(path))

    def restore_names(self) -> None:
        """Give a derived constant its source's name where it is all that is left of it."""
        by_source: dict[str, list[str]] = {}
        for name, source in self._sources.items():
            if self.readers(name):
                by_source.setdefault(source, []).append(name)
        for source, names in by_source.items():
            if len(names) == 1 and not self.readers(source):
                self._rename(names[0], source)

    def _rename(self, name: str, to: str) -> None:
        value = constant(self.module, self._reader(name))
        if value is None:
            raise ValueError(f"{name} is no constant of this graph")
        for node in self.graph.find_nodes(op="get_attr", target=to):
            self.graph.erase_node(node)
        self.overwrite(to, value)
        for node in self.graph.find_nodes(op="get_attr", target=name):
            node.target = to
        parent, _, leaf = name.rpartition(".")
        delattr(self.module.get_submodule(parent), leaf)

    def _reader(self, path: str) -> Node:
        node: Node = self.graph.find_nodes(op="get_attr", target=path)[0]
        return node

    def _value(self, node: Node) -> Any:
        if "val" not in node.meta and node.op == "get_attr":
            value = constant(self.module, node)
            if value is not None:
                node.meta["val"] = self._mode.from_tensor(value, static_shapes=True)
        return node.meta["val"]


def _fake_mode(module: GraphModule) -> FakeTensorMode:
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if isinstance(mode, FakeTensorMode):
            return mode
    return FakeTensorMode()
