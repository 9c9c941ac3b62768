"""What training steps cost: their time, the wait for data before them, the peak of memory."""

from __future__ import annotations

import resource
import statistics
import sys
from pathlib import Path
from typing import Any

from rankopt.units import NS_PER_S

WARM_UP_STEPS = 3
"""Steps left out of a longer run: they fill caches, allocate state and may compile."""


class StepMeter:
    """Adds up the steps of a run and what they waited for."""

    def __init__(self) -> None:
        self._step_ns: list[int] = []
        self._wait_ns: list[int] = []
        self._num_rows: list[int] = []
        reset_peak_memory()

    def add(self, step_ns: int, wait_ns: int, num_rows: int) -> None:
        """Count a finished step, and what it waited for its batch."""
        self._step_ns.append(step_ns)
        self._wait_ns.append(wait_ns)
        self._num_rows.append(num_rows)

    def summary(self) -> dict[str, Any]:
        """Describe the run, evaluations left out.

        Returns:
            `step_p50_ns`, `samples_per_s` and `data_wait_share` (of steps and waits together) over
            the steps after the first three, `num_steps` of all, and `peak_memory_bytes` of the
            process since the run began; None where there is nothing to tell.
        """
        skipped = WARM_UP_STEPS if len(self._step_ns) > 2 * WARM_UP_STEPS else 0
        steps = self._step_ns[skipped:]
        waits = self._wait_ns[skipped:]
        total_ns = sum(steps) + sum(waits)
        rows = sum(self._num_rows[skipped:])
        return {
            "num_steps": len(self._step_ns),
            "step_p50_ns": int(statistics.median(steps)) if steps else None,
            "samples_per_s": round(rows / total_ns * NS_PER_S, 1) if total_ns else None,
            "data_wait_share": round(sum(waits) / total_ns, 5) if total_ns else None,
            "peak_memory_bytes": peak_memory_bytes(),
        }


def reset_peak_memory() -> None:
    """Begin the peak anew where the system allows it (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process since the last reset, or since it began."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
