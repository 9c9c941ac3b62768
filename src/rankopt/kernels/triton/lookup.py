"""Rows of many tables on a GPU, unpacked while they are pooled.

Tables that are read by a fixed number of ids per row share one launch for each storage type; each
ragged or weighted lookup has its own. An id outside of its table gives NaN: a kernel cannot raise.

Shapes: T lookups of a plan, B rows of the result, L ids of a list input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankopt.kernels.lookup import COPY, DTYPES, FIELDS, MEAN, PlanRow, decode_plan, encode_plan
from rankopt.kernels.triton.launch import divide_up, launch, tile
from rankopt.tables import row_bytes


@dataclass(frozen=True)
class LookupBlocks:
    """How the work is cut.

    Attributes:
        values: numbers that one program holds: rows of the result times their width.
        ids: ids of a list that are read together.
        num_warps: of a program.
    """

    values: int = 1024
    ids: int = 8
    num_warps: int = 4


@triton.jit
def _half(at, mask):
    """Read fp16 from two bytes that need not be aligned."""
    low = tl.load(at, mask=mask, other=0).to(tl.uint16)
    high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rows(table, ids, valid, num_rows, size, dim, storage: tl.constexpr, block_d: tl.constexpr):
    """Read the rows of `ids` as fp32 [ids, block_d]; NaN for an id that is not there."""
    place = tl.arange(0, block_d)[None, :]
    there = valid & (ids >= 0) & (ids < num_rows)
    row = table + tl.where(there, ids, 0) * size
    inside = there[:, None] & (place < dim)
    if storage == 0:
        values = tl.load(
            row[:, None].to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0
        )
    elif storage == 1:
        halves = row[:, None].to(tl.pointer_type(tl.float16)) + place
        values = tl.load(halves, mask=inside, other=0.0).to(tl.float32)
    else:
        # int8, int4, int2: 1, 2 or 4 values a byte, the low bits first.
        per_byte: tl.constexpr = 1 if storage == 2 else (2 if storage == 3 else 4)
        bits: tl.constexpr = 8 // per_byte
        scale, bias = _half(row, there), _half(row + 2, there)
        byte = tl.load(row[:, None] + 4 + place // per_byte, mask=inside, other=0).to(tl.int32)
        level = (byte >> (place % per_byte) * bits) & ((1 << bits) - 1)
        values = level.to(tl.float32) * scale[:, None] + bias[:, None]
    values = tl.where((valid & (there == 0))[:, None], float("nan"), values)
    return tl.where(place < dim, values, 0.0)


@triton.jit
def _as_ids(values):
    """Turn ids of any type into int64; what is no whole number from 0 on becomes -1."""
    if values.dtype == tl.float32:
        usable = (values > -1.0) & (values < 9.0e18)
        result = tl.where(usable, tl.where(usable, values, 0.0).to(tl.int64), -1)
    else:
        result = values.to(tl.int64)
    return result


@triton.jit
def _fixed_kernel(
    store,
    plan,
    ids,
    out,
    num_rows,
    ids_width,
    out_width,
    first_lookup,
    num_fields: tl.constexpr,
    storage: tl.constexpr,
    block_b: tl.constexpr,
    block_d: tl.constexpr,
):
    fields = plan + (first_lookup + tl.program_id(1)) * num_fields
    mode = tl.load(fields)
    table = store + tl.load(fields + 1)
    table_rows = tl.load(fields + 2)
    dim = tl.load(fields + 3)
    to = tl.load(fields + 5)
    column = tl.load(fields + 7)
    length = tl.load(fields + 8)
    if storage == 0:
        size = dim * 4
    elif storage == 1:
        size = dim * 2
    else:
        per_byte: tl.constexpr = 1 if storage == 2 else (2 if storage == 3 else 4)
        size = (dim + per_byte - 1) // per_byte + 4
    row = tl.program_id(0).to(tl.int64) * block_b + tl.arange(0, block_b)
    valid = row < num_rows
    total = tl.zeros((block_b, block_d), tl.float32)
    for step in range(0, length):
        chosen = _as_ids(tl.load(ids + row * ids_width + column + step, mask=valid, other=0))
        total += _rows(table, chosen, valid, table_rows, size, dim, storage, block_d)
    if mode == 1:
        total = total / tl.maximum(length, 1).to(tl.float32)
    place = tl.arange(0, block_d)[None, :]
    inside = valid[:, None] & (place < dim)
    tl.store(out + row[:, None] * out_width + to + place, total, mask=inside)


@triton.jit
def _list_kernel(
    store,
    ids,
    offsets,
    weights,
    out,
    num_ids,
    num_offsets,
    out_width,
    table_offset,
    table_rows,
    size,
    dim,
    to,
    length,
    has_offsets: tl.constexpr,
    has_weights: tl.constexpr,
    is_mean: tl.constexpr,
    storage: tl.constexpr,
    block_l: tl.constexpr,
    block_d: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if has_offsets:
        begin = tl.load(offsets + row).to(tl.int64)
        end = tl.load(offsets + row + 1, mask=row + 1 < num_offsets, other=num_ids).to(tl.int64)
    else:
        begin = row * length
        end = begin + length
    begin = tl.maximum(begin, 0)
    end = tl.minimum(end, num_ids)
    total = tl.zeros((block_d,), tl.float32)
    for first in range(begin, end, block_l):
        at = first + tl.arange(0, block_l)
        valid = at < end
        chosen = _as_ids(tl.load(ids + at, mask=valid, other=0))
        values = _rows(store + table_offset, chosen, valid, table_rows, size, dim, storage, block_d)
        if has_weights:
            weight = tl.load(weights + at, mask=valid, other=0.0)
            values = values * weight[:, None]
        # What lies past the list's end was read as zeros times a bias, or not at all.
        total += tl.sum(tl.where(valid[:, None], values, 0.0), axis=0)
    if is_mean:
        total = total / tl.maximum(end - begin, 1).to(tl.float32)
    place = tl.arange(0, block_d)
    tl.store(out + row * out_width + to + place, total, mask=place < dim)


@triton.jit
def _copy_kernel(piece, out, out_width, to, dim, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    values = tl.load(piece + row * dim + place, mask=place < dim)
    tl.store(out + row * out_width + to + place, values, mask=place < dim)


@triton.jit
def _sequence_kernel(
    store,
    ids,
    out,
    num_ids,
    table_offset,
    table_rows,
    size,
    dim,
    storage: tl.constexpr,
    block_b: tl.constexpr,
    block_d: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block_b + tl.arange(0, block_b)
    valid = at < num_ids
    chosen = _as_ids(tl.load(ids + at, mask=valid, other=0))
    values = _rows(store + table_offset, chosen, valid, table_rows, size, dim, storage, block_d)
    place = tl.arange(0, block_d)[None, :]
    tl.store(out + at[:, None] * dim + place, values, mask=valid[:, None] & (place < dim))


def planned(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Order a plan for `lookup_planned`: lookups that share a launch stand side by side.

    Of those, `column` becomes the first of their columns in the matrix that holds all their ids.
    """
    ordered = sorted(rows, key=_launch_key)
    result: list[PlanRow] = []
    for key, group in groupby(ordered, key=_launch_key):
        column = 0
        for row in group:
            if key[0] == _FIXED:
                row = replace(row, weights=row.column, column=column)
                column += row.length
            result.append(row)
    return result


_FIXED, _LIST, _COPIED = 0, 1, 2


def _launch_key(row: PlanRow) -> tuple[int, int, int]:
    if row.mode == COPY:
        return (_COPIED, 0, 0)
    if row.length and row.weights < 0:
        return (_FIXED, row.storage, tile(row.dim))
    return (_LIST, row.storage, 0)


def lookup_planned(
    store: Tensor,
    plan: Tensor,
    host_plan: Sequence[int],
    inputs: Sequence[Tensor],
    num_rows: int,
    width: int,
    *,
    blocks: LookupBlocks = LookupBlocks(),
) -> Tensor:
    """Look up and pool by a plan that `planned` ordered, given on the device and as numbers.

    The numbers decide what is launched, so that nothing waits for the device.

    Shapes: plan int64 [T, fields]; host_plan the same T * fields numbers; returns [B, width].
    """
    step = len(FIELDS)
    rows = [PlanRow(*host_plan[start : start + step]) for start in range(0, len(host_plan), step)]
    out = torch.empty((num_rows, width), dtype=torch.float32, device=store.device)
    first = 0
    for key, group in groupby(rows, key=_planned_key):
        members = list(group)
        if key[0] == _FIXED:
            _launch_fixed(store, plan, members, inputs, out, num_rows, width, first, key, blocks)
        for row in members:
            if key[0] == _LIST:
                _launch_list(store, row, inputs, out, num_rows, width, blocks)
            elif key[0] == _COPIED:
                _launch_copy(row, inputs, out, num_rows, width)
        first += len(members)
    return out


def _planned_key(row: PlanRow) -> tuple[int, int, int]:
    # `planned` keeps a fixed lookup's own column in `weights`, which such a lookup has none of.
    if row.mode != COPY and row.length and row.offsets < 0 and row.weights >= 0:
        return (_FIXED, row.storage, tile(row.dim))
    return _launch_key(row)


def _launch_fixed(
    store: Tensor,
    plan: Tensor,
    members: Sequence[PlanRow],
    inputs: Sequence[Tensor],
    out: Tensor,
    num_rows: int,
    width: int,
    first: int,
    key: tuple[int, int, int],
    blocks: LookupBlocks,
) -> None:
    alike = len({inputs[row.source].dtype for row in members}) == 1
    pieces = []
    for row in members:
        ids = replace(row, column=row.weights).columns(inputs)
        pieces.append(ids if alike else _whole(ids))
    matrix = torch.cat(pieces, dim=1).contiguous()
    block_d = key[2]
    block_b = max(1, blocks.values // block_d)
    launch(
        _fixed_kernel,
        (divide_up(num_rows, block_b), len(members)),
        store=store,
        plan=plan,
        ids=matrix,
        out=out,
        num_rows=num_rows,
        ids_width=matrix.shape[1],
        out_width=width,
        first_lookup=first,
        num_fields=len(FIELDS),
        storage=key[1],
        block_b=block_b,
        block_d=block_d,
        num_warps=blocks.num_warps,
    )


def _whole(ids: Tensor) -> Tensor:
    if not ids.is_floating_point():
        return ids.to(torch.int64)
    usable = (ids > -1.0) & (ids < 9.0e18)
    return torch.where(usable, torch.where(usable, ids, 0.0).to(torch.int64), -1)


def _launch_list(
    store: Tensor,
    row: PlanRow,
    inputs: Sequence[Tensor],
    out: Tensor,
    num_rows: int,
    width: int,
    blocks: LookupBlocks,
) -> None:
    ids = row.ids(inputs).contiguous()
    offsets = row.begins(inputs, num_rows).contiguous() if row.length == 0 else ids
    launch(
        _list_kernel,
        (num_rows,),
        store=store,
        ids=ids,
        offsets=offsets,
        weights=inputs[row.weights].reshape(-1).contiguous() if row.weights >= 0 else out,
        out=out,
        num_ids=ids.shape[0],
        num_offsets=offsets.shape[0],
        out_width=width,
        table_offset=row.offset,
        table_rows=row.num_rows,
        size=row_bytes(row.dim, DTYPES[row.storage]),
        dim=row.dim,
        to=row.out,
        length=row.length,
        has_offsets=row.length == 0,
        has_weights=row.weights >= 0,
        is_mean=row.mode == MEAN,
        storage=row.storage,
        block_l=blocks.ids,
        block_d=tile(row.dim),
        num_warps=blocks.num_warps,
    )


def _launch_copy(
    row: PlanRow, inputs: Sequence[Tensor], out: Tensor, num_rows: int, width: int
) -> None:
    block = min(tile(row.dim), 256)
    launch(
        _copy_kernel,
        (num_rows, divide_up(row.dim, block)),
        piece=inputs[row.source].reshape(num_rows, row.dim).contiguous(),
        out=out,
        out_width=width,
        to=row.out,
        dim=row.dim,
        block=block,
    )


def lookup_rows(
    store: Tensor,
    plan: Tensor,
    inputs: Sequence[Tensor],
    num_rows: int,
    width: int,
    *,
    blocks: LookupBlocks = LookupBlocks(),
) -> Tensor:
    """Compute `rankopt::lookup_rows`; reads the plan back from the device first."""
    encoded = encode_plan(planned(decode_plan(plan)))
    numbers = encoded.flatten().tolist()
    there = encoded.to(store.device)
    return lookup_planned(store, there, numbers, inputs, num_rows, width, blocks=blocks)


def lookup_sequences(
    store: Tensor,
    plan: Tensor,
    inputs: Sequence[Tensor],
    width: int,
    *,
    blocks: LookupBlocks = LookupBlocks(),
) -> Tensor:
    """Compute `rankopt::lookup_sequences`; reads the plan back from the device first."""
    return sequences_planned(store, plan.flatten().tolist(), inputs, width, blocks=blocks)


def sequences_planned(
    store: Tensor,
    host_plan: Sequence[int],
    inputs: Sequence[Tensor],
    width: int,
    *,
    blocks: LookupBlocks = LookupBlocks(),
) -> Tensor:
    """Look up one row per id by a plan given as numbers.

    Shapes: returns float32 [N, width], one input's ids after the other's.
    """
    step = len(FIELDS)
    parts: list[Any] = []
    for number, start in enumerate(range(0, len(host_plan), step)):
        row = PlanRow(*host_plan[start : start + step])
        ids = inputs[number].reshape(-1).contiguous()
        out = torch.empty((ids.shape[0], width), dtype=torch.float32, device=store.device)
        block_d = tile(row.dim)
        block_b = max(1, blocks.values // block_d)
        launch(
            _sequence_kernel,
            (divide_up(ids.shape[0], block_b),),
            store=store,
            ids=ids,
            out=out,
            num_ids=ids.shape[0],
            table_offset=row.offset,
            table_rows=row.num_rows,
            size=row_bytes(row.dim, DTYPES[row.storage]),
            dim=row.dim,
            storage=row.storage,
            block_b=block_b,
            block_d=block_d,
            num_warps=blocks.num_warps,
        )
        parts.append(out)
    if not parts:
        return torch.empty((0, width), dtype=torch.float32, device=store.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
