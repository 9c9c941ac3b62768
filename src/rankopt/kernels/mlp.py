"""A chain of linear layers in one call: `rankopt::mlp_int8`, its reference and its C entry point.

Shapes: B rows, K inputs of the first layer, N outputs of the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankopt.kernels import reference
from rankopt.kernels.build import load_kernels
from rankopt.kernels.packing import unpack_linear_int8


@dataclass(frozen=True)
class MlpLayer:
    """One layer of a chain.

    Attributes:
        packed: the weight as `packing.pack_linear_int8` makes it, or `pack_linear_fp16`, or
            `pack_linear_fp32`.
        scale: float32 [N], what a level of an int8 weight stands for; None for other weights.
        bias: float32 [N], or None.
        negative_slope: float32 [1] or [N], what negative results are multiplied by; 0 is ReLU.
        num_outputs: N.
        peak: float32 [1], the value that the largest level of an int8 layer's inputs stands for,
            what lies beyond saturating; None scales each row by its own largest.
        activation: of `packing.ACTIVATION_CODES`, behind the slope.
    """

    packed: Tensor
    scale: Tensor | None
    bias: Tensor | None
    negative_slope: Tensor | None
    num_outputs: int
    peak: Tensor | None = None
    activation: int = 0


def mlp_int8(x: Tensor, layers: Sequence[MlpLayer], *, activation_bits: int = 7) -> Tensor:
    """Run linear layers one after the other while their rows are in the cache.

    Without fixed peaks the result has the bits of `ops.linear_int8`, `ops.linear_fp16` and
    `ops.linear_fp32` called layer by layer. A row's result is the same bit for bit alone, anywhere
    in a batch, beside any neighbours, with any number of threads and on every instruction set. A
    row that holds NaN or infinity before an int8 layer gives NaN.

    Shapes: x float32 [..., K]; returns float32 [..., N].
    """
    load_kernels()
    activations = [layer.activation for layer in layers]
    result: Tensor = torch.ops.rankopt.mlp_int8(x, *columns(layers), activation_bits, activations)
    return result


def columns(
    layers: Sequence[MlpLayer],
) -> tuple[
    list[Tensor],
    list[Tensor | None],
    list[Tensor | None],
    list[Tensor | None],
    list[Tensor | None],
    list[int],
]:
    """Return the operator's lists: weights, scales, biases, slopes, peaks, numbers of outputs."""
    return (
        [layer.packed for layer in layers],
        [layer.scale for layer in layers],
        [layer.bias for layer in layers],
        [layer.negative_slope for layer in layers],
        [layer.peak for layer in layers],
        [layer.num_outputs for layer in layers],
    )


def mlp_reference(
    x: Tensor,
    packed: list[Tensor],
    scale: list[Tensor | None],
    bias: list[Tensor | None],
    negative_slope: list[Tensor | None],
    peak: list[Tensor | None],
    num_outputs: list[int],
    activation_bits: int,
    activation: Sequence[int] = (),
) -> Tensor:
    """Compute `rankopt::mlp_int8` bit for bit: its layers, one by one."""
    codes = activation or [0] * len(num_outputs)
    for index, (width, code) in enumerate(zip(num_outputs, codes, strict=True)):
        vectors = bias[index], negative_slope[index]
        factor, fixed = scale[index], peak[index]
        sizes = width, activation_bits, code
        if factor is None:
            half = packed[index].dtype == torch.float16
            layer = reference.linear_fp16 if half else reference.linear_fp32
            x = layer(x, packed[index], *vectors, width, code)
        elif fixed is None:
            x = reference.linear_int8(x, packed[index], factor, *vectors, *sizes)
        else:
            x = _fixed_layer(x, packed[index], factor, *vectors, fixed, *sizes)
    return x


def _fixed_layer(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negative_slope: Tensor | None,
    peak: Tensor,
    num_outputs: int,
    activation_bits: int,
    activation: int,
) -> Tensor:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    most = torch.full_like(peak, 63.0 if activation_bits == 7 else 127.0)
    levels = torch.round((rows * (most / peak)).clamp(-most, most))
    finite = torch.isfinite(rows).all(1, keepdim=True)
    weight = unpack_linear_int8(packed.reshape(-1), num_outputs, x.shape[-1]).to(torch.float64)
    exact = levels.nan_to_num().to(torch.float64) @ weight.T
    row_scale = torch.where(finite, peak / most, torch.full_like(peak, torch.nan))
    result = exact.to(torch.float32) * (row_scale * scale)
    result = reference.epilogue(result, bias, negative_slope, activation)
    return result.reshape(*x.shape[:-1], num_outputs)
