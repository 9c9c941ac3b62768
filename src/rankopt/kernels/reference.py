"""The kernels' arithmetic in plain PyTorch: what every implementation is compared with.

Shapes: B rows, N outputs, K inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankopt.kernels.packing import (
    ACTIVATION_CODES,
    LANE_INPUTS,
    NARROW_OUTPUTS,
    unpack_linear_fp32,
    unpack_linear_int8,
)

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
    activation: int = 0,
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
    result = epilogue(result, bias, negative_slope, activation)
    return result.reshape(*x.shape[:-1], num_outputs)


def linear_fp32(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    negative_slope: Tensor | None,
    num_outputs: int,
    activation: int = 0,
) -> Tensor:
    """Compute `rankopt::linear_fp32` bit for bit: each product added with one rounding, in order.

    Shapes: x float32 [..., K]; packed float32; bias float32 [N]; negative_slope [1] or [N];
    returns float32 [..., N].
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    weight = unpack_linear_fp32(packed.reshape(-1), num_outputs, x.shape[-1])
    if num_outputs > NARROW_OUTPUTS:
        result = rows.new_zeros(rows.shape[0], num_outputs)
        for k in range(x.shape[-1]):
            result = _fma(rows[:, k, None], weight[None, :, k], result)
    else:
        num_steps = -(-x.shape[-1] // LANE_INPUTS)
        padding = (0, num_steps * LANE_INPUTS - x.shape[-1])
        rows = torch.nn.functional.pad(rows, padding).view(rows.shape[0], num_steps, LANE_INPUTS)
        weight = torch.nn.functional.pad(weight, padding).view(num_outputs, num_steps, LANE_INPUTS)
        lanes = rows.new_zeros(rows.shape[0], num_outputs, LANE_INPUTS)
        for step in range(num_steps):
            lanes = _fma(rows[:, None, step], weight[None, :, step], lanes)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        result = lanes[..., 0]
    result = epilogue(result, bias, negative_slope, activation)
    return result.reshape(*x.shape[:-1], num_outputs)


def linear_fp16(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    negative_slope: Tensor | None,
    num_outputs: int,
    activation: int = 0,
) -> Tensor:
    """Compute `rankopt::linear_fp16` bit for bit: `linear_fp32` on the weights widened, exactly.

    Shapes: as `linear_fp32`; packed float16.
    """
    widened = packed.to(torch.float32)
    return linear_fp32(x, widened, bias, negative_slope, num_outputs, activation)


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


def gru(
    x: Tensor,
    lengths: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    first: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `rankopt::gru` in float64, one row at a time, with `torch.nn.GRU` on its own length.

    Shapes: as `rankopt.kernels.ops.gru`.
    """
    layer = torch.nn.GRU(x.shape[2], w_hh.shape[1], batch_first=True)
    outputs, last = _recur(layer, x, lengths, (w_ih, w_hh, b_ih, b_hh), (first,), reverse)
    return outputs, last


def lstm(
    x: Tensor,
    lengths: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    first: Tensor | None,
    memory: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rankopt::lstm` in float64, one row at a time, with `torch.nn.LSTM`.

    Shapes: as `rankopt.kernels.ops.lstm`.
    """
    layer = torch.nn.LSTM(x.shape[2], w_hh.shape[1], batch_first=True)
    states = (first, memory)
    outputs, last, held = _recur(layer, x, lengths, (w_ih, w_hh, b_ih, b_hh), states, reverse)
    return outputs, last, held


def _recur(
    layer: torch.nn.RNNBase,
    x: Tensor,
    lengths: Tensor,
    weights: tuple[Tensor | None, ...],
    states: tuple[Tensor | None, ...],
    reverse: bool,
) -> tuple[Tensor, ...]:
    num_rows, num_steps, _ = x.shape
    layer.double()
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(torch.zeros_like(parameter) if weight is None else weight)
        outputs = x.new_zeros((num_rows, num_steps, layer.hidden_size), dtype=torch.float64)
        ends = [x.new_zeros((num_rows, layer.hidden_size), dtype=torch.float64) for _ in states]
        for end, state in zip(ends, states, strict=True):
            if state is not None:
                end.copy_(state)
        for row, length in enumerate(lengths.tolist()):
            if length < 1:
                continue
            steps = x[row : row + 1, :length].double()
            begin = [end[None, row : row + 1].clone() for end in ends]
            result, found = layer(
                steps.flip(1) if reverse else steps, begin[0] if len(begin) == 1 else tuple(begin)
            )
            outputs[row, :length] = result[0].flip(0) if reverse else result[0]
            for end, state in zip(ends, [found] if len(ends) == 1 else found, strict=True):
                end[row] = state[0, 0]
    return outputs, *ends


def epilogue(
    result: Tensor, bias: Tensor | None, negative_slope: Tensor | None, activation: int = 0
) -> Tensor:
    """Add the bias, scale what is negative, apply an activation of `packing.ACTIVATION_CODES`."""
    if bias is not None:
        result = result + bias
    if negative_slope is not None:
        result = torch.where(result >= 0, result, result * negative_slope)
    if activation == ACTIVATION_CODES["sigmoid"]:
        return 1.0 / (1.0 + _exp(-result))
    if activation == ACTIVATION_CODES["silu"]:
        far = result < -88.0
        return torch.where(far, result * 0.0, result / (1.0 + _exp(-result)))
    return result


def _exp(x: Tensor) -> Tensor:
    """Compute the kernels' exp bit for bit: every operation rounded by itself, as exact_exp.h."""
    x = torch.where(x < -87.0, -87.0, x)
    x = torch.where(x > 88.0, 88.0, x)
    round_bits = torch.tensor(12582912.0).view(torch.int32)
    shifted = x * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = torch.full_like(x, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1):
        p = p * r + factor
    p = p * r + 5.0000001201e-1
    mantissa = (p * (r * r) + r) + 1.0
    exponent = shifted.view(torch.int32) - round_bits + 127
    return mantissa * (exponent << 23).view(torch.float32)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32 rounded once, as the fused instruction does.

    The product is exact in float64. The sum is rounded to odd there (an inexact one gets its last
    bit set), so that rounding it again to float32 cannot fall on the wrong side of a tie.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008).
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(torch.int64) & 1) == 0
    nudged = even & (error != 0) & total.isfinite()
    away_from_zero = (error > 0) == (total > 0)
    step = torch.where(away_from_zero, 1, -1) * nudged
    return (total.view(torch.int64) + step).view(torch.float64).to(torch.float32)


def _peak(rows: Tensor) -> Tensor:
    """Return each row's largest absolute value [B, 1]; NaN or infinity where the row holds one."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], 1)
    return rows.abs().amax(dim=1, keepdim=True)
