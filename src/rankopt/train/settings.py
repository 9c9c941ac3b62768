"""How a card's model is trained: the card's `train:` mapping and the flags of `rankopt train`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainSettings(BaseModel):
    """Settings of one training run; a card may hold its own under `train:`.

    Example:
        ```yaml
        train: {epochs: 3, batch_size: 512, learning_rate: 0.001, weight_decay: 0.01}
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(default=5, gt=0)
    """At most so many passes over the training rows."""
    batch_size: int = Field(default=1024, gt=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled, as in AdamW; tables with an optimizer of their own have none."""
    table_optimizer: Literal["adam", "sparse_adam", "adagrad"] = "adam"
    """`adam` treats tables as any weight and writes every row each step; the others touch only
    the rows of the batch, which large tables need."""
    table_learning_rate: float | None = Field(default=None, gt=0)
    """`learning_rate` when None."""
    evaluations_per_epoch: int = Field(default=1, gt=0)
    """How often validation NE is measured; ranking models often overfit within one epoch."""
    patience: int = Field(default=2, gt=0)
    """Stop after so many evaluations in a row without a better validation NE."""
    window_rows: int = Field(default=262_144, gt=1)
    """Rows are shuffled within windows of this size; a smaller split stays in memory."""
    row_shards: int = Field(default=1, ge=1)
    """Stretches that an epoch's rows are dealt into. With several ranks each reads its own alone;
    the batches do not depend on the number of ranks, which must divide this or be a multiple of it.
    Divides `batch_size`, which is the batch of all ranks together."""
    seed: int = Field(default=0, ge=0)
    num_threads: int | None = Field(default=None, gt=0)
    """PyTorch's default when None."""
