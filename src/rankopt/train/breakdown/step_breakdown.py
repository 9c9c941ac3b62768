"""Where a training step goes, found on a few steps of a run.

One step in eight is watched. With one process the phases are read off a clock; where there are
collectives, torch.profiler tells their waits from the work that hides them, on so few steps that it
costs less than half a percent of the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rankopt.data.dealt import Share
from rankopt.data.rows import Rows
from rankopt.diagnose.schema import MachinePeaks
from rankopt.train.breakdown.communication import exposed_segments
from rankopt.train.breakdown.phase_clock import SPAN_PREFIX, Segment
from rankopt.train.breakdown.phases import (
    PHASES,
    TITLES,
    DenseUse,
    Phase,
    PhaseRow,
    SparseUse,
    StepBreakdown,
)
from rankopt.train.breakdown.step_work import StepWork, count_step, optimizer_phase
from rankopt.train.breakdown.watched_lookups import watch_lookups
from rankopt.train.meter import WARM_UP_STEPS
from rankopt.train.step import Step
from rankopt.units import NS_PER_S

Batch = TypeVar("Batch", bound=Rows | Share)

WATCH_EVERY = 8
PROFILE_COST = 0.005
"""Share of the run that profiled steps may cost beyond what they would have taken anyway."""
_RECENT = 256
TRACED_STEPS = 3
TRACE_NAME = "trace.json"
_ANCHOR = "rankopt: clocks"


class StepWatch:
    """Takes a run's steps, and says where the time of those it watched went.

    Args:
        step: of a set-up whose passes have been applied, and that has taken no step yet.
        trace: the folder that gets a Chrome trace of three steps after the warm-up.
        profiles: read collectives off torch.profiler; None: where there are several ranks.
        every: one step of so many is watched, with the profiler at most.

    Attributes:
        last_wait_ns: how long the last batch took to come.
    """

    def __init__(
        self,
        step: Step,
        *,
        trace: Path | None = None,
        profiles: bool | None = None,
        every: int = WATCH_EVERY,
    ) -> None:
        ranks = step.setup.ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._step = step
        self._clock = step.clock
        self._lookups = watch_lookups(step.setup.module, self._clock)
        self._clock.optimizer_phases = {
            id(item): optimizer_phase(item, self._lookups.tables) for item in step.optimizers
        }
        if any(weight.is_cuda for weight in step.setup.module.parameters()):
            self._clock.synchronize = torch.cuda.synchronize
        self._every = self._gap = every
        self._usual_rows: int | None = None
        self._profiles = self.world_size > 1 if profiles is None else profiles
        self._tracer = None if trace is None else _Tracer(trace / trace_name(self.rank))
        if self._profiles or self._tracer is not None:
            _prime_profiler()
        self._spent_ns = 0.0
        self._num_steps = 0
        self.last_wait_ns = self._wait_ns = self._checkpoint_ns = 0
        self._plain_ns: list[int] = []
        self._sampled_ns: list[int] = []
        self._phase_ns: defaultdict[Phase, int] = defaultdict(int)
        self._work: StepWork | None = None

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Hand batches on, counting the time each took to come."""
        while True:
            began = time.perf_counter_ns()
            with _span("data_wait", self._tracer is not None and self._tracer.is_open):
                batch = next(batches, None)
            self.last_wait_ns = time.perf_counter_ns() - began
            if batch is None:
                return
            yield batch
            del batch  # or it would live on while the next is waited for

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Count what the block takes as a checkpoint; every one is counted."""
        began = time.perf_counter_ns()
        try:
            with _span("checkpoint", self._tracer is not None and self._tracer.is_open):
                yield
        finally:
            self._checkpoint_ns += time.perf_counter_ns() - began

    def step(self, batch: Rows | Share) -> tuple[float, int]:
        """Do a step; return its mean loss and its wall time in nanoseconds."""
        index = self._num_steps
        self._num_steps += 1
        # What a rank gets of a batch may be less than `batch_size`, but the first is a full one.
        self._usual_rows = self._usual_rows or batch.num_rows
        if index < WARM_UP_STEPS:
            return self._step.timed(batch)
        self._wait_ns += self.last_wait_ns
        if self._tracer is not None and self._tracer.wants_more:
            return self._traced(batch, self._tracer)
        is_usual = batch.num_rows == self._usual_rows
        if is_usual and self._work is None:
            step = self._step
            parts = step.parts(batch.rows if isinstance(batch, Share) else batch)
            self._work = count_step(step.setup, self._lookups, step.optimizers, parts)
        if not is_usual or not self._is_due(index):
            value, step_ns = self._step.timed(batch)
            self._plain_ns.append(step_ns)
            return value, step_ns
        return self._profiled(batch) if self._profiles else self._clocked(batch)

    def close(self) -> str | None:
        """Write the trace, if one is still being taken; return its name, if there is one."""
        if self._tracer is None:
            return None
        self._tracer.close()
        return self._tracer.file.name if self._tracer.file.exists() else None

    def summary(self, peaks: MachinePeaks | None = None) -> StepBreakdown:
        """Describe the run so far.

        Args:
            peaks: what the machine can do with the run's threads; None where it was not measured.
        """
        trace = self.close()
        place = {"rank": self.rank, "world_size": self.world_size, "trace": trace}
        if not self._sampled_ns:
            note = f"the run ended before a full batch was watched, after {self._num_steps} steps"
            return StepBreakdown(num_sampled=0, notes=(note,), **place)
        means = self._means()
        wall_ns = sum(means.values())
        return StepBreakdown(
            num_sampled=len(self._sampled_ns),
            wall_ns=wall_ns,
            phases=tuple(
                PhaseRow(phase=phase, mean_ns=means[phase], share=means[phase] / wall_ns)
                for phase in PHASES
            ),
            measured_with="profiler" if self._profiles else "clock",
            sampled_p50_ns=statistics.median(self._sampled_ns),
            plain_p50_ns=statistics.median(self._plain_ns) if self._plain_ns else None,
            dense=self._dense(means, peaks),
            sparse=self._sparse(means, peaks),
            notes=tuple(self._notes()),
            **place,
        )

    def _means(self) -> dict[Phase, float]:
        num_timed = self._num_steps - WARM_UP_STEPS
        means: dict[Phase, float] = {
            phase: self._phase_ns[phase] / len(self._sampled_ns) for phase in PHASES
        }
        # A window read or a checkpoint falls on one step of many: all of them are counted, or the
        # sample would miss it, or have it far too often.
        means["data_wait"] = self._wait_ns / num_timed
        means["checkpoint"] = self._checkpoint_ns / self._num_steps
        return means

    def _is_due(self, index: int) -> bool:
        if not self._profiles:
            return (index - WARM_UP_STEPS) % self._every == 0
        if not self._plain_ns:  # the cost of the first is held against a plain step
            return False
        if not self._sampled_ns:
            return True
        return index % self._gap == 0

    def _clocked(self, batch: Rows | Share) -> tuple[float, int]:
        value, step_ns, segments = self._watched(batch, annotates=False)
        self._take(step_ns, segments)
        return value, step_ns

    def _profiled(self, batch: Rows | Share) -> tuple[float, int]:
        began = time.perf_counter_ns()
        with _profile() as taken:
            with record_function(_ANCHOR):
                anchor_ns = time.perf_counter_ns()
            value, step_ns, segments = self._watched(batch, annotates=False)
        results = taken.profiler.kineto_results if taken.profiler is not None else None
        if results is not None:
            segments = exposed_segments(segments, results.events(), _ANCHOR, anchor_ns)
        self._take(step_ns, segments)
        self._space_out(time.perf_counter_ns() - began)
        return value, step_ns

    def _space_out(self, lasted_ns: int) -> None:
        """Set how far apart profiled steps are, from what they cost."""
        plain_ns = statistics.median(self._plain_ns[-_RECENT:])
        self._spent_ns += max(0.0, lasted_ns - plain_ns)
        cost = self._spent_ns / len(self._sampled_ns) / (PROFILE_COST * plain_ns)
        # A power of two, so that ranks whose costs differ a little profile the same steps: one that
        # did so alone would come late to its collectives, and have the others wait in its place.
        self._gap = max(self._every, 1 << math.ceil(math.log2(max(1.0, cost))))

    def _traced(self, batch: Rows | Share, tracer: _Tracer) -> tuple[float, int]:
        tracer.open()
        with record_function(f"step {self._num_steps}"):
            value, step_ns, _ = self._watched(batch, annotates=True)
        tracer.count()
        return value, step_ns

    def _watched(self, batch: Rows | Share, *, annotates: bool) -> tuple[float, int, list[Segment]]:
        self._clock.start(annotates=annotates)
        try:
            value, step_ns = self._step.timed(batch)
        finally:
            segments = self._clock.stop()
        return value, step_ns, segments

    def _take(self, step_ns: int, segments: list[Segment]) -> None:
        self._sampled_ns.append(step_ns)
        for segment in segments:
            self._phase_ns[segment.phase] += segment.stop_ns - segment.start_ns

    def _dense(self, means: dict[Phase, float], peaks: MachinePeaks | None) -> DenseUse:
        work = self._work
        if work is None or work.flops is None:
            reason = "no full batch was counted" if work is None else work.dense_reason
            return DenseUse(reason=reason)
        is_half = self._step.setup.autocast is not None
        time_ns = means["forward"] + means["backward"]
        speed = work.flops / time_ns * NS_PER_S
        peak, reason = None, _NO_PEAKS
        if peaks is not None:
            peak = peaks.bf16 if is_half else peaks.fp32
            reason = "this CPU has no bf16 products"
        return DenseUse(
            flops=work.flops,
            recomputed_flops=work.recomputed_flops,
            num_rows=work.num_rows,
            time_ns=time_ns,
            flops_per_s=speed,
            peak="bf16" if is_half else "fp32",
            peak_per_s=None if peak is None else peak.per_s,
            mfu=None if peak is None else speed / peak.per_s,
            reason=reason if peak is None else None,
        )

    def _sparse(self, means: dict[Phase, float], peaks: MachinePeaks | None) -> SparseUse:
        work = self._work
        if work is None or work.lookup_bytes is None:
            reason = "no full batch was counted" if work is None else work.sparse_reason
            return SparseUse(reason=reason)
        lookup_ns, update_ns = means["lookup"], means["optimizer_tables"]
        moved, time_ns = work.lookup_bytes, lookup_ns
        if work.update_bytes is not None:
            moved, time_ns = moved + work.update_bytes, time_ns + update_ns
        speed = moved / time_ns * NS_PER_S if time_ns else None
        peak = None if peaks is None else peaks.read_per_s(work.table_bytes)
        reasons = [work.sparse_reason, _NO_PEAKS if peaks is None else None]
        return SparseUse(
            lookup_bytes=work.lookup_bytes,
            update_bytes=work.update_bytes,
            num_ids=work.num_ids,
            num_distinct_ids=work.num_distinct_ids,
            lookup_ns=lookup_ns,
            update_ns=update_ns if work.update_bytes is not None else None,
            bytes_per_s=speed,
            peak_per_s=peak,
            utilization=None if peak is None or speed is None else speed / peak,
            reason="; ".join(filter(None, reasons)) or None,
        )

    def _notes(self) -> Iterator[str]:
        if not self._lookups.names:
            yield "no embedding module was found: lookups count as dense forward"
        if self._lookups.sharded:
            yield "sharded tables are updated inside the backward: that time counts as backward"
        if self._profiles:
            yield "a collective counts as exposed while no operator runs in this process"


_NO_PEAKS = "this machine's peaks are not measured: `rankopt train --peaks`"


class _Tracer:
    """A profile of a few steps in a row, written as a Chrome trace."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._profile: Any = None
        self._num_steps = 0

    @property
    def is_open(self) -> bool:
        return self._profile is not None

    @property
    def wants_more(self) -> bool:
        return self._num_steps < TRACED_STEPS

    def open(self) -> None:
        if self._profile is None:
            self._profile = _profile()
            self._profile.__enter__()

    def count(self) -> None:
        self._num_steps += 1
        if not self.wants_more:
            self.close()

    def close(self) -> None:
        if self._profile is None:
            return
        taken, self._profile = self._profile, None
        self._num_steps = TRACED_STEPS
        taken.__exit__(None, None, None)
        taken.export_chrome_trace(str(self.file))


def trace_name(rank: int) -> str:
    """Return the name of a rank's trace: trace.json of the first, trace-rank1.json and so on."""
    return TRACE_NAME if rank == 0 else f"trace-rank{rank}.json"


def _prime_profiler() -> None:
    """Start and stop the profiler once: its first start takes long, and is no step's fault."""
    with _profile():
        pass


def _profile() -> Any:
    # Or the profiler tells the terminal of each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _span(phase: Phase, is_traced: bool) -> Any:
    return record_function(SPAN_PREFIX + TITLES[phase]) if is_traced else contextlib.nullcontext()
