"""Embedding rows as a lookup call stores them.

A table batch is one flat byte array: tables one after the other, rows packed, so that one call
looks up all of them. The layout is fbgemm's (`split_table_batched_embeddings_ops_inference`): a
quantised row is a scale and a bias in fp16, then the packed values.

Shapes: N rows, D values of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

TableDtype = Literal["fp32", "fp16", "int8", "int4", "int2"]

TYPE_CODES: dict[TableDtype, int] = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3, "int2": 4}
"""fbgemm's `SparseType` as integers."""

BITS: dict[TableDtype, int] = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}
SCALE_BIAS_BYTES = 4
PACKING_UNIT_BITS = 16
"""fbgemm's row quantisation takes rows only in whole units of 2 packed bytes."""
FP16_MAX = 65504.0
MAX_ELEMENTS = 2**31 - 1
"""fbgemm's row quantisation indexes with 32 bits: a larger table is packed in row blocks."""


@dataclass(frozen=True)
class TableSlot:
    """One table inside a batch."""

    name: str
    num_rows: int
    dim: int
    dtype: TableDtype
    offset: int
    """First byte of the table in the batch."""

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.dim, self.dtype)

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class TableBatch:
    """The tables that the lookup calls of one store read, by name."""

    slots: tuple[TableSlot, ...]

    def slot(self, name: str) -> TableSlot:
        return next(slot for slot in self.slots if slot.name == name)


def row_bytes(dim: int, dtype: TableDtype) -> int:
    """Bytes of one packed row, scale and bias included."""
    payload = (dim * BITS[dtype] + 7) // 8
    return payload + (SCALE_BIAS_BYTES if dtype.startswith("int") else 0)


def refusal(dim: int, dtype: TableDtype) -> str | None:
    """Say why a table of width `dim` cannot or should not take `dtype`; None when it fits."""
    packed, plain = row_bytes(dim, dtype), row_bytes(dim, "fp32")
    if packed >= plain:
        return f"a packed {dtype} row takes {packed} bytes against {plain} in fp32 (D = {dim})"
    per_byte = max(1, 8 // BITS[dtype])
    if dim % per_byte:
        return f"{dtype} packs {per_byte} values a byte, and D = {dim} is no multiple of {per_byte}"
    return None


def range_refusal(weight: Tensor) -> str | None:
    """Say why no narrower type can hold the values of a table; None when one can."""
    if not weight.numel():
        return None
    # The smallest and the largest tell, NaN among them; no copy of a large table is made.
    low, high = (float(value) for value in weight.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return "its rows are not all finite"
    if max(-low, high) > FP16_MAX:
        return "a value exceeds fp16's range, in which a packed row keeps its scale and bias"
    return None


def pack_rows(weight: Tensor, dtype: TableDtype) -> Tensor:
    """Pack a float table.

    Shapes:
        weight: float [N, D].

    Returns:
        uint8 [N, row_bytes(D, dtype)].
    """
    weight = weight.detach().contiguous()
    if dtype == "fp32":
        return weight.float().view(torch.uint8)
    if dtype == "fp16":
        return weight.half().view(torch.uint8)
    rows_at_once = max(1, MAX_ELEMENTS // max(1, weight.shape[1]))
    blocks = [_quantise_block(block, BITS[dtype]) for block in torch.split(weight, rows_at_once)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _quantise_block(weight: Tensor, bits: int) -> Tensor:
    import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)

    dim = weight.shape[1]
    # Repeating the last value fills a row up to the converter's unit and leaves its range alone.
    filler = -dim % (PACKING_UNIT_BITS // bits)
    padded = torch.cat([weight, weight[:, -1:].expand(-1, filler)], dim=1) if filler else weight
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(padded.float(), bits)
    values = fused[:, : (dim * bits + 7) // 8]
    # fbgemm's converter writes scale and bias behind the values; its lookup reads them before.
    return torch.cat([fused[:, -SCALE_BIAS_BYTES:], values], dim=1)


def unpack_rows(packed: Tensor, dim: int, dtype: TableDtype) -> Tensor:
    """Read packed rows back as fp32 [N, dim]: what a lookup of that row returns."""
    if dtype == "fp32":
        return packed.contiguous().view(torch.float32)
    if dtype == "fp16":
        return packed.contiguous().view(torch.float16).float()
    head = scale_and_bias(packed).float()
    values = unpack_bits(packed[:, SCALE_BIAS_BYTES:], BITS[dtype])[:, :dim]
    return values.float() * head[:, :1] + head[:, 1:]


def scale_and_bias(packed: Tensor) -> Tensor:
    """Return the heads of packed rows, fp16 [N, 2]."""
    # Flattened first: a lone row counts as contiguous whatever its stride, and cannot be viewed.
    flat = packed[:, :SCALE_BIAS_BYTES].reshape(-1).clone()
    return flat.view(torch.float16).view(-1, 2)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Spread packed integers, low bits first: uint8 [..., P] becomes [..., P * 8 / bits]."""
    if bits == 8:
        return packed
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def pack_batch(
    names: Sequence[str], weights: Sequence[Tensor], dtypes: Sequence[TableDtype]
) -> tuple[TableBatch, Tensor]:
    """Lay tables out behind each other.

    Returns:
        The batch, and its bytes as a flat uint8 tensor.
    """
    slots, blocks, offset = [], [], 0
    for name, weight, dtype in zip(names, weights, dtypes, strict=True):
        slot = TableSlot(name, weight.shape[0], weight.shape[1], dtype, offset)
        slots.append(slot)
        blocks.append(pack_rows(weight, dtype).flatten())
        # The next table starts on a cache line, so that its rows straddle as few as they can.
        padding = -slot.size_bytes % 64
        if padding:
            blocks.append(torch.zeros(padding, dtype=torch.uint8))
        offset += slot.size_bytes + padding
    return TableBatch(tuple(slots)), torch.cat(blocks)


def table_weight(batch: TableBatch, storage: Tensor, name: str) -> Tensor:
    """Read one table of a batch back as fp32 [N, D]."""
    slot = batch.slot(name)
    packed = storage[slot.offset : slot.offset + slot.size_bytes].view(
        slot.num_rows, slot.row_bytes
    )
    return unpack_rows(packed, slot.dim, slot.dtype)
