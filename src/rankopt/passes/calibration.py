"""What a layer's inputs reach on real rows: the fixed scales of static activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from rankopt.passes.graph import Linear

MIN_PEAK = 2.0**-100
"""The kernels' own limit: the reciprocal of a smaller one overflows."""


@dataclass(frozen=True)
class InputRange:
    """What one layer saw.

    Attributes:
        num_rows: rows of its input, over all its applications.
        peak: the quantile asked for, of the rows' largest absolute values; 0 without a finite row.
        saturated: share of the values that lie beyond `peak` and would be cut off.
    """

    num_rows: int
    peak: float
    saturated: float


def calibrate(
    module: GraphModule, inputs: Sequence[Tensor], linears: Sequence[Linear], quantile: float
) -> dict[str, InputRange]:
    """Run a graph on real rows and measure the inputs of layers, by the layer's name.

    A layer that is applied several times has one range for all of them.
    """
    recorder = _Recorder(module, {linear.node for linear in linears})
    with torch.no_grad():
        recorder.run(*inputs)
    seen: dict[str, list[Tensor]] = {}
    for linear in linears:
        x = recorder.seen[linear.node]
        seen.setdefault(linear.layer, []).append(x.reshape(-1, x.shape[-1]))
    return {layer: _measure(torch.cat(rows), quantile) for layer, rows in seen.items()}


def _measure(rows: Tensor, quantile: float) -> InputRange:
    magnitude = rows.abs()
    largest = magnitude.amax(1) if rows.shape[1] else magnitude.new_zeros(len(rows))
    largest = largest[torch.isfinite(largest)]
    if not len(largest):
        return InputRange(len(rows), 0.0, 0.0)
    # A value that was seen, not one between two: the largest at quantile 1.
    rank = min(int(quantile * len(largest)), len(largest) - 1)
    peak = float(largest.sort().values[rank])
    return InputRange(len(rows), peak, float((magnitude > peak).double().mean()))


class _Recorder(Interpreter):
    """Keep what each of some linear nodes read."""

    def __init__(self, module: GraphModule, wanted: set[Node]) -> None:
        super().__init__(module)
        self._wanted = wanted
        self.seen: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        if n in self._wanted:
            given, _ = self.fetch_args_kwargs_from_env(n)
            # An operator further on may write over it.
            self.seen[n] = given[0].detach().clone()
        return super().run_node(n)
