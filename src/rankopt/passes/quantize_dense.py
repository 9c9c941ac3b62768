"""quantize_dense: linear layers in int8, with one activation scale per row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.bundle import ModelBundle
from rankopt.capture.export import TRACE_ROWS
from rankopt.capture.requests import REQUEST_INDEX, one_request_a_row
from rankopt.environment import Environment
from rankopt.errors import Problem
from rankopt.kernels.build import load_kernels
from rankopt.kernels.dense_choice import Arithmetic
from rankopt.kernels.ops import current_isa
from rankopt.kernels.packing import (
    ACTIVATION_CODES,
    fits_fp16,
    pack_linear_fp16,
    pack_linear_fp32,
    pack_linear_int8,
    quantize_linear_weight,
)
from rankopt.models.card import ModelCard
from rankopt.passes import dense_torchao
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.calibration import MIN_PEAK, InputRange, calibrate
from rankopt.passes.dense_chains import fuse_chains
from rankopt.passes.dense_choice import choose_arithmetic, traced_size
from rankopt.passes.graph import (
    LayerConstants,
    Linear,
    arguments,
    constant,
    fake,
    find_linears,
    replace_linear,
)
from rankopt.scheme import load_scheme, scheme_problems
from rankopt.selectors import Rule, resolve

Backend = Literal["native", "fp16", "fbgemm", "torchao", "auto"]
_ARITHMETIC: dict[Backend, Arithmetic] = {"native": "int8", "fp16": "fp16", "fbgemm": "fbgemm"}
MAX_INPUTS = 65536
"""More could overflow the kernel's 32-bit sums."""


class QuantizeDense(Pass):
    """Run linear layers on weights of fewer bits.

    Activations are quantised row by row, never by one scale for the batch, so a row's score does
    not depend on its neighbours; or, static, by a scale that tuning rows fixed for the layer, which
    lets one layer hand int8 to the next and cuts off what lies beyond. Layers that are too small to
    gain stay in fp32, in a kernel whose sums do not depend on the batch either.

    `native` is rankopt's own kernel: scaling, bias and ReLU, PReLU, SiLU or sigmoid in one call,
    weights stored as the kernel reads them; layers that follow one another become one call.
    `fbgemm` goes through torch's fbgemm with weights packed when the artifact is loaded. `torchao`
    applies one of its configurations and unwraps it before export.

    `fp16` is rankopt's own kernel too: weights in fp16, activations and sums in fp32. `auto` times
    each layer in int8 (`native`), fp16, fp32 and `fbgemm` on this machine, at the recipe's batch
    sizes, and gives it the arithmetic that is fastest over all of them: one for the layer, whatever
    the batch. int8 stays unless another saves 5 % (`fbgemm`: 10 %). What was chosen stands in
    `passes.json` with the ratios, and in the manifest.

    Example:
        ```yaml
        - quantize_dense:
            backend: native
            rules:
              - {select: "top.4", use: false}
        ```
    """

    kind: ClassVar[str] = "quantize_dense"
    purpose: ClassVar[Purpose] = "latency"
    forbids: ClassVar[frozenset[str]] = frozenset({"artifact", "low_precision_dense"})
    provides: ClassVar[frozenset[str]] = frozenset({"low_precision_dense"})

    backend: Backend = "native"
    torchao: dense_torchao.Configuration = "int8_dynamic"
    """Which of torchao's configurations; read by that backend alone."""
    activation_bits: Literal["auto", 7, 8] = "auto"
    """8 where the kernels use AVX-512 VNNI, which cannot saturate, else 7."""
    activations: Literal["dynamic", "static"] = "dynamic"
    """`static` (`native` alone): one scale per layer, from tuning rows, in place of one per row."""
    quantile: float = Field(default=1.0, gt=0, le=1)
    """Of the rows' largest inputs, what a static scale must reach; 1 is the largest of all."""
    min_inputs: int = Field(default=16, ge=1)
    min_outputs: int = Field(default=1, ge=1)
    """Narrower layers stay in fp32. Up to four outputs have a fp32 kernel of their own: 256 -> 1
    took 0.42 of int8's time there at batch 512 and 0.84 at batch 1, 40 -> 1 took 0.37 and 0.86."""
    fuse: bool = True
    """Run layers that follow one another as one call; `native` alone can. No score changes."""
    rules: tuple[Rule[bool], ...] = ()
    """`use: false` keeps a layer in fp32."""
    scheme: str | None = None
    """A file in `quantize/` that supplies `activation_bits` and further rules."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """List what rules the backend out on this machine, and what is wrong with the scheme."""
        problems = scheme_problems(self.scheme, "layers")
        if self.backend == "torchao":
            problems += dense_torchao.check(self.torchao, environment)
        if self.activations == "static" and self.backend != "native":
            problems.append(
                Problem(
                    "quantize_dense.activations",
                    "only the backend native can fix the scale of activations",
                    f"static with {self.backend}",
                    hint="Leave activations dynamic, or take backend native.",
                )
            )
        return problems

    @property
    def needs_rows(self) -> bool:
        """Static activations are calibrated on rows."""
        return self.activations == "static"

    def resolved(self) -> QuantizeDense:
        """Return the pass with its scheme written out."""
        layers = load_scheme(self.scheme).layers if self.scheme else None
        if layers is None:
            return self
        own = "activation_bits" in self.model_fields_set
        changes = {
            "activation_bits": self.activation_bits if own else layers.activation_bits,
            "rules": (*self.rules, *layers.rules),
            "scheme": None,
        }
        return self.model_copy(update=changes)

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Replace every selected linear."""
        if self.scheme:
            return self.resolved().apply(bundle, context)
        load_kernels()
        changed: list[str] = []
        arithmetic: dict[str, Arithmetic] = {}
        bits = self._bits()

        def rewrite(module: GraphModule) -> None:
            linears = find_linears(module)
            chosen = self._choose(linears, context)
            if self.backend == "torchao":
                changed.extend(dense_torchao.replace(module, chosen, self.torchao, context))
                return
            store = LayerConstants(module)
            peaks: dict[str, float] = {}
            if chosen and self.activations == "static":
                ranges = calibrate(module, _sample(bundle), chosen, self.quantile)
                peaks = _fixed_peaks(ranges, self.quantile, context)
                if not peaks:
                    return
            if self.backend == "auto":
                rows = _traced_rows(module, bundle)
                arithmetic.update(choose_arithmetic(chosen, bits, rows, context))
            for linear in chosen:
                kind = arithmetic.get(linear.layer) or _ARITHMETIC[self.backend]
                if kind == "int8":
                    _replace_native(module, linear, bits, store, peaks.get(linear.layer))
                elif kind == "fbgemm":
                    _replace_fbgemm(module, linear, store)
                else:
                    _replace_float(module, linear, store, fp16=kind == "fp16")
                changed.append(linear.layer)
            rest = [linear for linear in linears if linear not in chosen] if changed else []
            # A second copy of an embedding table would cost more than a stable order of sums.
            for linear in (linear for linear in rest if not linear.tied):
                _replace_float(module, linear, store, fp16=False)
            if self.fuse:
                fuse_chains(module)

        quantised = bundle.edit(rewrite, provided=bundle.provided | self.provides)
        if arithmetic:
            quantised = replace(quantised, arithmetic={**bundle.arithmetic, **arithmetic})
        return quantised if changed else bundle

    def _bits(self) -> int:
        if self.activation_bits != "auto":
            return self.activation_bits
        # Without VNNI the fast byte product adds pairs in 16 bits, where 8-bit operands could
        # saturate; the exact way round that takes 1.3 to 1.6 times as long on AVX2.
        return 8 if current_isa() == "avx512_vnni" else 7

    def _choose(self, linears: list[Linear], context: PassContext) -> list[Linear]:
        names = list(dict.fromkeys(linear.layer for linear in linears))
        wanted = resolve(names, self.rules, True, where="quantize_dense.rules", noun="layer")
        chosen = []
        for linear in linears:
            outputs, inputs = linear.weight.shape
            if not wanted[linear.layer]:
                context.note(f"{linear.layer}: kept in fp32 by the recipe")
            elif inputs < self.min_inputs or outputs < self.min_outputs:
                context.note(f"{linear.layer}: {inputs} x {outputs} is too small to gain")
            elif linear.tied:
                context.note(
                    f"{linear.layer}: kept in fp32, its weight is an embedding table too, and a "
                    "second copy would only add to the size"
                )
            elif inputs > MAX_INPUTS:
                context.note(f"{linear.layer}: int8 takes at most {MAX_INPUTS} inputs")
            elif not bool(torch.isfinite(linear.weight).all()):
                context.note(f"{linear.layer}: its weights are not all finite")
            elif self.backend == "fp16" and not fits_fp16(linear.weight):
                context.note(f"{linear.layer}: kept in fp32, a weight exceeds fp16's range")
            else:
                chosen.append(linear)
        return chosen


def _fixed_peaks(
    ranges: dict[str, InputRange], quantile: float, context: PassContext
) -> dict[str, float]:
    """Return the peaks of the layers that can have one; note what was seen of every layer."""
    peaks = {}
    for layer, found in ranges.items():
        if found.num_rows == 0:
            context.note(f"{layer}: there are no rows to calibrate its activations on")
        elif found.peak < MIN_PEAK:
            context.note(
                f"{layer}: its inputs were zero or not finite in the {found.num_rows} rows to "
                "calibrate on, so each row keeps its own scale"
            )
        else:
            peaks[layer] = found.peak
            context.note(
                f"{layer}: static scale up to {found.peak:.4g}, quantile {quantile:g} of "
                f"{found.num_rows} rows; {found.saturated:.2%} of the values saturate"
            )
    return peaks


def _replace_native(
    module: GraphModule, linear: Linear, bits: int, store: LayerConstants, peak: float | None
) -> None:
    """Put `rankopt::linear_int8` in a linear's place, its activation in the epilogue.

    With a fixed peak a chain of one layer, which takes one.
    """
    graph = module.graph
    with graph.inserting_before(linear.node):
        x = arguments(linear.node)[0]
        layer: tuple[Any, ...] = (
            store.node(linear, "packed", lambda: pack_linear_int8(_quantised(linear)[0])),
            store.node(linear, "scale", lambda: _quantised(linear)[1]),
            arguments(linear.node)[2] if linear.bias is not None else None,
            _slope_node(module, linear, store),
        )
        outputs, code = linear.weight.shape[0], ACTIVATION_CODES[linear.activation]
        if peak is None:
            inputs = (x, *layer, outputs, bits, code)
            new = graph.call_function(torch.ops.rankopt.linear_int8.default, inputs)
        else:
            fixed = store.node(linear, "peak", lambda: torch.tensor([peak]))
            columns = [[value] for value in (*layer, fixed, outputs)]
            new = graph.call_function(
                torch.ops.rankopt.mlp_int8.default, (x, *columns, bits, [code])
            )
    replace_linear(linear.last, new)


def _replace_fbgemm(module: GraphModule, linear: Linear, store: LayerConstants) -> None:
    graph = module.graph
    with graph.inserting_before(linear.node):
        inputs: tuple[Any, ...] = (
            arguments(linear.node)[0],
            store.node(linear, "int8", lambda: _quantised(linear)[0]),
            store.node(linear, "scale", lambda: _quantised(linear)[1]),
            arguments(linear.node)[2] if linear.bias is not None else None,
            # Zero: not packed yet. The loader writes the handle of what it packed and owns.
            store.node(linear, FBGEMM_HANDLE, lambda: torch.zeros(1, dtype=torch.int64)),
        )
        new = graph.call_function(torch.ops.rankopt.linear_fbgemm.default, inputs)
    replace_linear(linear.node, new)


def _replace_float(
    module: GraphModule, linear: Linear, store: LayerConstants, *, fp16: bool
) -> None:
    """Give a layer whose sums stay in fp32 a kernel that sums in one order whatever the batch.

    MKL's order depends on the batch size: 13 -> 512 and 256 -> 1 gave other last bits at batch 1,
    2 and 33 than at 513, and a row's score would depend on its batch.
    """
    graph = module.graph
    pack = pack_linear_fp16 if fp16 else pack_linear_fp32
    operator = torch.ops.rankopt.linear_fp16 if fp16 else torch.ops.rankopt.linear_fp32
    with graph.inserting_before(linear.node):
        inputs: tuple[Any, ...] = (
            arguments(linear.node)[0],
            store.node(linear, "fp16" if fp16 else "fp32", lambda: pack(linear.weight)),
            arguments(linear.node)[2] if linear.bias is not None else None,
            _slope_node(module, linear, store),
            linear.weight.shape[0],
            ACTIVATION_CODES[linear.activation],
        )
        new = graph.call_function(operator.default, inputs)
    replace_linear(linear.last, new)


def _quantised(linear: Linear) -> tuple[Tensor, Tensor]:
    return quantize_linear_weight(linear.weight)


def _sample(bundle: ModelBundle) -> list[Tensor]:
    """List the graph's inputs on real rows; the second form sees each row as a request."""
    features = bundle.sample
    if bundle.form == "requests":
        features = one_request_a_row(features, bundle.card)
    return [features[name] for name in bundle.input_names]


def _traced_rows(module: GraphModule, bundle: ModelBundle) -> int:
    """Return how many rows the graph was traced on."""
    if bundle.form == "rows":
        return TRACE_ROWS
    inputs = module.graph.find_nodes(op="placeholder")
    return traced_size(fake(inputs[bundle.input_names.index(REQUEST_INDEX)]).shape[0])


FBGEMM_HANDLE = "fbgemm_handle"
"""Ending of the constants in which a loaded artifact keeps what it packed for fbgemm."""


def fbgemm_layers(module: GraphModule) -> dict[str, tuple[str, str]]:
    """Map each handle constant of a graph to its weight's and scale's constants."""
    found = {}
    for node in module.graph.find_nodes(
        op="call_function", target=torch.ops.rankopt.linear_fbgemm.default
    ):
        weight, scale, handle = (str(arguments(node)[index].target) for index in (1, 2, 4))
        found[handle] = (weight, scale)
    return found


def _slope_node(module: GraphModule, linear: Linear, store: LayerConstants) -> Node | None:
    slope = linear.slope
    if slope is None:
        return None
    if isinstance(slope, str):
        node = module.graph.get_attr(slope)
        if constant(module, node) is None:
            raise ValueError(f"{slope} is no constant of this graph")
        return node
    return store.node(linear, f"slope_{slope:g}", lambda: torch.tensor([slope]))
