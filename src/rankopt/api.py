"""The Python API: `optimize` a model, `compare` two arms, or do both and review the result.

Each call is also a verb of the command line, and writes the same files.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rankopt.artifact.manifest import MANIFEST, PASSES, Manifest, card_of, read_manifest
from rankopt.bench.ab import run_ab
from rankopt.bench.arms import ArmSpec
from rankopt.bench.backend import Backend
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan, load_plan
from rankopt.bench.ray_backend import RayBackend
from rankopt.bundle import build_bundle
from rankopt.data.encode import load_rows
from rankopt.data.rows import Rows
from rankopt.data.splits import Splits, open_splits
from rankopt.environment import Environment, collect_environment
from rankopt.errors import ArtifactError, DataError, InputError, RecipeError, UsageError
from rankopt.kernels.build import load_kernels
from rankopt.models.build import build_model
from rankopt.models.card import ModelCard, load_card, save_card
from rankopt.output import staged_output
from rankopt.passes.base import PassContext
from rankopt.passes.pipeline import run_pipeline
from rankopt.passes.trial import TrialBench, trial_plan
from rankopt.recipe import Objective, Recipe, dump_recipe, load_recipe, parse_recipe
from rankopt.review.draft import Subject, draft_report
from rankopt.review.gate import Scope
from rankopt.review.gates import Gates
from rankopt.review.judge import judge
from rankopt.review.report import write_report
from rankopt.review.schema import PassRecord, Report, Size
from rankopt.units import NS_PER_MS

if TYPE_CHECKING:
    import pandas as pd
    import ray.data
    from torch import nn

    Data = str | Path | pd.DataFrame | ray.data.Dataset
    """A file, a folder of splits, a DataFrame or a Ray Dataset."""

Progress = Callable[[str], None]

TUNING_ROWS = 8_192
"""Rows that keep-or-drop decisions look at; the verdict is on other rows."""
DRIFT_ROWS = 256
"""Rows on which each pass's change of the scores is measured."""
BASELINE = "aoti-fp32"
"""Label of the arm that went through the export pass alone."""


def _quiet(_: str) -> None:
    return None


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
    progress: Progress = _quiet,
    detail: Progress = _quiet,
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
    recipe, card, environment = _check(recipe, card)
    kept = read_choices(Path(choices)) if choices is not None else None
    with staged_output(Path(out), overwrite=overwrite) as stage:
        _optimize_into(
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
        )
    return Path(out)


def _check(
    recipe: Recipe | str | Path, card: ModelCard | str | Path
) -> tuple[Recipe, ModelCard, Environment]:
    """Read recipe and card and find everything wrong with them before any torch work."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    card = card if isinstance(card, ModelCard) else load_card(card)
    environment = collect_environment()
    if recipe.is_training:
        raise RecipeError(
            f"{recipe.where}: holds training passes alone. Use it with: "
            f"rankopt train CARD --recipe {recipe.name} --out DIR"
        )
    problems = recipe.check(environment, card)
    if problems:
        raise RecipeError(problems=problems)
    return recipe, card, environment


def _optimize_into(
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
) -> None:
    workdir = folder / ".work"
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        progress("preparing kernels")  # compiled once per machine: some 15 s the first time
        load_kernels()
        progress("reading rows and weights")
        tuning = _tuning_rows(card, open_splits(card, data))
        built = build_model(card, checkpoint)
        for note in built.notes:
            progress(note)
        progress("exporting the model")
        sample = tuning.slice(0, DRIFT_ROWS).features
        bundle = build_bundle(card, built.module, sample)
        bench = TrialBench(
            export=next(step for step in recipe.passes if step.purpose == "artifact"),
            control=_eager_arm(card, checkpoint, workdir),
            rows=tuning,
            plan=trial_plan(recipe.batch_sizes, num_threads),
            context=PassContext(environment, workdir),
            control_size_bytes=module_bytes(built.module),
            recipe=recipe.name,
            progress=progress,
            detail=detail,
        )
        result = run_pipeline(
            recipe, bundle, bench, environment, workdir, choices=choices, progress=progress
        )
        if baseline_out is not None and result.baseline is not None:
            shutil.rmtree(baseline_out, ignore_errors=True)
            baseline_out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(result.baseline, baseline_out)
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
    rows = load_rows(card, source, limit=TUNING_ROWS, with_labels=False)
    if rows.num_rows < 2:
        raise DataError(f"{source.name}: holds {rows.num_rows} row; at least 2 are needed.")
    return rows


def _eager_arm(
    card: ModelCard, checkpoint: str | Path | None, workdir: Path, label: str = "control"
) -> ArmSpec:
    """Describe the control: built again from card and checkpoint in its own process."""
    file = save_card(card, workdir / "control" / "card.yaml")
    given = Path(checkpoint).resolve() if checkpoint is not None else None
    return ArmSpec(label=label, kind="eager", card=file, checkpoint=given)


def module_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's parameters and buffers, shared ones once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def write_choices(
    file: Path, recipe: Recipe, card: ModelCard, records: Sequence[PassRecord]
) -> None:
    """Write passes.json: the recipe as it was run, and what became of each pass."""
    content = {
        "model": card.name,
        "recipe": dump_recipe(recipe),
        "passes": [record.model_dump(mode="json") for record in records],
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_choices(file: Path) -> list[PassRecord]:
    """Read the decisions of an earlier run, its export step left out.

    Raises:
        InputError: the file is missing or no passes.json.
    """
    recipe, records = read_passes(file)
    kinds = {step.kind for step in recipe.passes if step.purpose == "artifact"}
    return [record for record in records if record.kind not in kinds]


def read_records(folder: Path) -> list[PassRecord]:
    """Read what became of each pass of an artifact."""
    return read_passes(folder / PASSES)[1]


def with_objective(recipe: str, objective: str | None) -> Recipe:
    """Read a recipe and put another objective in its place when one is given."""
    loaded = load_recipe(recipe)
    if objective is None:
        return loaded
    allowed = get_args(Objective)
    if objective not in allowed:
        raise UsageError(f"--objective must be one of {', '.join(allowed)}; got {objective!r}.")
    return loaded.model_copy(update={"objective": objective})


def to_ns(milliseconds: float | None) -> float | None:
    """Convert a command line's milliseconds."""
    return None if milliseconds is None else milliseconds * NS_PER_MS


def choose_backend(ray_address: str | None, *, local: bool) -> Backend:
    """Return the backend that the command line asked for; local Ray when it said nothing."""
    if local and ray_address:
        raise UsageError("--local and --ray-address exclude each other.")
    return LocalBackend() if local else RayBackend(ray_address)


def read_passes(file: Path) -> tuple[Recipe, list[PassRecord]]:
    """Read passes.json: the recipe as it was run, and what became of each pass.

    Raises:
        InputError: the file is missing or no passes.json.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        records = [PassRecord.model_validate(entry) for entry in content["passes"]]
        return parse_recipe(content["recipe"], where=str(file)), records
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file}: is no passes.json of an artifact ({type(error).__name__}: {error}). "
            "It lies in every folder that `rankopt optimize` wrote."
        ) from error


def compare(
    control: ModelCard | str | Path,
    candidate: str | Path,
    data: Data | None = None,
    *,
    checkpoint: str | Path | None = None,
    out: str | Path | None = None,
    plan: BenchPlan | str | Path = "ab-default",
    gates: Gates | None = None,
    baselines: dict[str, str | Path] | None = None,
    price_per_hour: float | None = None,
    slo_p99_ns: float | None = None,
    backend: Backend | None = None,
    overwrite: bool = False,
    resume: bool = False,
    reproduce: str | None = None,
    progress: Progress = _quiet,
    detail: Progress = _quiet,
) -> Report:
    """Run control and candidate on the same rows and judge the candidate.

    Args:
        control: a model card (its eager model), or an artifact folder.
        candidate: an artifact folder.
        data: rows in place of the card's; only the test split is looked at.
        checkpoint: the eager control's weights in place of the card's.
        out: where to write report.json, report.md and report.html; nowhere when None.
        plan: how much to time; a plan, its path, or its name in `benchmarks/`.
        gates: in place of those of the recipe that made the candidate.
        baselines: label -> artifact folder of further arms, timed in the same run.
        price_per_hour: dollars an hour of this machine, for the cost.
        slo_p99_ns: the latency target to write beside the cost.
        backend: where the arms run; local Ray when None.
        overwrite: replace a report that `out` holds.
        resume: go on from what a killed run with the same `out` left.
        reproduce: the command to write into the report.
        progress: told one line per step.
        detail: told how far the current step is.

    Returns:
        The judged report.

    Raises:
        InputError, UsageError: an input is wrong.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    job = _Comparison(control, candidate, checkpoint, gates, plan, baselines or {}, price_per_hour)

    def into(workdir: Path) -> Report:
        return job.run(
            workdir,
            data=data,
            slo_p99_ns=slo_p99_ns,
            backend=backend or RayBackend(),
            resume=resume,
            reproduce=reproduce or job.command(data, out),
            progress=progress,
            detail=detail,
        )

    if out is None:
        with tempfile.TemporaryDirectory(prefix="rankopt-ab-") as folder:
            return into(Path(folder))
    with staged_output(Path(out), overwrite=overwrite, resume=resume, keep_partial=True) as stage:
        report = into(stage / "ab")
        write_report(report, stage)
    return report


class _Comparison:
    """The inputs of one A/B, read and checked before anything is run."""

    def __init__(
        self,
        control: ModelCard | str | Path,
        candidate: str | Path,
        checkpoint: str | Path | None,
        gates: Gates | None,
        plan: BenchPlan | str | Path,
        baselines: dict[str, str | Path],
        price_per_hour: float | None,
    ) -> None:
        self.candidate = Path(candidate)
        self.manifest = read_manifest(self.candidate)
        self.control = control
        self.checkpoint = checkpoint
        self.control_manifest = _artifact_manifest(control)
        self.plan = plan if isinstance(plan, BenchPlan) else load_plan(plan)
        self.baselines = {label: Path(folder) for label, folder in baselines.items()}
        self.price_per_hour = price_per_hour
        self.card = self._card()
        self.recipe, self.passes = self._passes()
        self.gates = gates or (self.recipe.gates if self.recipe else Gates())
        self._check_gates()

    def _card(self) -> ModelCard:
        if isinstance(self.control, ModelCard):
            return self.control
        if self.control_manifest is None:
            return load_card(self.control)
        return card_of(self.manifest)

    def _passes(self) -> tuple[Recipe | None, list[PassRecord]]:
        file = self.candidate / PASSES
        return read_passes(file) if file.is_file() else (None, [])

    def _check_gates(self) -> None:
        scope = Scope(
            where=self.recipe.name if self.recipe else "gates",
            batch_sizes=self.plan.batch_sizes,
            baseline_arms=tuple(self.baselines),
            price_given=self.price_per_hour is not None,
        )
        problems = self.gates.check(scope)
        if problems:
            raise UsageError(problems=problems)

    def command(self, data: object, out: object) -> str:
        control = getattr(self.control, "path", None) or self.control
        words = ["rankopt ab", f"--control {control}", f"--candidate {self.candidate}"]
        if isinstance(data, str | Path):
            words.append(f"--data {data}")
        words.append(f"--out {out or 'DIR'}")
        return " ".join(words)

    def run(
        self,
        workdir: Path,
        *,
        data: Data | None,
        slo_p99_ns: float | None,
        backend: Backend,
        resume: bool,
        reproduce: str,
        progress: Progress,
        detail: Progress,
    ) -> Report:
        """Score, time, compute quality, judge."""
        workdir.mkdir(parents=True, exist_ok=True)
        progress("reading the rows of the verdict")
        splits = open_splits(self.card, data)
        rows = load_rows(self.card, splits.test)
        progress("running control and candidate in turns")
        result = run_ab(
            self._control_arm(workdir),
            ArmSpec(label="candidate", kind="artifact", artifact=self.candidate),
            baselines=[
                ArmSpec(label=label, kind="artifact", artifact=folder)
                for label, folder in self.baselines.items()
            ],
            rows=rows,
            card=self.card,
            plan=self.plan,
            backend=backend,
            workdir=workdir,
            resume=resume,
            progress=detail,
        )
        progress("comparing quality")
        subject = Subject(
            size=self._size(),
            data=splits.description,
            reproduce=reproduce,
            recipe=self.recipe.name if self.recipe else self.manifest.recipe,
            objective=self.recipe.objective if self.recipe else None,
            passes=self.passes,
            price_per_hour=self.price_per_hour,
            slo_p99_ns=slo_p99_ns,
        )
        draft = draft_report(self.card, rows, result, self.gates, subject, collect_environment())
        return judge(draft, self.gates)

    def _control_arm(self, workdir: Path) -> ArmSpec:
        if self.control_manifest is not None:
            return ArmSpec(label="control", kind="artifact", artifact=Path(str(self.control)))
        return _eager_arm(self.card, self.checkpoint, workdir)

    def _size(self) -> Size:
        control = self.control_manifest
        return Size(
            control_bytes=control.size_bytes if control else self.manifest.control_size_bytes,
            candidate_bytes=self.manifest.size_bytes,
            control_code_bytes=control.code_bytes if control else None,
            candidate_code_bytes=self.manifest.code_bytes,
        )


def _artifact_manifest(control: ModelCard | str | Path) -> Manifest | None:
    """Read the control's manifest when it is an artifact folder; None when it is a card."""
    if isinstance(control, ModelCard) or not Path(control).is_dir():
        return None
    return read_manifest(Path(control))


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
    progress: Progress = _quiet,
    detail: Progress = _quiet,
) -> Report:
    """Optimize, compare and review in one: `out` gets artifact/, baseline/ and the report.

    The arm `aoti-fp32`, the model through the export pass alone, is timed beside.
    Arguments and errors: see `optimize` and `compare`.
    """
    recipe, card, environment = _check(recipe, card)
    plan = plan if isinstance(plan, BenchPlan) else load_plan(plan)
    if num_threads is not None:
        plan = plan.model_copy(update={"num_threads": num_threads})
    scope = Scope(recipe.where, plan.batch_sizes, (BASELINE,), price_per_hour is not None)
    if problems := recipe.gates.check(scope):
        raise RecipeError(problems=problems)
    with staged_output(Path(out), overwrite=overwrite, resume=resume, keep_partial=True) as stage:
        artifact, baseline = stage / "artifact", stage / "baseline"
        if resume and _is_complete(artifact) and _is_complete(baseline):
            progress("taking up the artifact that the earlier run built")
        else:
            shutil.rmtree(artifact, ignore_errors=True)
            artifact.mkdir()
            _optimize_into(
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
        job = _Comparison(
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
