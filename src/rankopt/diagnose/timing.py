"""Take the times of a model and of its profile in turns.

Shapes: C calls, S sites.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rankopt.bench.rows_file import RowsFile
from rankopt.bench.stats import percentile_with_support
from rankopt.diagnose.profile import CallTimes, Clock, Profiled, Scores, Ticks
from rankopt.diagnose.schema import Timing
from rankopt.errors import EnvironmentProblem
from rankopt.units import NS_PER_MS

MAX_WINDOWS = 64
MAX_WINDOW_ROWS = 32_768


@dataclass(frozen=True)
class Effort:
    """How much is timed at one batch size.

    Attributes:
        num_blocks: turns of the model and of its profile each; short and many, so that whatever
            else the machine does hits both.
        block_ns: about how long a turn lasts.
        min_calls: calls of a turn at least.
        warm_up_ns: untimed calls before, of each.
    """

    num_blocks: int = 36
    block_ns: int = 20 * NS_PER_MS
    min_calls: int = 3
    warm_up_ns: int = 300 * NS_PER_MS


QUICK = Effort(num_blocks=10, block_ns=8 * NS_PER_MS, warm_up_ns=50 * NS_PER_MS)


@dataclass(frozen=True)
class Measured:
    """Times of one batch size.

    Attributes:
        plain_ns: ns of the model's calls, without clocks.
        profiled: times of the profile's calls.
        clock_ns: what one clock costs.
        num_dropped: profiled calls in which other operators ran than in the noted one.
    """

    plain_ns: npt.NDArray[np.float64]
    profiled: CallTimes
    clock_ns: float
    num_dropped: int


def windows_of(rows: RowsFile, batch_size: int) -> list[dict[str, Tensor]]:
    """Cut calls out of the rows, spread over all of them."""
    count = max(1, min(MAX_WINDOWS, MAX_WINDOW_ROWS // batch_size, rows.num_rows // batch_size))
    starts = [index * rows.num_rows // count for index in range(count)]
    return [rows.window(start, batch_size) for start in starts]


def measure(
    run: Scores,
    profile: Profiled,
    windows: Sequence[dict[str, Tensor]],
    num_sites: int,
    effort: Effort,
) -> Measured:
    """Time a model and its profile on the same rows, block by block.

    Raises:
        EnvironmentProblem: no call of the profile ran the operators that were noted.
    """
    clock = Clock()
    call_ns = _warm_up(run, windows, effort)
    profile.time(windows)
    num_calls = max(effort.min_calls, math.ceil(effort.block_ns / call_ns))
    plain: list[int] = []
    ticks: list[Ticks] = []
    gc.collect()
    gc.disable()
    try:
        for block in range(effort.num_blocks):
            first = block * num_calls
            turn = [windows[(first + index) % len(windows)] for index in range(num_calls)]
            # In mirrored order, so that a drift of the machine hits both alike.
            if block % 2:
                ticks.append(profile.time(turn))
            for features in turn:
                begun = time.perf_counter_ns()
                run(features)
                plain.append(time.perf_counter_ns() - begun)
            if not block % 2:
                ticks.append(profile.time(turn))
    finally:
        gc.enable()
    profiled, num_dropped = _joined(ticks, num_sites, clock.ns_per_tick())
    return Measured(
        plain_ns=np.asarray(plain, dtype=np.float64),
        profiled=profiled,
        clock_ns=clock.cost_ns(),
        num_dropped=num_dropped,
    )


def _joined(ticks: Sequence[Ticks], num_sites: int, rate: float) -> tuple[CallTimes, int]:
    """Join the turns' calls, those left out that ran other operators than the noted one."""
    wholes = [whole for turn in ticks for whole in turn.whole_ns]
    sites = [row for turn in ticks for row in turn.sites]
    inside = [row for turn in ticks for row in turn.inside or ()]
    kept = [index for index, row in enumerate(sites) if len(row) == num_sites]
    if not kept:
        raise EnvironmentProblem(
            "no timed call ran the operators of the first one, so its operators cannot be told "
            "apart. Does the model do other things from call to call?"
        )
    times = CallTimes(
        whole_ns=np.asarray([wholes[index] for index in kept], dtype=np.float64),
        sites_ns=np.stack([sites[index] for index in kept]).astype(np.float64) * rate,
        inside_ns=np.asarray([inside[index] for index in kept]) * rate if inside else None,
    )
    return times, len(sites) - len(kept)


def _warm_up(run: Scores, windows: Sequence[dict[str, Tensor]], effort: Effort) -> float:
    samples: list[int] = []
    begun = time.perf_counter_ns()
    while len(samples) < effort.min_calls or time.perf_counter_ns() - begun < effort.warm_up_ns:
        start = time.perf_counter_ns()
        run(windows[len(samples) % len(windows)])
        samples.append(time.perf_counter_ns() - start)
    return float(np.median(samples))


def timing(samples_ns: npt.NDArray[np.float64]) -> Timing:
    """Sum up the times of some calls; an interval needs 20 of them."""
    found = percentile_with_support(samples_ns, 0.5)
    if found is None:
        return Timing(
            p50_ns=float(np.median(samples_ns)),
            ci_low_ns=None,
            ci_high_ns=None,
            num_samples=len(samples_ns),
        )
    return Timing(
        p50_ns=found.value_ns,
        ci_low_ns=found.ci_low_ns,
        ci_high_ns=found.ci_high_ns,
        num_samples=found.num_samples,
    )
