"""From the turns of one model's arms to rows, the best peer of each cell, and means over cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rankopt.bench.peers.goals import Goals
from rankopt.bench.peers.result import Comparison, GeometricMean, PeerRow, SummaryRow
from rankopt.bench.peers.suite import EAGER, RANKOPT
from rankopt.bench.samples import BlockRecord
from rankopt.bench.stats import SpeedupEstimate, percentile_with_support
from rankopt.bench.timing import estimate_speedup


def rows_of(
    model: str,
    records: Sequence[BlockRecord],
    quality_ok: Mapping[tuple[str, int], bool],
    settings: Mapping[tuple[str, int], dict[str, Any]],
) -> list[PeerRow]:
    """Make one row per batch size and arm.

    Args:
        model: its name.
        records: all turns of the model's run.
        quality_ok: (arm, batch size) -> whether the setting used there holds the NE margin.
        settings: (arm, batch size) -> that setting.
    """
    rows = []
    for batch_size, some in by_batch_size(records).items():
        arms = list(dict.fromkeys(record.arm for record in some))
        # Through one arm, so that the ratio of any arm to it is the paired estimate.
        pivot = RANKOPT if RANKOPT in arms else arms[0]
        pivot_ns = _typical_ns(some, pivot)
        for arm in arms:
            samples = [record.latency_ns for record in some if record.arm == arm]
            ratio = 1.0 if arm == pivot else estimate_speedup(some, arm, pivot).speedup
            interval = percentile_with_support(np.concatenate(samples), 0.5)
            rows.append(
                PeerRow(
                    model=model,
                    batch_size=batch_size,
                    arm=arm,
                    p50_ns=pivot_ns * ratio,
                    p50_low_ns=interval.ci_low_ns if interval else None,
                    p50_high_ns=interval.ci_high_ns if interval else None,
                    quality_ok=quality_ok[arm, batch_size],
                    num_samples=sum(block.size for block in samples),
                    num_blocks=len(samples),
                    setting=settings[arm, batch_size],
                )
            )
    return rows


def summarise(rows: Sequence[PeerRow], records: Sequence[BlockRecord]) -> list[SummaryRow]:
    """Compare rankopt with the best peer of each batch size of one model.

    The best peer is the arm with the smallest p50 among those whose quality holds. Choosing the
    smallest of several noisy figures favours the peers, never rankopt.
    """
    found = []
    groups = by_batch_size(records)
    for batch_size, some in groups.items():
        cell = {row.arm: row for row in rows if row.batch_size == batch_size}
        peers = [row for row in cell.values() if row.arm != RANKOPT and row.quality_ok]
        best = min(peers, key=lambda row: row.p50_ns, default=None)
        reason = _why_no_ratio(cell.get(RANKOPT), best)
        estimate = None
        if best is not None and reason is None:
            estimate = estimate_speedup(some, best.arm, RANKOPT, len(groups))
        found.append(
            SummaryRow(
                **_ratio(estimate),
                model=next(iter(cell.values())).model,
                batch_size=batch_size,
                best_peer=best.arm if best else None,
                reason=reason,
            )
        )
    return found


def compare_with_eager(rows: Sequence[PeerRow], records: Sequence[BlockRecord]) -> list[Comparison]:
    """Compare rankopt with eager at each batch size of one model that has both."""
    found = []
    groups = by_batch_size(records)
    for batch_size, some in groups.items():
        cell = {row.arm: row for row in rows if row.batch_size == batch_size}
        if RANKOPT not in cell or EAGER not in cell:
            continue
        reason = _why_no_ratio(cell[RANKOPT], cell[EAGER])
        estimate = None if reason else estimate_speedup(some, EAGER, RANKOPT, len(groups))
        model = cell[EAGER].model
        found.append(
            Comparison(**_ratio(estimate), model=model, batch_size=batch_size, reason=reason)
        )
    return found


def geometric_means(
    summary: Iterable[SummaryRow], against_eager: Iterable[Comparison], goals: Goals | None = None
) -> list[GeometricMean]:
    """Average ratios over the cells that have one, per batch size and over all.

    Goals are those of all batch sizes together.
    """
    means = []
    for against, cells in (("best_peer", list(summary)), ("eager", list(against_eager))):
        sizes = sorted({cell.batch_size for cell in cells})
        for batch_size in (None, *sizes):
            logs = [
                math.log(cell.ratio)
                for cell in cells
                if cell.ratio is not None and batch_size in (None, cell.batch_size)
            ]
            if logs:
                means.append(
                    GeometricMean(
                        against=against,
                        batch_size=batch_size,
                        ratio=math.exp(sum(logs) / len(logs)),
                        num_cells=len(logs),
                        goal=goals.of(against).geometric_mean
                        if goals is not None and batch_size is None
                        else None,
                    )
                )
    return means


def by_batch_size(records: Iterable[BlockRecord]) -> dict[int, list[BlockRecord]]:
    """Group turns by batch size."""
    groups: dict[int, list[BlockRecord]] = {}
    for record in records:
        groups.setdefault(record.batch_size, []).append(record)
    return groups


def _typical_ns(records: Iterable[BlockRecord], arm: str) -> float:
    medians = [float(np.median(record.latency_ns)) for record in records if record.arm == arm]
    return float(np.median(medians))


def _why_no_ratio(ours: PeerRow | None, best: PeerRow | None) -> str | None:
    if ours is None:
        return "rankopt was not run"
    if not ours.quality_ok:
        return "rankopt does not hold the NE margin"
    return "no other arm holds the NE margin" if best is None else None


def _ratio(estimate: SpeedupEstimate | None) -> dict[str, float | None]:
    if estimate is None:
        return {"ratio": None, "ci_low": None, "ci_high": None}
    return {
        "ratio": estimate.speedup,
        "ci_low": estimate.ci_low,
        "ci_high": estimate.ci_high,
    }
