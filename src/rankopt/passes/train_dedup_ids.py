"""The training pass `train_dedup_ids`: equal ids of a batch looked up once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from rankopt.train.setup import TrainingSetup


class TrainDedupIds(TrainingPass):
    """Look each distinct id of a batch up once, for tables that PyTorch's optimizers update.

    The sparse gradient then has one row per distinct id, so the optimizer has fewer to sort and add
    up; it pays where ids repeat often. Fused tables bring equal ids together in their own step.

    Example:
        ```yaml
        - train_dedup_ids: {}
        ```
    """

    kind: ClassVar[str] = "train_dedup_ids"
    provides: ClassVar[frozenset[str]] = frozenset({"distinct_ids"})
    forbids: ClassVar[frozenset[str]] = frozenset({"sharded_tables"})

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Change the tables that are not fused."""
        from rankopt.train.distinct_ids import look_up_once

        names, notes = look_up_once(setup.module, setup.fused_parameters)
        setup.notes.extend(notes)
        if setup.fused_tables is not None:
            setup.note("fused tables bring equal ids together in their own step")
        elif not names:
            setup.note("the module has no table of single ids")
        return replace(setup) if names else setup
