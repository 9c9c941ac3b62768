"""The A/B: predictions of both arms on the same rows, and their paired latency."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankopt.bench.arms import ArmSpec
from rankopt.bench.backend import ArmError, Backend, OpenBackend
from rankopt.bench.crew import Crew
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan
from rankopt.bench.rows_file import FlatRows, write_rows
from rankopt.bench.samples import BlockRecord, SampleFile
from rankopt.bench.stats import Percentile, percentile_with_support
from rankopt.bench.timing import (
    Progress,
    estimate_speedup,
    fingerprint,
    is_settled,
    launch_of,
    prepare_arms,
    time_arms,
    time_crew,
)
from rankopt.errors import EnvironmentProblem
from rankopt.models.card import ModelCard
from rankopt.review.schema import BaselineRow, LatencyRow
from rankopt.units import NS_PER_S

__all__ = [
    "AbResult",
    "baseline_rows",
    "latency_rows",
    "predict_rows",
    "probabilities_of",
    "run_ab",
    "throughput",
    "time_arms",
    "time_pair",
]

# Calls of one `predict` message: large enough that messages cost nothing, small enough that
# progress shows and a dead worker loses little.
PREDICT_CALLS = 64

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AbResult:
    """What an A/B measured; judging it is for the gates.

    Attributes:
        control_predictions: output name -> probabilities [N], in the rows' order.
        candidate_predictions: the same of the candidate, same rows.
        latency: one row per batch size.
        baselines: the candidate against each further arm, per batch size.
        throughput_per_s: arm -> batch size -> predictions a second, closed loop.
        records: every finished turn.
        environments: arm -> what it ran under.
        notes: what a reader of the numbers should know.
    """

    control_predictions: dict[str, Scores]
    candidate_predictions: dict[str, Scores]
    latency: list[LatencyRow]
    baselines: list[BaselineRow]
    throughput_per_s: dict[str, dict[int, float]]
    records: list[BlockRecord]
    environments: dict[str, dict[str, Any]]
    notes: tuple[str, ...]


def run_ab(
    control: ArmSpec,
    candidate: ArmSpec,
    *,
    baselines: Sequence[ArmSpec] = (),
    rows: FlatRows,
    card: ModelCard,
    plan: BenchPlan,
    backend: Backend,
    workdir: Path,
    resume: bool = False,
    progress: Progress | None = None,
    timed: bool = True,
) -> AbResult:
    """Run control, candidate and baselines on the same rows, in turns.

    Args:
        control: the arm that the candidate is judged against.
        candidate: the arm that may ship.
        baselines: further arms timed in the same run, such as a plain export.
        rows: encoded rows; every arm reads them from one file.
        card: for the outputs' names and activations.
        plan: how much to time.
        backend: where arms run; opened and closed here.
        workdir: keeps rows, predictions, raw samples and worker logs.
        resume: continue the run that `workdir` holds; finished blocks are not timed again.
        progress: told one line per step.
        timed: False makes predictions only.

    Raises:
        OutputExistsError: `workdir` holds samples and `resume` is False.
        UsageError: labels stand twice, or a resumed run differs from the first.
        WorkerDied: workers died more often than the plan allows.
        ArmError: an arm raised, or lacks an output that the card names.
        EnvironmentProblem: the disk is full, or Ray has not the CPUs.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    rows_file = write_rows(rows, workdir / "rows.safetensors")
    arms = prepare_arms([control, candidate, *baselines])
    samples = SampleFile(
        workdir / "samples.jsonl", fingerprint(arms, rows_file, plan, backend), resume=resume
    )
    with OpenBackend(backend, launch_of(arms, plan, workdir)) as opened:
        crew = Crew(arms, rows_file, plan, opened, samples, progress or (lambda _: None))
        predictions = [
            probabilities_of(predict_rows(crew, label, rows.num_rows, workdir), card, label)
            for label in (control.label, candidate.label)
        ]
        records = time_crew(crew) if timed else []
    return AbResult(
        control_predictions=predictions[0],
        candidate_predictions=predictions[1],
        latency=latency_rows(records, control.label, candidate.label),
        baselines=baseline_rows(records, [arm.label for arm in baselines], candidate.label),
        throughput_per_s=throughput(records),
        records=records,
        environments=crew.environments,
        notes=tuple(_notes(crew, records, predictions)),
    )


def time_pair(
    control: ArmSpec,
    candidate: ArmSpec,
    rows: FlatRows,
    plan: BenchPlan,
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> list[LatencyRow]:
    """Time two arms in turns and keep nothing but the result, one row per batch size.

    Raises:
        WorkerDied: workers died more often than the plan allows.
        ArmError: an arm raised.
    """
    with tempfile.TemporaryDirectory(prefix="rankopt-pair-") as folder:
        rows_file = write_rows(rows, Path(folder) / "rows.safetensors")
        records = time_arms(
            [control, candidate], rows_file, plan, backend or LocalBackend(),
            workdir=Path(folder), progress=progress,
        )  # fmt: skip
    return latency_rows(records, control.label, candidate.label)


def latency_rows(records: Sequence[BlockRecord], control: str, candidate: str) -> list[LatencyRow]:
    """Join the turns of two arms into one latency row per batch size."""
    rows = []
    by_batch_size = _by_batch_size(records)
    for batch_size, some in by_batch_size.items():
        estimate = estimate_speedup(some, control, candidate, len(by_batch_size))
        p50s = [_percentile(some, arm, 0.50) for arm in (control, candidate)]
        p99s = [_percentile(some, arm, 0.99) for arm in (control, candidate)]
        rows.append(
            LatencyRow(
                batch_size=batch_size,
                control_p50_ns=estimate.control_p50_ns,
                candidate_p50_ns=estimate.candidate_p50_ns,
                control_p99_ns=_field(p99s[0], "value_ns"),
                candidate_p99_ns=_field(p99s[1], "value_ns"),
                candidate_p99_low_ns=_field(p99s[1], "ci_low_ns"),
                candidate_p99_high_ns=_field(p99s[1], "ci_high_ns"),
                control_p50_low_ns=_field(p50s[0], "ci_low_ns"),
                control_p50_high_ns=_field(p50s[0], "ci_high_ns"),
                candidate_p50_low_ns=_field(p50s[1], "ci_low_ns"),
                candidate_p50_high_ns=_field(p50s[1], "ci_high_ns"),
                speedup=estimate.speedup,
                ci_low=estimate.ci_low,
                ci_high=estimate.ci_high,
                num_samples=estimate.num_samples,
                num_blocks=estimate.num_blocks,
            )
        )
    return rows


def baseline_rows(
    records: Sequence[BlockRecord], baselines: Iterable[str], candidate: str
) -> list[BaselineRow]:
    """Compare the candidate with each further arm of the same run, per batch size."""
    rows = []
    by_batch_size = _by_batch_size(records)
    for arm in baselines:
        for batch_size, some in by_batch_size.items():
            estimate = estimate_speedup(some, arm, candidate, len(by_batch_size))
            rows.append(
                BaselineRow(
                    arm=arm,
                    batch_size=batch_size,
                    arm_p50_ns=estimate.control_p50_ns,
                    candidate_p50_ns=estimate.candidate_p50_ns,
                    speedup=estimate.speedup,
                    ci_low=estimate.ci_low,
                    ci_high=estimate.ci_high,
                    num_samples=estimate.num_samples,
                )
            )
    return rows


def throughput(records: Iterable[BlockRecord]) -> dict[str, dict[int, float]]:
    """Return predictions a second per arm and batch size, from the turns' wall time.

    Closed loop: each call begins when the one before ends, so nothing ever queues.
    """
    rows: dict[tuple[str, int], int] = {}
    wall_ns: dict[tuple[str, int], int] = {}
    for record in records:
        key = (record.arm, record.batch_size)
        rows[key] = rows.get(key, 0) + record.batch_size * record.latency_ns.size
        wall_ns[key] = wall_ns.get(key, 0) + record.wall_ns
    result: dict[str, dict[int, float]] = {}
    for (arm, batch_size), count in rows.items():
        result.setdefault(arm, {})[batch_size] = count / wall_ns[arm, batch_size] * NS_PER_S
    return result


def _by_batch_size(records: Iterable[BlockRecord]) -> dict[int, list[BlockRecord]]:
    groups: dict[int, list[BlockRecord]] = {}
    for record in records:
        groups.setdefault(record.batch_size, []).append(record)
    return groups


def _percentile(records: Iterable[BlockRecord], arm: str, quantile: float) -> Percentile | None:
    samples_ns = np.concatenate([record.latency_ns for record in records if record.arm == arm])
    return percentile_with_support(samples_ns, quantile)


def _field(percentile: Percentile | None, name: str) -> float | None:
    return None if percentile is None else float(getattr(percentile, name))


def predict_rows(
    crew: Crew, label: str, num_rows: int, workdir: Path
) -> dict[str, npt.NDArray[np.float32]]:
    """Score all rows with one arm, or read the scores that an earlier try of this run left."""
    file = workdir / f"predictions-{label}.npz"
    if crew.samples.is_resumed and file.exists():
        with np.load(file) as stored:
            return {name: stored[name] for name in stored.files}
    batch = crew.plan.quality_batch_size
    step = batch * PREDICT_CALLS
    parts: dict[str, list[npt.NDArray[np.float32]]] = {}
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        crew.progress(f"{label}: predictions, {stop:,} of {num_rows:,} rows")
        scores = crew.retrying(_prediction(crew, label, start, stop, batch))
        for name, array in scores.items():
            parts.setdefault(name, []).append(array)
    outputs = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    part = file.with_suffix(".part")
    try:
        with part.open("wb") as stream:
            np.savez(stream, **outputs)  # type: ignore[arg-type]
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise EnvironmentProblem(f"{file}: cannot be written: {error.strerror}.") from error
    return outputs


def _prediction(
    crew: Crew, label: str, start: int, stop: int, batch_size: int
) -> Callable[[], dict[str, npt.NDArray[np.float32]]]:
    return lambda: dict(crew.call(label, "predict", start, stop, batch_size))


def probabilities_of(
    outputs: Mapping[str, npt.NDArray[np.float32]], card: ModelCard, label: str
) -> dict[str, Scores]:
    """Apply each output's activation as the card names it, in float64."""
    missing = [output.name for output in card.outputs if output.name not in outputs]
    if missing:
        raise ArmError(
            f"arm {label!r}: gives outputs {sorted(outputs)}, but the card {card.name!r} names "
            f"{missing} too."
        )
    probabilities = {}
    for output in card.outputs:
        scores = outputs[output.name].astype(np.float64)
        if output.activation == "logit":
            # 1 / (1 + exp(-x)) without overflow, and exact far out, where log loss looks.
            with np.errstate(invalid="ignore"):  # NaN stays NaN, and is noted
                scores = np.exp(-np.logaddexp(0.0, -scores))
        probabilities[output.name] = scores
    return probabilities


def _notes(
    crew: Crew, records: Sequence[BlockRecord], predictions: Sequence[Mapping[str, Scores]]
) -> Iterable[str]:
    for event in crew.samples.events:
        yield f"{event['arm']}: a worker was restarted: {event['reason']}"
    for label, outputs in zip(crew.labels, predictions, strict=False):
        for name, scores in outputs.items():
            if bad := int(np.count_nonzero(~np.isfinite(scores))):
                yield f"{label}: {bad:,} of {scores.size:,} predictions of {name!r} are not finite."
    yield from _thread_notes(crew)
    yield from _idle_notes(records, crew.plan)
    for batch_size, some in _by_batch_size(records).items():
        yield from _stability_notes(crew, batch_size, some)
    if crew.samples.num_resumed:
        yield f"resumed: {crew.samples.num_resumed} turns were taken from the earlier try."


def _stability_notes(crew: Crew, batch_size: int, records: Sequence[BlockRecord]) -> Iterable[str]:
    plan = crew.plan
    control, candidate = crew.labels[:2]
    for note in estimate_speedup(records, control, candidate).notes:
        yield f"batch {batch_size}: {note}."
    if not is_settled(records, crew.labels, plan):
        yield (
            f"batch {batch_size}: may be unstable: after {plan.max_blocks} blocks an interval is "
            f"still wider than ±{plan.target_relative_width:.1%}, or an arm has fewer than "
            f"{plan.min_num_samples} calls. Quieten the machine, or raise max_blocks."
        )


def _thread_notes(crew: Crew) -> Iterable[str]:
    counts = {label: env["num_threads"] for label, env in crew.environments.items()}
    yield "threads in effect: " + ", ".join(f"{label} {n}" for label, n in counts.items()) + "."
    if len(set(counts.values())) > 1:
        yield "arms ran with different thread counts, as they were asked to."
    for label, environment in crew.environments.items():
        if not environment["threads_set_before_torch"]:
            yield f"{label}: torch was imported before the thread counts were set."


def _idle_notes(records: Sequence[BlockRecord], plan: BenchPlan) -> Iterable[str]:
    limit = f"{plan.idle_cpu_limit:.1%}"
    if reruns := sum(record.attempt for record in records):
        yield f"{reruns} turns were run again because an idle arm used more than {limit} CPU."
    if disturbed := sum(record.disturbed for record in records):
        yield (
            f"may be unstable: {disturbed} of {len(records)} turns were kept although an idle arm "
            f"used more than {limit} CPU in every try."
        )
    if any(record.idle_cpu_share is None for record in records):
        yield "the CPU time of idle arms could not be measured on this machine."
