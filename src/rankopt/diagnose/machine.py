"""The machine's own peaks, measured: what achieved speed is held against.

Arithmetic is a loop over registers that holds nothing but the multiply-add of the instruction set
in use; memory is read in order out of buffers of several sizes, and in rows at random places. All
threads work at once. Kept in the cache under the machine's fingerprint, the number of threads and
the instruction set.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from rankopt.diagnose.schema import (
    Distribution,
    GatherPeak,
    MachinePeaks,
    Peak,
    ReadPeak,
)
from rankopt.environment import collect_environment
from rankopt.kernels.build import cache_dir, load_kernels
from rankopt.kernels.ops import current_isa
from rankopt.units import BYTES_PER_KIB, BYTES_PER_MIB, format_bytes

NUM_SAMPLES = 9
SAMPLE_S = 0.01
"""A sample lasts at least about so long."""
READ_BYTES = (256 * BYTES_PER_KIB, 2 * BYTES_PER_MIB, 16 * BYTES_PER_MIB, 256 * BYTES_PER_MIB)
ROW_BYTES = (36, 68, 132, 256)
"""Rows of 32, 64 and 128 int8 values with scale and bias, and of 64 floats."""
GATHER_BYTES = (BYTES_PER_MIB, 32 * BYTES_PER_MIB, 256 * BYTES_PER_MIB)
GATHERED_ROWS = 65_536
ZIPF_EXPONENT = 1.05
"""Of ids as ads traffic has them: a few rows take most of the reads."""


def machine_peaks(
    num_threads: int | None = None,
    *,
    again: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> MachinePeaks:
    """Return the peaks of this machine, measured where the cache has none.

    Args:
        num_threads: threads that work at once; torch's own number when None.
        again: measure even though the cache holds them.
        progress: told what is being measured.
    """
    load_kernels()
    threads = num_threads or torch.get_num_threads()
    before = torch.get_num_threads()
    fingerprint = collect_environment().fingerprint()
    file = cache_dir() / "peaks" / f"{fingerprint}-{threads}-{current_isa()}.json"
    if not again and (kept := _read(file)) is not None:
        return kept
    try:
        torch.set_num_threads(threads)
        found = _measure(fingerprint, threads, progress)
    finally:
        torch.set_num_threads(before)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    part.replace(file)
    return found


def known_peaks(num_threads: int | None = None) -> MachinePeaks | None:
    """Return the peaks that the cache holds, of the best instruction set; measures nothing.

    Args:
        num_threads: threads that work at once; torch's own number when None.
    """
    fingerprint = collect_environment().fingerprint()
    pattern = f"{fingerprint}-{num_threads or torch.get_num_threads()}-*.json"
    found = [kept for file in (cache_dir() / "peaks").glob(pattern) if (kept := _read(file))]
    return max(found, key=lambda kept: kept.fp32.per_s, default=None)


def _read(file: Path) -> MachinePeaks | None:
    try:
        return MachinePeaks.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):  # none yet, or of another version: measured anew
        return None


def _measure(fingerprint: str, threads: int, progress: Callable[[str], None]) -> MachinePeaks:
    progress("arithmetic")
    int8, fp32, bf16 = (_compute(kind) for kind in ("int8", "fp32", "bf16"))
    if int8 is None or fp32 is None:
        raise ValueError("every instruction set has int8 and fp32 loops")
    return MachinePeaks(
        fingerprint=fingerprint,
        cpu_model=collect_environment().cpu_model,
        isa=current_isa(),
        num_threads=threads,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        int8=int8,
        fp32=fp32,
        bf16=bf16,
        reads=tuple(_reads(progress)),
        gathers=tuple(_gathers(progress)),
    )


def _compute(kind: str) -> Peak | None:
    rounds, lasted_s = 500, 0.0
    while lasted_s < SAMPLE_S:
        rounds *= 2
        begun = time.perf_counter()
        rate = float(torch.ops.rankopt.peak_compute(kind, rounds))
        lasted_s = time.perf_counter() - begun
        if rate == 0.0:
            return None
    return peak(float(torch.ops.rankopt.peak_compute(kind, rounds)) for _ in range(NUM_SAMPLES))


def _reads(progress: Callable[[str], None]) -> Iterable[ReadPeak]:
    buffer = torch.ones(max(READ_BYTES), dtype=torch.uint8)
    for size_bytes in READ_BYTES:
        progress(f"reading {format_bytes(size_bytes)}")
        part = buffer[:size_bytes]
        rounds = max(1, 256 * BYTES_PER_MIB // size_bytes)
        torch.ops.rankopt.peak_read(part, rounds)
        rates = [float(torch.ops.rankopt.peak_read(part, rounds)) for _ in range(NUM_SAMPLES)]
        yield ReadPeak(working_set_bytes=size_bytes, peak=peak(rates))


def _gathers(progress: Callable[[str], None]) -> Iterable[GatherPeak]:
    storage = torch.ones(max(GATHER_BYTES), dtype=torch.uint8)
    random = torch.Generator().manual_seed(0)
    for working_set in GATHER_BYTES:
        progress(f"reading rows out of {format_bytes(working_set)}")
        for row_bytes in ROW_BYTES:
            num_rows = working_set // row_bytes
            for distribution in ("uniform", "zipf"):
                yield GatherPeak(
                    row_bytes=row_bytes,
                    working_set_bytes=working_set,
                    distribution=distribution,
                    peak=_gather(storage, row_bytes, num_rows, distribution, random),
                )


def _gather(
    storage: Tensor, row_bytes: int, num_rows: int, kind: Distribution, random: torch.Generator
) -> Peak:
    size = torch.tensor([row_bytes])
    # New ids for every sample: the same ones again would lie in the cache.
    draws = [draw_ids(num_rows, GATHERED_ROWS, kind, random) * row_bytes for _ in range(6)]
    rates = [
        GATHERED_ROWS * row_bytes / torch.ops.rankopt.peak_gather(storage, offsets, size)
        for offsets in draws
    ]
    return peak(rates[1:])


def draw_ids(num_rows: int, count: int, kind: Distribution, random: torch.Generator) -> Tensor:
    """Draw ids below `num_rows`: all alike, or by Zipf's law over rows in random order."""
    if kind == "uniform":
        return torch.randint(num_rows, (count,), generator=random)
    # The inverse of the power law's integral; its head is a little heavier than the sum's.
    power = 1.0 - ZIPF_EXPONENT
    share = torch.rand(count, generator=random, dtype=torch.float64)
    ranks = (1 + share * ((num_rows + 1.0) ** power - 1)) ** (1 / power)
    ids = ranks.long().clamp_(1, num_rows) - 1
    # Popular rows lie anywhere in a table: a multiplier prime to the size spreads the ranks.
    spread: Tensor = ids * _SPREAD % num_rows
    return spread


_SPREAD = 2_654_435_761
"""Knuth's multiplier; prime, so that it is prime to every smaller number of rows."""


def peak(rates: Iterable[float]) -> Peak:
    """Sum up several measurements of one rate."""
    values = sorted(rates)
    return Peak(
        per_s=values[-1],
        median_per_s=statistics.median(values),
        lowest_per_s=values[0],
        num_samples=len(values),
    )
