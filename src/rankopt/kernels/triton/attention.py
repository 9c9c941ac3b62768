"""Attention over ragged lists on a GPU: one program for a block of queries of one list.

Shapes: as in `rankopt.kernels.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankopt.kernels.triton.launch import divide_up, dot_precision, launch, tile


@dataclass(frozen=True)
class AttentionBlocks:
    """How the work is cut.

    Attributes:
        queries: tokens or candidates that one program takes.
        keys: keys that it reads at a time.
        num_warps: of a program.
        allow_tf32: multiply fp32 in TF32.
    """

    queries: int = 32
    keys: int = 32
    num_warps: int = 4
    allow_tf32: bool = False


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _hstu_kernel(
    q,
    k,
    v,
    ends,
    lengths,
    bias,
    out,
    num_lists,
    row_width,
    score_scale,
    weight_scale,
    num_context: tl.constexpr,
    max_length: tl.constexpr,
    head_width: tl.constexpr,
    has_bias: tl.constexpr,
    align_right: tl.constexpr,
    causal: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.program_id(1) * block_m
    head = tl.program_id(2)
    last: tl.constexpr = num_context + max_length
    count = tl.minimum(tl.load(lengths + request), max_length).to(tl.int32)
    first = tl.load(ends + request) - count
    num_tokens = num_context + count
    shift = max_length - count if align_right else 0
    # Where a list's ids begin among all tokens, the context tokens of all lists being first.
    base = tl.cast(num_lists, tl.int64) * num_context + first
    column = tl.arange(0, block_k)
    width = column < head_width
    if start < num_tokens:
        token = start + tl.arange(0, block_m)
        row = tl.where(
            token < num_context, request * num_context + token, base + token - num_context
        )
        position = tl.where(token < num_context, token, token + shift)
        at = row[:, None] * row_width + head * head_width + column[None, :]
        mine = (token < num_tokens)[:, None] & width[None, :]
        queries = tl.load(q + at, mask=mine, other=0.0)
        gathered = tl.zeros((block_m, block_k), tl.float32)
        stop = tl.minimum(start + block_m, num_tokens) if causal else num_tokens
        for begin in range(0, stop, block_n):
            other = begin + tl.arange(0, block_n)
            other_row = tl.where(
                other < num_context, request * num_context + other, base + other - num_context
            )
            other_position = tl.where(other < num_context, other, other + shift)
            there = other_row[:, None] * row_width + head * head_width + column[None, :]
            exists = (other < num_tokens)[:, None] & width[None, :]
            keys = tl.load(k + there, mask=exists, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * score_scale
            seen = (token < num_tokens)[:, None] & (other < num_tokens)[None, :]
            if causal:
                seen = seen & (other[None, :] <= token[:, None])
            if has_bias:
                distance = other_position[None, :] - position[:, None] + last
                scores += tl.load(bias + head * (2 * last + 1) + distance, mask=seen, other=0.0)
            weights = tl.where(seen, _silu(scores) * weight_scale, 0.0)
            values = tl.load(v + there, mask=exists, other=0.0)
            gathered = tl.dot(weights.to(values.dtype), values, gathered, input_precision=precision)
        tl.store(out + at, gathered.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _candidate_kernel(
    q,
    k,
    v,
    own_k,
    own_v,
    ends,
    lengths,
    index,
    bias,
    out,
    num_rows,
    num_lists,
    row_width,
    score_scale,
    weight_scale,
    num_context: tl.constexpr,
    max_length: tl.constexpr,
    head_width: tl.constexpr,
    has_index: tl.constexpr,
    has_bias: tl.constexpr,
    align_right: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_m + tl.arange(0, block_m)
    head = tl.program_id(1)
    last: tl.constexpr = num_context + max_length
    table = bias + head * (2 * last + 1)
    column = tl.arange(0, block_k)
    width = column < head_width
    valid = row < num_rows
    request = tl.load(index + row, mask=valid, other=0) if has_index else row
    nobody = tl.cast(num_lists, tl.int64)
    # A request that is not there is read by nobody: its candidates see themselves alone.
    left = tl.where(valid & (request >= 0) & (request < nobody), request, nobody)
    at = row[:, None] * row_width + head * head_width + column[None, :]
    mine = valid[:, None] & width[None, :]
    queries = tl.load(q + at, mask=mine, other=0.0)
    own_keys = tl.load(own_k + at, mask=mine, other=0.0)
    own = tl.sum(queries.to(tl.float32) * own_keys.to(tl.float32), axis=1) * score_scale
    if has_bias:
        own += tl.load(table + last)
    own_values = tl.load(own_v + at, mask=mine, other=0.0).to(tl.float32)
    gathered = (_silu(own) * weight_scale)[:, None] * own_values
    current = tl.min(left, axis=0)
    # Candidates of one request stand side by side: one or two turns for a block of them.
    while current < nobody:
        chosen = left == current
        count = tl.minimum(tl.load(lengths + current), max_length).to(tl.int32)
        first = tl.load(ends + current) - count
        num_tokens = num_context + count
        shift = max_length - count if align_right else 0
        base = nobody * num_context + first
        part = tl.zeros((block_m, block_k), tl.float32)
        for begin in range(0, num_tokens, block_n):
            other = begin + tl.arange(0, block_n)
            other_row = tl.where(
                other < num_context, current * num_context + other, base + other - num_context
            )
            there = other_row[:, None] * row_width + head * head_width + column[None, :]
            exists = (other < num_tokens)[:, None] & width[None, :]
            keys = tl.load(k + there, mask=exists, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * score_scale
            if has_bias:
                position = tl.where(other < num_context, other, other + shift)
                scores += tl.load(table + position, mask=other < num_tokens, other=0.0)[None, :]
            weights = tl.where((other < num_tokens)[None, :], _silu(scores) * weight_scale, 0.0)
            values = tl.load(v + there, mask=exists, other=0.0)
            part = tl.dot(weights.to(values.dtype), values, part, input_precision=precision)
        gathered = tl.where(chosen[:, None], gathered + part, gathered)
        left = tl.where(chosen, nobody, left)
        current = tl.min(left, axis=0)
    tl.store(out + at, gathered.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _ragged_sum_kernel(
    weights, rows, ends, lengths, out, dim, max_length, block_n: tl.constexpr, block_d: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block_d + tl.arange(0, block_d)
    end = tl.load(ends + request)
    first = end - tl.minimum(tl.load(lengths + request), max_length)
    total = tl.zeros((block_d,), tl.float32)
    for begin in range(first, end, block_n):
        at = begin + tl.arange(0, block_n)
        inside = (at < end)[:, None] & (column < dim)[None, :]
        values = tl.load(rows + at[:, None] * dim + column[None, :], mask=inside, other=0.0)
        weight = tl.load(weights + at, mask=at < end, other=0.0)
        # A weight that is NaN must not reach the places of columns that are not there.
        total += tl.sum(tl.where(inside, values * weight[:, None], 0.0), axis=0)
    tl.store(out + request * dim + column, total, mask=column < dim)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    bias: Tensor | None,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool,
    causal: bool,
    score_scale: float,
    weight_scale: float,
    *,
    blocks: AttentionBlocks = AttentionBlocks(),
) -> Tensor:
    """Compute `rankopt::hstu_attention`; q, k and v may be fp32, fp16 or bf16, sums are fp32."""
    q, k, v, lengths = (each.contiguous() for each in (q, k, v, lengths))
    out = torch.zeros_like(q)
    num_lists, head_width = lengths.shape[0], q.shape[1] // num_heads
    launch(
        _hstu_kernel,
        (num_lists, divide_up(num_context + max_length, blocks.queries), num_heads),
        q=q,
        k=k,
        v=v,
        ends=lengths.cumsum(0),
        lengths=lengths,
        bias=q if bias is None else bias.contiguous(),
        out=out,
        num_lists=num_lists,
        row_width=q.shape[1],
        score_scale=score_scale,
        weight_scale=weight_scale,
        num_context=num_context,
        max_length=max_length,
        head_width=head_width,
        has_bias=bias is not None,
        align_right=align_right,
        causal=causal,
        block_m=blocks.queries,
        block_n=blocks.keys,
        block_k=tile(head_width),
        precision=dot_precision(q.dtype, blocks.allow_tf32),
        num_warps=blocks.num_warps,
    )
    return out


def hstu_candidate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    lengths: Tensor,
    request_index: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool,
    score_scale: float,
    weight_scale: float,
    *,
    blocks: AttentionBlocks = AttentionBlocks(),
) -> Tensor:
    """Compute `rankopt::hstu_candidate_attention`; inputs may be fp32, fp16 or bf16."""
    q, k, v, own_k, own_v, lengths = (
        each.contiguous() for each in (q, k, v, own_k, own_v, lengths)
    )
    out = torch.empty_like(q)
    head_width = q.shape[1] // num_heads
    # Without an index every candidate has a list of its own: small blocks waste fewer products.
    queries = blocks.queries if request_index is not None else 16
    launch(
        _candidate_kernel,
        (divide_up(q.shape[0], queries), num_heads),
        q=q,
        k=k,
        v=v,
        own_k=own_k,
        own_v=own_v,
        ends=lengths.cumsum(0),
        lengths=lengths,
        index=lengths if request_index is None else request_index.contiguous(),
        bias=q if bias is None else bias.contiguous(),
        out=out,
        num_rows=q.shape[0],
        num_lists=lengths.shape[0],
        row_width=q.shape[1],
        score_scale=score_scale,
        weight_scale=weight_scale,
        num_context=num_context,
        max_length=max_length,
        head_width=head_width,
        has_index=request_index is not None,
        has_bias=bias is not None,
        align_right=align_right,
        block_m=queries,
        block_n=blocks.keys,
        block_k=tile(head_width),
        precision=dot_precision(q.dtype, blocks.allow_tf32),
        num_warps=blocks.num_warps,
    )
    return out


def ragged_rows(lengths: Tensor, values: Tensor) -> Tensor:
    """Compute `rankopt::ragged_rows`."""
    places = torch.arange(values.shape[0], device=lengths.device)
    return torch.searchsorted(lengths.cumsum(0), places, right=True)


def ragged_sum(weights: Tensor, rows: Tensor, lengths: Tensor, max_length: int) -> Tensor:
    """Compute `rankopt::ragged_sum`."""
    weights, rows, lengths = weights.contiguous(), rows.contiguous(), lengths.contiguous()
    dim = rows.shape[1]
    block_d = min(tile(dim), 128)
    out = rows.new_empty((lengths.shape[0], dim))
    launch(
        _ragged_sum_kernel,
        (lengths.shape[0], divide_up(dim, block_d)),
        weights=weights,
        rows=rows,
        ends=lengths.cumsum(0),
        lengths=lengths,
        out=out,
        dim=dim,
        max_length=max_length,
        block_n=16,
        block_d=block_d,
    )
    return out
