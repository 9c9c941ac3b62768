"""Compare: control and candidate on the same rows, judged by the gates."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.artifact.manifest import PASSES, Manifest, card_of, read_manifest
from rankopt.bench.ab import run_ab
from rankopt.bench.arms import ArmSpec
from rankopt.bench.backend import Backend
from rankopt.bench.plan import BenchPlan, load_plan
from rankopt.bench.ray_backend import RayBackend
from rankopt.data.encode import load_rows
from rankopt.data.splits import open_splits
from rankopt.environment import collect_environment
from rankopt.errors import UsageError
from rankopt.jobs.decisions import read_passes
from rankopt.jobs.inputs import Progress, eager_arm, quiet
from rankopt.models.build import require_checkpoint
from rankopt.models.card import ModelCard, load_card
from rankopt.output import staged_output
from rankopt.recipe import Recipe, gates_at_least
from rankopt.review.draft import Subject, draft_report
from rankopt.review.gate import Scope
from rankopt.review.gates import Gates
from rankopt.review.judge import judge
from rankopt.review.report import write_report
from rankopt.review.schema import PassRecord, Report, Size

if TYPE_CHECKING:
    from rankopt.jobs.inputs import Data


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
    progress: Progress = quiet,
    detail: Progress = quiet,
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
    job = Comparison(control, candidate, checkpoint, gates, plan, baselines or {}, price_per_hour)

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


class Comparison:
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
        self.baselines = {label: Path(folder) for label, folder in baselines.items()}
        self.price_per_hour = price_per_hour
        self.card = self._card()
        if self.control_manifest is None:
            require_checkpoint(self.card, checkpoint)
        chosen = plan if isinstance(plan, BenchPlan) else load_plan(plan)
        self.plan = chosen.at_least(self.card.min_batch)
        self.recipe, self.passes = self._passes()
        given = gates or (self.recipe.gates if self.recipe else Gates())
        self.gates = gates_at_least(given, self.card.min_batch)
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
            outputs=tuple(output.name for output in self.card.outputs),
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
        timed: bool = True,
    ) -> Report:
        """Score, time unless `timed` is off, compute quality, judge."""
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
            timed=timed,
        )
        progress("comparing quality")
        subject = Subject(
            size=self._size(),
            data=splits.description,
            reproduce=reproduce,
            recipe=self.recipe.name if self.recipe else self.manifest.recipe,
            objective=self.recipe.objective if self.recipe else None,
            passes=self.passes,
            capture=self.manifest.capture,
            price_per_hour=self.price_per_hour,
            slo_p99_ns=slo_p99_ns,
        )
        draft = draft_report(self.card, rows, result, self.gates, subject, collect_environment())
        return judge(draft, self.gates)

    def _control_arm(self, workdir: Path) -> ArmSpec:
        if self.control_manifest is not None:
            return ArmSpec(label="control", kind="artifact", artifact=Path(str(self.control)))
        device = self.manifest.target.device
        return eager_arm(self.card, self.checkpoint, workdir, device=device)

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
