"""Collectives that a step waits for, told from those that its work hides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rankopt.train.breakdown.phase_clock import Segment
from rankopt.train.breakdown.phases import Phase
from rankopt.units import NS_PER_US

Interval = tuple[int, int]

_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "ncclDevKernel", "ncclKernel")
_WORK = ("aten::", "rankopt::", "fbgemm::", "torchrec::", "quantized::", "mkldnn::", "## Call ")
"""Operators, and what torch.compile made of them. Nodes of the backward are left out: one of them
may be nothing but a wait."""
LONGEST_PAUSE_NS = 100 * NS_PER_US
"""Between two operators: a shorter one is Python on its way to the next, not a wait."""


def exposed_segments(
    segments: Sequence[Segment], events: Iterable[Any], anchor: str, anchor_ns: int
) -> list[Segment]:
    """Give the time in which a collective runs and no operator does to `communication`.

    Args:
        segments: of a step, by the process's clock.
        events: the profile's, of the same step.
        anchor: the name of an event that the profile noted
        anchor_ns: at this time of the process's clock.
    """
    collectives: list[Interval] = []
    work: list[Interval] = []
    shift = None
    for event in events:
        name = event.name()
        interval = event.start_ns(), event.end_ns()
        if name == anchor:
            shift = anchor_ns - interval[0]
        elif name.startswith(_COLLECTIVES):
            collectives.append(interval)
        elif name.startswith(_WORK):
            work.append(interval)
    if shift is None:
        return list(segments)
    exposed = without(united(collectives), united(work, LONGEST_PAUSE_NS))
    return _given_to(segments, [(low + shift, high + shift) for low, high in exposed])


def united(intervals: Iterable[Interval], pause_ns: int = 0) -> list[Interval]:
    """Join intervals that overlap or lie no further apart than a pause, in order."""
    joined: list[Interval] = []
    for low, high in sorted(intervals):
        if joined and low <= joined[-1][1] + pause_ns:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return joined


def without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return what of the intervals no taken one covers; both in order, without overlap."""
    left: list[Interval] = []
    first = 0
    for start, high in intervals:
        low = start
        while first < len(taken) and taken[first][1] <= low:
            first += 1
        for take_low, take_high in taken[first:]:
            if take_low >= high:
                break
            if take_low > low:
                left.append((low, take_low))
            low = max(low, take_high)
        if low < high:
            left.append((low, high))
    return left


def _given_to(
    segments: Sequence[Segment], exposed: Sequence[Interval], phase: Phase = "communication"
) -> list[Segment]:
    result = []
    for segment in segments:
        whole = [(segment.start_ns, segment.stop_ns)]
        kept = without(whole, exposed)
        result += [Segment(segment.phase, *part) for part in kept]
        result += [Segment(phase, *part) for part in without(whole, kept)]
    return result
