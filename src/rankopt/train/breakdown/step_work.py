"""What one step must compute and move: FLOPs of the dense part, bytes of lookups and updates.

Counted on one batch beside the run: lookups hand their results on as leaves of the graph, so that
no table, gradient, buffer or random number of the run is touched, and the gradients that go back
into the lookups are computed all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rankopt.data.rows import Rows
from rankopt.train.breakdown.phases import Phase
from rankopt.train.breakdown.watched_lookups import CannotCutError, Lookups, Read
from rankopt.train.setup import TrainingSetup
from rankopt.train.step import cross_entropy


@dataclass(frozen=True)
class StepWork:
    """What was counted on one batch; None with the reason where it was not.

    Attributes:
        flops: of matrix products, convolutions and attention, forward and backward.
        recomputed_flops: of forwards that the backward repeats, not in `flops`.
        update_bytes: None where no optimizer is of tables alone.
        table_bytes: of all tables read and their optimizer's state.
    """

    num_rows: int
    flops: int | None = None
    recomputed_flops: int | None = None
    dense_reason: str | None = None
    lookup_bytes: int | None = None
    update_bytes: int | None = None
    num_ids: int | None = None
    num_distinct_ids: int | None = None
    table_bytes: int = 0
    sparse_reason: str | None = None


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what PyTorch has formulas for, as `torch.utils.flop_counter` does.

    That one adds up all of a backward; here what activation checkpointing repeats stands apart: the
    backward repeats a forward with gradients on, and computes gradients with them off.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.recomputed_flops = 0
        self.is_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        rest = kwargs or {}
        result = func(*args, **rest)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            count = int(formula(*args, **rest, out_val=result))
            if self.is_backward and torch.is_grad_enabled():
                self.recomputed_flops += count
            else:
                self.flops += count
        return result


def optimizer_phase(optimizer: Optimizer, tables: Iterable[Tensor]) -> Phase:
    """Tell whose optimizer it is."""
    known = {id(table) for table in tables}
    own = [id(p) in known for group in optimizer.param_groups for p in group["params"]]
    if own and all(own):
        return "optimizer_tables"
    return "optimizer_both" if any(own) else "optimizer_dense"


def count_step(
    setup: TrainingSetup, lookups: Lookups, optimizers: Sequence[Optimizer], parts: Sequence[Rows]
) -> StepWork:
    """Count one batch, leaving the run as it is.

    Args:
        setup: of the run; what is counted is its plain forward, compiled or not.
        lookups: of its module.
        optimizers: of its weights.
        parts: a batch of the usual size, as the step divides it.
    """
    counted: dict[str, Any] = {}
    try:
        with _undisturbed(setup.module), lookups.noting(), FlopCount() as count:
            for part in parts:
                _forward_and_backward(setup, lookups, count, part)
        counted["flops"] = count.flops
        counted["recomputed_flops"] = count.recomputed_flops
    except CannotCutError as error:
        counted["dense_reason"] = f"not counted: {error}, which cannot be cut off"
    if lookups.sharded:
        counted["sparse_reason"] = "not counted: lookups of sharded tables are fbgemm's own"
    elif not lookups.reads:
        counted["sparse_reason"] = "the module reads no table of an embedding module"
    else:
        counted |= _count_bytes(lookups, optimizers)
    return StepWork(num_rows=sum(part.num_rows for part in parts), **counted)


def _forward_and_backward(
    setup: TrainingSetup, lookups: Lookups, count: FlopCount, part: Rows
) -> None:
    tensors = [part.features[name] for name in setup.card.tensor_names]
    weights = [p for p in setup.module.parameters() if p.requires_grad]
    precision: Any = contextlib.nullcontext()
    if setup.autocast is not None:
        precision = torch.autocast(tensors[0].device.type, dtype=setup.autocast)
    lookups.cuts.clear()
    count.is_backward = False
    with precision:
        scores = setup.serving(*tensors)
    loss = cross_entropy(setup.card, scores, part)
    count.is_backward = True
    torch.autograd.grad(loss, [*weights, *lookups.cuts], allow_unused=True)


@contextlib.contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Put buffers (running means of a batch norm) and random numbers back afterwards."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = {weight.device.index for weight in module.parameters() if weight.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)


def _count_bytes(lookups: Lookups, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    reads: Sequence[Read] = lookups.reads
    tables: dict[int, Tensor] = {}
    ids: dict[int, list[Tensor]] = {}
    lookup_bytes = num_ids = 0
    for read in reads:
        lookup_bytes += read.index_bytes + read.result_bytes
        for table, wanted in zip(read.tables, read.ids, strict=True):
            tables[id(table)] = table
            ids.setdefault(id(table), []).append(wanted)
            lookup_bytes += wanted.numel() * _row_bytes(table)
            num_ids += wanted.numel()
    distinct = {key: len(torch.unique(torch.cat(parts))) for key, parts in ids.items()}
    owners = {
        id(p): optimizer
        for optimizer in optimizers
        if optimizer_phase(optimizer, lookups.tables) == "optimizer_tables"
        for group in optimizer.param_groups
        for p in group["params"]
    }
    updated = [
        2 * distinct[key] * (_row_bytes(table) + _state_row_bytes(owners[key], table))
        for key, table in tables.items()
        if key in owners
    ]
    updates = [read for read in reads if any(id(table) in owners for table in read.tables)]
    seen = sum(read.index_bytes + read.result_bytes for read in updates)
    return {
        "lookup_bytes": lookup_bytes,
        "update_bytes": seen + sum(updated) if updated else None,
        "num_ids": num_ids,
        "num_distinct_ids": sum(distinct.values()),
        "table_bytes": sum(
            len(table) * (_row_bytes(table) + _state_row_bytes(owners.get(key), table))
            for key, table in tables.items()
        ),
        "sparse_reason": None if updated else "the tables have no optimizer of their own to time",
    }


def _row_bytes(table: Tensor) -> int:
    return table.shape[1] * table.element_size()


def _state_row_bytes(optimizer: Optimizer | None, table: Tensor) -> int:
    """Bytes of optimizer state that belong to one row."""
    state = {} if optimizer is None else optimizer.state.get(table, {})
    return sum(
        value.element_size() * value.numel() // len(table)
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() and len(value) == len(table)
    )
