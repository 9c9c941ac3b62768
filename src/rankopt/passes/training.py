"""What a training pass is: a pass of a recipe that changes how a model is trained.

It has no bundle and exports nothing. `set_up` takes the set-up of a run before its first step and
returns a changed one, or the same object when there was nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankopt.passes.base import Pass

if TYPE_CHECKING:
    from rankopt.train.setup import TrainingSetup

TRAINING_PREFIX = "train_"


class TrainingPass(Pass):
    """One step of a training recipe; its kind begins with `train_`."""

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Return a changed set-up, or the same object when there was nothing to do.

        What is left alone, and why, goes into `setup.notes`. The module belongs to the run, so it
        may be changed in place; its state dict must stay that of the card's module.
        """
        raise TypeError(f"{type(self).__name__} defines no set_up()")
