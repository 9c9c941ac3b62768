"""Trace the operators as AOTInductor does, with a Hopper GPU made up for Triton's front end.

Prints, for each operator, the arguments that its kernels are found to write to: a kernel that the
analysis cannot read counts as writing to all of them, tables included, which are then copied.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rankopt.kernels.lookup import decode_plan, encode_plan
from rankopt.kernels.registry import KERNELS
from rankopt.kernels.triton import library
from rankopt.kernels.triton.lookup import planned


class Hopper:
    """As much of a driver as the front end asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Call(nn.Module):
    """One operator; its tensors come in a flat list."""

    def __init__(self, name: str, arguments: list[Any]) -> None:
        super().__init__()
        self._operator = getattr(torch.ops.rankopt_gpu, name)
        self._arguments = arguments

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        given = iter(tensors)

        def filled(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(given)
            if isinstance(value, list) and value and isinstance(value[0], Tensor):
                return [next(given) for _ in value]
            return value

        return (self._operator(*[filled(value) for value in self._arguments]),)


def tensors_of(arguments: list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in arguments:
        found += [value] if isinstance(value, Tensor) else []
        found += value if isinstance(value, list) and value and isinstance(value[0], Tensor) else []
    return [tensor.clone() for tensor in found]


def calls() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in library.EAGER:
        if name in KERNELS:
            last = [c for c in KERNELS[name].cases if getattr(c, "form", "mixed") != "single"][-1]
            found[name] = list(KERNELS[name].arguments(last))
    found["ragged_rows"] = [torch.tensor([2, 0, 3]), torch.zeros(5)]
    store, plan, inputs, *sizes = found.pop("lookup_rows")
    ordered = encode_plan(planned(decode_plan(plan)))
    found["lookup_planned"] = [store, ordered, ordered.flatten().tolist(), inputs, *sizes]
    store, plan, *rest = found.pop("lookup_sequences")
    found["sequences_planned"] = [store, plan.flatten().tolist(), *rest]
    return found


def main() -> None:
    driver.set_active(Hopper())
    report: dict[str, list[str]] = {}
    wrapper = torch.ops.higher_order.triton_kernel_wrapper_functional
    for name, arguments in calls().items():
        with torch.no_grad():
            graph, _ = aot_export_module(
                Call(name, arguments), tensors_of(arguments), trace_joint=False
            )
        report[name] = sorted(
            {
                written
                for node in graph.graph.nodes
                if node.target is wrapper
                for written in node.kwargs["tensors_to_clone"]
            }
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
