"""Run part of a graph on made-up inputs, to see what nodes do rather than how they are spelled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from rankopt.passes.graph import constant


class MadeUpRun:
    """Computes nodes of a graph on made-up inputs, each once.

    Args:
        module: the graph; its constants are as they are.
        known: values of nodes, inputs above all. Of other inputs `stand_in` makes one.
    """

    def __init__(self, module: GraphModule, known: dict[Node, Any]) -> None:
        self._module = module
        self._known = known

    def value(self, node: Node) -> Any:
        """Compute a node; None where it cannot be run."""
        try:
            return self._value(node)
        except Exception:  # an operator may refuse made-up sizes in any way
            return None

    def stand_in(self, node: Node) -> Tensor:
        """Make an input of which only sizes are read."""
        raise TypeError(f"{type(self).__name__} defines no stand_in()")

    def _value(self, node: Node) -> Any:
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: Node) -> Any:
        if node.op == "get_attr":
            return constant(self._module, node)
        if node.op == "placeholder":
            return self.stand_in(node)
        target: Any = node.target
        with torch.no_grad():
            return target(*map_arg(node.args, self._value), **map_arg(node.kwargs, self._value))
