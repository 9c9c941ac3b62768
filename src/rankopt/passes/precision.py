"""precision: linear layers in bf16 or fp16."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule

from rankopt.bundle import ModelBundle
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.graph import LayerConstants, Linear, arguments, aten, find_linears
from rankopt.selectors import Rule, resolve

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP16_MAX = 65504.0


class Precision(Pass):
    """Hold the weights of linear layers in 16 bits and multiply in them.

    Sums stay in fp32 where the machine's matrix product keeps them so; results return to fp32
    before anything else reads them. fp16 refuses a layer whose weights exceed its range.

    Example:
        ```yaml
        - precision:
            dtype: bf16
            rules:
              - {select: "top.*", use: false}
        ```
    """

    kind: ClassVar[str] = "precision"
    purpose: ClassVar[Purpose] = "latency"
    forbids: ClassVar[frozenset[str]] = frozenset({"artifact", "low_precision_dense"})
    provides: ClassVar[frozenset[str]] = frozenset({"low_precision_dense"})

    dtype: Literal["bf16", "fp16"] = "bf16"
    rules: tuple[Rule[bool], ...] = ()
    """`use: false` keeps a layer in fp32."""

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Convert every selected linear."""
        changed: list[str] = []

        def rewrite(module: GraphModule) -> None:
            linears = find_linears(module)
            names = list(dict.fromkeys(linear.layer for linear in linears))
            wanted = resolve(names, self.rules, True, where="precision.rules", noun="layer")
            store = LayerConstants(module)
            for linear in linears:
                if not wanted[linear.layer]:
                    context.note(f"{linear.layer}: kept in fp32 by the recipe")
                elif linear.tied:
                    context.note(
                        f"{linear.layer}: kept in fp32, its weight is an embedding table too, and "
                        "a second copy would only add to the size"
                    )
                elif self.dtype == "fp16" and float(linear.weight.abs().max()) > FP16_MAX:
                    context.note(f"{linear.layer}: kept in fp32, a weight exceeds fp16's range")
                else:
                    _convert(linear, DTYPES[self.dtype], store)
                    changed.append(linear.layer)

        converted = bundle.edit(rewrite, provided=bundle.provided | self.provides)
        return converted if changed else bundle


def _convert(linear: Linear, dtype: torch.dtype, store: LayerConstants) -> None:
    graph = linear.node.graph
    short = str(dtype).removeprefix("torch.")
    with graph.inserting_before(linear.node):
        x = graph.call_function(aten.to.dtype, (arguments(linear.node)[0], dtype))
        weight = store.node(linear, short, lambda: linear.weight.to(dtype))
        product = graph.call_function(aten.linear.default, (x, weight))
        result = graph.call_function(aten.to.dtype, (product, torch.float32))
        if linear.bias is not None:
            # The bias joins in fp32: it costs nothing there and loses nothing.
            result = graph.call_function(aten.add.Tensor, (result, arguments(linear.node)[2]))
    linear.node.replace_all_uses_with(result)
