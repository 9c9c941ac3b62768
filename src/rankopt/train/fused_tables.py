"""Embedding tables whose gradients go straight into their optimizer.

PyTorch makes a sparse gradient for each table, sorts and adds up its rows (`coalesce`), and runs
the optimizer over the result, a dozen kernels a table. Here the backward only notes which ids were
read and the gradient of what was read; `FusedTables.step` adds the rows up by id and updates
weights and state in one call for many tables. Because nothing is updated before `step`, a table
that is read twice in a forward and gradients accumulated over several batches give the same
weights as plain PyTorch.

The modules keep their class's attributes, their parameters and the parameters' names, so the state
dict is that of the unchanged module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankopt.errors import Problem, UsageError
from rankopt.kernels.build import load_kernels
from rankopt.kernels.train_lookup import NO_OFFSETS, NO_WEIGHTS, OPTIMIZER_CODES, StepOptimizer
from rankopt.models.layers import EmbeddingBags


@dataclass(frozen=True)
class Use:
    """One lookup since the last step: what it read, and the gradient of its result."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor
    gradient: Tensor


@dataclass
class TableGroup:
    """Tables that are always read together, by one call.

    Attributes:
        names: the parameters' names in the module.
        tables: float32 [rows, D] each.
        is_mean: whether bags are averaged.
        padding: an id that counts for nothing; -1 for none.
        uses: lookups whose gradients the next step takes.
    """

    names: list[str]
    tables: list[nn.Parameter]
    is_mean: bool = False
    padding: int = -1
    uses: list[Use] = field(default_factory=list)

    def lookup(
        self, ids: Tensor, offsets: Tensor = NO_OFFSETS, weights: Tensor = NO_WEIGHTS
    ) -> Tensor:
        """Pool rows, as `rankopt.kernels.train_lookup.table_lookup`; differentiable."""
        result: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            self, ids, offsets, weights, *self.tables
        )
        return result


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: TableGroup, ids: Tensor, offsets: Tensor, weights: Tensor, *tables: Tensor
    ) -> Tensor:
        ctx.group = group
        ctx.call = ids, offsets, weights
        result: Tensor = torch.ops.rankopt.table_lookup(
            list(tables), ids, offsets, weights, group.is_mean, group.padding
        )
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group: TableGroup = ctx.group
        ids, offsets, weights = ctx.call
        gradient = gradients[0]
        group.uses.append(Use(ids, offsets, weights.detach(), gradient))
        of_weights = None
        if ctx.needs_input_grad[3] and weights.numel():
            bag_of = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
            of_weights = (gradient[bag_of] * group.tables[0].detach()[ids]).sum(dim=1)
        return None, None, None, of_weights, *[None] * len(group.tables)


class FusedEmbeddingBags(EmbeddingBags):
    """`EmbeddingBags`, all tables in one call."""

    group: TableGroup

    def forward(self, ids_BT: Tensor) -> Tensor:
        pooled = self.group.lookup(ids_BT)
        return pooled.view(ids_BT.shape[0], len(self.bags), -1)


class FusedEmbeddingBag(nn.EmbeddingBag):
    """`nn.EmbeddingBag` with one call forward and no sparse gradient."""

    group: TableGroup

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if input.dim() == 2:
            num_rows, length = input.shape
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.reshape(-1)
            elif length == 1 and self.padding_idx is None:
                return self.group.lookup(input.long())
            offsets = torch.arange(num_rows + 1) * length
        elif offsets is None:
            raise ValueError("offsets has to be a 1D Tensor but got None")
        elif not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), len(input))])
        weights = NO_WEIGHTS if per_sample_weights is None else per_sample_weights.contiguous()
        ids = input.reshape(-1).long().contiguous()
        return self.group.lookup(ids, offsets.long().contiguous(), weights)


class FusedEmbedding(nn.Embedding):
    """`nn.Embedding` with one call forward and no sparse gradient."""

    group: TableGroup

    def forward(self, input: Tensor) -> Tensor:
        rows = self.group.lookup(input.long().reshape(-1, 1))
        if self.padding_idx is not None:
            # Padding reads its row, and only its gradient counts for nothing.
            kept = (input.reshape(-1, 1) != self.padding_idx).to(rows.dtype)
            rows = rows * kept + self.weight.detach()[self.padding_idx] * (1 - kept)
        return rows.view(*input.shape, self.embedding_dim)


class FusedTables(Optimizer):
    """The optimizer of fused tables.

    `adagrad` is `torch.optim.Adagrad` over coalesced sparse gradients, its state under the same
    name; `rowwise_adagrad` keeps one sum per row, the mean of the row's squared gradient.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        optimizer: StepOptimizer,
        learning_rate: float,
        eps: float = 1e-10,
    ) -> None:
        load_kernels()
        self.groups = list(groups)
        self.optimizer = optimizer
        super().__init__(
            [table for group in groups for table in group.tables],
            {"lr": learning_rate, "eps": eps},
        )
        if optimizer == "sgd":
            return
        for table in self.param_groups[0]["params"]:
            shape = table.shape if optimizer == "adagrad" else table.shape[:1]
            self.state[table]["sum"] = torch.zeros(shape)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the lookups that no step has taken."""
        super().zero_grad(set_to_none)
        for group in self.groups:
            group.uses.clear()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows that were read, and forget the lookups.

        Raises:
            UsageError: a table has a gradient of its own, so the module reads it in other ways too.
        """
        loss = None if closure is None else closure()
        options = self.param_groups[0]
        for group in self.groups:
            self._refuse_other_gradients(group)
            if not group.uses:
                continue
            states = [] if self.optimizer == "sgd" else [self.state[t]["sum"] for t in group.tables]
            uses = group.uses
            with torch.no_grad():
                torch.ops.rankopt.table_step(
                    list(group.tables),
                    states,
                    [use.ids for use in uses],
                    [use.offsets for use in uses],
                    [use.weights for use in uses],
                    [use.gradient for use in uses],
                    group.is_mean,
                    group.padding,
                    OPTIMIZER_CODES[self.optimizer],
                    options["lr"],
                    options["eps"],
                )
            group.uses = []
        return loss

    def _refuse_other_gradients(self, group: TableGroup) -> None:
        problems = [
            Problem(
                name,
                "gets a gradient that does not come from a lookup, since the module uses the table "
                "in another way too",
                hint=f"Leave it to PyTorch: `train_fuse_embeddings: {{skip: [{name}]}}`.",
            )
            for name, table in zip(group.names, group.tables, strict=True)
            if table.grad is not None
        ]
        if problems:
            raise UsageError(problems=problems)


def fuse_tables(
    module: nn.Module, skipped: Callable[[str], bool] = lambda name: False
) -> tuple[list[TableGroup], list[str]]:
    """Turn a module's embedding modules into fused ones, in place.

    Args:
        module: whatever holds nn.Embedding, nn.EmbeddingBag or `EmbeddingBags` modules.
        skipped: tells by its name that a table is to be left alone.

    Returns:
        The groups of tables, and one sentence for each module left as it was.
    """
    owners: dict[int, int] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    groups: list[TableGroup] = []
    notes: list[str] = []
    for name, found in list(module.named_modules()):
        if type(found) is EmbeddingBags:
            names = [f"{name}.bags.{index}.weight" for index in range(len(found.bags))]
            bags: list[Any] = list(found.bags)
            if any(skipped(item) for item in names) or any(_refusal(bag, owners) for bag in bags):
                continue  # its bags are taken one by one
            found.__class__ = FusedEmbeddingBags
            group = TableGroup(names, [bag.weight for bag in bags], bags[0].mode == "mean")
        elif type(found) in (nn.EmbeddingBag, nn.Embedding):
            full = f"{name}.weight" if name else "weight"
            taken = any(found.weight is table for one in groups for table in one.tables)
            reason = "is left out by `skip`" if skipped(full) else _refusal(found, owners)
            if taken or reason:
                notes += [] if taken else [f"{full} {reason}"]
                continue
            pools = isinstance(found, nn.EmbeddingBag)
            padding = found.padding_idx if pools and found.padding_idx is not None else -1
            group = TableGroup([full], [found.weight], pools and found.mode == "mean", padding)
            found.__class__ = FusedEmbeddingBag if pools else FusedEmbedding
        else:
            if isinstance(found, nn.EmbeddingBag | nn.Embedding) and not hasattr(found, "group"):
                notes.append(f"{name} is a {type(found).__name__}, whose own forward must stay")
            continue
        found.group = group
        groups.append(group)
    return groups, notes


def _refusal(found: nn.Module, owners: dict[int, int]) -> str | None:
    """Say why a table is left to PyTorch; None when it can be fused."""
    if not isinstance(found, nn.EmbeddingBag | nn.Embedding):
        return "is no embedding table"
    if not found.weight.requires_grad:
        return "is frozen"
    if found.weight.dtype != torch.float32 or found.weight.device.type != "cpu":
        return f"is {found.weight.dtype} on {found.weight.device}, not float32 on the CPU"
    if owners[id(found.weight)] > 1:
        return "belongs to several modules, whose gradients must be added up first"
    if isinstance(found, nn.EmbeddingBag) and found.mode == "max":
        return "is pooled by its maximum"
    if found.max_norm is not None:
        return "has a max_norm, which rewrites rows when they are read"
    if found.scale_grad_by_freq:
        return "has scale_grad_by_freq"
    return None
