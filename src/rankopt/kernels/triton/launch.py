"""Launch a Triton kernel: at once, or as a node of the graph that is being traced."""

from __future__ import annotations

from typing import Any

import torch
from torch._library.triton import is_wrap_triton_enabled
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.jit import JITFunction

MIN_TILE = 16
"""Smallest side of a tile that `tl.dot` takes."""


def launch(kernel: Any, grid: tuple[Any, ...], **arguments: Any) -> None:
    """Run a kernel; inside an operator that the compiler looks into, put it into its graph."""
    if isinstance(kernel, JITFunction) and is_wrap_triton_enabled():
        torch.library.wrap_triton(kernel)[grid](**arguments)
    elif not any(isinstance(value, FakeTensor) for value in arguments.values()):
        # The interpreter's kernels read memory; tensors that are traced have none.
        kernel[grid](**arguments)


def tile(size: int, at_least: int = MIN_TILE) -> int:
    """Return the power of two that holds `size`."""
    return max(at_least, 1 << max(size - 1, 0).bit_length())


def divide_up(size: Any, block: int) -> Any:
    """Return how many blocks hold `size`, which may be symbolic."""
    return (size + block - 1) // block


def dot_precision(dtype: torch.dtype, allow_tf32: bool) -> str:
    """Name the arithmetic of `tl.dot`: fp32 stays fp32 unless TF32 was asked for."""
    return "tf32" if allow_tf32 and dtype == torch.float32 else "ieee"
