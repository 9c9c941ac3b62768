"""Target attention on a GPU: an MLP over every pair of a candidate and an id of its list.

Shapes: as in `rankopt.kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rankopt.kernels.attention import ACTIVATIONS
from rankopt.kernels.packing import LANE_INPUTS, NARROW_OUTPUTS, TILE_OUTPUTS
from rankopt.kernels.triton.launch import dot_precision, launch, tile

MAX_LAYERS = 4
"""Layers of the MLP, the last one included, that the kernel is written for."""


@dataclass(frozen=True)
class TargetBlocks:
    """How the work is cut.

    Attributes:
        keys: ids of a list that are scored together.
        num_warps: of a program, which takes one candidate.
        allow_tf32: multiply fp32 in TF32.
    """

    keys: int = 16
    num_warps: int = 4
    allow_tf32: bool = False


@triton.jit
def _matrix(
    packed,
    num_inputs: tl.constexpr,
    num_outputs: tl.constexpr,
    block_in: tl.constexpr,
    block_out: tl.constexpr,
    narrow: tl.constexpr,
):
    """Read a packed matrix as [inputs, outputs], zeros around it."""
    into = tl.arange(0, block_in)[:, None]
    unit = tl.arange(0, block_out)[None, :]
    if narrow:
        place = unit * ((num_inputs + 15) // 16 * 16) + into
    else:
        place = (unit // 16) * (16 * num_inputs) + into * 16 + unit % 16
    inside = (into < num_inputs) & (unit < num_outputs)
    return tl.load(packed + place, mask=inside, other=0.0)


@triton.jit
def _activated(
    x, vectors, num_outputs: tl.constexpr, block: tl.constexpr, activation: tl.constexpr
):
    """Apply one of `attention.ACTIVATIONS`; slopes, for dice scales and shifts lie in `vectors`."""
    unit = tl.arange(0, block)
    inside = unit < num_outputs
    if activation == 1:
        slope = tl.load(vectors + unit, mask=inside, other=0.0)
        x = tl.where(x >= 0, x, x * slope[None, :])
    elif activation == 2:
        x = 1.0 / (1.0 + tl.exp(-x))
    elif activation == 3:
        x = x / (1.0 + tl.exp(-x))
    elif activation >= 4:
        slope = tl.load(vectors + unit, mask=inside, other=0.0)
        shift = tl.load(vectors + 2 * num_outputs + unit, mask=inside, other=0.0)
        if activation == 4:
            scale = tl.load(vectors + num_outputs + unit, mask=inside, other=0.0)
            at = x * scale[None, :] + shift[None, :]
        else:
            mean = tl.sum(tl.where(inside[None, :], x, 0.0), axis=1) / num_outputs
            less = tl.where(inside[None, :], x - mean[:, None], 0.0)
            spread = tl.sum(less * less + shift[None, :], axis=1)
            at = less / tl.sqrt(spread)[:, None]
        p = 1.0 / (1.0 + tl.exp(-at))
        x = x * (slope[None, :] + (1.0 - slope[None, :]) * p)
    return x


@triton.jit
def _layer(
    x,
    packed,
    vectors,
    num_inputs: tl.constexpr,
    num_outputs: tl.constexpr,
    block_in: tl.constexpr,
    block_out: tl.constexpr,
    activation: tl.constexpr,
    precision: tl.constexpr,
):
    """Run a further layer on [pairs, inputs]; its bias, slopes and so on lie behind it."""
    weight = _matrix(packed, num_inputs, num_outputs, block_in, block_out, num_outputs <= 4)
    unit = tl.arange(0, block_out)
    bias = tl.load(vectors + unit, mask=unit < num_outputs, other=0.0)
    x = tl.dot(x, weight, input_precision=precision) + bias[None, :]
    return _activated(x, vectors + num_outputs, num_outputs, block_out, activation)


@triton.jit
def _target_kernel(
    query,
    keys,
    ends,
    lengths,
    index,
    weights,
    out,
    num_lists,
    max_length,
    dim: tl.constexpr,
    has_index: tl.constexpr,
    width_1: tl.constexpr,
    width_2: tl.constexpr,
    width_3: tl.constexpr,
    activation_1: tl.constexpr,
    activation_2: tl.constexpr,
    activation_3: tl.constexpr,
    at_vectors_1: tl.constexpr,
    at_matrix_2: tl.constexpr,
    at_matrix_3: tl.constexpr,
    at_last: tl.constexpr,
    last_inputs: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_1: tl.constexpr,
    block_2: tl.constexpr,
    block_3: tl.constexpr,
    precision: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block_d)
    candidate = tl.load(query + row * dim + column, mask=column < dim, other=0.0)
    request = tl.load(index + row) if has_index else row
    known = (request >= 0) & (request < num_lists)
    request = tl.where(known, request, 0)
    end = tl.load(ends + request)
    count = tl.where(known, tl.minimum(tl.load(lengths + request), max_length), 0)
    tiles: tl.constexpr = (width_1 + 15) // 16 * 16 * dim
    of_query = _matrix(weights, dim, width_1, block_d, block_1, False)
    mixed = _matrix(weights + tiles, dim, width_1, block_d, block_1, False)
    mixed += (
        _matrix(weights + 2 * tiles, dim, width_1, block_d, block_1, False) * candidate[:, None]
    )
    unit = tl.arange(0, block_1)
    share = tl.sum(of_query * candidate[:, None], axis=0)
    share += tl.load(weights + at_vectors_1 + unit, mask=unit < width_1, other=0.0)
    total = tl.zeros((block_d,), tl.float32)
    for begin in range(end - count, end, block_n):
        at = begin + tl.arange(0, block_n)
        inside = (at < end)[:, None] & (column < dim)[None, :]
        mine = tl.load(keys + at[:, None] * dim + column[None, :], mask=inside, other=0.0)
        hidden = tl.dot(mine, mixed, input_precision=precision) + share[None, :]
        slopes = weights + at_vectors_1 + width_1
        hidden = _activated(hidden, slopes, width_1, block_1, activation_1)
        if width_2 > 0:
            packed = weights + at_matrix_2
            behind: tl.constexpr = at_matrix_2 + (
                width_2 * ((width_1 + 15) // 16 * 16)
                if width_2 <= 4
                else (width_2 + 15) // 16 * 16 * width_1
            )
            hidden = _layer(
                hidden,
                packed,
                weights + behind,
                width_1,
                width_2,
                block_1,
                block_2,
                activation_2,
                precision,
            )
        if width_3 > 0:
            packed = weights + at_matrix_3
            after: tl.constexpr = at_matrix_3 + (
                width_3 * ((width_2 + 15) // 16 * 16)
                if width_3 <= 4
                else (width_3 + 15) // 16 * 16 * width_2
            )
            hidden = _layer(
                hidden,
                packed,
                weights + after,
                width_2,
                width_3,
                block_2,
                block_3,
                activation_3,
                precision,
            )
        place = tl.arange(0, block_3 if width_3 > 0 else (block_2 if width_2 > 0 else block_1))
        factor = tl.load(weights + at_last + place, mask=place < last_inputs, other=0.0)
        score = tl.sum(hidden * factor[None, :], axis=1)
        score += tl.load(weights + at_last + (last_inputs + 15) // 16 * 16)
        total += tl.sum(tl.where(inside, mine * score[:, None], 0.0), axis=0)
    tl.store(out + row * dim + column, total, mask=column < dim)


def target_attention(
    query: Tensor,
    keys: Tensor,
    lengths: Tensor,
    request_index: Tensor | None,
    weights: Tensor,
    widths: Sequence[int],
    activations: Sequence[int],
    max_length: int,
    *,
    blocks: TargetBlocks = TargetBlocks(),
) -> Tensor:
    """Compute `rankopt::target_attention` for an MLP of at most `MAX_LAYERS` layers.

    Raises:
        ValueError: the MLP has more layers.
    """
    hidden = list(widths[:-1])
    if len(widths) > MAX_LAYERS:
        raise ValueError(
            f"target_attention on a GPU takes {MAX_LAYERS} layers at most; got widths {[*widths]}"
        )
    query, keys, lengths = query.contiguous(), keys.contiguous(), lengths.contiguous()
    dim = query.shape[1]
    vectors_1, matrices, at_last = _places(hidden, activations, dim)
    padded = (*hidden, 0, 0)[:3]
    given = (*activations, 0, 0)[:3]
    out = query.new_empty(query.shape)
    launch(
        _target_kernel,
        (query.shape[0],),
        query=query,
        keys=keys,
        ends=lengths.cumsum(0),
        lengths=lengths,
        index=lengths if request_index is None else request_index.contiguous(),
        weights=weights,
        out=out,
        num_lists=lengths.shape[0],
        max_length=max_length,
        dim=dim,
        has_index=request_index is not None,
        width_1=padded[0],
        width_2=padded[1],
        width_3=padded[2],
        activation_1=given[0],
        activation_2=given[1],
        activation_3=given[2],
        at_vectors_1=vectors_1,
        at_matrix_2=matrices[0],
        at_matrix_3=matrices[1],
        at_last=at_last,
        last_inputs=hidden[-1],
        block_n=max(blocks.keys, 16),
        block_d=tile(dim),
        block_1=tile(padded[0]),
        block_2=tile(padded[1]),
        block_3=tile(padded[2]),
        precision=dot_precision(query.dtype, blocks.allow_tf32),
        num_warps=blocks.num_warps,
    )
    return out


def _places(
    hidden: Sequence[int], activations: Sequence[int], dim: int
) -> tuple[int, tuple[int, int], int]:
    """Say where in the packed weights things lie.

    Returns:
        The first layer's bias and slopes; the matrices of the second and third; the last layer.
    """
    num_vectors = [4 if "dice" in ACTIVATIONS[code] else 2 for code in activations]
    vectors = 3 * _tiles(hidden[0]) * dim
    at = vectors + num_vectors[0] * hidden[0]
    matrices = [0, 0]
    for number, width in enumerate(hidden[1:]):
        matrices[number] = at
        inputs = hidden[number]
        narrow = width <= NARROW_OUTPUTS
        at += width * _lanes(inputs) if narrow else _tiles(width) * inputs
        at += num_vectors[number + 1] * width
    return vectors, (matrices[0], matrices[1]), at


def _tiles(num_outputs: int) -> int:
    return -(-num_outputs // TILE_OUTPUTS) * TILE_OUTPUTS


def _lanes(num_inputs: int) -> int:
    return -(-num_inputs // LANE_INPUTS) * LANE_INPUTS
