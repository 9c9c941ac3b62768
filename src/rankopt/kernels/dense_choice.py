"""How long a dense layer takes in one arithmetic and in another, on this machine.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rankopt.kernels import ops
from rankopt.kernels.autotune import fastest
from rankopt.kernels.packing import (
    pack_linear_fp16,
    pack_linear_fp32,
    pack_linear_int8,
    quantize_linear_weight,
)

Arithmetic = Literal["int8", "fp16", "fp32", "fbgemm"]
ARITHMETICS: tuple[Arithmetic, ...] = ("int8", "fp16", "fp32", "fbgemm")
"""By what they cost besides time: bytes; fbgemm packs whenever an artifact is loaded."""

BLOCK_NS = 150_000
"""Calls are timed in blocks of about this long: one alone may take less than reading the clock."""
BUDGET_NS = 800_000_000
"""All variants of one layer at one number of rows together."""


@dataclass(frozen=True)
class DenseLayer:
    """A layer's form. Its weights do not change what a call takes."""

    num_inputs: int
    num_outputs: int
    has_bias: bool
    has_slope: bool
    activation_bits: int


def relative_times(layer: DenseLayer, num_rows: int) -> dict[str, float]:
    """Time a layer on so many rows in every arithmetic that this build has.

    The variants take turns in short blocks in this process, with its number of threads. The result
    is kept in the cache under the machine's fingerprint.

    Returns:
        Median time of a call, by arithmetic, over that of int8.
    """
    key = (
        f"dense {layer.num_inputs}x{layer.num_outputs} rows{num_rows} bias{layer.has_bias:d} "
        f"slope{layer.has_slope:d} {layer.activation_bits}bit {torch.get_num_threads()}t "
        f"{ops.current_isa()}"
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, layer.num_inputs, generator=generator)
    weight = torch.randn(layer.num_outputs, layer.num_inputs, generator=generator)
    levels, scale = quantize_linear_weight(weight)
    handle = ops.fbgemm_pack(levels, scale) if has_fbgemm() else 0
    try:
        calls = _calls(layer, x, weight, levels, scale, handle)
        repeats = max(1, int(BLOCK_NS / _once_ns(calls["int8"])))
        blocks = {name: _block(call, repeats) for name, call in calls.items()}
        median_ns = fastest(key, blocks, budget_ns=BUDGET_NS).median_ns
    finally:
        if handle:
            ops.fbgemm_release(handle)
    return {name: time / median_ns["int8"] for name, time in median_ns.items()}


def has_fbgemm() -> bool:
    """Tell whether this build of torch can run `linear_fbgemm`."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def _calls(
    layer: DenseLayer, x: Tensor, weight: Tensor, levels: Tensor, scale: Tensor, handle: int
) -> dict[str, Callable[[], object]]:
    width, bits = layer.num_outputs, layer.activation_bits
    bias = torch.zeros(width) if layer.has_bias else None
    slope = torch.zeros(1) if layer.has_slope else None
    int8, fp16, fp32 = pack_linear_int8(levels), pack_linear_fp16(weight), pack_linear_fp32(weight)
    run = torch.ops.rankopt
    calls: dict[str, Callable[[], object]] = {
        "int8": lambda: run.linear_int8(x, int8, scale, bias, slope, width, bits),
        "fp16": lambda: run.linear_fp16(x, fp16, bias, slope, width),
        "fp32": lambda: run.linear_fp32(x, fp32, bias, slope, width),
    }
    if handle:
        number = torch.tensor([handle])

        def fbgemm() -> object:
            y: Tensor = run.linear_fbgemm(x, levels, scale, bias, number)
            # It has no epilogue: the activation is another pass over its result.
            return y.relu_() if layer.has_slope else y

        calls["fbgemm"] = fbgemm
    return calls


def _once_ns(call: Callable[[], object]) -> int:
    call()
    begin = time.perf_counter_ns()
    call()
    return max(time.perf_counter_ns() - begin, 1)


def _block(call: Callable[[], object], repeats: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(repeats):
            call()

    return block
