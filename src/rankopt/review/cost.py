"""Dollars per million predictions, from the throughput measured in interleaved blocks.

Closed-loop: the next call starts when the last one ends, so this is the cost of a machine kept
busy, not of one that keeps a latency target under arriving traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankopt.review.schema import Cost
from rankopt.units import NS_PER_S, usd_per_million

if TYPE_CHECKING:
    from rankopt.bench.samples import BlockRecord

NUM_RESAMPLES = 2_000
MIN_BLOCKS = 8
"""Fewer blocks than this say too little of their spread for a bootstrap interval."""
NO_PRICE = "no hourly price was given"


@dataclass(frozen=True)
class BlockTimes:
    """What one arm did in each block, in the order of the run.

    Attributes:
        num_rows: predictions made in each block.
        duration_ns: wall time of each block.
    """

    num_rows: Sequence[int]
    duration_ns: Sequence[float]

    @classmethod
    def of(cls, records: Iterable[BlockRecord], arm: str, batch_size: int) -> BlockTimes:
        """Collect one arm's turns at one batch size, in the order of the blocks."""
        turns = sorted(
            (record for record in records if (record.arm, record.batch_size) == (arm, batch_size)),
            key=lambda record: record.block,
        )
        return cls(
            [len(turn.latency_ns) * batch_size for turn in turns], [turn.wall_ns for turn in turns]
        )

    def usable(self) -> bool:
        """Say whether there is at least one block, each with rows and a finite time above 0."""
        times = np.asarray(self.duration_ns, dtype=np.float64)
        return (
            0 < len(self.num_rows) == len(times)
            and min(self.num_rows) > 0
            and bool(np.isfinite(times).all() and (times > 0).all())
        )


def closed_loop_cost(
    price_per_hour: float | None,
    batch_size: int,
    control: BlockTimes | None,
    candidate: BlockTimes | None,
    *,
    slo_p99_ns: float | None = None,
    seed: int = 0,
) -> Cost:
    """Price one million predictions of each arm; the ratio of the arms needs no price.

    Block i of the control and block i of the candidate ran beside each other, so blocks are
    resampled in pairs.

    Args:
        price_per_hour: dollars an hour that the user gave; None leaves dollars out.
        batch_size: batch size of every call in the blocks.
        control: the control's blocks at that batch size; None when they were not measured.
        candidate: likewise.
        slo_p99_ns: the latency target the user named, written beside.
        seed: of the bootstrap.
    """
    base = Cost(
        price_per_hour=price_per_hour,
        slo_p99_ns=slo_p99_ns,
        batch_size=batch_size,
        reason=None if price_per_hour is not None else NO_PRICE,
    )
    if not (control and candidate and control.usable() and candidate.usable()):
        reason = f"throughput at batch {batch_size} was not measured for both arms"
        return base.model_copy(update={"reason": reason})
    control_qps, candidate_qps = _qps(control), _qps(candidate)
    update: dict[str, float | int | str | None] = {
        "control_qps": control_qps,
        "candidate_qps": candidate_qps,
        "ratio": control_qps / candidate_qps,
        "num_blocks": len(candidate.num_rows),
    }
    spread = _bootstrap(control, candidate, seed)
    if spread is not None:
        control_draws, candidate_draws = spread
        update["ratio_low"], update["ratio_high"] = _ends(control_draws / candidate_draws)
    if price_per_hour is not None:
        update["control_usd_per_million"] = usd_per_million(price_per_hour, control_qps)
        update["candidate_usd_per_million"] = usd_per_million(price_per_hour, candidate_qps)
        if spread is not None:
            slow, fast = _ends(spread[1])
            update["candidate_usd_low"] = usd_per_million(price_per_hour, fast)
            update["candidate_usd_high"] = usd_per_million(price_per_hour, slow)
    return base.model_copy(update=update)


def _qps(blocks: BlockTimes) -> float:
    return float(sum(blocks.num_rows) / sum(blocks.duration_ns) * NS_PER_S)


def _bootstrap(
    control: BlockTimes, candidate: BlockTimes, seed: int
) -> tuple[np.ndarray, np.ndarray] | None:
    num_blocks = len(control.num_rows)
    if num_blocks != len(candidate.num_rows) or num_blocks < MIN_BLOCKS:
        return None
    picks = np.random.default_rng(seed).integers(num_blocks, size=(NUM_RESAMPLES, num_blocks))

    def draws(blocks: BlockTimes) -> np.ndarray:
        rows = np.asarray(blocks.num_rows, dtype=np.float64)[picks].sum(axis=1)
        times = np.asarray(blocks.duration_ns, dtype=np.float64)[picks].sum(axis=1)
        return np.asarray(rows / times * NS_PER_S)

    return draws(control), draws(candidate)


def _ends(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)
