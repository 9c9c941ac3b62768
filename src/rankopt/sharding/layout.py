"""Which rank gets which rows and columns of each tensor of a checkpoint."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rankopt.errors import Problem, UsageError, nearest
from rankopt.sharding.schema import ShardPlan, TablePlan
from rankopt.sharding.stored import Key, StoredCheckpoint, StoredTensor
from rankopt.units import BYTES_PER_MIB

_TORCHREC_TABLE = re.compile(r"(^|\.)(embedding_bags|embeddings)\.[^.]+\.weight$")
_LARGE_BYTES = BYTES_PER_MIB
"""A matrix of this size is cut by rows, whatever it is; smaller ones stay whole."""


@dataclass(frozen=True)
class Cut:
    """The rectangle of a tensor that one rank keeps."""

    rank: int
    row_offset: int
    num_rows: int
    column_offset: int
    num_columns: int


class RowSource(Protocol):
    """What rows of a target are read from."""

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` as [rows, columns]."""
        ...


@dataclass(frozen=True)
class TargetTensor:
    """One tensor of the checkpoint that is written."""

    key: str
    path: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[Cut, ...]
    rows: RowSource
    stored: tuple[StoredTensor, ...]
    """What it is made of; alone and with the same shape where it is copied."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_columns(self) -> int:
        return torch.Size(self.shape[1:]).numel()

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.num_columns * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The whole of it, and what had to be assumed."""

    tensors: tuple[TargetTensor, ...]
    notes: list[str]


def lay_out(checkpoint: StoredCheckpoint, world_size: int, plan: ShardPlan | None) -> Layout:
    """Decide where everything goes.

    Args:
        checkpoint: what is resharded.
        world_size: over how many ranks.
        plan: placements by table; None: each table in even blocks of rows.

    Raises:
        UsageError: the plan is of another world size or of another model.
    """
    model = model_tensors(checkpoint.tensors)
    if plan is None:
        cuts = {
            name: _even(tensor, world_size)
            for name, tensor in model.items()
            if is_table(name, tensor)
        }
    else:
        cuts = planned_cuts(plan, model, world_size)
    work = _Work(model, cuts, [0] * world_size)
    for tensor in checkpoint.tensors.values():
        name = state_owner(tensor.path, model)
        if tensor.path[-1] in cuts and model.get(str(tensor.path[-1])) is tensor:
            work.add(tensor, cuts[str(tensor.path[-1])])
        elif name in cuts:
            work.add_state(tensor, model[name], cuts[name])
        else:
            work.later.append(tensor)
    work.add_rest()
    order = {key: number for number, key in enumerate(checkpoint.tensors)}
    tensors = sorted(work.done, key=lambda tensor: order[tensor.key])
    return Layout(tuple(tensors), work.notes)


def model_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Pick the weights, by their names in the module; the rest is optimizer state and the like."""
    plain = [tensor for tensor in tensors.values() if len(tensor.path) == 1]
    nested = [tensor for tensor in tensors.values() if len(tensor.path) == 2]
    groups = {tensor.path[0] for tensor in nested}
    if not plain and ("model" in groups or len(groups) == 1):
        group = "model" if "model" in groups else groups.pop()
        plain = [tensor for tensor in nested if tensor.path[0] == group]
    return {str(tensor.path[-1]): tensor for tensor in plain}


def is_table(name: str, tensor: StoredTensor) -> bool:
    """Tell what is cut by rows without a plan."""
    large = tensor.size_bytes >= _LARGE_BYTES
    return len(tensor.shape) == 2 and (large or _TORCHREC_TABLE.search(name) is not None)


def state_owner(path: Key, model: Mapping[str, StoredTensor]) -> str:
    """Name the weight that a tensor is the optimizer's state of; empty for any other tensor."""
    if len(path) < 3 or path[-3] != "state":
        return ""
    # torchrec's CombinedOptimizer puts a name of its own before the weight's.
    name = str(path[-2])
    return next((n for n in (name, name.partition(".")[2]) if n in model), "")


def column_offsets(cuts: Iterable[Cut]) -> tuple[int, ...]:
    """List where columns begin; one entry where rows are whole."""
    return tuple(sorted({cut.column_offset for cut in cuts if cut.num_rows}))


def _even(tensor: StoredTensor, world_size: int) -> tuple[Cut, ...]:
    """Cut as torchrec does row-wise: blocks of ceil(rows / ranks), the last ones shorter."""
    block = max(1, -(-tensor.num_rows // world_size))
    starts = range(0, max(1, tensor.num_rows), block)
    return tuple(
        Cut(rank, start, min(block, tensor.num_rows - start), 0, tensor.num_columns)
        for rank, start in enumerate(starts)
    )


def planned_cuts(
    plan: ShardPlan, model: Mapping[str, StoredTensor], world_size: int
) -> dict[str, tuple[Cut, ...]]:
    """Cut each table as a plan says; tables that every rank holds are left out.

    Raises:
        UsageError: the plan is of another world size or of another model.
    """
    problems = []
    if not plan.fits:
        problems.append(Problem("--plan", "is of a plan that does not fit", plan.reason))
    if plan.world_size != world_size:
        problems.append(
            Problem("--world-size", f"must be {plan.world_size}, as the plan has", world_size)
        )
    cuts: dict[str, tuple[Cut, ...]] = {}
    for table in plan.tables:
        names = _names(table)
        name = next((name for name in names if name in model), None)
        if name is None:
            hint = nearest(names[0], model)
            problems.append(Problem(f"--plan: {table.name}", "is not in the checkpoint", hint=hint))
        elif model[name].shape != (table.num_rows, table.dim):
            what = f"has {table.num_rows:,} x {table.dim} values in the plan"
            problems.append(Problem(f"--plan: {table.name}", what, model[name].shape))
        elif table.sharding_type != "data_parallel":
            cuts[name] = tuple(
                Cut(part.rank, part.row_offset, part.num_rows, part.column_offset, part.num_columns)
                for part in table.shards
            )
    if problems:
        raise UsageError(problems=problems)
    return cuts


def _names(table: TablePlan) -> list[str]:
    """List what a table's weight may be called in a state dict."""
    prefix = f"{table.path}." if table.path else ""
    if table.key is None:
        return [f"{prefix}weight", table.path]
    return [f"{prefix}{holder}.{table.key}.weight" for holder in ("embedding_bags", "embeddings")]


@dataclass(frozen=True)
class _Merged:
    """Row-wise state of a table that was cut by columns: the mean over its columns.

    The state of a row is the mean of its squared gradients over the columns of one part, so that
    of the whole row is the mean of the parts', each counted by its width: exact in fp64 where the
    parts are equal.
    """

    stored: StoredTensor
    num_rows: int
    widths: tuple[int, ...]

    def read_rows(self, start: int, stop: int) -> Tensor:
        total = torch.zeros(stop - start, 1, dtype=torch.float64)
        for index, width in enumerate(self.widths):
            first = index * self.num_rows
            total += self.stored.read_rows(first + start, first + stop).double() * width
        return (total / sum(self.widths)).to(self.stored.dtype)


@dataclass(frozen=True)
class _Repeated:
    """Rows that are read over and over: state of a row for each part of its columns."""

    rows: RowSource
    num_rows: int

    def read_rows(self, start: int, stop: int) -> Tensor:
        parts = []
        while start < stop:
            first = start % self.num_rows
            last = min(self.num_rows, first + stop - start)
            parts.append(self.rows.read_rows(first, last))
            start += last - first
        return torch.cat(parts)


class _Work:
    """Collects the targets; `filled` is what each rank holds so far."""

    def __init__(
        self,
        model: Mapping[str, StoredTensor],
        cuts: Mapping[str, Sequence[Cut]],
        filled: list[int],
    ) -> None:
        self.done: list[TargetTensor] = []
        self.later: list[StoredTensor] = []
        self.notes: list[str] = []
        self._model, self._cuts, self._filled = model, cuts, filled

    def add(self, tensor: StoredTensor, cuts: Sequence[Cut]) -> None:
        """Copy a tensor as it is."""
        self._put(tensor, tensor.shape, tensor, cuts)

    def add_state(self, tensor: StoredTensor, table: StoredTensor, cuts: Sequence[Cut]) -> None:
        """Copy the optimizer's state of a table, in the form that its cuts ask for."""
        before = sorted({piece.column_offset for piece in table.pieces})
        if tensor.shape == table.shape:
            self.add(tensor, cuts)
        elif tensor.shape in {(table.num_rows,), (table.num_rows * len(before),)}:
            self._add_row_state(tensor, table, before, cuts)
        elif len(tensor.shape) == 1 and tensor.shape[0] == len(table.pieces):
            # One number for each part, such as a count of steps; it is the same in all.
            single = tuple(Cut(cut.rank, i, 1, 0, 1) for i, cut in enumerate(cuts))
            self._put(tensor, (len(cuts),), _Repeated(tensor, 1), single)
        else:
            self.later.append(tensor)

    def _add_row_state(
        self, tensor: StoredTensor, table: StoredTensor, before: list[int], cuts: Sequence[Cut]
    ) -> None:
        rows: RowSource = tensor
        after = column_offsets(cuts)
        split = tensor.num_rows != table.num_rows
        kept = split and after == tuple(before)
        if split and not kept:
            edges = [*before, table.num_columns]
            widths = tuple(b - a for a, b in itertools.pairwise(edges))
            rows = _Merged(tensor, table.num_rows, widths)
            self.notes.append(
                f"{tensor.key}: one value a row and part of the columns; their mean was taken"
            )
        if len(after) > 1 and not kept:
            rows = _Repeated(rows, table.num_rows)
            self.notes.append(
                f"{tensor.key}: one value a row, which each of the {len(after)} parts of the "
                "columns is given"
            )
        placed = [
            Cut(
                cut.rank,
                after.index(cut.column_offset) * table.num_rows + cut.row_offset,
                cut.num_rows,
                0,
                1,
            )
            for cut in cuts
            if cut.num_rows
        ]
        self._put(tensor, (table.num_rows * max(1, len(after)),), rows, placed)

    def add_rest(self) -> None:
        """Give what stays whole to the rank that holds the least, the largest first."""
        for tensor in sorted(self.later, key=lambda tensor: (-tensor.size_bytes, tensor.key)):
            rank = min(range(len(self._filled)), key=lambda rank: (self._filled[rank], rank))
            self.add(tensor, [Cut(rank, 0, tensor.num_rows, 0, tensor.num_columns)])

    def _put(
        self,
        tensor: StoredTensor,
        shape: tuple[int, ...],
        rows: RowSource,
        cuts: Sequence[Cut],
    ) -> None:
        kept = [cut for cut in cuts if cut.num_rows and cut.num_columns] or list(cuts[:1])
        for cut in kept:
            self._filled[cut.rank] += cut.num_rows * cut.num_columns * tensor.dtype.itemsize
        self.done.append(
            TargetTensor(tensor.key, tensor.path, shape, tensor.dtype, tuple(kept), rows, (tensor,))
        )
