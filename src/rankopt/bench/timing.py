"""Time arms in turns until the intervals are narrow enough.

When to stop is decided by the width of each interval and never by where it lies: a run that looked
at the sign, or at whether 1.0 is inside, would stop more often on a lucky streak and claim
differences that are not there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from rankopt.bench.arms import ArmSpec, arm_identity, hash_path, resolve_arm
from rankopt.bench.backend import Backend, Launch, OpenBackend
from rankopt.bench.crew import Crew
from rankopt.bench.plan import BenchPlan
from rankopt.bench.samples import BlockRecord, SampleFile
from rankopt.bench.schedule import turn_order
from rankopt.bench.stats import SpeedupEstimate, paired_speedup
from rankopt.bench.worker import BlockSamples
from rankopt.errors import UsageError
from rankopt.units import format_duration

OnBlock = Callable[[list[BlockRecord]], None]
Progress = Callable[[str], None]


def time_arms(
    arms: Sequence[ArmSpec],
    rows_file: Path,
    plan: BenchPlan,
    backend: Backend,
    *,
    workdir: Path | None = None,
    resume: bool = False,
    on_block: OnBlock | None = None,
    progress: Progress | None = None,
) -> list[BlockRecord]:
    """Time any number of arms in turns; the second is the candidate that the others face.

    Args:
        arms: at least one, with different labels.
        rows_file: what `write_rows` wrote.
        plan: how much to time.
        backend: where arms run; opened and closed here.
        workdir: keeps the raw samples and worker logs; a temporary folder when None.
        resume: continue the run that `workdir` holds.
        on_block: told each newly finished block, all arms together.
        progress: told one line per step.

    Raises:
        UsageError: labels stand twice, or a resumed run differs from the first.
        WorkerDied: workers died more often than the plan allows.
        ArmError: an arm raised.
    """
    if workdir is None:
        with tempfile.TemporaryDirectory(prefix="rankopt-bench-") as folder:
            return time_arms(
                arms, rows_file, plan, backend,
                workdir=Path(folder), on_block=on_block, progress=progress,
            )  # fmt: skip
    workdir.mkdir(parents=True, exist_ok=True)
    arms = prepare_arms(arms)
    samples = SampleFile(
        workdir / "samples.jsonl", fingerprint(arms, rows_file, plan, backend), resume=resume
    )
    with OpenBackend(backend, launch_of(arms, plan, workdir)) as opened:
        crew = Crew(arms, rows_file, plan, opened, samples, progress or _quiet)
        return time_crew(crew, on_block)


def prepare_arms(arms: Sequence[ArmSpec]) -> list[ArmSpec]:
    """Resolve every arm and check that labels differ.

    Raises:
        UsageError: no arm, or a label that stands twice.
    """
    labels = [arm.label for arm in arms]
    if not labels:
        raise UsageError("no arms to time; give at least one.")
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise UsageError(f"arm labels must differ; {twice} stand twice.")
    return [resolve_arm(arm) for arm in arms]


def fingerprint(
    arms: Sequence[ArmSpec], rows_file: Path, plan: BenchPlan, backend: Backend
) -> dict[str, object]:
    """Describe a run by content: samples belong together only when this is equal."""
    return {
        "plan": plan.model_dump(mode="json"),
        "backend": backend.name,
        "rows": hash_path(rows_file),
        **{f"arm {arm.label}": arm_identity(arm) for arm in arms},
    }


def launch_of(arms: Sequence[ArmSpec], plan: BenchPlan, workdir: Path) -> Launch:
    """Return what the arms' workers are started with."""
    return Launch(
        num_threads={arm.label: arm.num_threads or plan.num_threads for arm in arms},
        num_interop_threads=plan.num_interop_threads,
        omp_wait_policy=plan.omp_wait_policy,
        log_folder=workdir / "logs",
        call_timeout_s=plan.call_timeout_s,
    )


def time_crew(crew: Crew, on_block: OnBlock | None = None) -> list[BlockRecord]:
    """Time the arms of a crew at every batch size of its plan."""
    records: list[BlockRecord] = []
    for batch_size in crew.plan.batch_sizes:
        records += _time_batch_size(crew, batch_size, on_block)
    return records


def _time_batch_size(crew: Crew, batch_size: int, on_block: OnBlock | None) -> list[BlockRecord]:
    plan, samples = crew.plan, crew.samples
    records: list[BlockRecord] = []
    num_calls: int | None = None
    begun_ns = time.monotonic_ns()
    for block in range(plan.max_blocks):
        # Orders mirror in pairs, so a run ends only after an even number of blocks.
        may_end = block >= plan.min_blocks and block % 2 == 0
        if may_end and (is_settled(records, crew.labels, plan) or is_over(plan, begun_ns)):
            break
        finished = samples.block(batch_size, block, crew.labels)
        if finished is None:
            if num_calls is None:
                num_calls = _warm_up(crew, batch_size)
                begun_ns = time.monotonic_ns()
            finished = _time_block(crew, batch_size, block, num_calls)
            samples.add_block(finished)
            if on_block is not None:
                on_block(finished)
        records += finished
        crew.progress(_progress_line(plan, finished))
    return records


def _warm_up(crew: Crew, batch_size: int) -> int:
    crew.progress(f"batch {batch_size}: warm-up")
    medians = crew.warm_up(batch_size)
    known = crew.samples.num_calls(batch_size)
    if known is None:
        known = crew.plan.num_calls(medians.values())
        crew.samples.set_num_calls(batch_size, known)
    return known


def _time_block(crew: Crew, batch_size: int, block: int, num_calls: int) -> list[BlockRecord]:
    """Give every arm its turn; a death in any turn repeats the whole block, so turns stay close."""
    order = turn_order(len(crew.labels), batch_size, block, crew.plan.seed)

    def turns() -> list[BlockRecord]:
        return [
            _take_turn(crew, crew.labels[position], batch_size, block, turn, num_calls)
            for turn, position in enumerate(order)
        ]

    records = {record.arm: record for record in crew.retrying(turns)}
    return [records[label] for label in crew.labels]


def _take_turn(
    crew: Crew, label: str, batch_size: int, block: int, turn: int, num_calls: int
) -> BlockRecord:
    plan = crew.plan
    for attempt in range(plan.max_block_reruns + 1):
        got: BlockSamples = crew.call(
            label, "time_block",
            batch_size, block, num_calls, plan.lead_in_duration_ns, crew.other_pids(label),
        )  # fmt: skip
        share = got.idle_cpu_share
        disturbed = share is not None and share > plan.idle_cpu_limit
        record = BlockRecord(
            batch_size=batch_size,
            block=block,
            arm=label,
            turn=turn,
            latency_ns=got.latency_ns,
            wall_ns=got.wall_ns,
            cpu_ns=got.cpu_ns,
            started_ns=got.started_ns,
            idle_cpu_share=share,
            attempt=attempt,
            disturbed=disturbed,
        )
        if not disturbed or attempt == plan.max_block_reruns:
            break
        crew.samples.add_discarded(record)
    return record


def is_over(plan: BenchPlan, begun_ns: int) -> bool:
    """Tell whether a batch size has taken as long as the plan allows."""
    limit_ns = plan.max_duration_ns
    return limit_ns is not None and time.monotonic_ns() - begun_ns >= limit_ns


def is_settled(records: Sequence[BlockRecord], labels: Sequence[str], plan: BenchPlan) -> bool:
    """Tell whether the arms of one batch size have been timed enough.

    Enough calls of each arm, and every interval narrower than the plan's width. The estimates'
    position is not looked at.
    """
    num_samples = sum(record.latency_ns.size for record in records if record.arm == labels[0])
    if num_samples < plan.min_num_samples:
        return False
    if len(labels) < 2:
        return True
    candidate = labels[1]
    return all(
        (estimate.ci_high - estimate.ci_low) / 2 <= plan.target_relative_width * estimate.speedup
        for estimate in (
            estimate_speedup(records, label, candidate, len(plan.batch_sizes))
            for label in labels
            if label != candidate
        )
    )


def estimate_speedup(
    records: Iterable[BlockRecord], control: str, candidate: str, family_size: int = 1
) -> SpeedupEstimate:
    """Estimate control p50 / candidate p50 from the records of one batch size.

    Args:
        records: turns of one batch size; other arms' are left out.
        control: label of the arm compared against.
        candidate: label of the arm judged.
        family_size: intervals that stand in one report, usually the number of batch sizes.
    """
    blocks: dict[str, list[np.ndarray]] = {control: [], candidate: []}
    for record in records:
        if record.arm in blocks:
            blocks[record.arm].append(record.latency_ns)
    return paired_speedup(blocks[control], blocks[candidate], family_size=family_size)


def _progress_line(plan: BenchPlan, finished: Sequence[BlockRecord]) -> str:
    first = finished[0]
    medians = ", ".join(
        f"{record.arm} {format_duration(float(np.median(record.latency_ns)))}"
        for record in finished
    )
    return f"batch {first.batch_size}: block {first.block + 1} of {plan.min_blocks} to " + (
        f"{plan.max_blocks}: {medians}"
    )


def _quiet(_: str) -> None:
    return None
