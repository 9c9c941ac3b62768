"""The training pass `train_pipeline`: batches made ready while a step runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from rankopt.train.setup import TrainingSetup


class TrainPipeline(TrainingPass):
    """Read, encode and cut batches in a thread beside the step, at most `depth` of them ahead.

    The batches and their order are the same. What a step waits for data is in metrics.json.

    Example:
        ```yaml
        - train_pipeline: {depth: 2}
        ```
    """

    kind: ClassVar[str] = "train_pipeline"

    depth: int = Field(default=2, ge=1, le=64)
    """Batches held ready at most."""

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Prefetch."""
        return replace(setup, num_prefetched=self.depth)
