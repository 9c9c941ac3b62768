"""The training pass `train_precision`: products of the dense part in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from rankopt.errors import Problem
from rankopt.passes.training import TrainingPass

if TYPE_CHECKING:
    from rankopt.environment import Environment
    from rankopt.models.card import ModelCard
    from rankopt.train.setup import TrainingSetup

_UNITS = frozenset({"avx512_bf16", "amx_bf16", "neon_bf16"})


class TrainPrecision(TrainingPass):
    """Compute the products of forward and backward in bf16 (torch.autocast).

    Weights, their gradients, the optimizer's state, tables and the loss stay float32. bf16 has
    float32's range, so no loss scaling is needed. On a CPU without bf16 instructions it would be
    several times slower than float32, so nothing is changed there, and the record says so.

    Example:
        ```yaml
        - train_precision: {dtype: bf16}
        ```
    """

    kind: ClassVar[str] = "train_precision"

    dtype: Literal["bf16", "fp16"] = "bf16"
    """`fp16`, which needs its loss scaled, is refused on the CPU."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """Refuse fp16."""
        if self.dtype == "bf16":
            return []
        what = (
            "fp16 is for GPUs: CPUs multiply it in float32 after converting, and its range needs "
            "the loss to be scaled"
        )
        return [Problem("dtype", what, self.dtype, "Use bf16, which has float32's range.")]

    def set_up(self, setup: TrainingSetup) -> TrainingSetup:
        """Turn autocast on where the CPU has the instructions."""
        import torch

        if self.dtype != "bf16" or not _UNITS & set(setup.environment.isa):
            setup.note(f"this CPU has none of {', '.join(sorted(_UNITS))}: products stay float32")
            return setup
        return replace(setup, autocast=torch.bfloat16)
