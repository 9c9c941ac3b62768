"""What a suite asks of rankopt, which cells miss it, and what bounds those."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rankopt.bench.peers.result import (
    Comparison,
    GeometricMean,
    MissedGoal,
    SummaryRow,
    TimeBreakdown,
)
from rankopt.diagnose.schema import Bound


class Goal(BaseModel):
    """How much faster than something rankopt should be; None asks nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    geometric_mean: float | None = Field(default=None, gt=0)
    """Of the ratios of all cells."""
    ci_low: float | None = Field(default=None, gt=0)
    """The lower end of each cell's interval."""
    up_to_batch: int | None = Field(default=None, ge=1)
    """The largest batch size that `ci_low` is asked of; None: all."""

    def asked_of(self, batch_size: int) -> float | None:
        """Return what the lower end of the interval must reach at a batch size."""
        within = self.up_to_batch is None or batch_size <= self.up_to_batch
        return self.ci_low if within else None


class Goals(BaseModel):
    """What a suite's ratios are held against.

    Example:
        ```yaml
        best_peer: {geometric_mean: 1.6, ci_low: 1.0, up_to_batch: 512}
        eager: {geometric_mean: 3.0}
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    best_peer: Goal = Goal()
    eager: Goal = Goal()

    def of(self, against: str) -> Goal:
        return self.eager if against == "eager" else self.best_peer


def missed_goals(
    goals: Goals,
    summary: Iterable[SummaryRow],
    against_eager: Iterable[Comparison],
    means: Iterable[GeometricMean],
    breakdown: Iterable[TimeBreakdown],
) -> list[MissedGoal]:
    """List the cells that miss a goal.

    A cell misses the lower end by itself. Where a geometric mean is missed, the cells below it are
    what keeps it down. A cell in which rankopt has no ratio misses all that is asked of it; one in
    which there is nothing to compare with misses nothing.
    """
    short = {mean.against for mean in means if mean.goal is not None and mean.ratio < mean.goal}
    times = {(row.model, row.batch_size): row for row in breakdown}
    missed = []
    cells: list[tuple[str, str | None, Comparison]] = [
        ("best_peer", row.best_peer, row) for row in summary
    ]
    cells += [("eager", "eager", row) for row in against_eager]
    for against, peer, row in cells:
        if peer is None:
            continue
        wanted = _missed_by(row, goals.of(against), against in short)
        if wanted:
            missed.append(
                MissedGoal(
                    **row.model_dump(exclude={"best_peer"}),
                    against=against,
                    peer=peer,
                    wanted=wanted,
                    **_limits(times.get((row.model, row.batch_size))),
                )
            )
    return missed


def _missed_by(row: Comparison, goal: Goal, mean_is_short: bool) -> dict[str, float]:
    wanted = {}
    lowest = goal.asked_of(row.batch_size)
    if lowest is not None and (row.ci_low is None or row.ci_low < lowest):
        wanted["ci_low"] = lowest
    mean = goal.geometric_mean
    if mean is not None and (row.ratio is None or (mean_is_short and row.ratio < mean)):
        wanted["geometric_mean"] = mean
    return wanted


def _limits(row: TimeBreakdown | None) -> dict[str, Any]:
    if row is None:
        return {}
    bound, share = nearest_limit(row)
    part = row.parts[0]
    of_limit = max(part.of_operations_peak or 0.0, part.of_bytes_peak or 0.0)
    return {
        "bound": bound,
        "bound_share": share,
        "largest_part": part.part,
        "largest_share": part.share,
        "largest_of_limit": of_limit if part.num_operators else None,
    }


def nearest_limit(row: TimeBreakdown) -> tuple[Bound, float]:
    """Say what most of a call's time is nearest to, and how much of the call that time is."""
    by_bound = _by_bound(row)
    bound = max(by_bound, key=lambda each: by_bound[each])
    return bound, by_bound[bound] / row.whole.p50_ns


def _by_bound(row: TimeBreakdown) -> dict[Bound, float]:
    found: dict[Bound, float] = {}
    for part in row.parts:
        found[part.bound] = found.get(part.bound, 0.0) + max(part.time.p50_ns, 0.0)
    return found
