"""Run a recipe's passes over a model, measure each, and keep what earns its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankopt.artifact.verify import verify_artifact
from rankopt.bundle import ModelBundle
from rankopt.environment import Environment
from rankopt.errors import ArtifactError, ExportError, RecipeError
from rankopt.passes.base import Pass, PassContext
from rankopt.passes.decision import Gain, decide, missed_gates, slow_byte_savers
from rankopt.passes.forms import apply_to_forms
from rankopt.passes.trial import Trial, TrialBench
from rankopt.passes.tuning_quality import TuningQuality
from rankopt.recipe import Recipe
from rankopt.review.schema import PassRecord

Progress = Callable[[str], None]


@dataclass(frozen=True)
class PipelineResult:
    """What a recipe made of a model.

    Attributes:
        artifact: the proven artifact folder, still in the work folder.
        baseline: the same model through the export pass alone; None when choices were replayed.
        records: one per pass, in order.
    """

    artifact: Path
    baseline: Path | None
    records: tuple[PassRecord, ...]


@dataclass(frozen=True)
class _Step:
    """A rewriting pass that has been applied, and what was seen of it."""

    trial: Trial
    record: PassRecord


def run_pipeline(
    recipe: Recipe,
    bundle: ModelBundle,
    bench: TrialBench,
    environment: Environment,
    workdir: Path,
    *,
    quality: TuningQuality | None = None,
    choices: Sequence[PassRecord] | None = None,
    progress: Progress = lambda _: None,
) -> PipelineResult:
    """Apply, measure, decide; compile and prove what is left.

    Args:
        recipe: already checked against this machine and card.
        bundle: the exported model.
        bench: compiles and times trials.
        environment: of this machine.
        workdir: for trials; the artifact lies in it until the caller moves it.
        quality: drops passes that the recipe's quality gates will not bear; None looks at speed and
            bytes alone.
        choices: records of an earlier run whose decisions are taken over without timing.
        progress: told one line per step.

    Raises:
        ExportError: the model as it is does not compile.
        SelectorError: a pass's selector matches nothing.
        ArtifactError: the finished artifact failed its own checks.
    """
    rewrites = [step for step in recipe.passes if step.purpose != "artifact"]
    export = next(step for step in recipe.passes if step.purpose == "artifact")
    if choices is not None:
        artifact, records = _replay(rewrites, bundle, bench, environment, workdir, choices)
        return _finish(artifact, None, records, export, progress)
    baseline = bench.compile(bundle, "baseline")
    current, records = baseline, list[PassRecord]()
    for step in rewrites:
        progress(f"{step.kind}: rewriting")
        done = _measure(step, current, bench, quality, environment, workdir, recipe.batch_sizes)
        records.append(done.record)
        current = done.trial
    slow = slow_byte_savers(records, [step.purpose for step in rewrites])
    missed = list[str]()
    if slow and recipe.objective != "bytes" and recipe.gates.latency:
        missed = missed_gates(recipe.gates, bench.against_control(current))
    if missed:
        records = [
            _dropped(record, missed) if index in slow else record
            for index, record in enumerate(records)
        ]
        progress("building again without the passes that cost the latency gate")
        current, records = _replay(rewrites, bundle, bench, environment, workdir, records)
    return _finish(current, baseline, records, export, progress)


def _measure(
    step: Pass,
    current: Trial,
    bench: TrialBench,
    quality: TuningQuality | None,
    environment: Environment,
    workdir: Path,
    batch_sizes: tuple[int, ...],
) -> _Step:
    context = PassContext(environment, workdir, batch_sizes=batch_sizes)
    started_ns = time.perf_counter_ns()
    before = current.bundle
    blank = PassRecord(kind=step.kind, changed=False, kept=False, reason="")
    try:
        after = apply_to_forms(step, before, context)
        record = blank.model_copy(
            update={
                "bytes_before": before.size_bytes,
                "bytes_after": after.size_bytes,
                "details": tuple(context.notes),
                "choices": context.chosen,
                "changed": after is not before,
            }
        )
        if after is before:
            reason = "changed nothing: " + (context.notes[0] if context.notes else "no match")
            return _Step(current, _timed(record, started_ns, reason=reason))
        lost = quality.lost(after) if quality is not None else None
        if lost is not None:
            reason = f"dropped for quality: {lost}"
            return _Step(current, _timed(record, started_ns, reason=reason))
        trial = bench.compile(after, step.kind)
    except ExportError as error:
        reason = f"dropped, it does not compile here: {str(error).splitlines()[0]}"
        return _Step(current, _timed(blank, started_ns, reason=reason))
    request_size = getattr(step, "request_size", None)
    if step.purpose == "requests" and request_size is not None:
        gain = bench.time_requests(trial, request_size)
    else:
        gain = bench.time(current, trial, step.kind)
    kept, reason = decide(step.purpose, gain, before.size_bytes, after.size_bytes)
    record = _with_times(record, gain, largest_drift(before, after))
    return _Step(
        trial if kept else current,
        _timed(record, started_ns, reason=reason, kept=kept),
    )


def _with_times(record: PassRecord, gain: Gain, drift: float) -> PassRecord:
    return record.model_copy(
        update={
            "measured_speedup": gain.speedup,
            "ci_low": gain.ci_low,
            "ci_high": gain.ci_high,
            "max_abs_drift": drift,
        }
    )


def _timed(record: PassRecord, started_ns: int, *, reason: str, kept: bool = False) -> PassRecord:
    return record.model_copy(
        update={
            "reason": reason,
            "kept": kept,
            "duration_ns": time.perf_counter_ns() - started_ns,
        }
    )


def _dropped(record: PassRecord, missed: Sequence[str]) -> PassRecord:
    reason = f"dropped although it saves bytes: with it the candidate reaches {'; '.join(missed)}"
    return record.model_copy(update={"kept": False, "reason": reason})


def _replay(
    rewrites: Sequence[Pass],
    bundle: ModelBundle,
    bench: TrialBench,
    environment: Environment,
    workdir: Path,
    choices: Sequence[PassRecord],
) -> tuple[Trial, list[PassRecord]]:
    """Apply the passes that were kept, without timing anything."""
    if [step.kind for step in rewrites] != [record.kind for record in choices]:
        raise RecipeError(
            f"the choices are for the passes {[record.kind for record in choices]}, and the "
            f"recipe has {[step.kind for step in rewrites]}. Give the passes.json of this recipe."
        )
    current = bundle
    records = []
    for step, record in zip(rewrites, choices, strict=True):
        if record.kept:
            context = PassContext(environment, workdir, choices=record.choices)
            current = apply_to_forms(step, current, context)
            seen = {"details": tuple(context.notes), "choices": context.chosen}
            record = record.model_copy(update=seen)
        records.append(record)
    return bench.compile(current, "chosen"), records


def _finish(
    current: Trial,
    baseline: Trial | None,
    records: Sequence[PassRecord],
    export: Pass,
    progress: Progress,
) -> PipelineResult:
    progress("proving the artifact in a fresh process")
    started_ns = time.perf_counter_ns()
    verification = verify_artifact(current.artifact)
    if not verification.passed:
        raise ArtifactError(
            "the artifact was compiled but failed its checks, so nothing was written: "
            + "; ".join(verification.problems)
        )
    size_bytes = current.bundle.size_bytes
    record = PassRecord(
        kind=export.kind,
        changed=True,
        kept=True,
        reason=f"ran in a fresh process at batch {', '.join(map(str, verification.batch_sizes))}",
        bytes_before=size_bytes,
        bytes_after=size_bytes,
        duration_ns=time.perf_counter_ns() - started_ns,
        details=(ROWS_DIFFER,) if verification.rows_alone_equal is False else (),
    )
    return PipelineResult(
        artifact=current.artifact,
        baseline=baseline.artifact if baseline else None,
        records=(*records, record),
    )


ROWS_DIFFER = (
    "a row scored alone and inside a batch differs in its last bits: an fp32 matrix product that "
    "no pass replaced sums in another order for another batch size"
)


def largest_drift(before: ModelBundle, after: ModelBundle) -> float:
    """Return the largest change of any score between two bundles, on the same sample rows."""
    left, right = before.run(), after.run()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
