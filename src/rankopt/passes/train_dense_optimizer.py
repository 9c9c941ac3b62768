"""The training pass `train_dense_optimizer`: one kernel for the step of the dense weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from rankopt.train.setup import TrainingSetup


class TrainDenseOptimizer(TrainingPass):
    """Update the dense weights with torch's fused AdamW: one pass over each weight and its state.

    The mathematics is that of the plain AdamW.

    Example:
        ```yaml
        - train_dense_optimizer: {implementation: fused}
        ```
    """

    kind: ClassVar[str] = "train_dense_optimizer"

    implementation: Literal["fused", "foreach"] = "fused"
    """`foreach` batches each operation over all weights instead, which suits GPUs."""

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Ask for the implementation."""
        return replace(setup, dense_options={**setup.dense_options, self.implementation: True})
