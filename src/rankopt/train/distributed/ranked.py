"""What a run of several ranks does once: write its folder, score each row, decide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rankopt.data.rows import Rows
from rankopt.errors import Problem, UsageError
from rankopt.models.card import ModelCard
from rankopt.output import staged_output
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.setup import TrainingSetup

Floats = npt.NDArray[np.float64]
OutputMetrics = dict[str, float | int | None]


@contextlib.contextmanager
def ranked_output(out: Path, *, overwrite: bool, ranks: Ranks) -> Iterator[Path]:
    """Give all ranks the folder that the first one stages; it becomes `out` when all are done.

    Ranks on several hosts need a folder that all of them see.

    Raises:
        OutputExistsError: `out` holds something and `overwrite` is False.
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    if not ranks.is_first:
        yield Path(ranks.broadcast(""))
        ranks.barrier()
        return
    with staged_output(out, overwrite=overwrite) as staging:
        ranks.broadcast(str(staging))
        yield staging
        ranks.barrier()


def refuse_for_ranks(
    setup: TrainingSetup, *, start: str | Path | None, save_optimizer: bool
) -> None:
    """Refuse what sharded tables cannot do yet.

    Raises:
        UsageError: optimizers' state is to be read or written while tables are cut over ranks.
    """
    if setup.sharded is None:
        return
    flags = {"--start": start is not None, "--save-optimizer": save_optimizer}
    what = "is for runs whose every rank holds every weight; train_shard cuts the tables"
    hint = "Leave it out, or train without train_shard."
    problems = [Problem(flag, what, hint=hint) for flag, given in flags.items() if given]
    if problems:
        raise UsageError(problems=problems)


class ScoredShares:
    """Probabilities of rows, each scored by one rank.

    All ranks read all rows and score an even part of each batch, so every rank knows the labels and
    the order, and makes as many calls as the others. What is held is one number a row and output.
    """

    def __init__(self, card: ModelCard, ranks: Ranks) -> None:
        self._card, self._ranks = card, ranks
        self._sizes: list[int] = []
        self._own: dict[str, list[Tensor]] = {output.name: [] for output in card.outputs}
        self._labels: dict[str, list[Floats]] = {output.name: [] for output in card.outputs}

    def add(self, batch: Rows, serving: nn.Module) -> None:
        """Score this rank's part of a batch."""
        start, stop = self._part(batch.num_rows, self._ranks.rank)
        # A sharded module's forward is called by all ranks: one without a row scores a row in vain.
        rows = batch if self._ranks.is_alone else batch.slice(start, max(stop, start + 1))
        if stop == start:
            rows = batch.slice(0, 1)
        # fbgemm's lookups of sharded tables have no kernel for inference mode on CPUs.
        with torch.inference_mode() if self._ranks.is_alone else torch.no_grad():
            scores = serving(*[rows.features[name] for name in self._card.tensor_names])
        for output, score in zip(self._card.outputs, scores, strict=True):
            wide = score.double()
            prob = torch.sigmoid(wide) if output.activation == "logit" else wide
            self._own[output.name].append(prob[: stop - start])
            self._labels[output.name].append(batch.labels[output.label])
        self._sizes.append(batch.num_rows)

    def judged(
        self, metrics: Callable[[Floats, Floats], OutputMetrics]
    ) -> dict[str, OutputMetrics]:
        """Measure each output on all rows, in their order; the first rank's figures are all's."""
        found = self._ranks.gather([torch.cat(parts) for parts in self._own.values()])
        judged: Any = None
        if self._ranks.is_first:
            judged = {
                name: metrics(
                    self._in_order([of_rank[index] for of_rank in found]),
                    np.concatenate(self._labels[name]),
                )
                for index, name in enumerate(self._own)
            }
        result: dict[str, OutputMetrics] = self._ranks.broadcast(judged)
        return result

    def _part(self, size: int, rank: int) -> tuple[int, int]:
        count = self._ranks.world_size
        return size * rank // count, size * (rank + 1) // count

    def _in_order(self, of_ranks: list[Tensor]) -> Floats:
        """Join what ranks scored into the order of the rows."""
        left = [scores.numpy() for scores in of_ranks]
        parts: list[Floats] = []
        for size in self._sizes:
            for rank in range(self._ranks.world_size):
                start, stop = self._part(size, rank)
                parts.append(left[rank][: stop - start])
                left[rank] = left[rank][stop - start :]
        return np.concatenate(parts)
