"""What training by two arms cost and where their steps went, as the cells of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rankopt.review import wording
from rankopt.review.schema import TrainingCost
from rankopt.train.breakdown.phases import (
    PHASES,
    TITLES,
    Phase,
    StepBreakdown,
    dense_text,
    sparse_text,
)

NOT_MEASURED = "not measured"


def training_cells(training: Mapping[str, TrainingCost]) -> list[tuple[str, str, str, str]]:
    """Write one line per figure: what, control, candidate, candidate against control."""
    control, candidate = training.get("control"), training.get("candidate")
    if control is None or candidate is None:
        return []
    more = wording.ratio(candidate.samples_per_s / control.samples_per_s)
    less = wording.ratio(candidate.peak_memory_bytes / control.peak_memory_bytes)
    rows = [
        (
            "Samples a second",
            f"{control.samples_per_s:,.0f}",
            f"{candidate.samples_per_s:,.0f}",
            f"{more} the throughput",
        ),
        (
            "Peak memory",
            wording.size(control.peak_memory_bytes),
            wording.size(candidate.peak_memory_bytes),
            f"{less} the memory",
        ),
    ]
    if control.breakdown is None and candidate.breakdown is None:
        return rows
    for phase in PHASES:
        rows += _phase(phase, control.breakdown, candidate.breakdown)
    return [
        *rows,
        _texts("Dense part", control, candidate, lambda found: dense_text(found.dense)),
        _texts("Tables", control, candidate, lambda found: sparse_text(found.sparse)),
    ]


def _phase(
    phase: Phase, control: StepBreakdown | None, candidate: StepBreakdown | None
) -> list[tuple[str, str, str, str]]:
    times = [None if found is None else found.mean_ns(phase) for found in (control, candidate)]
    if not any(times):
        return []
    shown = [
        NOT_MEASURED if found is None else _with_share(found, phase)
        for found in (control, candidate)
    ]
    before, after = times
    against = wording.ratio(after / before) if before and after else "not compared"
    if before and after:
        against += " the time"
    return [(f"Step: {TITLES[phase]}", shown[0], shown[1], against)]


def _with_share(found: StepBreakdown, phase: Phase) -> str:
    share = sum(row.share for row in found.phases if row.phase == phase)
    return f"{wording.duration(found.mean_ns(phase))}, {share:.1%}"


def _texts(
    what: str,
    control: TrainingCost,
    candidate: TrainingCost,
    words: Callable[[StepBreakdown], str],
) -> tuple[str, str, str, str]:
    shown = [
        NOT_MEASURED if arm.breakdown is None else words(arm.breakdown).partition(": ")[2]
        for arm in (control, candidate)
    ]
    return what, shown[0], shown[1], "not compared"
