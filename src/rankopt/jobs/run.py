"""Run: optimize, compare and review in one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.artifact.manifest import MANIFEST, read_manifest
from rankopt.bench.backend import Backend
from rankopt.bench.plan import BenchPlan, load_plan
from rankopt.bench.ray_backend import RayBackend
from rankopt.errors import ArtifactError
from rankopt.jobs.compare import Comparison
from rankopt.jobs.inputs import Progress, check_inputs, quiet
from rankopt.jobs.optimize import optimize_into
from rankopt.models.card import ModelCard, load_card
from rankopt.output import staged_output
from rankopt.recipe import Recipe
from rankopt.review.gate import Scope
from rankopt.review.report import write_report
from rankopt.review.schema import Report

if TYPE_CHECKING:
    from rankopt.jobs.inputs import Data

BASELINE = "aoti-fp32"
"""Label of the arm that went through the export pass alone."""


def run(
    recipe: Recipe | str | Path,
    card: ModelCard | str | Path,
    checkpoint: str | Path | None = None,
    data: Data | None = None,
    *,
    out: str | Path,
    plan: BenchPlan | str | Path = "ab-default",
    price_per_hour: float | None = None,
    slo_p99_ns: float | None = None,
    backend: Backend | None = None,
    overwrite: bool = False,
    resume: bool = False,
    num_threads: int | None = None,
    reproduce: str | None = None,
    progress: Progress = quiet,
    detail: Progress = quiet,
) -> Report:
    """Optimize, compare and review in one: `out` gets artifact/, baseline/ and the report.

    The arm `aoti-fp32`, the model through the export pass alone, is timed beside.
    Arguments and errors: see `optimize` and `compare`.
    """
    card = card if isinstance(card, ModelCard) else load_card(card)
    plan = (plan if isinstance(plan, BenchPlan) else load_plan(plan)).at_least(card.min_batch)
    if num_threads is not None:
        plan = plan.model_copy(update={"num_threads": num_threads})
    scope = Scope(
        batch_sizes=plan.batch_sizes,
        baseline_arms=(BASELINE,),
        outputs=tuple(output.name for output in card.outputs),
        price_given=price_per_hour is not None,
    )
    recipe, card, environment = check_inputs(recipe, card, scope)
    with staged_output(Path(out), overwrite=overwrite, resume=resume, keep_partial=True) as stage:
        artifact, baseline = stage / "artifact", stage / "baseline"
        if resume and _is_complete(artifact) and _is_complete(baseline):
            progress("taking up the artifact that the earlier run built")
        else:
            shutil.rmtree(artifact, ignore_errors=True)
            artifact.mkdir()
            optimize_into(
                artifact,
                recipe,
                card,
                checkpoint,
                data,
                environment,
                None,
                baseline,
                num_threads,
                progress,
                detail,
            )
        job = Comparison(
            card, artifact, checkpoint, recipe.gates, plan, {BASELINE: baseline}, price_per_hour
        )
        report = job.run(
            stage / "ab",
            data=data,
            slo_p99_ns=slo_p99_ns,
            backend=backend or RayBackend(),
            resume=resume,
            reproduce=reproduce or _run_command(recipe, card, checkpoint, data, out),
            progress=progress,
            detail=detail,
        )
        write_report(report, stage)
    return report


def _is_complete(folder: Path) -> bool:
    if not (folder / MANIFEST).is_file():
        return False
    try:
        read_manifest(folder)
    except ArtifactError:
        return False
    return not (folder / ".work").exists()


def _run_command(
    recipe: Recipe, card: ModelCard, checkpoint: object, data: object, out: object
) -> str:
    words = [f"rankopt run {recipe.path or recipe.name}", f"--model {card.path or card.name}"]
    if checkpoint is not None:
        words.append(f"--checkpoint {checkpoint}")
    if isinstance(data, str | Path):
        words.append(f"--data {data}")
    return " ".join([*words, f"--out {out}"])
