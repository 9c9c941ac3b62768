"""What a diagnosis says, in words and rows: the one source of the HTML page and of the Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rankopt.diagnose.schema import (
    PARTS,
    BatchRow,
    Diagnosis,
    MachinePeaks,
    OperatorRow,
    Part,
    PartRow,
    Peak,
    Timing,
)
from rankopt.review.page import flatten
from rankopt.review.plots import Figure
from rankopt.review.rendering import Table
from rankopt.units import format_bytes, format_duration

PART_HEADINGS = (
    "Part", "Time", "Share", "Operators", "Arithmetic", "Of its peak", "Memory", "Of its peak",
    "Nearest limit",
)  # fmt: skip
OPERATOR_HEADINGS = (
    "Operator", "Layer", "Part", "Shapes", "Time", "Arithmetic", "Of its peak", "Memory",
    "Of its peak", "Nearest limit",
)  # fmt: skip
MACHINE_HEADINGS = ("What", "Best", "Middle", "Lowest", "Measurements")
COLOURS: dict[Part, str] = {
    "lookup": "#2c7fb8",
    "interaction": "#d98a1f",
    "attention": "#a0609e",
    "dense": "#2a9d8f",
    "quantise": "#8c6d46",
    "eager part": "#c0504d",
    "other compiled code": "#6f9fd8",
    "framework overhead": "#7d8794",
}
UNKNOWN = "not counted"

LIMITS = (
    "Times are medians of calls on one process, one call at a time. Intervals are 95 % and take "
    "calls as independent.",
    "The parts come from a copy of the compiled code with clocks in it, or from torch's own record "
    "of an eager model; the whole is timed without either, in turns with it. What the parts lack "
    "of the whole is shown as unexplained.",
    "A loop that the compiler fused of several kinds of work counts as one of them.",
    "Bytes are the least that must move: each operand once. Their rate is held against reading "
    "memory of the size that one call touches; a lookup is held against reading its own rows.",
)


@dataclass(frozen=True)
class Section:
    """One batch size."""

    title: str
    summary: str
    parts: Table
    operators: Table
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A diagnosis in readable words."""

    title: str
    headline: str
    tiles: list[tuple[str, str, str]]
    sections: list[Section]
    machine: Table
    limits: tuple[str, ...]
    facts: list[tuple[str, str]]


def page_of(diagnosis: Diagnosis) -> Page:
    """Put a diagnosis into words."""
    return Page(
        title=f"Where the time goes: {diagnosis.model} ({diagnosis.subject})",
        headline=" ".join(_headline(batch) for batch in diagnosis.batches),
        tiles=[_tile(batch) for batch in diagnosis.batches],
        sections=[_section(batch) for batch in diagnosis.batches],
        machine=_machine(diagnosis.machine),
        limits=(*LIMITS, *diagnosis.notes),
        facts=[*flatten(diagnosis.data), *flatten(diagnosis.environment)],
    )


def _headline(batch: BatchRow) -> str:
    first = batch.parts[0]
    return f"Batch {batch.batch_size:,}: {first.share:.0%} {first.part}, {_nearest(first)}."


def _tile(batch: BatchRow) -> tuple[str, str, str]:
    first = batch.parts[0]
    note = f"{_interval(batch.whole)}; largest part {first.part}, {first.share:.0%}"
    return f"One call at batch {batch.batch_size:,}", format_duration(batch.whole.p50_ns), note


def _section(batch: BatchRow) -> Section:
    summary = (
        f"One call takes {format_duration(batch.whole.p50_ns)} ({_interval(batch.whole)}, "
        f"{batch.whole.num_samples:,} calls). Its parts leave {batch.unexplained_share:+.1%} of it "
        f"unexplained; the clocks cost {format_duration(batch.clocks_p50_ns)} more a call, left "
        "out here."
    )
    if batch.overhead_inside_p50_ns is not None:
        inside = format_duration(max(batch.overhead_inside_p50_ns, 0.0))
        summary += f" Of the overhead, {inside} are inside the compiled code: buffers and views."
    return Section(
        title=f"Batch {batch.batch_size:,}",
        summary=summary,
        parts=Table("Parts", PART_HEADINGS, [_part(part) for part in batch.parts]),
        operators=Table("Operators", OPERATOR_HEADINGS, [_operator(o) for o in batch.operators]),
        notes=batch.notes,
    )


def _part(row: PartRow) -> tuple[str, ...]:
    return (
        row.part,
        f"{format_duration(row.time.p50_ns)} ({_interval(row.time)})",
        f"{row.share:.1%}",
        str(row.num_operators),
        _rate(row.operations_per_s, "GOP/s"),
        _share(row.of_operations_peak),
        _rate(row.bytes_per_s, "GB/s"),
        _share(row.of_bytes_peak),
        row.bound,
    )


def _operator(row: OperatorRow) -> tuple[str, ...]:
    arithmetic = _rate(row.operations_per_s, "GOP/s")
    time = format_duration(row.time.p50_ns)
    if row.quantise_p50_ns:
        time += f", {format_duration(row.quantise_p50_ns)} of it quantising"
    return (
        row.name,
        row.layer,
        row.part,
        row.shapes,
        time,
        arithmetic if row.peak is None else f"{arithmetic} {row.peak}",
        _share(row.of_operations_peak),
        _rate(row.bytes_per_s, "GB/s"),
        _share(row.of_bytes_peak),
        row.bound,
    )


def _nearest(row: PartRow) -> str:
    return "bound by neither" if row.bound == "overhead" else f"nearest to its {row.bound}"


def _interval(time: Timing) -> str:
    if time.ci_low_ns is None or time.ci_high_ns is None:
        return "too few calls for an interval"
    return f"{format_duration(time.ci_low_ns)} to {format_duration(time.ci_high_ns)}"


def _rate(per_s: float | None, unit: str) -> str:
    return UNKNOWN if per_s is None else f"{per_s / 1e9:.3g} {unit}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def _machine(machine: MachinePeaks) -> Table:
    rows = [
        _peak("int8 multiply-add", machine.int8, "GOP/s"),
        _peak("fp32 multiply-add", machine.fp32, "GOP/s"),
    ]
    if machine.bf16 is not None:
        rows.append(_peak("bf16 multiply-add", machine.bf16, "GOP/s"))
    for read in machine.reads:
        what = f"read in order out of {format_bytes(read.working_set_bytes)}"
        rows.append(_peak(what, read.peak, "GB/s"))
    for gather in machine.gathers:
        place = format_bytes(gather.working_set_bytes)
        what = f"rows of {gather.row_bytes} bytes out of {place}, {gather.distribution} ids"
        rows.append(_peak(what, gather.peak, "GB/s"))
    threads = f"{machine.num_threads} thread{'s' if machine.num_threads > 1 else ''}"
    return Table(f"{threads}, {machine.isa}", MACHINE_HEADINGS, rows)


def _peak(what: str, peak: Peak, unit: str) -> tuple[str, ...]:
    return (
        what,
        _rate(peak.per_s, unit),
        _rate(peak.median_per_s, unit),
        _rate(peak.lowest_per_s, unit),
        str(peak.num_samples),
    )


def figures(diagnosis: Diagnosis) -> list[Figure]:
    """Draw the shares of each batch size, and each part's speed against its limit."""
    return [_shares(diagnosis.batches), _against_limits(diagnosis.batches)]


def _shares(batches: Sequence[BatchRow]) -> Figure:
    names = [f"batch {batch.batch_size}" for batch in batches]
    traces: list[dict[str, Any]] = []
    for part in PARTS:
        by_batch = [{row.part: row for row in batch.parts}.get(part) for batch in batches]
        if not any(by_batch):
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": names,
                "x": [0.0 if row is None else round(row.share * 100, 3) for row in by_batch],
                "marker": {"color": COLOURS[part]},
                "hovertext": [
                    "" if row is None else f"{escape(part)}: {format_duration(row.time.p50_ns)}"
                    for row in by_batch
                ],
                "hoverinfo": "text",
            }
        )
    layout = {
        "barmode": "stack",
        "height": 170 + 46 * len(names),
        "xaxis": {"title": {"text": "share of one call, %"}},
        "yaxis": {"title": {"text": ""}, "autorange": "reversed"},
    }
    caption = "Medians of each part over the median of the whole call; the rest is unexplained."
    return Figure("shares", "Where the time of one call goes", caption, traces, layout)


def _against_limits(batches: Sequence[BatchRow]) -> Figure:
    names = [f"batch {batch.batch_size}" for batch in batches]
    traces: list[dict[str, Any]] = []
    for part in PARTS:
        shares: list[float | None] = []
        for batch in batches:
            row = {row.part: row for row in batch.parts}.get(part)
            nearest = None
            if row is not None and row.num_operators:
                nearest = max(row.of_operations_peak or 0.0, row.of_bytes_peak or 0.0) * 100
            shares.append(None if nearest is None else round(nearest, 2))
        if any(shares):
            traces.append(
                {
                    "type": "bar",
                    "name": part,
                    "x": names,
                    "y": shares,
                    "marker": {"color": COLOURS[part]},
                }
            )
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": ""}},
        "yaxis": {"title": {"text": "of the nearest limit, %"}, "rangemode": "tozero"},
    }
    caption = (
        "How much of its time the work of each part would take at this machine's measured peak: "
        "arithmetic or memory, whichever is nearer."
    )
    return Figure("limits", "Achieved against the machine's own peak", caption, traces, layout)
