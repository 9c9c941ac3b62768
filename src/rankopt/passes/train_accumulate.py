"""The training pass `train_accumulate`: a batch in parts, one step for all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rankopt.errors import Problem
from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from rankopt.environment import Environment
    from rankopt.models.card import ModelCard
    from rankopt.train.setup import TrainingSetup


class TrainAccumulate(TrainingPass):
    """Compute a batch's gradients in parts and step once, for a batch that memory does not hold.

    The loss stays the mean over the whole batch and tables are updated once, so the weights are
    those of the undivided batch up to rounding; batch statistics (BatchNorm, Dice) are each part's.

    Example:
        ```yaml
        - train_accumulate: {parts: 4}
        ```
    """

    kind: ClassVar[str] = "train_accumulate"
    provides: ClassVar[frozenset[str]] = frozenset({"batch_parts"})
    forbids: ClassVar[frozenset[str]] = frozenset({"sharded_tables"})

    parts: int = Field(default=2, gt=1)
    """Parts of a batch; each has batch_size / parts rows, rounded up."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """Refuse parts of less than two rows."""
        if card is None or card.train.batch_size >= 2 * self.parts:
            return []
        what = f"must leave each part two rows of the card's batch of {card.train.batch_size}"
        return [Problem("parts", what, self.parts)]

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Divide the batch."""
        return replace(setup, num_micro_batches=self.parts)
