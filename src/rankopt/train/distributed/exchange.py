"""What ranks tell each other in a step, so that all of them make the same update.

Dense gradients are added up in flat buckets. This is not DistributedDataParallel: a step calls
forwards that passes have wrapped (compiled parts, parts of a batch, recomputed modules), which DDP
only sees through one forward of its own; it adds up sparse gradients with a density check and one
collective a table; and it does not know of tables that have left autograd's gradients.

Gradients of tables are small beside the tables. What each rank read and its gradients go to all
ranks in their order, and each applies all of it: the sums are those of one process, whose batch is
the ranks' rows in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Adagrad, Optimizer, SparseAdam

from rankopt.errors import Problem, UsageError
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.fused_tables import FusedTables, Use
from rankopt.units import BYTES_PER_MIB

BUCKET_BYTES = 32 * BYTES_PER_MIB

_NONE, _SPARSE, _DENSE = range(3)
"""Kinds of gradient that a table may have on a rank."""


class Exchange(Protocol):
    """Makes the gradients of all ranks those of the global batch, between backward and update.

    Attributes:
        loss_scale: what the loss is multiplied by before its backward.
    """

    loss_scale: float

    def __call__(self, loss: float) -> float:
        """Exchange gradients; return the loss of all ranks together."""
        ...


class NoExchange:
    """One process: gradients are what they are."""

    loss_scale = 1.0

    def __call__(self, loss: float) -> float:
        """Return the loss."""
        return loss


class GradientExchange:
    """Data parallelism: every rank holds every weight.

    Args:
        ranks: who takes part.
        optimizers: of the run; their parameters' gradients are exchanged.
    """

    loss_scale = 1.0

    def __init__(self, ranks: Ranks, optimizers: Sequence[Optimizer]) -> None:
        self._ranks = ranks
        fused = [one for one in optimizers if isinstance(one, FusedTables)]
        sparse = [one for one in optimizers if isinstance(one, SparseAdam | Adagrad)]
        self._groups = [group for one in fused for group in one.groups]
        self._tables = list(_parameters(sparse))
        others = [one for one in optimizers if one not in fused and one not in sparse]
        self._dense = list(_parameters(others))

    def __call__(self, loss: float) -> float:
        """Exchange gradients; return the loss of all ranks together."""
        total = self._reduce_dense(loss)
        if self._tables or self._groups:
            self._gather_tables()
        return total

    def _reduce_dense(self, loss: float) -> float:
        """Add up dense gradients; a weight that no rank has used stays without one."""
        used = [float(parameter.grad is not None) for parameter in self._dense]
        total, *used = self._ranks.sum([loss, *used])
        shared = [p for p, count in zip(self._dense, used, strict=True) if count]
        for bucket in _buckets(shared):
            self._add_up(bucket)
        return total

    def _add_up(self, bucket: Sequence[nn.Parameter]) -> None:
        flat = torch.cat([_dense_gradient(p).reshape(-1) for p in bucket])
        torch.distributed.all_reduce(flat)
        parts = torch.split(flat, [parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def _gather_tables(self) -> None:
        """Give every rank all sparse gradients and all lookups of fused tables."""
        own: list[Tensor] = []
        for table in self._tables:
            own += _sparse_parts(table)
        for group in self._groups:
            own.append(torch.tensor([len(group.uses)]))
            for use in group.uses:
                own += [use.ids, use.offsets, use.weights, use.gradient]
        found = [iter(part) for part in self._ranks.gather(own)]
        for table in self._tables:
            parts = [(int(next(one)), next(one), next(one)) for one in found]
            self._join(table, parts)
        for group in self._groups:
            group.uses = [
                Use(next(one), next(one), next(one), next(one))
                for one in found
                for _ in range(int(next(one)))
            ]

    def _join(self, table: nn.Parameter, parts: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        kinds = {kind for kind, _, _ in parts}
        if kinds == {_NONE}:
            table.grad = None
        elif _DENSE in kinds:  # it is used in another way than by lookup too
            total = _dense_gradient(table)
            torch.distributed.all_reduce(total)
            table.grad = total
        else:
            table.grad = torch.sparse_coo_tensor(
                torch.cat([ids for _, ids, _ in parts])[None, :],
                torch.cat([values for _, _, values in parts]),
                table.shape,
                check_invariants=False,
            )


def make_exchange(ranks: Ranks, module: nn.Module, optimizers: Sequence[Optimizer]) -> Exchange:
    """Return what a run's steps exchange, and give every rank the first one's weights.

    Raises:
        UsageError: the module normalises over the rows of a batch, which no rank has all of.
    """
    if ranks.is_alone:
        return NoExchange()
    refuse_batch_statistics(module)
    ranks.broadcast_([tensor.detach() for tensor in module.state_dict().values()])
    return GradientExchange(ranks, optimizers)


def refuse_batch_statistics(module: nn.Module) -> None:
    """Refuse modules whose result for a row depends on the other rows of its batch.

    Raises:
        UsageError: there are such; all are named.
    """
    names = [
        name
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
    ]
    if names:
        what = (
            "normalises over the batch, and each of several ranks would do so over its own rows; "
            "its running statistics would differ from rank to rank"
        )
        hint = "Train it in one process, or normalise by row (nn.LayerNorm)."
        raise UsageError(problems=[Problem(name, what, hint=hint) for name in names])


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[nn.Parameter]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Divide parameters into runs of one type and of BUCKET_BYTES, or of one parameter."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        full = size + parameter.nbytes > BUCKET_BYTES
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _sparse_parts(table: nn.Parameter) -> list[Tensor]:
    """Return the kind of a table's gradient, and ids [n] and values [n, D] where it is sparse."""
    gradient = table.grad
    nothing = [torch.empty(0, dtype=torch.int64), table.detach().new_empty(0, *table.shape[1:])]
    if gradient is None:
        return [torch.tensor(_NONE), *nothing]
    if not gradient.is_sparse:
        return [torch.tensor(_DENSE), *nothing]
    return [torch.tensor(_SPARSE), gradient._indices()[0], gradient._values()]
