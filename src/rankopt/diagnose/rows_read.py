"""Which rows of which tables a lookup reads: what its speed can be held against.

Shapes: T tables, B bags of each, R rows read in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankopt.diagnose.costs import plain_name
from rankopt.diagnose.profile import Notes, Site
from rankopt.kernels.lookup import COPY, DTYPES, decode_plan
from rankopt.tables import row_bytes


@dataclass(frozen=True)
class RowsRead:
    """Rows as places in one block of memory.

    Attributes:
        storage: the block, as bytes.
        offsets: first byte of each row, in the order in which it is read.
        row_bytes: bytes of each row.
    """

    storage: Tensor
    offsets: Tensor
    row_bytes: Tensor

    @property
    def num_bytes(self) -> int:
        return int(self.row_bytes.sum())

    def seconds(self) -> float:
        """Read these rows once with all threads and do nothing else."""
        return float(torch.ops.rankopt.peak_gather(self.storage, self.offsets, self.row_bytes))


def rows_read(site: Site, notes: Notes) -> RowsRead | None:
    """Return what a lookup reads; None where this operator's arguments are not known here."""
    reader = READERS.get(plain_name(site))
    if reader is None or site.generated:
        return None
    return reader(notes.arguments)


def _table_batched(given: Sequence[Tensor]) -> RowsRead | None:
    """Read a call of fbgemm: weights, unused, placements, starts, types, dims, ids, offsets."""
    if len(given) < 8:
        return None
    storage, _, _, starts_T, types_T, dims_T, ids_R, offsets = given[:8]
    num_tables = starts_T.numel()
    num_bags = (offsets.numel() - 1) // num_tables
    edges = offsets[:: max(num_bags, 1)][: num_tables + 1].tolist()
    places, sizes = [], []
    for table in range(num_tables):
        dim = int(dims_T[table + 1] - dims_T[table])
        size = row_bytes(dim, DTYPES[int(types_T[table])])
        ids = ids_R[int(edges[table]) : int(edges[table + 1])].long()
        places.append(int(starts_T[table]) + ids * size)
        sizes.append(torch.full_like(ids, size))
    return RowsRead(storage.view(torch.uint8), torch.cat(places), torch.cat(sizes))


def _embedding(given: Sequence[Tensor]) -> RowsRead | None:
    """Read a call of torch: a table and ids; bags' offsets and weights may follow."""
    table, ids = given[0], given[1].reshape(-1).long()
    if not table.is_contiguous() or table.dim() != 2:
        return None
    size = table.shape[1] * table.element_size()
    storage = table.detach().reshape(-1).view(torch.uint8)
    return RowsRead(storage, ids * size, torch.full_like(ids, size))


def _planned(given: Sequence[Tensor]) -> RowsRead | None:
    """Read a call of `lookup_rows`: bytes of all tables, the plan, then the ids."""
    return _by_plan(given, whole=False)


def _planned_sequences(given: Sequence[Tensor]) -> RowsRead | None:
    """Read a call of `lookup_sequences`, which reads every id of an input."""
    return _by_plan(given, whole=True)


def _by_plan(given: Sequence[Tensor], *, whole: bool) -> RowsRead | None:
    storage, plan, inputs = given[0], given[1], given[2:]
    places, sizes = [], []
    for row in decode_plan(plan):
        if row.mode == COPY:
            continue
        if inputs[row.source].is_meta:  # ids in a packed matrix of floats, which is not kept
            return None
        ids = inputs[row.source] if whole else row.ids(inputs)[row.own(inputs)]
        ids = ids.reshape(-1).long()
        ids = ids[(ids >= 0) & (ids < row.num_rows)]
        size = row_bytes(row.dim, DTYPES[row.storage])
        places.append(row.offset + ids * size)
        sizes.append(torch.full_like(ids, size))
    if not places:
        return None
    return RowsRead(storage.view(torch.uint8), torch.cat(places), torch.cat(sizes))


READERS: dict[str, Callable[[Sequence[Tensor]], RowsRead | None]] = {
    "int_nbit_split_embedding_codegen_lookup_function": _table_batched,
    "lookup_rows": _planned,
    "lookup_sequences": _planned_sequences,
    "embedding": _embedding,
    "embedding_bag": _embedding,
    "_embedding_bag": _embedding,
    "_embedding_bag_forward_only": _embedding,
}
"""Operator -> how its tensors say what is read. Another lookup is one line here."""
