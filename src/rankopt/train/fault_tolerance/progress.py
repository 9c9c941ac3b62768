"""How far a run has come: what its next step needs beside weights, optimizers and rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RunProgress:
    """Counters of a run, and what its evaluations found.

    Attributes:
        num_steps: steps done.
        num_epoch_rows: rows of the epoch that steps have taken.
        num_marks: evaluations within the epoch that are behind it.
        losses: of the steps since the last evaluation.
        curve: one point per evaluation.
        best_ne: the lowest validation NE.
        best_step: steps done when it was measured.
        num_worse: evaluations since then.
    """

    num_steps: int = 0
    num_epoch_rows: int = 0
    num_marks: int = 0
    losses: list[float] = field(default_factory=list)
    curve: list[dict[str, float | int]] = field(default_factory=list)
    best_ne: float = float("inf")
    best_step: int = 0
    num_worse: int = 0

    def add_step(self, loss: float, num_rows: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_epoch_rows += num_rows
        self.losses.append(loss)

    def is_due(self, num_rows: int | None, num_parts: int) -> bool:
        """Tell whether an evaluation within the epoch is due.

        Args:
            num_rows: of an epoch; None where nobody knows, and then none is.
            num_parts: evaluations of an epoch; the last one is at its end.
        """
        following = self.num_marks + 1
        if not num_rows or following >= num_parts:
            return False
        return self.num_epoch_rows >= num_rows * following / num_parts

    def add_evaluation(self, point: dict[str, float | int], ne: float) -> bool:
        """Count an evaluation; True where it is the best."""
        self.curve.append(point)
        self.losses = []
        if not ne < self.best_ne:  # NaN is no better
            self.num_worse += 1
            return False
        self.best_ne, self.best_step, self.num_worse = ne, self.num_steps, 0
        return True

    def end_epoch(self) -> None:
        """Begin the next epoch's counts."""
        self.num_epoch_rows = self.num_marks = 0

    def to_json(self) -> dict[str, Any]:
        """Return the counters as JSON values; a best NE of infinity is None."""
        best = None if self.best_ne == float("inf") else self.best_ne
        return {**asdict(self), "best_ne": best}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunProgress:
        """Read what `to_json` wrote."""
        best = value["best_ne"]
        return cls(**{**value, "best_ne": float("inf") if best is None else best})
