"""Keep or drop: what a pass's own measurement says about it.

A pass is dropped when it changed nothing, or when its interval shows that it fails what it is for.
A pass whose interval leaves it open is kept, and its record says so. A pass that saves bytes is not
judged on its own speed here: it stays while the whole candidate holds its latency gates
(`slow_byte_savers`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import norm

from rankopt.passes.base import Purpose
from rankopt.review.gates import Gates
from rankopt.review.schema import LatencyRow, PassRecord
from rankopt.units import format_bytes

_Z = float(norm.ppf(0.975))


@dataclass(frozen=True)
class Gain:
    """Speed-up over the batch sizes of a recipe: the geometric mean, with its 95 % interval."""

    speedup: float
    ci_low: float
    ci_high: float
    rows: tuple[LatencyRow, ...]

    def __str__(self) -> str:
        each = ", ".join(f"batch {row.batch_size}: {_written(row)}" for row in self.rows)
        return f"{self.speedup:.2f} [{self.ci_low:.2f}, {self.ci_high:.2f}] ({each})"


def _written(row: LatencyRow) -> str:
    speedup, low, high = _figures(row)
    return f"{speedup:.2f} [{low:.2f}, {high:.2f}]"


def combine(rows: Sequence[LatencyRow]) -> Gain:
    """Join paired speed-ups of several batch sizes, each weighing the same.

    Blocks of different batch sizes are timed one after the other, so their errors are taken as
    independent and the log intervals add in squares.
    """
    count = len(rows)
    figures = [_figures(row) for row in rows]
    centre = sum(math.log(speedup) for speedup, _, _ in figures) / count
    squares = (math.log(high / low) / (2 * _Z) for _, low, high in figures)
    error = math.sqrt(sum(value**2 for value in squares)) / count
    return Gain(
        math.exp(centre),
        math.exp(centre - _Z * error),
        math.exp(centre + _Z * error),
        tuple(rows),
    )


def _figures(row: LatencyRow) -> tuple[float, float, float]:
    if row.speedup is None or row.ci_low is None or row.ci_high is None:
        raise ValueError(f"batch {row.batch_size} has no speed-up with an interval")
    return row.speedup, row.ci_low, row.ci_high


def decide(purpose: Purpose, gain: Gain, bytes_before: int, bytes_after: int) -> tuple[bool, str]:
    """Return whether a pass stays, and the sentence that says why."""
    faster, slower = gain.ci_low > 1, gain.ci_high < 1
    if purpose == "bytes":
        if bytes_after >= bytes_before:
            return False, (
                f"saves no bytes: {format_bytes(bytes_before)} before, "
                f"{format_bytes(bytes_after)} after"
            )
        saved = f"saves {1 - bytes_after / bytes_before:.0%} of the bytes"
        speed = "is faster too" if faster else "is slower" if slower else "speed undecided"
        return True, f"{saved}; {speed}: speed-up {gain}"
    if slower:
        return False, f"slower: speed-up {gain}"
    if faster:
        return True, f"faster: speed-up {gain}"
    return True, f"undecided and kept: speed-up {gain}"


def missed_gates(gates: Gates, rows: Sequence[LatencyRow]) -> list[str]:
    """Name the latency gates that the whole candidate misses with its whole interval."""
    by_batch = {row.batch_size: row for row in rows}
    missed = []
    for gate in gates.latency:
        row = by_batch.get(gate.batch_size)
        if row and gate.min_speedup is not None and _figures(row)[2] < gate.min_speedup:
            missed.append(
                f"{_written(row)} at batch {row.batch_size} against a gate of {gate.min_speedup:g}"
            )
    return missed


def slow_byte_savers(records: Sequence[PassRecord], purposes: Sequence[Purpose]) -> list[int]:
    """Find the kept byte-saving passes that their own interval shows to be slower."""
    return [
        index
        for index, (record, purpose) in enumerate(zip(records, purposes, strict=True))
        if record.kept and purpose == "bytes" and (record.ci_high or math.inf) < 1
    ]
