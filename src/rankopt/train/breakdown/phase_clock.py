"""A clock that says which phase of a step the process is in.

A step turns it from phase to phase; what is called inside (a lookup within the forward) enters its
own phase and leaves it again, and the outer phase stands still meanwhile. So phases never overlap
and add up to the step. While no step is watched every call returns at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from rankopt.train.breakdown.phases import TITLES, Phase

SPAN_PREFIX = "step: "
"""What the names of phases begin with in a trace."""


class Segment(NamedTuple):
    """An uninterrupted stretch of one phase, by `time.perf_counter_ns`."""

    phase: Phase
    start_ns: int
    stop_ns: int


class PhaseClock:
    """Notes when a watched step goes from one phase to another.

    Attributes:
        is_running: whether a step is being watched.
        optimizer_phases: an optimizer's id -> whose weights it updates.
        synchronize: called before the clock is read: on a device that works behind the host's back
            a phase ends when its kernels do.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.is_running = False
        self.synchronize = synchronize
        self.optimizer_phases: Mapping[int, Phase] = {}
        self._thread = 0
        self._stack: list[Phase] = []
        self._spans: list[Any] = []
        self._annotates = False
        self._segments: list[Segment] = []
        self._since_ns = 0

    def start(self, *, annotates: bool = False) -> None:
        """Begin a step, in the phase `other`.

        Args:
            annotates: make each phase a named span of the profile that is being taken.
        """
        self._thread = threading.get_ident()
        self._segments = []
        self._annotates = annotates
        self._stack = ["other"]
        self.is_running = True
        self._since_ns = time.perf_counter_ns()

    def stop(self) -> list[Segment]:
        """End the step; return its segments in order, without gaps."""
        self._cut()
        self.is_running = False
        while self._spans:
            self._close_span()
        return self._segments

    def turn_to(self, phase: Phase) -> None:
        """Go on to the next phase of the step."""
        if not self.is_running:
            return
        self._cut()
        while self._spans:
            self._close_span()
        self._stack = [phase]
        self._open_span(phase)

    def turn_to_optimizer(self, optimizer: Optimizer) -> None:
        """Go on to an optimizer's step."""
        self.turn_to(self.optimizer_phases.get(id(optimizer), "optimizer_both"))

    def enter(self, phase: Phase) -> bool:
        """Begin a phase inside the present one; False where nothing is to be left again."""
        # Threads that score or read beside the step have phases of their own.
        if not self.is_running or threading.get_ident() != self._thread:
            return False
        self._cut()
        self._stack.append(phase)
        self._open_span(phase)
        return True

    def leave(self) -> None:
        """Go back to the phase around the present one."""
        self._cut()
        if len(self._stack) > 1:
            self._stack.pop()
            self._close_span()

    def _cut(self) -> None:
        if self.synchronize is not None:
            self.synchronize()
        now_ns = time.perf_counter_ns()
        self._segments.append(Segment(self._stack[-1], self._since_ns, now_ns))
        self._since_ns = now_ns

    def _open_span(self, phase: Phase) -> None:
        if self._annotates and phase != "other":
            span: Any = record_function(SPAN_PREFIX + TITLES[phase])
            span.__enter__()
            self._spans.append(span)

    def _close_span(self) -> None:
        if self._spans:
            self._spans.pop().__exit__(None, None, None)
