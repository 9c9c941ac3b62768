"""Compile what the kernels launch to machine code of an H100 or H200, which needs no GPU.

Arguments are taken from cases of the parity grid and from the types of half precision; prints how
many distinct kernels each operator given by name came to.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rankopt.kernels.registry import KERNELS
from rankopt.kernels.triton import attention, interaction, lookup, target

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
HOPPER = GPUTarget("cuda", 90, 32)
compiled: set[str] = set()


def compile_only(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    del grid
    num_warps = arguments.pop("num_warps", 4)
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        elif value == 1 and isinstance(value, int):
            # A number that is 1 becomes part of the code, as at a launch.
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    key = f"{kernel.__name__}{signature}{constants}{num_warps}"
    if key in compiled:
        return
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    built = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
    assert built.asm["cubin"]
    shared = built.metadata.shared
    assert shared <= 227 * 1024, f"{kernel.__name__} takes {shared} bytes of shared memory"
    compiled.add(key)


def half(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [half(each, dtype) for each in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def num_compiled(name: str) -> int:
    before = len(compiled)
    kernel = KERNELS[name]
    function = kernel.on_gpu()
    cases = [case for case in kernel.cases if getattr(case, "num_rows", 1)]
    for case in {*cases[:: max(1, len(cases) // 8)], cases[-1]}:
        function(*kernel.arguments(case))
    if name.startswith(("dot", "fm", "hstu")):
        arguments = list(kernel.arguments(cases[-1]))
        for dtype in (torch.float16, torch.bfloat16):
            function(*half(arguments, dtype))
    return len(compiled) - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    modules = (attention, interaction, lookup, target)
    patches = [mock.patch.object(module, "launch", compile_only) for module in modules]
    for patch in patches:
        patch.start()
    print(json.dumps({name: num_compiled(name) for name in sys.argv[1:]}))
