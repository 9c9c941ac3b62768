"""Train a card's model and write card, checkpoint and metrics as one result.

Seeded; stops early on validation NE; keeps the weights of the best evaluation. Two runs with the
same settings, data, thread count and library versions give the same weights.

Shapes in this module: B batch, N rows of a split.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rankopt.data.dealt import DealtSettings, DealtStream, Share
from rankopt.data.encode import iter_rows
from rankopt.data.report.run import refuse_broken_limits
from rankopt.data.rowsource import RowSource
from rankopt.data.splits import Splits
from rankopt.environment import collect_environment
from rankopt.errors import CardError, DataError, Problem
from rankopt.models.build import check_forward_signature, make_module
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule
from rankopt.output import write_json_atomic
from rankopt.quality.metrics import auc, calibration, log_loss, normalized_entropy
from rankopt.recipe import Recipe
from rankopt.train.meter import StepMeter
from rankopt.train.ranked import ScoredShares, ranked_output, refuse_for_ranks
from rankopt.train.ranks import Ranks
from rankopt.train.recipes import require_sound, training_passes
from rankopt.train.relocate import write_card
from rankopt.train.settings import TrainSettings
from rankopt.train.setup import apply_passes, plain_setup
from rankopt.train.state import load_state, save_optimizers
from rankopt.train.step import Step
from rankopt.train.weights import Kept, keep, put_back, write_weights

EVALUATION_BATCH = 4096
MAX_TRAIN_ROWS_JUDGED = 50_000

Metrics = dict[str, dict[str, float | int | None]]


@dataclass(frozen=True)
class TrainResult:
    """What a training run wrote, and how good it is.

    Attributes:
        out: the folder, with card.yaml, checkpoint.safetensors and metrics.json.
        card: the card in it, ready for `rankopt optimize --model`.
        metrics: the content of metrics.json.
    """

    out: Path
    card: Path
    metrics: dict[str, Any]


def train(
    card: ModelCard,
    splits: Splits,
    out: str | Path,
    settings: TrainSettings | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    recipe: Recipe | None = None,
    start: str | Path | None = None,
    save_optimizer: bool = False,
    overwrite: bool = False,
    ranks: Ranks | None = None,
) -> TrainResult:
    """Train the card's model on `splits.train` and write the result.

    Args:
        card: the model; its `train` settings hold when `settings` is None.
        splits: training and validation rows are required; test rows are only reported on.
        out: the folder to write, whole or not at all.
        settings: how to train.
        progress: called with one line per evaluation.
        recipe: training passes that change how steps are made; None for plain PyTorch.
        start: what an earlier run wrote; its weights, and its optimizers' state where it was saved,
            are what this run begins with.
        save_optimizer: write the optimizers' state of the best weights beside them.
        overwrite: replace an earlier result.
        ranks: the processes that train together, each of which calls this; None for one alone.

    Raises:
        CheckpointError: what `start` holds cannot be read or does not fit.
        RecipeError: the recipe holds other than training passes, or cannot work here.
        CardError: the module cannot be built or does not take the card's inputs.
        DataError: no training or validation rows, or rows the card does not allow, `data.limits`
            included.
        UsageError: the loss became infinite or NaN.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    chosen = settings or card.train
    require_sound(recipe, card)
    target = Path(out)
    joined = ranks or Ranks.alone()
    told = progress if progress is not None and joined.is_first else lambda line: None
    with ranked_output(target, overwrite=overwrite, ranks=joined) as staging, _seeded(chosen):
        if joined.is_first:
            refuse_broken_limits(card, splits, told)
        trainer = _Trainer(card, splits, chosen, told, recipe, joined)
        refuse_for_ranks(trainer.setup, start=start, save_optimizer=save_optimizer)
        trainer.keeps_optimizers = save_optimizer
        if start is not None:
            load_state(Path(start), trainer.module, trainer.step.optimizers)
        metrics = trainer.run()
        name = write_weights(trainer.module, joined, staging)
        if joined.is_first:
            if save_optimizer:
                save_optimizers(trainer.best_optimizers, trainer.step.optimizers, staging)
            write_card(card, chosen, staging / "card.yaml", target, name)
            write_json_atomic(staging / "metrics.json", metrics)
    return TrainResult(target, target / "card.yaml", metrics)


@contextlib.contextmanager
def _seeded(settings: TrainSettings) -> Iterator[None]:
    """Seed and set threads for the run, and leave the process as it was."""
    threads_before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads_before)


class _Trainer:
    """One run: the module, its optimizers, the rows and the best weights so far."""

    def __init__(
        self,
        card: ModelCard,
        splits: Splits,
        settings: TrainSettings,
        progress: Callable[[str], None],
        recipe: Recipe | None,
        ranks: Ranks,
    ) -> None:
        self.card = card
        self.splits = splits
        self.settings = settings
        self.progress = progress
        self.recipe = recipe
        self.ranks = ranks
        self.train_source, self.validation = _required(card, splits)
        self.module = make_module(card)
        problems = check_forward_signature(card, self.module)
        if problems:
            raise CardError(problems=problems)
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        self.serving = ServingModule(card, self.module)
        setup = plain_setup(card, settings, collect_environment(), self.serving, ranks)
        self.setup, self.passes = apply_passes(setup, training_passes(recipe))
        self.module = self.setup.module
        self.step = Step(self.setup)
        ranks.reseed(settings.seed)
        stream = settings.model_dump(include={"batch_size", "row_shards", "window_rows", "seed"})
        place = {"rank": ranks.rank, "world_size": ranks.world_size}
        dealt = DealtSettings(**stream, **place, prefetch=self.setup.num_prefetched)
        self.windows = DealtStream(card, self.train_source, dealt)
        self.curve: list[dict[str, float | int]] = []
        self.best: Kept = {}
        self.best_optimizers: list[dict[str, Any]] = []
        self.keeps_optimizers = False
        self.best_ne = float("inf")
        self.num_worse = 0
        self.meter = StepMeter()

    @property
    def num_rows_seen(self) -> int:
        return self.step.num_rows_seen

    def run(self) -> dict[str, Any]:
        """Train until the epochs or the patience run out; load the best weights; measure all."""
        started = time.perf_counter()
        for epoch in range(1, self.settings.epochs + 1):
            if self._epoch(epoch):
                break
        put_back(self.module, self.best)
        duration_s = time.perf_counter() - started
        steps = self.meter.summary()
        judged = {
            "train": self._judge(self.train_source, limit=MAX_TRAIN_ROWS_JUDGED),
            "validation": self._judge(self.validation),
            "test": self._judge(self.splits.test),
        }
        return {
            **judged,
            "curve": self.curve,
            "seed": self.settings.seed,
            "settings": self.settings.model_dump(mode="json"),
            "num_rows_seen": self.num_rows_seen,
            "num_parameters": self.num_parameters,
            "duration_s": round(duration_s, 3),
            "steps": steps,
            "recipe": None if self.recipe is None else self.recipe.name,
            "passes": [record.model_dump(mode="json", exclude_none=True) for record in self.passes],
            "num_threads": torch.get_num_threads(),
            "ranks": self.ranks.describe(),
            "torch_version": torch.__version__,
            "data": self.splits.description,
        }

    def _epoch(self, epoch: int) -> bool:
        """Go once over the training rows; True when the patience ran out."""
        losses: list[float] = []
        parts = self.settings.evaluations_per_epoch
        num_total = self.windows.num_rows
        marks = [num_total * part / parts for part in range(1, parts)] if num_total else []
        num_done = 0
        self.serving.train()
        for batch in self._batches():
            losses.append(self._step(batch))
            num_done += batch.num_rows
            if marks and num_done >= marks[0]:
                marks.pop(0)
                if self._evaluate(epoch, losses):
                    return True
                losses = []
        return bool(losses) and self._evaluate(epoch, losses)

    def _batches(self) -> Iterator[Share]:
        return self.meter.waiting(self.windows.batches())

    def _step(self, batch: Share) -> float:
        value, step_ns = self.step.timed(batch)
        self.meter.add(step_ns, batch.num_rows)
        return value

    def _evaluate(self, epoch: int, losses: list[float]) -> bool:
        """Measure validation NE and keep the weights if it is the best; True to stop."""
        judged = self._judge(self.validation)
        ne, auc_mean = self._mean(judged, "ne"), self._mean(judged, "auc")
        point: dict[str, float | int] = {
            "epoch": epoch,
            "num_rows_seen": self.num_rows_seen,
            "train_loss": float(np.mean(losses)),
            "validation_ne": ne,
            "validation_auc": auc_mean,
        }
        self.curve.append(point)
        if ne < self.best_ne:
            self.best_ne, self.num_worse = ne, 0
            self.best = keep(self.module)
            if self.keeps_optimizers:
                states = [optimizer.state_dict() for optimizer in self.step.optimizers]
                self.best_optimizers = copy.deepcopy(states)
        else:
            self.num_worse += 1
        self.progress(
            f"epoch {epoch}, {self.num_rows_seen:,} rows: training loss {point['train_loss']:.4f}, "
            f"validation NE {ne:.4f}, AUC {auc_mean:.4f}"
            + ("" if self.num_worse else " (best so far)")
        )
        self.serving.train()
        return self.num_worse >= self.settings.patience

    def _mean(self, judged: Metrics, name: str) -> float:
        values = [item[name] for item in judged.values()]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            what = "must hold labels of both classes: without, no NE can say when to stop"
            raise DataError(problems=[Problem(self.validation.name, what)])
        return float(np.mean(known))

    def _judge(self, source: RowSource, limit: int | None = None) -> Metrics:
        self.serving.eval()
        return judge(self.card, self.serving, source, limit=limit, ranks=self.ranks)


def judge(
    card: ModelCard,
    serving: nn.Module,
    source: RowSource,
    *,
    limit: int | None = None,
    ranks: Ranks | None = None,
) -> Metrics:
    """Measure NE, AUC, log loss and calibration of each output on a source's rows.

    Args:
        card: names inputs, outputs and labels.
        serving: the card's module in eval mode, taking flat tensors.
        source: the rows, read a batch at a time.
        limit: judge the first rows only.
        ranks: those that share the scoring; all get the metrics of the first.
    """
    scored = ScoredShares(card, ranks or Ranks.alone())
    num_rows = 0
    for rows in iter_rows(card, source, EVALUATION_BATCH):
        batch = rows if limit is None else rows.slice(0, min(rows.num_rows, limit - num_rows))
        scored.add(batch, serving)
        num_rows += batch.num_rows
        if limit is not None and num_rows >= limit:
            break
    if not num_rows:
        raise DataError(problems=[Problem(source.name, "holds no rows")])
    return scored.judged(_metrics)


def _metrics(prob_N: np.ndarray, labels_N: np.ndarray) -> dict[str, float | int | None]:
    values: Mapping[str, float] = {
        "ne": normalized_entropy(prob_N, labels_N),
        "auc": auc(prob_N, labels_N),
        "log_loss": log_loss(prob_N, labels_N),
        "calibration": calibration(prob_N, labels_N),
        "base_rate": float(labels_N.mean()),
    }
    known = {name: value if np.isfinite(value) else None for name, value in values.items()}
    return {**known, "num_rows": len(labels_N)}


def _required(card: ModelCard, splits: Splits) -> tuple[RowSource, RowSource]:
    if splits.train is None or splits.validation is None:
        missing = [n for n in ("train", "validation") if getattr(splits, n) is None]
        problem = Problem(
            f"{card.where}: data",
            f"training needs rows for {' and '.join(missing)}",
            hint="Name them under data, or give --data a folder with train, validation and test.",
        )
        raise DataError(problems=[problem])
    return splits.train, splits.validation
