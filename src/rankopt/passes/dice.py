"""Recognise dice in a graph, however it is spelled: by its constants, and then by what it computes.

Dice (DIN, arXiv:1706.06978, eq. 3) is x * (slope + (1 - slope) * p), p the sigmoid of x normalised:
by the moments of the training data for each unit, or by those of its own row.

Shapes: N outputs of the layer in front; [..., N] what is gated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from rankopt.passes.graph import arguments, aten, constant, fake

_MOST_NODES = 32
_NUM_ROWS = 64


@dataclass(frozen=True, eq=False)
class Dice:
    """A gate as `rankopt.kernels.attention.ScoreLayer` writes it.

    Attributes:
        linear: the layer whose outputs are gated.
        activation: `dice` or `row_dice`.
    """

    linear: Node
    activation: str
    slope: Tensor
    scale: Tensor
    shift: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Gate numbers in float64. Shapes: [R, N] to [R, N]."""
        if self.activation == "dice":
            p = (x * self.scale + self.shift).sigmoid()
        else:
            less = x - x.mean(1, keepdim=True)
            p = (less / (less**2 + self.shift).sum(1, keepdim=True).sqrt()).sigmoid()
        return x * (self.slope + (1 - self.slope) * p)


@dataclass
class _Region:
    """What lies between a layer and one node."""

    linear: Node | None = None
    nodes: set[Node] = field(default_factory=set)


def read_dice(module: GraphModule, end: Node) -> Dice | None:
    """Return the dice whose result `end` is; None for anything else."""
    region = _region(end)
    if region is None or region.linear is None:
        return None
    linear = region.linear
    ordered = [node for node in module.graph.nodes if node in region.nodes]
    width = int(fake(linear).shape[-1])
    x = _sample(linear)
    found = _run(module, ordered, linear, end, x)
    if found is None or found.numel() != x.numel():
        return None
    for dice in (*_of_units(module, ordered, linear), *_of_rows(module, ordered, linear)):
        if dice.slope.numel() not in (1, width):
            continue
        expected = dice(x.reshape(-1, width))
        if torch.allclose(found.reshape(-1, width), expected, rtol=1e-9, atol=1e-9):
            return dice
    return None


def _region(end: Node) -> _Region | None:
    """Collect the nodes from one layer to `end`; None where there is more than one layer."""
    region = _Region()
    pending = [end]
    while pending:
        node = pending.pop()
        if node in region.nodes or node.op == "get_attr":
            continue
        if node.target is aten.linear.default:
            if region.linear not in (None, node):
                return None
            region.linear = node
            continue
        if node.op != "call_function" or len(region.nodes) == _MOST_NODES:
            return None
        region.nodes.add(node)
        pending += node.all_input_nodes
    return region


def _sample(linear: Node) -> Tensor:
    """Draw outputs of the layer, from tiny ones to those that close the gate."""
    shape: tuple[Any, ...] = tuple(fake(linear).shape)
    sizes = [size if isinstance(size, int) else 0 for size in shape]
    known = max(1, sizes[1]) if len(sizes) == 3 else 1
    sizes[0] = sizes[0] or -(-_NUM_ROWS // known)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, generator=generator, dtype=torch.float64)
    rows = x.reshape(-1, sizes[-1])
    rows *= torch.logspace(-2, 2, len(rows), dtype=torch.float64)[:, None]
    return x


def _run(
    module: GraphModule, ordered: list[Node], linear: Node, end: Node, x: Tensor
) -> Tensor | None:
    """Compute what becomes of a layer's outputs, in float64."""
    values: dict[Node, Any] = {linear: x}

    def value(node: Node) -> Any:
        held = constant(module, node)
        if held is None:
            return values[node]
        return held.double() if held.is_floating_point() else held

    for node in ordered:
        target: Any = node.target
        try:
            with torch.no_grad():
                values[node] = target(*map_arg(node.args, value), **map_arg(node.kwargs, value))
        except Exception:  # an operator may refuse made-up sizes in any way
            return None
    result = values[end]
    return result if isinstance(result, Tensor) else None


def _of_units(module: GraphModule, ordered: list[Node], linear: Node) -> Iterator[Dice]:
    """Read a gate on moments of the training data, once for each constant that may be its slope."""
    norms = [node for node in ordered if node.target is aten.batch_norm.default]
    if len(norms) != 1 or arguments(norms[0])[5]:
        return
    _, *vectors, _, _, eps = arguments(norms[0])[:8]
    weight, bias, mean, var = (_doubled(module, each) for each in vectors)
    if mean is None or var is None:
        return
    scale = (var + eps).rsqrt() if weight is None else weight * (var + eps).rsqrt()
    shift = -mean * scale if bias is None else bias - mean * scale
    for slope in _slopes(module, ordered, set(vectors)):
        yield Dice(linear, "dice", slope, scale, shift)


def _of_rows(module: GraphModule, ordered: list[Node], linear: Node) -> Iterator[Dice]:
    """Read a gate on the moments of a row."""
    added = [
        float(arguments(node)[1])
        for node in ordered
        if node.target in {aten.add.Tensor, aten.add.Scalar} and _is_number(arguments(node)[1])
    ]
    if len(added) != 1:
        return
    shift = torch.tensor(added, dtype=torch.float64)
    for slope in _slopes(module, ordered, set()):
        yield Dice(linear, "row_dice", slope, torch.ones(1, dtype=torch.float64), shift)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _slopes(module: GraphModule, ordered: list[Node], others: set[object]) -> Iterator[Tensor]:
    """List the constants beside the moments, flat."""
    read = {
        each: None for node in ordered for each in node.all_input_nodes if each.op == "get_attr"
    }
    for node in read:
        held = _doubled(module, node) if node not in others else None
        if held is not None:
            yield held.reshape(-1)


def _doubled(module: GraphModule, node: object) -> Tensor | None:
    held = constant(module, node)
    return None if held is None else held.double()
