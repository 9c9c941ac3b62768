"""torchao's configurations as a backend of quantize_dense."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from rankopt.environment import Environment
from rankopt.errors import Problem
from rankopt.passes.base import PassContext
from rankopt.passes.graph import Linear, arguments, free_name

Configuration = Literal["int8_dynamic", "int8_weight_only", "int4_weight_only", "float8_dynamic"]

INT4_GROUP = 32


def check(configuration: Configuration, environment: Environment) -> list[Problem]:
    """List what rules a configuration out on this machine."""
    if configuration == "float8_dynamic" and not environment.gpus:
        return [
            Problem(
                "torchao",
                "float8_dynamic needs a CUDA device with float8 units",
                configuration,
                "Use int8_dynamic, int8_weight_only or int4_weight_only on a CPU.",
            )
        ]
    return []


def replace(
    module: GraphModule,
    linears: Sequence[Linear],
    configuration: Configuration,
    context: PassContext,
) -> list[str]:
    """Swap linears for modules that torchao has quantised; the next trace unfolds them.

    Returns:
        Names of the layers changed.
    """
    graph = module.graph
    # The module holds the bias too, and one weight may go with several.
    names: dict[tuple[str, str], str] = {}
    for linear in linears:
        reason = _refusal(linear, configuration)
        if reason:
            context.note(f"{linear.layer}: left alone, {reason}")
            continue
        bias = str(arguments(linear.node)[2]) if linear.bias is not None else ""
        key = (linear.layer, bias)
        if key not in names:
            names[key] = free_name(module, f"torchao_{linear.layer}")
            module.add_submodule(names[key], _quantised(linear, configuration))
        with graph.inserting_before(linear.node):
            new = graph.call_module(names[key], (arguments(linear.node)[0],))
        linear.node.replace_all_uses_with(new)
    if names and configuration == "int4_weight_only":
        context.note("int4 weights take a byte each here: torchao packs them for its own kernels")
    return list(dict.fromkeys(layer for layer, _ in names))


def _refusal(linear: Linear, configuration: Configuration) -> str | None:
    inputs = linear.weight.shape[1]
    if configuration == "int4_weight_only" and inputs % INT4_GROUP:
        return f"int4 groups {INT4_GROUP} inputs, and {inputs} is no multiple"
    return None


def _quantised(linear: Linear, configuration: Configuration) -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.utils import unwrap_tensor_subclass

    outputs, inputs = linear.weight.shape
    layer = nn.Linear(inputs, outputs, bias=linear.bias is not None)
    layer.weight = nn.Parameter(linear.weight.clone(), requires_grad=False)
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.clone(), requires_grad=False)
    # A Sequential, because quantize_ replaces children and never its argument itself.
    holder = nn.Sequential(layer).eval()
    quantize_(holder, _config(configuration))
    unwrapped: nn.Module = unwrap_tensor_subclass(holder)
    return copy.deepcopy(unwrapped)


def _config(configuration: Configuration) -> Any:
    from torchao import quantization as ao

    if configuration == "int8_dynamic":
        return ao.Int8DynamicActivationInt8WeightConfig()
    if configuration == "int8_weight_only":
        return ao.Int8WeightOnlyConfig()
    if configuration == "float8_dynamic":
        return ao.Float8DynamicActivationFloat8WeightConfig()
    # torch's stubs lack int4.
    int4: Any = vars(torch)["int4"]
    return ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=ao.PerGroup(INT4_GROUP))
