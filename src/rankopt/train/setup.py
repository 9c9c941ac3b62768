"""The set-up of a training run: what its passes change before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankopt.environment import Environment
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule
from rankopt.passes.training import TrainingPass
from rankopt.review.schema import PassRecord
from rankopt.train.distributed.exchange import Exchange, make_exchange
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.fused_tables import FusedTables
from rankopt.train.optimizers import make_optimizers
from rankopt.train.settings import TrainSettings

if TYPE_CHECKING:
    from rankopt.train.distributed.sharded import ShardedTables

Forward = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class TrainingSetup:
    """How a run's steps are made.

    Attributes:
        card: the model.
        settings: the card's or the command line's.
        environment: of this machine.
        serving: the card's module behind flat tensors.
        forward: what a step calls; `serving` until a pass wraps it.
        fused_tables: the optimizer of tables that have left PyTorch's.
        dense_options: further arguments of the dense weights' optimizer.
        autocast: the type that products of the dense part are computed in; None for float32.
        num_micro_batches: parts of a batch whose gradients are added up before the step.
        num_prefetched: batches encoded ahead of the step; 0 makes each when its step begins.
        notes: one sentence per thing a pass left alone, and why.
        ranks: the processes that train together.
        sharded: tables that are cut over the ranks.
    """

    card: ModelCard
    settings: TrainSettings
    environment: Environment
    serving: ServingModule
    forward: Forward
    fused_tables: FusedTables | None = None
    dense_options: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    num_micro_batches: int = 1
    num_prefetched: int = 0
    notes: list[str] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks.alone)
    sharded: ShardedTables | None = None

    @property
    def module(self) -> nn.Module:
        """The card's module."""
        return self.serving.model

    @property
    def fused_parameters(self) -> list[nn.Parameter]:
        """Tables that have left PyTorch's optimizers."""
        return [] if self.fused_tables is None else self.fused_tables.param_groups[0]["params"]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def make_optimizers(self) -> list[Optimizer]:
        """Make the optimizers of all weights, those of fused tables last."""
        if self.sharded is not None:
            return self.sharded.make_optimizers(self.settings, self.dense_options)
        optimizers = make_optimizers(
            self.module,
            self.settings,
            without=self.fused_parameters,
            dense_options=self.dense_options,
        )
        return optimizers if self.fused_tables is None else [*optimizers, self.fused_tables]

    def make_exchange(self, optimizers: Sequence[Optimizer]) -> Exchange:
        """Return what ranks tell each other in a step."""
        return self.sharded or make_exchange(self.ranks, self.module, optimizers)


def plain_setup(
    card: ModelCard,
    settings: TrainSettings,
    environment: Environment,
    serving: ServingModule,
    ranks: Ranks | None = None,
) -> TrainingSetup:
    """Return the set-up of a run without a recipe."""
    return TrainingSetup(
        card,
        settings,
        environment,
        serving,
        forward=serving,
        ranks=ranks or Ranks.alone(),
    )


def apply_passes(
    setup: TrainingSetup, passes: Iterable[TrainingPass]
) -> tuple[TrainingSetup, list[PassRecord]]:
    """Run the passes of a recipe in order.

    Returns:
        The set-up, and per pass whether it changed anything and what it left alone.
    """
    records = []
    for step in passes:
        before = len(setup.notes)
        changed = step.set_up(setup)
        notes = changed.notes[before:]
        did = changed is not setup
        reason = "; ".join(notes) or ("as asked" if did else "there was nothing to change")
        records.append(PassRecord(kind=step.kind, changed=did, kept=did, reason=reason))
        setup = changed
    return setup, records
