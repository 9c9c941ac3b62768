"""Compare two ways of training one model: step time, samples a second, memory, and quality."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from rankopt.bench.ab import latency_rows
from rankopt.bench.arms import ArmSpec
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan, load_plan
from rankopt.bench.rows_file import write_rows
from rankopt.bench.timing import time_arms
from rankopt.bench.worker import MAX_WINDOW_ROWS, MIN_WINDOWS
from rankopt.data.encode import load_rows
from rankopt.data.splits import open_splits
from rankopt.environment import collect_environment
from rankopt.errors import DataError, Problem, UsageError
from rankopt.jobs.inputs import Progress, quiet
from rankopt.models.card import ModelCard, load_card, save_card
from rankopt.output import staged_output
from rankopt.recipe import Recipe, dump_recipe
from rankopt.review.gates import Gates
from rankopt.review.judge import judge
from rankopt.review.report import write_report
from rankopt.review.schema import (
    Cost,
    LatencyRow,
    MetricParity,
    PassRecord,
    Report,
    Size,
    TrainingCost,
)
from rankopt.train.arm import labelled
from rankopt.train.breakdown.phases import breakdown_of, typical
from rankopt.train.recipes import find_training_recipe, require_sound
from rankopt.train.seeds import Metrics, compare_seeds, train_seeds

DEFAULT_SEEDS = 5
PLAN = "ab-training"


@dataclass(frozen=True)
class TrainingPair:
    """A model and two ways to train it; None is plain PyTorch, as the card's settings say."""

    card: ModelCard
    control: Recipe | None
    candidate: Recipe | None

    @property
    def recipes(self) -> dict[str, Recipe | None]:
        """Arm -> recipe."""
        return {"control": self.control, "candidate": self.candidate}


def read_pair(
    control: str | Path, candidate: str | Path, model: str | Path | None = None
) -> TrainingPair:
    """Read what `rankopt ab` was given when its candidate is a training recipe.

    Args:
        control: a training recipe, or the card itself for plain PyTorch.
        candidate: a training recipe.
        model: the card, where `control` is a recipe.

    Raises:
        UsageError: the card is not named, or the candidate is no training recipe.
        RecipeError: a recipe cannot work here.
    """
    chosen = find_training_recipe(candidate)
    if chosen is None:
        raise UsageError(f"--candidate: {candidate} is no training recipe.")
    before = find_training_recipe(control)
    if before is not None and model is None:
        raise UsageError(
            problems=[Problem("--model", "names the card to train when --control is a recipe")]
        )
    card = load_card(model if model is not None else control)
    for recipe in (before, chosen):
        require_sound(recipe, card)
    return TrainingPair(card, before, chosen)


def time_training(
    card: ModelCard,
    recipes: Mapping[str, Recipe | None],
    workdir: Path,
    plan: BenchPlan,
    data: str | Path | None = None,
    progress: Progress = quiet,
) -> list[LatencyRow]:
    """Time steps of two arms in turns, each in a fresh process, on batches that lie ready.

    Args:
        card: the model; the batch size is its training settings'.
        recipes: arm -> recipe, the control first.
        workdir: keeps card, rows, samples and logs.
        plan: how many blocks; its batch sizes do not matter.
        data: rows in place of the card's.
        progress: told one line per step.
    """
    batch_size = card.train.batch_size
    source = open_splits(card, data).train
    if source is None:
        raise DataError(f"{card.where}: training steps need rows of the train split.")
    rows = load_rows(card, source, limit=max(MAX_WINDOW_ROWS, MIN_WINDOWS * batch_size))
    workdir.mkdir(parents=True, exist_ok=True)
    rows_file = write_rows(labelled(rows), workdir / "rows.safetensors")
    file = save_card(card.model_copy(update={"checkpoint": None}), workdir / "card.yaml")
    arms = [
        ArmSpec(
            label=label,
            kind="training",
            card=file,
            options={"recipe": None if recipe is None else dump_recipe(recipe)},
        )
        for label, recipe in recipes.items()
    ]
    chosen = plan.model_copy(update={"batch_sizes": (batch_size,)})
    records = time_arms(
        arms, rows_file, chosen, LocalBackend(), workdir=workdir, resume=True, progress=progress
    )
    return latency_rows(records, *recipes)


def compare_training(
    pair: TrainingPair,
    out: str | Path,
    data: str | Path | None = None,
    *,
    seeds: Sequence[int] = tuple(range(DEFAULT_SEEDS)),
    plan: BenchPlan | str | Path = PLAN,
    gates: Gates | None = None,
    overwrite: bool = False,
    resume: bool = False,
    reproduce: str = "",
    progress: Progress = quiet,
    detail: Progress = quiet,
) -> Report:
    """Time steps in turns, train both arms over seeds at equal samples, and judge.

    Args:
        pair: the model and its two recipes.
        out: where to write report.json, report.md and report.html.
        data: rows in place of the card's.
        seeds: of initial weights and row order, the same for both arms.
        plan: how much to time; a plan, its path, or its name in `benchmarks/`.
        gates: in place of the candidate's recipe's.
        overwrite: replace a report that `out` holds.
        resume: go on from what a killed run with the same `out` left.
        reproduce: the command to write into the report.
        progress: told one line per step.
        detail: told how far the current step is.

    Raises:
        UsageError: a training run failed.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    chosen = plan if isinstance(plan, BenchPlan) else load_plan(plan)
    limits = gates or (pair.candidate.gates if pair.candidate else Gates())
    with staged_output(Path(out), overwrite=overwrite, resume=resume, keep_partial=True) as stage:
        work = stage / "ab"
        progress("timing steps")
        latency = time_training(pair.card, pair.recipes, work / "steps", chosen, data, detail)
        progress(f"training over {len(seeds)} seeds")
        runs = train_seeds(
            save_card(pair.card.model_copy(update={"checkpoint": None}), work / "card.yaml"),
            _recipe_files(pair, work),
            seeds,
            work / "runs",
            data=data,
            num_threads=chosen.num_threads,
            progress=detail,
        )
        report = judge(_draft(pair, latency, runs, limits, seeds, work, reproduce), limits)
        write_report(report, stage)
    return report


def _recipe_files(pair: TrainingPair, folder: Path) -> dict[str, Path | None]:
    files: dict[str, Path | None] = {}
    for arm, recipe in pair.recipes.items():
        files[arm] = None
        if recipe is not None:
            files[arm] = file = folder / f"recipe-{arm}.yaml"
            text = yaml.safe_dump(dump_recipe(recipe), sort_keys=False)
            file.write_text(text, encoding="utf-8")
    return files


def _draft(
    pair: TrainingPair,
    latency: list[LatencyRow],
    runs: Mapping[str, list[Metrics]],
    gates: Gates,
    seeds: Sequence[int],
    work: Path,
    reproduce: str,
) -> Report:
    environment = collect_environment()
    candidate = runs["candidate"][0]
    sizes = [
        (work / "runs" / f"{arm}-{seeds[0]}" / "checkpoint.safetensors").stat().st_size
        for arm in ("control", "candidate")
    ]
    return Report(
        quality=seed_quality(pair.card, runs, gates),
        latency=latency,
        size=Size(
            control_bytes=sizes[0],
            candidate_bytes=sizes[1],
            control_code_bytes=None,
            candidate_code_bytes=None,
        ),
        cost=Cost(reason="training: see samples a second"),
        passes=[PassRecord.model_validate(record) for record in candidate["passes"]],
        outputs=tuple(output.name for output in pair.card.outputs),
        statistics_unit="seed",
        model=pair.card.name,
        recipe=pair.candidate.name if pair.candidate else None,
        data={**candidate["data"], "seeds": list(seeds)},
        training={arm: training_cost(found) for arm, found in runs.items()},
        environment={
            **environment.model_dump(mode="json"),
            "fingerprint": environment.fingerprint(),
            "notes": _notes(pair, runs),
        },
        reproduce=reproduce,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def seed_quality(
    card: ModelCard, runs: Mapping[str, list[Metrics]], gates: Gates
) -> dict[str, MetricParity]:
    """Judge every metric that has a margin, on the test rows of each seed's run."""
    found = {}
    for output in card.outputs:
        prefix = f"{output.name}." if len(card.outputs) > 1 else ""
        values = {
            arm: [metrics["test"][output.name] for metrics in some] for arm, some in runs.items()
        }
        for metric, margin in gates.quality.margins_of(output.name).items():
            before = [item.get(metric) for item in values["control"]]
            after = [item.get(metric) for item in values["candidate"]]
            if None in before or None in after:
                continue  # not measured by a training run: the gate says so
            num_rows = int(values["control"][0]["num_rows"])
            found[f"{prefix}{metric}"] = compare_seeds(metric, before, after, margin, num_rows)
    return found


def training_cost(runs: Sequence[Metrics]) -> TrainingCost:
    """Summarise an arm's runs: medians over seeds, of memory the largest."""
    steps = [metrics["steps"] for metrics in runs]
    return TrainingCost(
        samples_per_s=statistics.median(item["samples_per_s"] for item in steps),
        step_p50_ns=statistics.median(item["step_p50_ns"] for item in steps),
        data_wait_share=statistics.median(item["data_wait_share"] for item in steps),
        peak_memory_bytes=max(item["peak_memory_bytes"] for item in steps),
        num_rows_seen=[metrics["num_rows_seen"] for metrics in runs],
        breakdown=typical([found for metrics in runs if (found := breakdown_of(metrics))]),
    )


def _notes(pair: TrainingPair, runs: Mapping[str, list[Metrics]]) -> list[str]:
    notes = [
        "steps were timed in turns on batches that lay ready; samples a second, memory and data "
        "wait are those of whole runs",
        "the control is "
        + (f"the recipe {pair.control.name}" if pair.control else "plain PyTorch")
        + f", tables by {pair.card.train.table_optimizer}",
    ]
    seen = {arm: [metrics["num_rows_seen"] for metrics in some] for arm, some in runs.items()}
    if seen["control"] != seen["candidate"]:
        notes.append(
            f"the arms saw different numbers of rows, {seen}: training stopped early; fix "
            "`epochs` and raise `patience` to compare at equal samples"
        )
    return notes
