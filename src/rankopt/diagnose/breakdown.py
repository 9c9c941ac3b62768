"""Where the time of one batch size goes: operators, parts, what is left, and what bounds each.

Shapes: C calls, S sites.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from rankopt.diagnose.costs import Cost, cost_of, describe_shapes, part_of
from rankopt.diagnose.profile import Notes, Profiled, Scores, Site
from rankopt.diagnose.quantise import quantise_ns
from rankopt.diagnose.roofline import Limits, limits_of
from rankopt.diagnose.rows_read import RowsRead, rows_read
from rankopt.diagnose.schema import (
    PARTS,
    BatchRow,
    MachinePeaks,
    OperatorRow,
    Part,
    PartRow,
    Timing,
)
from rankopt.diagnose.timing import Effort, Measured, measure, timing
from rankopt.units import NS_PER_S

NUM_NOTED = 8
"""Calls whose rows are noted: ids differ from call to call."""
STEADY = 0.1
"""Share of the whole that the parts may lack or exceed on a quiet machine."""
ABOVE_PEAK = 1.05
"""Share of a peak above which the peak was not one."""
NUM_GATHERS = 5
"""Times that the rows of each noted call are read by themselves."""


@dataclass(frozen=True)
class Subject:
    """What is looked into.

    Attributes:
        model: its name.
        kind: a compiled artifact, or the card's eager module.
        run: the model as it is served.
        profile: the same with clocks.
        sequence_lengths: how long an axis may be that is a history.
    """

    model: str
    kind: Literal["artifact", "eager"]
    run: Scores
    profile: Profiled
    sequence_lengths: Collection[int]


@dataclass(frozen=True)
class _Operator:
    """One site, what it has to do, and what of it is quantising."""

    site: Site
    notes: Notes
    part: Part
    cost: Cost
    gather_ns: float | None
    row_bytes: float | None
    quantise_ns: float | None


def break_down(
    subject: Subject,
    windows: Sequence[dict[str, Tensor]],
    batch_size: int,
    machine: MachinePeaks,
    effort: Effort,
) -> BatchRow:
    """Time one batch size and say where it goes."""
    operators = _operators(subject, windows)
    measured = measure(subject.run, subject.profile, windows, len(operators), effort)
    working_set = sum(operator.cost.num_bytes for operator in operators)
    limits = [limits_of(each.cost, machine, working_set, each.gather_ns) for each in operators]
    times = [timing(measured.profiled.sites_ns[:, index]) for index in range(len(operators))]
    rows = tuple(
        _operator_row(operator, limit, time)
        for operator, limit, time in zip(operators, limits, times, strict=True)
    )
    whole = timing(measured.plain_ns)
    parts = _parts(operators, limits, times, measured, whole)
    left = whole.p50_ns - sum(part.time.p50_ns for part in parts)
    return BatchRow(
        model=subject.model,
        subject=subject.kind,
        batch_size=batch_size,
        whole=whole,
        parts=parts,
        operators=rows,
        unexplained_share=left / whole.p50_ns,
        overhead_inside_p50_ns=_inside(measured),
        clocks_p50_ns=_clocks_ns(measured),
        parameter_bytes=sum(operator.cost.parameter_bytes for operator in operators),
        notes=(*_notes(operators, measured), *_above_peak(rows), *_unsteady(left / whole.p50_ns)),
    )


def _operators(subject: Subject, windows: Sequence[dict[str, Tensor]]) -> list[_Operator]:
    sites, notes = subject.profile.note(windows[0])
    reads: list[list[RowsRead]] = [[] for _ in sites]
    for window in windows[:NUM_NOTED]:
        again, noted = subject.profile.note(window)
        if len(again) != len(sites):
            continue
        for index, (site, note) in enumerate(zip(again, noted, strict=True)):
            found = rows_read(site, note)
            if found is not None and found.offsets.numel():
                reads[index].append(found)
    operators = []
    for site, note, read in zip(sites, notes, reads, strict=True):
        part = part_of(site, note, subject.sequence_lengths)
        row_bytes = statistics.mean(each.num_bytes for each in read) if read else None
        cost = cost_of(site, note, part, None if row_bytes is None else round(row_bytes))
        operators.append(
            _Operator(
                site=site,
                notes=note,
                part=part,
                cost=cost,
                gather_ns=_gather_ns(read) if read else None,
                row_bytes=row_bytes,
                quantise_ns=quantise_ns(site, note),
            )
        )
    return operators


def _gather_ns(reads: Sequence[RowsRead]) -> float:
    """Read the rows of some calls by themselves, in turns, so that none finds its own in cache."""
    seconds = [read.seconds() for _ in range(NUM_GATHERS) for read in reads]
    return statistics.median(seconds[len(reads) :]) * NS_PER_S


def _operator_row(operator: _Operator, limits: Limits, time: Timing) -> OperatorRow:
    time_ns, cost = max(time.p50_ns, 1.0), operator.cost
    operations = cost.num_operations
    read = operator.row_bytes if operator.row_bytes is not None else cost.num_bytes
    quantise = operator.quantise_ns
    return OperatorRow(
        name=operator.site.name,
        part=operator.part,
        layer=_layer(operator.site),
        shapes=describe_shapes(operator.notes),
        time=time,
        num_operations=operations,
        num_bytes=cost.num_bytes,
        operations_per_s=None if operations is None else operations / time_ns * NS_PER_S,
        bytes_per_s=read / time_ns * NS_PER_S,
        peak=limits.peak,
        of_operations_peak=None if limits.operations_ns is None else limits.operations_ns / time_ns,
        of_bytes_peak=limits.bytes_ns / time_ns,
        bound=limits.bound(time_ns),
        of_bound=limits.nearest_ns / time_ns,
        gather_bytes_per_s=None
        if operator.gather_ns is None or operator.row_bytes is None
        else operator.row_bytes / operator.gather_ns * NS_PER_S,
        quantise_p50_ns=None if quantise is None else min(quantise, time.p50_ns),
    )


def _layer(site: Site) -> str:
    """Name the layer by the first constant it reads: `top_0_packed` is of `top_0`."""
    return site.constants[0] if site.constants else ""


def _parts(
    operators: Sequence[_Operator],
    limits: Sequence[Limits],
    times: Sequence[Timing],
    measured: Measured,
    whole: Timing,
) -> tuple[PartRow, ...]:
    sites_ns = measured.profiled.sites_ns
    # Of each site's time, the share that is quantising.
    share_S = np.array(
        [
            min((operator.quantise_ns or 0.0) / max(time.p50_ns, 1.0), 1.0)
            for operator, time in zip(operators, times, strict=True)
        ]
    )
    found = []
    for part in PARTS:
        members = [index for index, operator in enumerate(operators) if operator.part == part]
        samples_C = (sites_ns[:, members] * (1 - share_S[members])).sum(axis=1)
        if part == "quantise":
            samples_C = samples_C + (sites_ns * share_S).sum(axis=1)
        if part == "framework overhead":
            clocks_ns = _clocks_ns(measured)
            samples_C = measured.profiled.whole_ns - sites_ns.sum(axis=1) - clocks_ns
        elif not members and not samples_C.any():
            continue
        found.append(_part_row(part, members, operators, limits, times, timing(samples_C), whole))
    return tuple(sorted(found, key=lambda row: -row.time.p50_ns))


def _part_row(
    part: Part,
    members: Sequence[int],
    operators: Sequence[_Operator],
    limits: Sequence[Limits],
    times: Sequence[Timing],
    time: Timing,
    whole: Timing,
) -> PartRow:
    # Against the operators' own times: a dense layer that quantises is held to its peak with that.
    spent_ns = max(sum(times[index].p50_ns for index in members), 1.0)
    counted = [index for index in members if limits[index].operations_ns is not None]
    operations_ns = sum(limits[index].operations_ns or 0.0 for index in counted)
    bytes_ns = sum(limits[index].bytes_ns for index in members)
    total = sum(operators[index].cost.num_operations or 0 for index in counted)
    read = sum(operators[index].row_bytes or operators[index].cost.num_bytes for index in members)
    together = Limits(operations_ns if counted else None, bytes_ns, None)
    return PartRow(
        part=part,
        time=time,
        share=time.p50_ns / whole.p50_ns,
        num_operators=len(members),
        operations_per_s=total / spent_ns * NS_PER_S if counted else None,
        bytes_per_s=read / spent_ns * NS_PER_S if members else None,
        of_operations_peak=operations_ns / spent_ns if counted else None,
        of_bytes_peak=bytes_ns / spent_ns if members else None,
        bound=together.bound(spent_ns) if members else "overhead",
    )


def _clocks_ns(measured: Measured) -> float:
    return float(measured.clock_ns * measured.profiled.sites_ns.shape[1])


def _inside(measured: Measured) -> float | None:
    inside_ns = measured.profiled.inside_ns
    if inside_ns is None:
        return None
    left_C = inside_ns - measured.profiled.sites_ns.sum(axis=1) - _clocks_ns(measured)
    return float(np.median(left_C))


def _notes(operators: Sequence[_Operator], measured: Measured) -> list[str]:
    notes = []
    unknown = sorted(
        {
            each.site.name
            for each in operators
            if each.part == "lookup" and each.gather_ns is None and not each.site.generated
        }
    )
    if unknown:
        notes.append(
            f"the rows that {', '.join(unknown)} reads are not known here, so it is not held "
            "against a gather of the same rows"
        )
    if measured.num_dropped:
        notes.append(
            f"{measured.num_dropped} profiled calls ran other operators than the first, and are "
            "left out"
        )
    if any(each.quantise_ns for each in operators):
        notes.append(
            "the time of quantising inside int8 layers is estimated from rows of the same width "
            "with 16 outputs"
        )
    return notes


def _above_peak(rows: Sequence[OperatorRow]) -> list[str]:
    names = sorted({row.name for row in rows if (row.of_operations_peak or 0.0) > ABOVE_PEAK})
    if not names:
        return []
    return [
        f"{', '.join(names)} ran faster than the peak measured before, so the machine was busy "
        "then; measure it again (`rankopt diagnose --measure-again`)"
    ]


def _unsteady(unexplained: float) -> list[str]:
    if abs(unexplained) <= STEADY:
        return []
    return [
        f"the parts and the whole, timed in turns, differ by {unexplained:+.0%} of it: the machine "
        "did other work; diagnose again when it is quiet"
    ]
