"""One training step: scores, loss, gradients, update.

Shapes in this module: B rows of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rankopt.data.dealt import Share
from rankopt.data.rows import Rows
from rankopt.errors import Problem, UsageError
from rankopt.models.card import ModelCard
from rankopt.train.breakdown.phase_clock import PhaseClock
from rankopt.train.setup import TrainingSetup


class Step:
    """A set-up with its optimizers, ready to take batches.

    Attributes:
        optimizers: of the dense weights, then of tables.
        num_rows_seen: rows of all steps so far, of all ranks.
        exchange: what ranks tell each other before the update.
        clock: told which phase the step is in.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.optimizers = setup.make_optimizers()
        self.exchange = setup.make_exchange(self.optimizers)
        self.num_rows_seen = 0
        self.clock = PhaseClock()

    def __call__(self, batch: Rows | Share) -> float:
        """Update the weights by one batch, or by this rank's share of one; return its mean loss.

        Raises:
            UsageError: the loss is infinite or NaN; the weights are then as before (sharded tables,
                which are updated in the backward, aside).
        """
        share = batch if isinstance(batch, Share) else Share.whole(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        value = 0.0
        for part in self.parts(share.rows):
            self.clock.turn_to("forward")
            loss = self.loss(part)
            if part is not share.rows or share.num_own != share.num_rows:
                loss = loss * (part.num_rows / share.rows.num_rows * share.weight)
            value += float(loss.detach())
            self.clock.turn_to("backward")
            torch.autograd.backward(loss * self.exchange.loss_scale)
        value = self.exchange(value)
        if not np.isfinite(value):
            raise _not_finite(self.setup.card, value, self.num_rows_seen)
        for optimizer in self.optimizers:
            self.clock.turn_to_optimizer(optimizer)
            optimizer.step()
        self.clock.turn_to("other")
        self.num_rows_seen += share.num_rows
        return value

    def timed(self, batch: Rows | Share) -> tuple[float, int]:
        """Do a step; return its mean loss and its wall time in nanoseconds."""
        began = time.perf_counter_ns()
        value = self(batch)
        return value, time.perf_counter_ns() - began

    def loss(self, batch: Rows) -> Tensor:
        """Return the sum over outputs of the mean cross entropy, computed in float32."""
        setup = self.setup
        tensors = [batch.features[name] for name in setup.card.tensor_names]
        if setup.autocast is None:
            scores = setup.forward(*tensors)
        else:
            with torch.autocast("cpu", dtype=setup.autocast):
                scores = setup.forward(*tensors)
        return cross_entropy(setup.card, scores, batch)

    def parts(self, batch: Rows) -> Sequence[Rows]:
        """Divide a batch into those whose gradients are added up."""
        count = self.setup.num_micro_batches
        if count == 1:
            return [batch]
        size = max(2, -(-batch.num_rows // count))
        bounds = list(range(0, batch.num_rows, size))
        if batch.num_rows - bounds[-1] == 1 and len(bounds) > 1:
            bounds.pop()  # batch statistics need two rows
        return [
            batch.slice(start, stop)
            for start, stop in zip(bounds, [*bounds[1:], batch.num_rows], strict=True)
        ]


def cross_entropy(card: ModelCard, scores: Sequence[Tensor], batch: Rows) -> Tensor:
    """Sum the mean cross entropy of each output."""
    losses = [
        _output_loss(score, batch.labels[output.label], output.activation)
        for score, output in zip(scores, card.outputs, strict=True)
    ]
    return torch.stack(losses).sum()


def _output_loss(score_B: Tensor, labels: np.ndarray, activation: str) -> Tensor:
    target_B = torch.as_tensor(labels, dtype=torch.float32)
    if activation == "logit":
        return F.binary_cross_entropy_with_logits(score_B.float(), target_B)
    return F.binary_cross_entropy(score_B.float(), target_B)


def _not_finite(card: ModelCard, value: float, num_rows: int) -> UsageError:
    problem = Problem(
        f"{card.where}: train",
        f"the loss became {value} after {num_rows:,} rows",
        hint="Lower the learning rate, or look for extreme values in the dense columns.",
    )
    return UsageError(problems=[problem])
