"""The kernels' arithmetic in plain PyTorch: what every implementation is compared with.

Shapes: B rows, N outputs, K inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankopt.kernels.packing import unpack_linear_int8

TINY_PEAK = 2.0**-100
"""A row whose largest absolute value is below this counts as zero."""


def linear_int8(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negative_slope: Tensor | None,
    num_outputs: int,
    activation_bits: int,
) -> Tensor:
    """Compute `rankopt::linear_int8` bit for bit: integer sums exact, float32 in the same order.

    Shapes: x float32 [..., K]; packed int8; scale, bias float32 [N]; negative_slope [1] or [N];
    returns float32 [..., N].
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    weight = unpack_linear_int8(packed.reshape(-1), num_outputs, x.shape[-1])
    peak = _peak(rows)
    # A tensor: torch divides a Python number by a tensor as a product with the reciprocal.
    levels = torch.full_like(peak, 63.0 if activation_bits == 7 else 127.0)
    usable = torch.isfinite(peak) & (peak >= TINY_PEAK)
    safe = torch.where(usable, peak, torch.ones_like(peak))
    quantized = torch.round(torch.where(usable, rows, torch.zeros_like(rows)) * (levels / safe))
    row_scale = torch.where(usable, safe / levels, torch.zeros_like(peak))
    row_scale = torch.where(torch.isfinite(peak), row_scale, torch.full_like(peak, torch.nan))
    # Sums stay below 2^53, so float64 holds them exactly.
    exact = quantized.to(torch.float64) @ weight.to(torch.float64).T
    result = exact.to(torch.float32) * (row_scale * scale)
    if bias is not None:
        result = result + bias
    if negative_slope is not None:
        result = torch.where(result >= 0, result, result * negative_slope)
    return result.reshape(*x.shape[:-1], num_outputs)


def linear_fbgemm(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, handle: Tensor
) -> Tensor:
    """Compute `rankopt::linear_fbgemm` in float64 from the same quantised inputs.

    `handle` says where the packed weights are and does not change the result.

    Shapes: x float32 [..., K]; weight int8 [N, K]; scale, bias float32 [N]; returns float32
    [..., N].
    """
    del handle
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    peak = _peak(rows)
    usable = torch.isfinite(peak) & (peak >= torch.finfo(torch.float32).tiny)
    safe = torch.where(usable, peak, torch.ones_like(peak))
    normal = torch.where(usable, rows, torch.zeros_like(rows)) / safe
    quantized = torch.round(normal * 63.0).to(torch.float64)
    factor = torch.where(usable, safe, torch.zeros_like(peak))
    factor = torch.where(torch.isfinite(peak), factor, torch.full_like(peak, torch.nan))
    exact = quantized @ weight.to(torch.float64).T
    result = exact * scale.to(torch.float64) * (factor.to(torch.float64) / 63.0)
    if bias is not None:
        result = result + bias.to(torch.float64)
    return result.to(torch.float32).reshape(*x.shape[:-1], weight.shape[0])


def _peak(rows: Tensor) -> Tensor:
    """Return each row's largest absolute value [B, 1]; NaN or infinity where the row holds one."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], 1)
    return rows.abs().amax(dim=1, keepdim=True)
