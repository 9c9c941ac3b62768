"""Hold what ranks measured against what a plan predicted.

Shapes: K blocks, N steps of a block.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from rankopt.bench.stats import SpeedupEstimate, paired_speedup
from rankopt.sharding.measure_task import PartTimes, RankPlan
from rankopt.sharding.measured import Compared, MeasuredPlan, Ordering, Part
from rankopt.sharding.memory import Use
from rankopt.sharding.schema import MemoryParts, RankLoad, ShardPlan

Blocks = list[list[float]]
"""[K][N], in ns."""


def compare(
    name: str, plan: ShardPlan, ranks: Sequence[RankPlan], dense: Use, *, chosen: bool
) -> MeasuredPlan:
    """Compare every figure of one plan.

    Args:
        name: of the alternative.
        plan: with its predictions.
        ranks: what each rank measured, in order.
        dense: what the plan counts for the dense layers, which are not there to be measured.
        chosen: whether the planner chose it.
    """
    slowest = _slowest(ranks)
    times = (
        ("step", max(map(_tables_step, plan.ranks)), [[s.step_ns for s in b] for b in slowest]),
        ("parts", max(map(_tables_step, plan.ranks)), [[_parts(s) for s in b] for b in slowest]),
        ("lookup", _most(plan, "lookup_ns"), [[s.lookup_ns for s in b] for b in slowest]),
        ("update", _most(plan, "update_ns"), [[s.update_ns for s in b] for b in slowest]),
        ("all_to_all", _most(plan, "all_to_all_ns"), [[_exchange(s) for s in b] for b in slowest]),
        (
            "all_reduce",
            _most(plan, "all_reduce_ns"),
            [[s.all_reduce_ns for s in b] for b in slowest],
        ),
    )
    sizes = _predicted_sizes(plan, dense)
    return MeasuredPlan(
        name=name,
        chosen=chosen,
        sharding=dict(sorted(Counter(table.sharding_type for table in plan.tables).items())),
        compared=(
            *(_time(part, predicted, blocks) for part, predicted, blocks in times),
            _size("weights", sizes["weights"], [rank.weights_bytes for rank in ranks]),
            _size("optimizer", sizes["optimizer"], [rank.optimizer_bytes for rank in ranks]),
            _size("memory", sizes["memory"], [rank.peak_bytes for rank in ranks]),
        ),
    )


def order(plans: Mapping[str, ShardPlan], ranks: Mapping[str, Sequence[RankPlan]]) -> Ordering:
    """Say how well predicted steps order the measured ones.

    Args:
        plans: by name, with their predictions.
        ranks: by name, what each rank measured.
    """
    from scipy.stats import spearmanr

    predicted = {name: max(map(_tables_step, plan.ranks)) for name, plan in plans.items()}
    blocks = {name: step_blocks(ranks[name]) for name in plans}
    measured = {name: _middle(blocks[name]) for name in plans}
    pairs = in_order = 0
    for one, other in itertools.combinations(plans, 2):
        ratio = paired_speedup(blocks[one], blocks[other])
        if ratio.ci_low <= 1 <= ratio.ci_high:
            continue
        pairs += 1
        in_order += (predicted[one] > predicted[other]) == (ratio.speedup > 1)
    first = min(predicted, key=lambda name: predicted[name])
    best = min(measured, key=lambda name: measured[name])
    cost = _no_difference() if first == best else paired_speedup(blocks[first], blocks[best])
    correlation = None
    if len(plans) >= 3:
        found = float(spearmanr(list(predicted.values()), list(measured.values())).statistic)
        correlation = None if math.isnan(found) else found
    return Ordering(
        num_alternatives=len(plans),
        rank_correlation=correlation,
        num_pairs=pairs,
        num_pairs_in_order=in_order,
        fastest_predicted=first,
        fastest_measured=best,
        cost_of_choice=cost.speedup,
        ci_low=cost.ci_low,
        ci_high=cost.ci_high,
    )


def step_blocks(ranks: Sequence[RankPlan]) -> Blocks:
    """Return the steps of the slowest rank, block by block."""
    return [[step.step_ns for step in block] for block in _slowest(ranks)]


def _no_difference() -> SpeedupEstimate:
    return SpeedupEstimate(1.0, 1.0, 1.0, 0, 0, 0.0, 0.0)


def _slowest(ranks: Sequence[RankPlan]) -> list[list[PartTimes]]:
    """Take each part's time of the rank that took longest: the others wait for it."""
    return [
        [
            PartTimes(
                **{key: max(getattr(one, key) for one in same) for key in PartTimes.model_fields}
            )
            for same in zip(*blocks, strict=True)
        ]
        for blocks in zip(*(rank.blocks for rank in ranks), strict=True)
    ]


def _tables_step(rank: RankLoad) -> float:
    return rank.step_ns - (rank.dense_ns or 0.0)


def _exchange(step: PartTimes) -> float:
    return step.ids_ns + step.vectors_ns + step.gradients_ns


def _parts(step: PartTimes) -> float:
    return _exchange(step) + step.lookup_ns + step.update_ns + step.all_reduce_ns


def _most(plan: ShardPlan, key: str) -> float:
    return max(float(getattr(rank, key)) for rank in plan.ranks)


def _middle(blocks: Blocks) -> float:
    return statistics.median(statistics.median(block) for block in blocks)


def _time(part: str, predicted: float, blocks: Blocks) -> Compared:
    key: Part = part  # type: ignore[assignment]
    num_samples = sum(map(len, blocks))
    happened = all(value > 0 for block in blocks for value in block)
    measured = _middle(blocks) if happened else None
    ratio = low = high = None
    if predicted > 0 and happened:
        # The prediction is the same in every block, so the interval is of the measured side alone.
        found = paired_speedup(blocks, [[predicted] * len(block) for block in blocks])
        ratio, low, high = found.speedup, found.ci_low, found.ci_high
    return Compared(
        part=key,
        unit="ns",
        predicted=predicted,
        measured=measured,
        ratio=ratio,
        ci_low=low,
        ci_high=high,
        num_samples=num_samples,
    )


def _predicted_sizes(plan: ShardPlan, dense: Use) -> dict[str, int]:
    on_device = plan.topology["device"] == "cuda"
    own = dense.hbm if on_device else dense.host

    def held(rank: RankLoad) -> MemoryParts:
        return rank.hbm if on_device else rank.host_memory

    return {
        "weights": max(held(rank).weights_bytes for rank in plan.ranks) - own.weights,
        "optimizer": max(held(rank).optimizer_bytes for rank in plan.ranks) - own.optimizer,
        "memory": max(held(rank).total_bytes for rank in plan.ranks) - own.total,
    }


def _size(part: Part, predicted: int, by_rank: Sequence[int]) -> Compared:
    measured = max(by_rank)
    return Compared(
        part=part,
        unit="bytes",
        predicted=predicted,
        measured=measured,
        ratio=measured / predicted if predicted and measured else None,
        ci_low=None,
        ci_high=None,
        num_samples=len(by_rank),
    )
