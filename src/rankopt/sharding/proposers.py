"""Which complete plans torchrec's partitioner is asked to place.

torchrec's greedy proposer walks through the options of one table after another, which for large
tables in several kinds of memory comes late to the plans that fit: `SpillProposer` starts from
those. All of them propose a bounded number of plans, and no clock decides when they stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption
from torchrec.distributed.planner.types import Topology as PlannerTopology

from rankopt.sharding.setting import CACHING_KERNELS, UVM_KERNELS

MAX_GREEDY_PLACEMENTS = 960
"""Proposals times ranks of one greedy proposer: a placement costs as much as there are ranks."""
MIN_GREEDY_PROPOSALS = 24
MAX_SPILL_STEPS = 40
SMALL_SHARE = 0.005
"""A table below this share of a rank's memory lies wherever it is fastest."""
_HOST_KERNELS = UVM_KERNELS | CACHING_KERNELS


def proposers(topology: PlannerTopology) -> list[Proposer]:
    """List the proposers of one search, in the order in which they are asked."""
    at_most = max(MIN_GREEDY_PROPOSALS, MAX_GREEDY_PLACEMENTS // topology.world_size)
    return [
        SpillProposer(topology),
        UniformProposer(),
        BoundedGreedyProposer(use_depth=True, max_proposals=at_most),
        BoundedGreedyProposer(use_depth=False, max_proposals=at_most),
    ]


class BoundedGreedyProposer(GreedyProposer):  # type: ignore[misc]
    """torchrec's greedy proposer, up to a number of proposals."""

    def __init__(self, *, use_depth: bool, max_proposals: int) -> None:
        """Start counting.

        Args:
            use_depth: sort a table's options by its slowest shard, else by the sum of all.
            max_proposals: stop after so many.
        """
        super().__init__(use_depth=use_depth)
        self._left = max_proposals

    def propose(self) -> list[ShardingOption] | None:
        """Give the next plan, or None at the end."""
        if self._left <= 0:
            return None
        self._left -= 1
        proposal: list[ShardingOption] | None = super().propose()
        return proposal


class SpillProposer(Proposer):  # type: ignore[misc]
    """Keep in device memory what is looked up most per byte, and move the rest to the host.

    One family of plans for each way to split large tables (columns, rows over all ranks, rows over
    the ranks of one host, whichever is most even), from nothing moved to everything moved. On a
    device with one kind of memory each family is one plan.
    """

    def __init__(self, topology: PlannerTopology) -> None:
        """Take the memory of a rank as the measure.

        Args:
            topology: all ranks alike.
        """
        self._memory = topology.devices[0].storage
        self._families: list[list[list[ShardingOption]]] = []

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Make the proposals of a search space."""
        del enumerator
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.fqn, []).append(option)
        self._families = [
            self._family(by_table, kind)
            for kind in (None, "column_wise", "row_wise", "table_row_wise")
        ]

    def propose(self) -> list[ShardingOption] | None:
        """Give the next plan, or None at the end."""
        return self._families[0][0] if self._families else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: PlannerTopology | None = None,
    ) -> None:
        """Go on: to the next plan, or to the next family once one fits.

        Moving more tables to the host than must be only makes a plan slower.
        """
        del plan, perf_rating, storage_constraint
        self._families[0].pop(0)
        if partitionable or not self._families[0]:
            self._families.pop(0)

    def leanest(self, search_space: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the option of each table that fills the fullest memory of a rank the least."""
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.fqn, []).append(option)
        return [min(options, key=self._leanness) for options in by_table.values()]

    def _family(
        self, by_table: dict[str, list[ShardingOption]], kind: str | None
    ) -> list[list[ShardingOption]]:
        near: dict[str, ShardingOption] = {}
        far: dict[str, ShardingOption] = {}
        for name, options in by_table.items():
            on_device = [o for o in options if o.compute_kernel not in _HOST_KERNELS]
            on_host = [o for o in options if o.compute_kernel in _HOST_KERNELS]
            if on_device:
                near[name] = self._choose(on_device, kind)
            if on_host:
                far[name] = min(_of_kind(on_host, kind), key=self._leanness)
        order = sorted(
            (n for n in near if n in far and self._fill(near[n]) >= SMALL_SHARE / len(near)),
            key=lambda name: (-_bytes_per_lookup(near[name]), name),
        )
        stride = max(1, -(-len(order) // MAX_SPILL_STEPS))
        counts = sorted({*range(0, len(order) + 1, stride), len(order)})
        return [
            [
                far[name] if name not in near or name in order[:count] else near[name]
                for name in by_table
            ]
            for count in counts
        ]

    def _choose(self, options: list[ShardingOption], kind: str | None) -> ShardingOption:
        fastest = min(options, key=_slowest_shard)
        if self._fill(fastest) < SMALL_SHARE:
            return fastest
        return min(_of_kind(options, kind), key=self._leanness)

    def _leanness(self, option: ShardingOption) -> tuple[float, float, str, str]:
        fill = round(self._fill(option), 6)
        return fill, _slowest_shard(option)[0], option.sharding_type, option.compute_kernel

    def _fill(self, option: ShardingOption) -> float:
        return max(
            max(
                shard.storage.hbm / self._memory.hbm if self._memory.hbm else 0.0,
                shard.storage.ddr / self._memory.ddr if self._memory.ddr else 0.0,
            )
            for shard in option.shards
        )


def _of_kind(options: list[ShardingOption], kind: str | None) -> list[ShardingOption]:
    return [option for option in options if option.sharding_type == kind] or options


def _slowest_shard(option: ShardingOption) -> tuple[float, str, str]:
    slowest = max(shard.perf.total for shard in option.shards)
    return slowest, option.sharding_type, option.compute_kernel


def _bytes_per_lookup(option: ShardingOption) -> float:
    size_bytes: int = option.total_storage.hbm
    return size_bytes / float(sum(option.input_lengths))
