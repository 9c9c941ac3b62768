"""Optimize: a recipe applied to a trained model, measured pass by pass."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.artifact.manifest import PASSES
from rankopt.bundle import build_bundle
from rankopt.capture.preflight import check_module
from rankopt.data.encode import load_rows
from rankopt.data.rows import Rows
from rankopt.data.splits import Splits, open_splits
from rankopt.environment import Environment
from rankopt.errors import DataError
from rankopt.jobs.decisions import read_choices, write_choices
from rankopt.jobs.inputs import Progress, check_inputs, eager_arm, quiet
from rankopt.kernels.build import load_kernels
from rankopt.models.build import build_model
from rankopt.models.card import ModelCard
from rankopt.output import staged_output
from rankopt.passes.base import PassContext
from rankopt.passes.pipeline import run_pipeline
from rankopt.passes.trial import TrialBench, trial_plan
from rankopt.passes.tuning_quality import TuningQuality
from rankopt.recipe import Recipe
from rankopt.review.schema import PassRecord

if TYPE_CHECKING:
    from torch import nn

    from rankopt.jobs.inputs import Data

TUNING_ROWS = 8_192
"""Rows that keep-or-drop decisions look at; the verdict is on other rows."""
DRIFT_ROWS = 256
"""Rows on which each pass's change of the scores is measured."""


def optimize(
    recipe: Recipe | str | Path,
    card: ModelCard | str | Path,
    checkpoint: str | Path | None = None,
    data: Data | None = None,
    *,
    out: str | Path,
    overwrite: bool = False,
    choices: str | Path | None = None,
    baseline_out: str | Path | None = None,
    num_threads: int | None = None,
    progress: Progress = quiet,
    detail: Progress = quiet,
) -> Path:
    """Apply a recipe to a trained model and write the artifact.

    Args:
        recipe: a recipe, its path, or the name of one that rankopt ships.
        card: a model card, its path, or the name of one that rankopt ships.
        checkpoint: weights in place of the card's.
        data: rows in place of the card's; only the validation split is looked at.
        out: the artifact's folder.
        overwrite: replace an artifact that `out` holds.
        choices: `passes.json` of an earlier run; its decisions are taken over without timing.
        baseline_out: keep here what the export pass alone makes of the model.
        num_threads: thread budget of the timings; all physical cores when None.
        progress: told one line per step.
        detail: told how far the current step is.

    Returns:
        `out`.

    Raises:
        RecipeError, CardError, CheckpointError, DataError: an input is wrong; all that is wrong
            with it is listed.
        ExportError: the model cannot be exported or compiled.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    recipe, card, environment = check_inputs(recipe, card)
    kept = read_choices(Path(choices)) if choices is not None else None
    with staged_output(Path(out), overwrite=overwrite) as stage:
        optimize_into(
            stage,
            recipe,
            card,
            checkpoint,
            data,
            environment,
            kept,
            Path(baseline_out) if baseline_out else None,
            num_threads,
            progress,
            detail,
            overwrite,
        )
    return Path(out)


def optimize_into(
    folder: Path,
    recipe: Recipe,
    card: ModelCard,
    checkpoint: str | Path | None,
    data: Data | None,
    environment: Environment,
    choices: Sequence[PassRecord] | None,
    baseline_out: Path | None,
    num_threads: int | None,
    progress: Progress,
    detail: Progress,
    overwrite: bool = False,
) -> None:
    """Write the artifact into a folder that is staged already; see `optimize`."""
    workdir = folder / ".work"
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        progress("preparing kernels")  # compiled once per machine: some 50 s the first time
        load_kernels()
        progress("reading rows and weights")
        tuning = _tuning_rows(card, open_splits(card, data))
        built = build_model(card, checkpoint)
        for note in built.notes:
            progress(note)
        progress("checking the card against the model")
        sample = tuning.slice(0, DRIFT_ROWS).features
        for note in check_module(card, built.module, sample):
            progress(note)
        progress("exporting the model")
        bundle = build_bundle(card, built.module, sample, built.checkpoint)
        export = next(step for step in recipe.passes if step.purpose == "artifact")
        bench = TrialBench(
            export=export,
            control=eager_arm(card, checkpoint, workdir, device=export.device),
            rows=tuning,
            plan=trial_plan(recipe.batch_sizes, num_threads),
            context=PassContext(environment, workdir),
            control_size_bytes=module_bytes(built.module),
            recipe=recipe.name,
            progress=progress,
            detail=detail,
        )
        # Replayed choices decide nothing, so nothing has to be scored for them.
        decides = bool(tuning.labels) and choices is None
        quality = TuningQuality(bundle, tuning, recipe.gates) if decides else None
        result = run_pipeline(
            recipe,
            bundle,
            bench,
            environment,
            workdir,
            quality=quality,
            choices=choices,
            progress=progress,
        )
        if baseline_out is not None and result.baseline is not None:
            with staged_output(baseline_out, overwrite=overwrite) as place:
                shutil.copytree(result.baseline, place, dirs_exist_ok=True)
        for item in result.artifact.iterdir():
            shutil.move(item, folder / item.name)
        write_choices(folder / PASSES, recipe, card, result.records)
    finally:
        shutil.rmtree(workdir, ignore_errors=True)


def _tuning_rows(card: ModelCard, splits: Splits) -> Rows:
    source = splits.validation or splits.train
    if source is None:
        raise DataError(
            f"{card.where}: data names neither validation nor train rows. Passes are kept or "
            "dropped by timing them on rows that the verdict is not on; name `validation`, or give "
            "one file with --data, which is then divided."
        )
    # Labels let quality be looked at too; without them passes are judged on speed and bytes.
    labelled = set(card.labels) <= set(source.column_names())
    rows = load_rows(card, source, limit=TUNING_ROWS, with_labels=labelled, refuse_one_class=False)
    if rows.num_rows < 2:
        raise DataError(f"{source.name}: holds {rows.num_rows} row; at least 2 are needed.")
    return rows


def module_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's parameters and buffers, shared ones once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
