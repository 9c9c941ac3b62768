"""Feature interactions on a GPU: pairwise dot products and their sum, one pass over the fields.

Shapes: B rows, F fields, D numbers of each, N columns copied in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankopt.kernels.triton.launch import divide_up, dot_precision, launch, tile


@dataclass(frozen=True)
class InteractionBlocks:
    """How the work is cut.

    Attributes:
        rows: rows that one program of a sum over pairs takes.
        dim: numbers of a field that are read at a time.
        num_warps: of a program.
        allow_tf32: multiply fp32 fields in TF32.
    """

    rows: int = 16
    dim: int = 64
    num_warps: int = 4
    allow_tf32: bool = False


@triton.jit
def _dot_kernel(
    fields,
    before,
    out,
    num_before,
    out_width,
    num_fields: tl.constexpr,
    dim: tl.constexpr,
    upper: tl.constexpr,
    diagonal: tl.constexpr,
    block_f: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    to = out + row * out_width
    place = tl.arange(0, block_d)
    for first in range(0, num_before, block_d):
        copied = first + place < num_before
        piece = tl.load(before + row * num_before + first + place, mask=copied)
        tl.store(to + first + place, piece, mask=copied)
    field = tl.arange(0, block_f)
    source = fields + row * (num_fields * dim) + field[:, None] * dim + place[None, :]
    products = tl.zeros((block_f, block_f), tl.float32)
    for first in range(0, dim, block_d):
        inside = (field[:, None] < num_fields) & (first + place[None, :] < dim)
        values = tl.load(source + first, mask=inside, other=0.0)
        products = tl.dot(values, tl.trans(values), products, input_precision=precision)
    i = field[:, None]
    j = field[None, :]
    if upper:
        wanted = (j >= i) if diagonal else (j > i)
        pair = i * num_fields - i * (i - 1) // 2 + j - i
        if not diagonal:
            pair = pair - i - 1
    else:
        wanted = (j <= i) if diagonal else (j < i)
        pair = i * (i - 1) // 2 + j
        if diagonal:
            pair = pair + i
    wanted = wanted & (i < num_fields) & (j < num_fields)
    tl.store(to + num_before + pair, products.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _fm_kernel(
    fields,
    out,
    num_rows,
    num_fields: tl.constexpr,
    dim: tl.constexpr,
    total: tl.constexpr,
    block_b: tl.constexpr,
    block_d: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_b + tl.arange(0, block_b)
    place = tl.arange(0, block_d)
    totals = tl.zeros((block_b,), tl.float32)
    for first in range(0, dim, block_d):
        inside = (row[:, None] < num_rows) & (first + place[None, :] < dim)
        source = fields + row[:, None] * (num_fields * dim) + first + place[None, :]
        before = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        sums = tl.zeros((block_b, block_d), tl.float32)
        for field in range(1, num_fields):
            values = tl.load(source + field * dim, mask=inside, other=0.0).to(tl.float32)
            sums += before * values
            before += values
        if total:
            totals += tl.sum(sums, axis=1)
        else:
            to = out + row[:, None] * dim + first + place[None, :]
            tl.store(to, sums.to(out.dtype.element_ty), mask=inside)
    if total:
        tl.store(out + row, totals.to(out.dtype.element_ty), mask=row < num_rows)


def dot_interaction(
    before: Sequence[Tensor],
    fields: Sequence[Tensor],
    dim: int,
    upper: bool,
    diagonal: bool,
    rows_per_thread: int = 0,
    *,
    blocks: InteractionBlocks = InteractionBlocks(),
) -> Tensor:
    """Compute `rankopt::dot_interaction`; fields may be fp32, fp16 or bf16, sums are fp32."""
    del rows_per_thread
    values = _side_by_side(fields)
    num_fields = values.shape[1] // dim
    num_before = sum(int(piece.shape[1]) for piece in before)
    width = num_before + num_fields * (num_fields + (1 if diagonal else -1)) // 2
    out = values.new_empty((values.shape[0], width))
    launch(
        _dot_kernel,
        (values.shape[0],),
        fields=values,
        before=_side_by_side(before) if before else values,
        out=out,
        num_before=num_before,
        out_width=width,
        num_fields=num_fields,
        dim=dim,
        upper=upper,
        diagonal=diagonal,
        block_f=tile(num_fields),
        block_d=min(tile(dim), max(blocks.dim, 16)),
        precision=dot_precision(values.dtype, blocks.allow_tf32),
        num_warps=blocks.num_warps,
    )
    return out


def fm_interaction(
    fields: Sequence[Tensor],
    dim: int,
    total: bool,
    rows_per_thread: int = 0,
    *,
    blocks: InteractionBlocks = InteractionBlocks(),
) -> Tensor:
    """Compute `rankopt::fm_interaction`; fields may be fp32, fp16 or bf16, sums are fp32."""
    del rows_per_thread
    values = _side_by_side(fields)
    num_rows = values.shape[0]
    shape: tuple[Any, ...] = (num_rows,) if total else (num_rows, dim)
    out = values.new_empty(shape)
    launch(
        _fm_kernel,
        (divide_up(num_rows, blocks.rows),),
        fields=values,
        out=out,
        num_rows=num_rows,
        num_fields=values.shape[1] // dim,
        dim=dim,
        total=total,
        block_b=blocks.rows,
        block_d=min(tile(dim), max(blocks.dim, 16)),
        num_warps=blocks.num_warps,
    )
    return out


def _side_by_side(pieces: Sequence[Tensor]) -> Tensor:
    return (pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=1)).contiguous()
