"""Serve quantised tables that no single process holds.

torchrec shards quantised collections over the GPUs of one process; on CPUs it does so only by a
process-wide switch, table-wise, and copies no weights. So here is a loader of our own: each rank
reads its rows and columns of a checkpoint, whatever way that is cut, as int8, looks up what it
holds of the same rows, and the partial sums are added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor, PoolingType

from rankopt.errors import CheckpointError, DataError, Problem, UsageError
from rankopt.sharding.integrity import steps
from rankopt.sharding.layout import Cut, model_tensors, planned_cuts
from rankopt.sharding.opening import open_checkpoint
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.stored import StoredTensor

SCALE_BYTES = 8
"""fp32 scale and bias after the codes of a row."""


def serve_shards(
    module: nn.Module,
    checkpoint: str | Path,
    plan: ShardPlan,
    *,
    rank: int | None = None,
    process_group: Any = None,
) -> nn.Module:
    """Turn a model into this rank's share of it, its tables read as int8.

    Rows are quantised whole and then cut, so scores do not depend on the plan but for the order in
    which sums are added. Every rank scores the same rows, at the same time.

    Args:
        module: the model, whose torchrec bag collections may be on the meta device; changed.
        checkpoint: its weights: a folder of any number of shards, a `.pt` or a `.safetensors` file.
        plan: what each rank holds.
        rank: None: that of the process group, or 0 without one.
        process_group: over which sums are added up; None: the default one, if there is one.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
        UsageError: the plan is of another model, or of more ranks than there are.
    """
    together = distributed.is_available() and distributed.is_initialized()
    size = distributed.get_world_size(process_group) if together else 1
    if rank is None:
        rank = distributed.get_rank(process_group) if together else 0
    if plan.world_size != size:
        problem = Problem("plan", f"is of {plan.world_size} ranks", f"{size} processes")
        raise UsageError(problems=[problem])
    stored = open_checkpoint(Path(checkpoint))
    if stored.damage:
        raise stored.damage[0]
    model = model_tensors(stored.tensors)
    cuts = planned_cuts(plan, model, plan.world_size)
    seen: set[str] = set()
    for path, child in list(module.named_modules()):
        if isinstance(child, EmbeddingBagCollection):
            prefix = f"{path}.embedding_bags." if path else "embedding_bags."
            tables = [
                _table(child, i, prefix, model, cuts, rank)
                for i in range(len(child.embedding_bag_configs()))
            ]
            seen.update(f"{prefix}{c.name}.weight" for c in child.embedding_bag_configs())
            _replace(module, path, QuantizedBags(tables, child.is_weighted(), process_group))
    _load_dense(module, {name: t for name, t in model.items() if name not in seen}, checkpoint)
    return module.eval()


@dataclass(frozen=True)
class _Part:
    """What this rank holds of a table: [rows, columns + 8] bytes."""

    cut: Cut
    packed: Tensor


@dataclass(frozen=True)
class _Table:
    features: tuple[str, ...]
    num_rows: int
    dim: int
    mean: bool
    parts: tuple[_Part, ...]


class QuantizedBags(nn.Module):
    """This rank's part of a bag collection; answers as the collection does."""

    def __init__(self, tables: list[_Table], is_weighted: bool, process_group: Any) -> None:
        super().__init__()
        self._tables, self._is_weighted, self._group = tables, is_weighted, process_group
        names = [feature for table in tables for feature in table.features]
        if len(set(names)) != len(names):
            problem = Problem("features", "must each be of one table to be served in shards", names)
            raise UsageError(problems=[problem])

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool what the ranks hold together.

        Args:
            features: the same on every rank.

        Raises:
            DataError: an id is outside of its table.
        """
        jagged = features.to_dict()
        columns = [
            _pooled(table, jagged[name], self._is_weighted)
            for table in self._tables
            for name in table.features
        ]
        pooled = torch.cat(columns, dim=1)
        if distributed.is_initialized() and distributed.get_world_size(self._group) > 1:
            distributed.all_reduce(pooled, group=self._group)
        for number, (name, table) in enumerate(self._named()):
            if table.mean:
                first = self._offset(number)
                lengths = jagged[name].lengths().clamp(min=1).unsqueeze(1)
                pooled[:, first : first + table.dim] /= lengths
        return KeyedTensor(
            keys=[name for name, _ in self._named()],
            length_per_key=[table.dim for _, table in self._named()],
            values=pooled,
        )

    def _named(self) -> list[tuple[str, _Table]]:
        return [(name, table) for table in self._tables for name in table.features]

    def _offset(self, number: int) -> int:
        return sum(table.dim for _, table in self._named()[:number])


def _pooled(table: _Table, bags: Any, is_weighted: bool) -> Tensor:
    """Sum what this rank holds of each bag; [bags, dim], zero where it holds nothing."""
    lengths, ids = bags.lengths(), bags.values()
    total = torch.zeros(len(lengths), table.dim)
    if not len(ids):
        return total
    if int(ids.min()) < 0 or int(ids.max()) >= table.num_rows:
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        what = f"ids must lie in 0 to {table.num_rows - 1:,}"
        raise DataError(problems=[Problem(", ".join(table.features), what, worst)])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    for part in table.parts:
        cut = part.cut
        held = (ids >= cut.row_offset) & (ids < cut.row_offset + cut.num_rows)
        counts = torch.bincount(owner[held], minlength=len(lengths))
        rows = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            part.packed,
            (ids[held] - cut.row_offset).long(),
            torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            mode=0,
            per_sample_weights=bags.weights()[held].float() if is_weighted else None,
            include_last_offset=True,
        )
        total[:, cut.column_offset : cut.column_offset + cut.num_columns] += rows
    return total


def _table(
    bags: EmbeddingBagCollection,
    index: int,
    prefix: str,
    model: Mapping[str, StoredTensor],
    cuts: Mapping[str, tuple[Cut, ...]],
    rank: int,
) -> _Table:
    config = bags.embedding_bag_configs()[index]
    name = f"{prefix}{config.name}.weight"
    stored = model.get(name)
    shape = config.num_embeddings, config.embedding_dim
    if stored is None or stored.shape != shape:
        got = None if stored is None else stored.shape
        raise CheckpointError(problems=[Problem(name, f"must be {shape} in the checkpoint", got)])
    # A table that every rank would hold is served by the first, or it would be added up twice.
    own = cuts.get(name, (Cut(0, 0, shape[0], 0, shape[1]),))
    parts = [_part(stored, cut) for cut in own if cut.rank == rank and cut.num_rows]
    mean = config.pooling == PoolingType.MEAN
    num_rows, dim = shape
    return _Table(tuple(config.feature_names), num_rows, dim, mean, tuple(parts))


def _part(stored: StoredTensor, cut: Cut) -> _Part:
    packed = torch.empty(cut.num_rows, cut.num_columns + SCALE_BYTES, dtype=torch.uint8)
    row_bytes = stored.num_columns * 4
    for start, stop in steps(cut.num_rows, row_bytes, cut.row_offset):
        rows = stored.read_rows(start, stop).float()
        whole = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
        at = slice(start - cut.row_offset, stop - cut.row_offset)
        columns = slice(cut.column_offset, cut.column_offset + cut.num_columns)
        packed[at, : cut.num_columns] = whole[:, columns]
        packed[at, cut.num_columns :] = whole[:, stored.num_columns :]
    return _Part(cut, packed)


def _replace(module: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    if not last:
        problem = Problem("module", "must hold its collections, not be one")
        raise UsageError(problems=[problem])
    setattr(module.get_submodule(parent), last, new)


def _load_dense(
    module: nn.Module, dense: Mapping[str, StoredTensor], checkpoint: str | Path
) -> None:
    state = {
        name: stored.read_rows(0, stored.num_rows).reshape(stored.shape)
        for name, stored in dense.items()
    }
    missing, unexpected = module.load_state_dict(state, strict=False, assign=True)
    problems = [Problem(f"{checkpoint}: {name}", "is missing") for name in missing]
    problems += [
        Problem(f"{checkpoint}: {name}", "is of no layer of the model") for name in unexpected
    ]
    if problems:
        raise CheckpointError(problems=problems)
