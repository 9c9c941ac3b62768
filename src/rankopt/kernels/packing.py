"""Lay a linear layer's weight out for the kernels, quantised or not.

Shapes: N outputs, K inputs. Padding is zeros and the bytes are the same for every instruction set.
A packed weight of `rankopt::linear_int8`, a flat int8 tensor::

    int8  tiles[ceil(N / 16)][ceil(K / 4)][16][4]
    int32 column_sum[16 * ceil(N / 16)]            the sum of each output's weights, little-endian

A packed weight of `rankopt::linear_fp32`, a flat float32 tensor::

    float tiles[ceil(N / 16)][K][16]               more than 4 outputs
    float rows[N][16 * ceil(K / 16)]               at most 4 outputs: the sum runs in 16 lanes

A packed weight of `rankopt::linear_fp16` lies like that one, a flat float16 tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_OUTPUTS = 16
TILE_INPUTS = 4
MAX_LEVEL = 127
NARROW_OUTPUTS = 4
LANE_INPUTS = 16
FP16_MAX = 65504.0
ACTIVATION_CODES = {"none": 0, "sigmoid": 2, "silu": 3}
"""What the operators take for what follows a layer; a slope is a tensor of its own."""


def quantize_linear_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise symmetrically to int8, with one scale per output.

    An output whose weights are all zero gets scale 1.

    Shapes: weight [N, K] float; returns int8 [N, K] in [-127, 127] and float32 [N].

    Raises:
        ValueError: the weight is not a matrix, or not finite.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight must be a float matrix; got {weight.dtype} {[*weight.shape]}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight must be finite; got NaN or infinity")
    values = weight.detach().to(torch.float64)
    peak = values.abs().amax(dim=1) if weight.shape[1] else values.new_zeros(weight.shape[0])
    scale = (peak / MAX_LEVEL).to(torch.float32)
    # A peak that float32 cannot hold divided by 127 is as good as zero.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = torch.round(values / scale.to(torch.float64)[:, None])
    return levels.clamp(-MAX_LEVEL, MAX_LEVEL).to(torch.int8), scale


def pack_linear_int8(levels: Tensor) -> Tensor:
    """Lay int8 weights [N, K] out for the kernel.

    Raises:
        ValueError: the weights are not an int8 matrix, or hold -128, which the kernels do not take.
    """
    if levels.dim() != 2 or levels.dtype != torch.int8:
        raise ValueError(f"weights must be an int8 matrix; got {levels.dtype} {[*levels.shape]}")
    if bool((levels == -128).any()):
        raise ValueError("weights must lie in [-127, 127]; got -128")
    num_outputs, num_inputs = levels.shape
    num_tiles, num_steps = _counts(num_outputs, num_inputs)
    padded = torch.zeros(
        num_tiles * TILE_OUTPUTS, num_steps * TILE_INPUTS, dtype=torch.int8, device="cpu"
    )
    padded[:num_outputs, :num_inputs] = levels
    tiles = padded.view(num_tiles, TILE_OUTPUTS, num_steps, TILE_INPUTS).permute(0, 2, 1, 3)
    column_sum = padded.sum(dim=1, dtype=torch.int32)
    return torch.cat([tiles.reshape(-1), column_sum.view(torch.int8)])


def unpack_linear_int8(packed: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Return the int8 weights [N, K] that `pack_linear_int8` was given.

    Raises:
        ValueError: `packed` has not the size of a weight of that shape.
    """
    size_bytes = packed_size_bytes(num_outputs, num_inputs)
    if packed.dtype != torch.int8 or packed.numel() != size_bytes:
        raise ValueError(
            f"packed must be {size_bytes} int8 values for {num_outputs} x {num_inputs}; "
            f"got {packed.numel()} of {packed.dtype}"
        )
    num_tiles, num_steps = _counts(num_outputs, num_inputs)
    tiles = packed[: num_tiles * num_steps * TILE_OUTPUTS * TILE_INPUTS]
    tiles = tiles.view(num_tiles, num_steps, TILE_OUTPUTS, TILE_INPUTS).permute(0, 2, 1, 3)
    padded = tiles.reshape(num_tiles * TILE_OUTPUTS, num_steps * TILE_INPUTS)
    return padded[:num_outputs, :num_inputs].contiguous()


def packed_size_bytes(num_outputs: int, num_inputs: int) -> int:
    """Return the size of a packed weight, column sums included."""
    num_tiles, num_steps = _counts(num_outputs, num_inputs)
    return num_tiles * TILE_OUTPUTS * (num_steps * TILE_INPUTS + 4)


def pack_linear_fp32(weight: Tensor) -> Tensor:
    """Lay float32 weights [N, K] out for the kernel.

    Raises:
        ValueError: the weight is not a float32 matrix.
    """
    if weight.dim() != 2 or weight.dtype != torch.float32:
        raise ValueError(f"weight must be a float32 matrix; got {weight.dtype} {[*weight.shape]}")
    num_outputs, num_inputs = weight.shape
    if num_outputs <= NARROW_OUTPUTS:
        padded = torch.zeros(num_outputs, _lanes(num_inputs))
        padded[:, :num_inputs] = weight.detach()
        return padded.reshape(-1)
    num_tiles = -(-num_outputs // TILE_OUTPUTS)
    padded = torch.zeros(num_tiles * TILE_OUTPUTS, num_inputs)
    padded[:num_outputs] = weight.detach()
    return padded.view(num_tiles, TILE_OUTPUTS, num_inputs).transpose(1, 2).reshape(-1)


def pack_linear_fp16(weight: Tensor) -> Tensor:
    """Round float32 weights [N, K] to float16 and lay them out for the kernel.

    Raises:
        ValueError: the weight is not a float32 matrix, or float16 cannot hold it.
    """
    if not fits_fp16(weight):
        raise ValueError(f"weight must be finite and at most {FP16_MAX:g}; float16 ends there")
    return pack_linear_fp32(weight).to(torch.float16)


def fits_fp16(weight: Tensor) -> bool:
    """Tell whether every weight is finite and stays so in float16."""
    return bool(torch.isfinite(weight).all()) and not bool((weight.abs() > FP16_MAX).any())


def unpack_linear_fp32(packed: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Return the float32 weights [N, K] that `pack_linear_fp32` was given.

    Raises:
        ValueError: `packed` has not the size of a weight of that shape.
    """
    narrow = num_outputs <= NARROW_OUTPUTS
    num_tiles = -(-num_outputs // TILE_OUTPUTS)
    size = num_outputs * _lanes(num_inputs) if narrow else num_tiles * TILE_OUTPUTS * num_inputs
    if packed.dtype != torch.float32 or packed.numel() != size:
        raise ValueError(
            f"packed must be {size} float32 values for {num_outputs} x {num_inputs}; "
            f"got {packed.numel()} of {packed.dtype}"
        )
    if narrow:
        padded = packed.view(num_outputs, _lanes(num_inputs))
    else:
        tiles = packed.view(num_tiles, num_inputs, TILE_OUTPUTS)
        padded = tiles.transpose(1, 2).reshape(num_tiles * TILE_OUTPUTS, num_inputs)
    return padded[:num_outputs, :num_inputs].contiguous()


def _lanes(num_inputs: int) -> int:
    return -(-num_inputs // LANE_INPUTS) * LANE_INPUTS


def _counts(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    return -(-num_outputs // TILE_OUTPUTS), -(-num_inputs // TILE_INPUTS)
