"""Look rows of many tables up in one call: what to read is a plan, a small int64 matrix.

Shapes: T lookups of a plan, B rows of the result, L ids of a list input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from rankopt.kernels.build import load_kernels
from rankopt.tables import TYPE_CODES, TableDtype, row_bytes, unpack_rows

SUM, MEAN, COPY = 0, 1, 2
"""Modes of a plan's row; the rows of one id are their own sum and mean."""
DTYPES: dict[int, TableDtype] = {code: dtype for dtype, code in TYPE_CODES.items()}
ID_BYTES = {torch.int64: 8, torch.int32: 4, torch.float32: 4}


@dataclass(frozen=True)
class PlanRow:
    """One lookup of a call, or a piece that is copied into the result beside them.

    Attributes:
        mode: `SUM`, `MEAN` or `COPY`.
        offset: first byte of the table in the store.
        num_rows, dim, storage: of the table; its type as `tables.TYPE_CODES` has it.
        out: first column of the result.
        source: which input holds the ids; of a copied piece, the piece.
        column: first column of the ids in it; with `groups`, which feature's lists.
        length: ids per row; 0 where offsets say.
        offsets: which input holds the offsets of the lists, or their lengths; -1 without.
        weights: which input holds one weight per id; -1 without.
        groups: features whose lists lie in the ids one after the other; `offsets` then names their
            lengths [groups * B], feature after feature. 0 where it names offsets.
    """

    mode: int
    offset: int
    num_rows: int
    dim: int
    storage: int
    out: int
    source: int
    column: int = 0
    length: int = 1
    offsets: int = -1
    weights: int = -1
    groups: int = 0

    def columns(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the ids of a lookup that reads equally many for every row, [B, length]."""
        ids = inputs[self.source]
        matrix = ids.unsqueeze(1) if ids.dim() == 1 else ids
        return matrix[:, self.column : self.column + self.length]

    def ids(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the ids that its lists lie in, one list after the other, [L]."""
        ids = self.columns(inputs) if self.length else inputs[self.source]
        return ids.reshape(-1)

    def own(self, inputs: Sequence[Tensor]) -> slice:
        """Return which of its ids its lists hold; the others are of other features."""
        if not self.groups:
            return slice(0, self.ids(inputs).shape[0])
        counts = inputs[self.offsets].long().view(self.groups, -1).sum(1).tolist()
        begin = sum(counts[: self.column])
        return slice(begin, begin + counts[self.column])

    def begins(self, inputs: Sequence[Tensor], num_rows: int) -> Tensor:
        """Return where each list begins in its ids, [B]; [B + 1] where the last one's end is known.

        Else the last list ends with the ids. Nothing waits for a device.
        """
        if self.length:
            return torch.arange(num_rows + 1, device=inputs[self.source].device) * self.length
        given = inputs[self.offsets]
        if not self.groups:
            return given
        edges = torch.nn.functional.pad(given.to(torch.int64).cumsum(0), (1, 0))
        return edges[self.column * num_rows : (self.column + 1) * num_rows + 1]

    def edges(self, inputs: Sequence[Tensor], num_rows: int) -> Tensor:
        """Return where each list begins in its ids, and where the last one ends; int64 [B + 1]."""
        begins = self.begins(inputs, num_rows).long()
        if len(begins) > num_rows:
            return begins
        return torch.cat([begins, begins.new_tensor([len(self.ids(inputs))])])


FIELDS = {field.name: index for index, field in enumerate(fields(PlanRow))}
"""Column of each field in an encoded plan."""


def encode_plan(rows: Sequence[PlanRow]) -> Tensor:
    """Write a plan as the int64 [T, fields] matrix that the operators read."""
    return torch.tensor([astuple(row) for row in rows], dtype=torch.int64).view(-1, len(FIELDS))


def decode_plan(plan: Tensor) -> list[PlanRow]:
    """Read a plan back."""
    return [PlanRow(*row) for row in plan.tolist()]


def lookup_rows(
    store: Tensor, plan: Tensor, inputs: Sequence[Tensor], num_rows: int, width: int
) -> Tensor:
    """Look up and pool rows of any number of tables, side by side in one result.

    A row's result is the same bit for bit alone, anywhere in a batch, with any number of threads
    and on every instruction set. A sum adds its rows in the order of their ids.

    Args:
        store: bytes of the tables (`tables.pack_batch`).
        plan: from `encode_plan`; its lookups fill every column of the result once.
        inputs: id tensors (int64, int32, or whole numbers in float32), [B], [B, C] or [L]; offsets
            [B] or [B + 1], or lengths [F * B]; weights [L]; float32 pieces [B, ...] that are
            copied.
        num_rows: B.
        width: columns of the result.

    Returns:
        float32 [B, width].

    Raises:
        RuntimeError: an id lies outside of its table, an input does not fit the plan, or lengths
            are negative or do not add up to the ids.
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.lookup_rows(store, plan, list(inputs), num_rows, width)
    return result


def lookup_sequences(store: Tensor, plan: Tensor, inputs: Sequence[Tensor], width: int) -> Tensor:
    """Look up one row per id, without pooling, for lookups of one width.

    Returns:
        float32 [N, width]: the rows of all ids of all inputs, one input after the other.
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.lookup_sequences(store, plan, list(inputs), width)
    return result


def lookup_rows_reference(
    store: Tensor,
    plan: Tensor,
    inputs: Sequence[Tensor],
    num_rows: int,
    width: int,
    *,
    sizes: bool = False,
) -> Tensor:
    """Compute `lookup_rows` in plain PyTorch, bit for bit.

    `sizes` adds up each row's largest absolute value instead, an upper bound of all sums.
    """
    result = torch.zeros(num_rows, width)
    for row in decode_plan(plan):
        span = result[:, row.out : row.out + row.dim]
        if row.mode == COPY:
            span.copy_(inputs[row.source].reshape(num_rows, row.dim))
            continue
        rows = _table(store, row)[row.ids(inputs).long()]
        rows = _largest(rows) if sizes else rows
        if row.weights >= 0:
            weights = inputs[row.weights].reshape(-1, 1)
            rows = (weights.abs() if sizes else weights) * rows
        edges = row.edges(inputs, num_rows)
        pooled = _sum_in_order(rows, edges)
        if row.mode == MEAN:
            pooled = pooled / edges.diff().clamp(min=1).unsqueeze(1)
        span.copy_(pooled)
    return result


def lookup_sequences_reference(
    store: Tensor, plan: Tensor, inputs: Sequence[Tensor], width: int, *, sizes: bool = False
) -> Tensor:
    """Compute `lookup_sequences` in plain PyTorch, bit for bit; `sizes` as above."""
    parts = [
        _table(store, row)[ids.reshape(-1).long()]
        for row, ids in zip(decode_plan(plan), inputs, strict=True)
    ]
    found = torch.cat([*parts, torch.zeros(0, width)])
    return _largest(found) if sizes else found


def _largest(rows: Tensor) -> Tensor:
    if not rows.numel():
        return rows
    finite = rows.nan_to_num(0.0, 0.0, 0.0)
    return finite.abs().amax(dim=1, keepdim=True).expand_as(rows)


def _table(store: Tensor, row: PlanRow) -> Tensor:
    dtype = DTYPES[row.storage]
    size = row_bytes(row.dim, dtype)
    packed = store[row.offset : row.offset + row.num_rows * size].view(row.num_rows, size)
    return unpack_rows(packed, row.dim, dtype)


def _sum_in_order(rows: Tensor, edges: Tensor) -> Tensor:
    starts, lengths = edges[:-1], edges.diff()
    pooled = torch.zeros(len(starts), rows.shape[1])
    for place in range(int(lengths.max()) if len(lengths) else 0):
        bags = (lengths > place).nonzero().squeeze(1)
        values = rows[starts[bags] + place]
        pooled[bags] = values if place == 0 else pooled[bags] + values
    return pooled


@dataclass(frozen=True)
class LookupTraffic:
    """Bytes that one call must move at least, every row counted as often as it is asked for.

    Attributes:
        row_bytes: read from the tables.
        id_bytes: read from ids, offsets and weights.
        result_bytes: written, and read where a piece is copied.
    """

    row_bytes: int
    id_bytes: int
    result_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.row_bytes + self.id_bytes + self.result_bytes


def lookup_traffic(plan: Tensor, inputs: Sequence[Tensor], num_rows: int) -> LookupTraffic:
    """Count the bytes that `lookup_rows` moves; of sequences, give each input's ids as lists."""
    from_tables = from_ids = result = 0
    for row in decode_plan(plan):
        result += 4 * num_rows * row.dim
        if row.mode == COPY:
            result += 4 * num_rows * row.dim
            continue
        own = row.own(inputs)
        count = own.stop - own.start
        from_tables += count * row_bytes(row.dim, DTYPES[row.storage])
        from_ids += count * (ID_BYTES[inputs[row.source].dtype] + 4 * (row.weights >= 0))
        from_ids += 8 * num_rows * (row.offsets >= 0)
    return LookupTraffic(from_tables, from_ids, result)
