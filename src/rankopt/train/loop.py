"""Train a card's model and write card, checkpoint and metrics as one result.

Seeded; stops early on validation NE; keeps the weights of the best evaluation. Two runs with the
same settings, data, thread count and library versions give the same weights.

Shapes in this module: B batch, N rows of a split.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
from rankopt.diagnose.machine import known_peaks, machine_peaks
from rankopt.environment import collect_environment
from rankopt.errors import CardError, DataError, Problem
from rankopt.models.build import check_forward_signature, make_module
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule
from rankopt.output import write_json_atomic
from rankopt.quality.metrics import auc, calibration, log_loss, normalized_entropy
from rankopt.recipe import Recipe
from rankopt.train.breakdown.step_breakdown import StepWatch
from rankopt.train.distributed.ranked import ScoredShares, ranked_output, refuse_for_ranks
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.distributed.weights import Kept, keep, put_back, write_weights
from rankopt.train.fault_tolerance.checkpoints import Checkpoints
from rankopt.train.fault_tolerance.kept_run import Keeping, finished_result, kept_run
from rankopt.train.fault_tolerance.progress import RunProgress
from rankopt.train.meter import StepMeter
from rankopt.train.recipes import require_sound, training_passes
from rankopt.train.relocate import write_card
from rankopt.train.reproducibility.describe import RunDescription
from rankopt.train.reproducibility.determinism import repeatable
from rankopt.train.reproducibility.run_manifest import RUN_MANIFEST
from rankopt.train.settings import TrainSettings
from rankopt.train.setup import apply_passes, plain_setup
from rankopt.train.state import load_state, save_optimizers
from rankopt.train.step import Step

EVALUATION_BATCH = 4096
MAX_TRAIN_ROWS_JUDGED = 50_000

Metrics = dict[str, dict[str, float | int | None]]


@dataclass(frozen=True)
class TrainResult:
    """What a training run wrote, and how good it is.

    Attributes:
        out: the folder, with card.yaml, checkpoint.safetensors, metrics.json and run.json.
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
    trace: bool = False,
    peaks: bool = False,
    overwrite: bool = False,
    checkpoint_every: int | None = None,
    resume: bool = False,
    launch: str | None = None,
    command: str = "rankopt.train.loop.train",
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
        trace: write a Chrome trace of a few steps, trace.json.
        peaks: measure the machine's peaks after the run where they are not known.
        overwrite: replace an earlier result.
        checkpoint_every: steps between checkpoints, from which a killed run can go on; None takes
            none, or those of the run that goes on.
        resume: go on with a run that was killed; without one, begin.
        launch: a name that workers share with those they were started again for; a run that such a
            launch began goes on without `resume`. Torchrun's restarts need none.
        command: what to write into run.json as the command that was run.
        ranks: the processes that train together, each of which calls this; None for one alone.

    Raises:
        Interrupted: a signal stopped the run, and a checkpoint is written.
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

    @functools.cache
    def described() -> RunDescription:
        origin = None if start is None else Path(start)
        return RunDescription(card, splits, chosen, recipe, origin, command)

    def identity() -> dict[str, Any]:
        return described().identity(save_optimizer=save_optimizer)

    keeping = Keeping(target, identity, checkpoint_every, resume, overwrite, launch, joined)
    if (metrics := finished_result(keeping)) is not None:
        told(f"the run had ended when it was killed; its result lies in {target}")
        return TrainResult(target, target / "card.yaml", metrics)
    with (
        ranked_output(target, overwrite=overwrite, ranks=joined) as staging,
        repeatable(chosen),
        kept_run(keeping, staging, told) as kept,
    ):
        if joined.is_first:
            refuse_broken_limits(card, splits, told)
            described()  # before a step, or what OUT held, can change what it describes
        trainer = _Trainer(card, splits, chosen, told, recipe, kept, joined)
        refuse_for_ranks(trainer.setup, start=start, save_optimizer=save_optimizer)
        trainer.keeps_optimizers = save_optimizer
        trainer.watch = StepWatch(trainer.step, trace=staging if trace else None)
        if not kept.load(trainer) and start is not None:
            load_state(Path(start), trainer.module, trainer.step.optimizers)
        with contextlib.closing(trainer.watch):
            metrics = trainer.run()
        metrics["steps"]["breakdown"] = _breakdown(trainer.watch, measures_peaks=peaks)
        name = write_weights(trainer.module, joined, staging)
        metrics["goodput"] = kept.end(trainer, staging)
        if joined.is_first:
            if save_optimizer:
                save_optimizers(trainer.best_optimizers, trainer.step.optimizers, staging)
            write_card(card, chosen, staging / "card.yaml", target, name)
            write_json_atomic(staging / "metrics.json", metrics)
            run = described().manifest(metrics, staging / name)
            write_json_atomic(staging / RUN_MANIFEST, run.model_dump(mode="json"))
    kept.remove()
    return TrainResult(target, target / "card.yaml", metrics)


def _breakdown(watch: StepWatch, *, measures_peaks: bool) -> dict[str, Any]:
    found = machine_peaks() if measures_peaks else known_peaks()
    return watch.summary(found).model_dump(mode="json")


class _Trainer:
    """One run: the module, its optimizers, the rows and the best weights so far."""

    watch: StepWatch

    def __init__(
        self,
        card: ModelCard,
        splits: Splits,
        settings: TrainSettings,
        progress: Callable[[str], None],
        recipe: Recipe | None,
        kept: Checkpoints,
        ranks: Ranks,
    ) -> None:
        self.kept = kept
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
        self.at = RunProgress()
        self.best: Kept = {}
        self.best_optimizers: list[dict[str, Any]] = []
        self.keeps_optimizers = False
        self.meter = StepMeter()

    @property
    def num_rows_seen(self) -> int:
        return self.step.num_rows_seen

    def keep_weights(self) -> Kept:
        """Copy what this rank holds of the weights."""
        return keep(self.module)

    def put_weights(self, kept: Kept) -> None:
        """Give the module the weights that `keep_weights` copied."""
        put_back(self.module, kept)

    def run(self) -> dict[str, Any]:
        """Train until the epochs or the patience run out; load the best weights; measure all."""
        started = time.perf_counter()
        with self.kept.stoppable():
            while not self._is_over():
                self._epoch()
            self.kept.finish(self)
            self.put_weights(self.best)
            duration_s = time.perf_counter() - started
            steps = self.meter.summary()
            with self.kept.journal.timed("evaluation", step=self.at.num_steps):
                judged = {
                    "train": self._judge(self.train_source, limit=MAX_TRAIN_ROWS_JUDGED),
                    "validation": self._judge(self.validation),
                    "test": self._judge(self.splits.test),
                }
        return {
            **judged,
            "curve": self.at.curve,
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

    def _is_over(self) -> bool:
        at_end = self.windows.epoch >= self.settings.epochs
        return at_end or self.at.num_worse >= self.settings.patience

    def _epoch(self) -> None:
        """Go over what is left of the training rows, or until the patience runs out."""
        epoch = self.windows.epoch + 1
        self.serving.train()
        batches = self._batches()
        while not self._is_over():
            # First, since a run that goes on may have been killed before it.
            if self.at.is_due(self.windows.num_rows, self.settings.evaluations_per_epoch):
                self._evaluate(epoch)
                self.at.num_marks += 1
            elif (batch := next(batches, None)) is not None:
                self.at.add_step(self._step(batch), batch.num_rows)
                with self.watch.checkpointing():
                    self.kept.after_step(self)
            else:
                break
        else:
            return
        if self.at.losses:
            self._evaluate(epoch)
        self.at.end_epoch()

    def _batches(self) -> Iterator[Share]:
        return self.watch.waiting(self.windows.batches())

    def _step(self, batch: Share) -> float:
        value, step_ns = self.watch.step(batch)
        wait_ns = self.watch.last_wait_ns
        self.meter.add(step_ns, wait_ns, batch.num_rows)
        self.kept.journal.add_step(self.at.num_steps + 1, step_ns, wait_ns)
        return value

    def _evaluate(self, epoch: int) -> None:
        """Measure validation NE and keep the weights if it is the best."""
        with self.kept.journal.timed("evaluation", step=self.at.num_steps):
            judged = self._judge(self.validation)
        ne, auc_mean = self._mean(judged, "ne"), self._mean(judged, "auc")
        point: dict[str, float | int] = {
            "epoch": epoch,
            "num_rows_seen": self.num_rows_seen,
            "train_loss": float(np.mean(self.at.losses)),
            "validation_ne": ne,
            "validation_auc": auc_mean,
        }
        if self.at.add_evaluation(point, ne):
            self.best = self.keep_weights()
            if self.keeps_optimizers:
                states = [optimizer.state_dict() for optimizer in self.step.optimizers]
                self.best_optimizers = copy.deepcopy(states)
            self.kept.keep_best(self)
        self.progress(
            f"epoch {epoch}, {self.num_rows_seen:,} rows: training loss {point['train_loss']:.4f}, "
            f"validation NE {ne:.4f}, AUC {auc_mean:.4f}"
            + ("" if self.at.num_worse else " (best so far)")
        )
        self.serving.train()

    def _mean(self, judged: Metrics, name: str) -> float:
        values = [item[name] for item in judged.values()]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            what = "must hold labels of both classes: without, no NE can say when to stop"
            raise DataError(problems=[Problem(self.validation.name, what)])
        return float(np.mean(known))

    def _judge(self, source: RowSource, limit: int | None = None) -> Metrics:
        self.serving.eval()
        look = functools.partial(self.kept.look, self)
        return judge(
            self.card, self.serving, source, limit=limit, ranks=self.ranks, before_batch=look
        )


def judge(
    card: ModelCard,
    serving: nn.Module,
    source: RowSource,
    *,
    limit: int | None = None,
    ranks: Ranks | None = None,
    before_batch: Callable[[], None] = lambda: None,
) -> Metrics:
    """Measure NE, AUC, log loss and calibration of each output on a source's rows.

    Args:
        card: names inputs, outputs and labels.
        serving: the card's module in eval mode, taking flat tensors.
        source: the rows, read a batch at a time.
        limit: judge the first rows only.
        ranks: those that share the scoring; all get the metrics of the first.
        before_batch: called before each batch; what it raises ends the measurement.
    """
    scored = ScoredShares(card, ranks or Ranks.alone())
    num_rows = 0
    for rows in iter_rows(card, source, EVALUATION_BATCH):
        before_batch()
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
