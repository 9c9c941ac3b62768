"""The dense layers, chains of layers and lookups that models' artifacts call, with their arguments.

Nothing is compiled: a model is captured, the passes of a recipe rewrite its graph, and the graph
runs on real rows, which shows every call of a kernel with what it is called with. Weights may be
random, since times hardly depend on them.

Shapes: M rows, K inputs and N outputs of a layer; T lookups of a plan.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from rankopt.bundle import ModelBundle, build_bundle
from rankopt.capture.export import trace_example
from rankopt.environment import collect_environment
from rankopt.kernels.build import load_kernels
from rankopt.kernels.mlp import MlpLayer, columns
from rankopt.models.build import build_model
from rankopt.models.card import ModelCard
from rankopt.passes.base import PassContext
from rankopt.passes.forms import apply_to_forms
from rankopt.recipe import load_recipe

DENSE = ("linear_int8", "mlp_int8")
Call = Callable[[], Tensor]
LOOKUPS = ("lookup_rows", "lookup_sequences")


@dataclass(frozen=True)
class Layer:
    """One linear layer with the rows that it is given.

    Attributes:
        name: of its constants in the artifact.
        x: float32 [..., K].
        layer: its weight, in fp32 where `layer.scale` is None.
        bits: of the activations.
    """

    name: str
    x: Tensor
    layer: MlpLayer
    bits: int

    @property
    def num_rows(self) -> int:
        return self.x.numel() // max(self.x.shape[-1], 1)

    @property
    def num_operations(self) -> int:
        """Count a multiply and an add as two."""
        return 2 * self.num_rows * self.x.shape[-1] * self.layer.num_outputs

    @property
    def is_int8(self) -> bool:
        return self.layer.scale is not None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Name what its time depends on."""
        given = self.layer
        slope = None if given.negative_slope is None else bool(given.negative_slope.any())
        kinds = (self.is_int8, given.bias is not None, slope, given.peak is not None)
        return self.num_rows, self.x.shape[-1], given.num_outputs, self.bits, *kinds

    def call(self) -> Call:
        """Return the call that an artifact makes of such a layer alone."""
        given, ops = self.layer, torch.ops.rankopt
        if given.peak is not None:
            return partial(ops.mlp_int8.default, self.x, *columns([given]), self.bits)
        rest = given.bias, given.negative_slope, given.num_outputs
        if given.scale is None:
            return partial(ops.linear_fp32.default, self.x, given.packed, *rest)
        return partial(ops.linear_int8.default, self.x, given.packed, given.scale, *rest, self.bits)


@dataclass(frozen=True)
class Dense:
    """One call of `linear_int8` or `mlp_int8`: a layer, or several one after the other."""

    operator: Any
    arguments: tuple[Any, ...]
    layers: tuple[Layer, ...]

    def call(self) -> Call:
        return partial(self.operator, *self.arguments)


@dataclass(frozen=True)
class Lookups:
    """One lookup call of a graph, with its arguments for several batches of rows."""

    name: str
    operator: Any
    arguments: tuple[tuple[Any, ...], ...]

    def calls(self) -> list[Call]:
        return [partial(self.operator, *arguments) for arguments in self.arguments]


@dataclass(frozen=True)
class Calls:
    """What one model calls at one batch size."""

    dense: tuple[Dense, ...]
    lookups: tuple[Lookups, ...]


def rewritten(card: ModelCard, recipe: str) -> ModelBundle:
    """Capture a model and apply a recipe's passes to it, all but the export."""
    load_kernels()
    torch.manual_seed(0)
    module = build_model(card, allow_random=True).module
    bundle = build_bundle(card, module, trace_example(card))
    with tempfile.TemporaryDirectory(prefix="rankopt-kernels-") as folder:
        context = PassContext(collect_environment(), Path(folder))
        for step in load_recipe(recipe).passes:
            if step.purpose != "artifact":
                bundle = apply_to_forms(step, bundle, context)
    return bundle


def calls_of(bundle: ModelBundle, windows: Sequence[dict[str, Tensor]]) -> Calls:
    """Run a graph on some batches of rows; list its calls, dense ones with the first batch."""
    module = bundle.program.module(check_guards=False)
    dense: list[Dense] = []
    lookups: dict[Node, list[tuple[Any, ...]]] = {}
    with torch.no_grad():
        for window in windows:
            recorder = _Recorder(module)
            recorder.run(*[window[name] for name in bundle.input_names])
            for node, arguments in recorder.seen:
                if _name(node) in LOOKUPS:
                    lookups.setdefault(node, []).append(arguments)
                elif window is windows[0]:
                    dense.append(_dense(node, arguments))
    return Calls(
        tuple(dense),
        tuple(
            Lookups(_name(node), node.target, tuple(arguments))
            for node, arguments in lookups.items()
        ),
    )


class _Recorder(Interpreter):
    """Keep the arguments of every call of a kernel that is measured."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.seen: list[tuple[Node, tuple[Any, ...]]] = []

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and _name(n) in (*DENSE, *LOOKUPS):
            given, named = self.fetch_args_kwargs_from_env(n)
            self.seen.append((n, (*given, *named.values())))
        return super().run_node(n)


def _name(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "rankopt":
        return str(node.target.overloadpacket.__name__)
    return ""


def _dense(node: Node, arguments: tuple[Any, ...]) -> Dense:
    """Take a call apart into its layers, each with the rows that it is given."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    nodes = _listed(node.args[1])
    fields = ("packed", "scale", "bias", "negative_slope", "peak", "num_outputs")
    each_layers = zip(*(_listed(given.get(field)) for field in fields), strict=True)
    x, bits = given["x"].detach().clone(), given["activation_bits"]
    arguments = (x, *arguments[1:])
    layers = []
    for each, (weight, scale, bias, slope, peak, outputs) in zip(nodes, each_layers, strict=True):
        made = MlpLayer(weight, scale, bias, slope, outputs, peak)
        layers.append(Layer(str(each.target).removesuffix("_packed"), x, made, bits))
        x = layers[-1].call()()
    return Dense(target, arguments, tuple(layers))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
