"""The training pass `train_fuse_embeddings`: tables with their optimizer in one call."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rankopt.errors import Problem
from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from rankopt.environment import Environment
    from rankopt.models.card import ModelCard
    from rankopt.train.setup import TrainingSetup

_UNAVAILABLE = {
    "adam": "Adam has no fused step on the CPU: fbgemm's kernel asserts on it, and a sparse Adam "
    "that skips rows is another optimizer than Adam",
    "fp16": "fp16 tables need stochastic rounding, which fbgemm's CPU kernel ignores in silence: "
    "updates smaller than half a step of fp16 would be lost",
}


class TrainFuseEmbeddings(TrainingPass):
    """Update embedding tables straight from the gradients of what was read.

    No sparse gradient is made, sorted and walked by the optimizer: one call for many tables adds
    gradients up by id and updates weights and state. All tables of nn.Embedding and nn.EmbeddingBag
    modules (torchrec's EmbeddingBagCollection holds those) take part; what is left to PyTorch is
    noted with its reason. The state dict keeps its names and shapes.

    `adagrad` is torch.optim.Adagrad's mathematics. `rowwise_adagrad` (one sum per row, the mean of
    its squared gradient) is another optimizer with 1/D of the state: compare its quality.

    Example:
        ```yaml
        - train_fuse_embeddings: {optimizer: adagrad, learning_rate: 0.02}
        ```
    """

    kind: ClassVar[str] = "train_fuse_embeddings"
    provides: ClassVar[frozenset[str]] = frozenset({"fused_tables"})
    forbids: ClassVar[frozenset[str]] = frozenset({"distinct_ids", "sharded_tables"})

    optimizer: Literal["adagrad", "rowwise_adagrad", "sgd", "adam"] = "adagrad"
    """Of the tables; `adam` is refused on the CPU."""
    table_dtype: Literal["fp32", "fp16"] = "fp32"
    """How rows are stored while training; `fp16` is refused on the CPU."""
    learning_rate: float | None = Field(default=None, gt=0)
    """The card's `table_learning_rate`, else its `learning_rate`, when None."""
    eps: float = Field(default=1e-10, gt=0)
    """Added to the root of Adagrad's sum."""
    skip: tuple[str, ...] = ()
    """Names of tables to leave to PyTorch, such as `item.weight`; `*` stands for anything."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """Refuse what no CPU kernel does rightly."""
        hints = {
            "optimizer": ("adam", "Allowed here: adagrad, rowwise_adagrad, sgd."),
            "table_dtype": ("fp16", "Train in fp32; `precision` or `quantize_embeddings` serve."),
        }
        return [
            Problem(field, _UNAVAILABLE[refused], refused, hint)
            for field, (refused, hint) in hints.items()
            if getattr(self, field) == refused
        ]

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Fuse the module's tables."""
        from rankopt.train.fused_tables import FusedTables, fuse_tables

        if self.optimizer == "adam" or setup.fused_tables is not None:
            setup.note("the tables are fused already" if setup.fused_tables else "adam is refused")
            return setup
        groups, notes = fuse_tables(setup.module, self._is_skipped)
        setup.notes.extend(notes)
        if not groups:
            setup.note("the module has no table that can be fused")
            return setup
        given = setup.settings
        if given.table_optimizer != self.optimizer:
            setup.note(
                f"the tables are trained with {self.optimizer}, not with the card's "
                f"{given.table_optimizer}"
            )
        rate = self.learning_rate or given.table_learning_rate or given.learning_rate
        return replace(setup, fused_tables=FusedTables(groups, self.optimizer, rate, self.eps))

    def _is_skipped(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.skip)
