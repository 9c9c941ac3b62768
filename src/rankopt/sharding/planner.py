"""Ask torchrec's planner for one setting, and say what every rank then holds and takes.

Where nothing fits, the shards are placed all the same, on the rank with the most room left: the
breakdown of a failed plan is worth as much as that of a plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    PerfModel,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Stats,
)

from rankopt.sharding.estimates import shard_of
from rankopt.sharding.memory import ID_BYTES, Shard, Use, dense_use, shard_use
from rankopt.sharding.proposers import SpillProposer, proposers
from rankopt.sharding.search_space import SearchSpace, allowed_types
from rankopt.sharding.setting import CACHING_KERNELS, Setting
from rankopt.sharding.tables import ModelTables
from rankopt.sharding.topology import Topology
from rankopt.units import NS_PER_MS, NS_PER_S

DENSE_OPERATIONS = 6
"""A training step takes two operations a weight and row forward and four backward; serving two."""
FORWARD_OPERATIONS = 2


_NO_ROOM = {
    PlannerErrorType.INSUFFICIENT_STORAGE,
    PlannerErrorType.STRICT_CONSTRAINTS,
    PlannerErrorType.PARTITION,
}


@dataclass(frozen=True)
class Times:
    """What one shard adds to a step of its rank, in nanoseconds."""

    lookup_ns: float = 0.0
    update_ns: float = 0.0
    vectors_ns: float = 0.0
    """Exchanging pooled vectors."""
    gradients_ns: float = 0.0
    """Exchanging their gradients."""
    ids_ns: float = 0.0
    """Exchanging ids."""
    all_reduce_ns: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(
            self.lookup_ns + other.lookup_ns,
            self.update_ns + other.update_ns,
            self.vectors_ns + other.vectors_ns,
            self.gradients_ns + other.gradients_ns,
            self.ids_ns + other.ids_ns,
            self.all_reduce_ns + other.all_reduce_ns,
        )


@dataclass(frozen=True)
class PlacedShard:
    """A shard on its rank."""

    shard: Shard
    rank: int
    row_offset: int
    column_offset: int
    use: Use
    times: Times


@dataclass(frozen=True)
class RankSum:
    """What one rank holds and takes, dense layers included."""

    rank: int
    use: Use
    times: Times
    all_to_all_ns: float
    dense_ns: float | None
    num_shards: int

    @property
    def step_ns(self) -> float:
        times = self.times
        whole = times.lookup_ns + times.update_ns + self.all_to_all_ns + times.all_reduce_ns
        return whole + (self.dense_ns or 0.0)


@dataclass(frozen=True)
class Solution:
    """What came of one setting."""

    setting: Setting
    topology: Topology
    fits: bool
    shards: tuple[PlacedShard, ...]
    ranks: tuple[RankSum, ...]
    num_proposals: int

    @property
    def fullest(self) -> RankSum:
        """The rank that needs the most of what it has, of either memory."""
        return max(self.ranks, key=lambda rank: (self.fill(rank), -rank.rank))

    @property
    def slowest(self) -> RankSum:
        return max(self.ranks, key=lambda rank: (rank.step_ns, -rank.rank))

    def fill(self, rank: RankSum) -> float:
        """The share of its memory that a rank needs."""
        shares = [rank.use.host.total / self.topology.host_bytes]
        if self.topology.hbm_bytes:
            shares.append(rank.use.hbm.total / self.topology.hbm_bytes)
        return max(shares)

    @property
    def step_ns(self) -> float:
        return self.slowest.step_ns

    @property
    def all_to_all_ns(self) -> float:
        return max(rank.all_to_all_ns for rank in self.ranks)


class SettingProblem(ValueError):  # noqa: N818 - it is told as the reason of an alternative
    """A setting leaves a table without any way to be sharded."""


def solve(model: ModelTables, topology: Topology, setting: Setting, batch_size: int) -> Solution:
    """Find the fastest plan that torchrec's planner knows for a setting.

    Args:
        model: the tables, and how much is dense.
        topology: over what.
        setting: what the planner may choose from.
        batch_size: rows of one rank.

    Raises:
        SettingProblem: a table can be sharded in none of the setting's ways on the device.
    """
    stuck = [t.name for t in model.tables if not allowed_types(t, topology, setting)]
    if stuck:
        kinds, kernels = " and ".join(setting.sharding_types), " and ".join(setting.kernels)
        names = ", ".join(stuck[:3]) + (" and others" if len(stuck) > 3 else "")
        raise SettingProblem(
            f"{kinds} with {kernels} does not run on {topology.device} for {names}"
        )
    dense = dense_use(model.dense_parameters, setting, topology)
    with _quiet():
        space = SearchSpace(model.tables, topology, setting, batch_size, dense)
        catch = _BestPlan()
        planner = EmbeddingShardingPlanner(
            topology=space.topology,
            batch_size=batch_size,
            enumerator=space.enumerator,
            storage_reservation=space.reservation,
            proposer=proposers(space.topology),
            performance_model=_SlowestRank(topology),
            constraints=space.constraints,
            stats=[catch],
            debug=False,
        )
        try:
            planner.plan(space.module, space.sharders)
            fits, options = True, catch.best_plan
        except PlannerError as error:
            if error.error_type not in _NO_ROOM:
                raise SettingProblem(str(error).splitlines()[0]) from error
            fits, options = False, _place_anyway(space, topology, dense)
    shards = _placed(options, space, topology, setting, batch_size)
    ranks = _sums(shards, model, topology, setting, batch_size, dense)
    if not fits:
        # torchrec's partitioner balances time; filling evenly sometimes fits where it does not.
        fits = all(
            rank.use.hbm.total <= topology.hbm_bytes and rank.use.host.total <= topology.host_bytes
            for rank in ranks
        )
    return Solution(setting, topology, fits, shards, ranks, catch.num_proposals)


class _SlowestRank(PerfModel):  # type: ignore[misc]
    """Rates a plan by its slowest rank, ids included, which torchrec's own model leaves out."""

    def __init__(self, topology: Topology) -> None:
        self._world_size = topology.world_size

    def rate(self, plan: list[ShardingOption]) -> float:
        totals = [0.0] * self._world_size
        for option in plan:
            for shard in option.shards:
                totals[shard.rank] += shard.perf.total + shard.perf.input_dist_comms
        return max(totals)


class _BestPlan(Stats):  # type: ignore[misc]
    """Takes the plan in full where torchrec's planner hands it to be printed."""

    def __init__(self) -> None:
        self.best_plan: list[ShardingOption] = []
        self.num_proposals = 0

    def log(self, *args: Any, **kwargs: Any) -> None:
        del args
        self.best_plan = list(kwargs["best_plan"])
        self.num_proposals = int(kwargs["num_proposals"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torchrec's account of its search off the terminal; the plan has its own."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(previous)


def _place_anyway(space: SearchSpace, topology: Topology, dense: Use) -> list[ShardingOption]:
    """Take the leanest option of each table and fill the ranks evenly, whatever they have."""
    search = space.enumerator.enumerate(space.module, space.sharders)
    options = SpillProposer(space.topology).leanest(search)
    filled = [_fill(topology, dense.hbm.total, dense.host.total)] * topology.world_size

    def put(shard: Any, rank: int) -> None:
        shard.rank = rank
        filled[rank] += _fill(topology, shard.storage.hbm, shard.storage.ddr)

    for option in options:
        if option.partition_by == "uniform":
            for rank, shard in enumerate(option.shards):
                put(shard, rank)
    rest = [option for option in options if option.partition_by != "uniform"]
    for option in sorted(rest, key=lambda o: (-o.total_storage.hbm - o.total_storage.ddr, o.fqn)):
        if option.partition_by == "host":
            size = topology.ranks_per_host
            hosts = [range(h * size, (h + 1) * size) for h in range(topology.num_hosts)]
            for shard, rank in zip(
                option.shards, min(hosts, key=lambda h: sum(filled[r] for r in h)), strict=True
            ):
                put(shard, rank)
            continue
        for shard in option.shards:
            put(shard, min(range(topology.world_size), key=lambda rank: (filled[rank], rank)))
    return options


def _fill(topology: Topology, hbm: int, host: int) -> float:
    on_device = hbm / topology.hbm_bytes if topology.hbm_bytes else 0.0
    return max(on_device, host / topology.host_bytes)


def _placed(
    options: Sequence[ShardingOption],
    space: SearchSpace,
    topology: Topology,
    setting: Setting,
    batch_size: int,
) -> tuple[PlacedShard, ...]:
    placed = []
    order = {name: index for index, name in enumerate(space.tables)}
    for option in sorted(options, key=lambda option: order[option.name]):
        for part in option.shards:
            shard = shard_of(option, space.tables[option.name], part.size)
            placed.append(
                PlacedShard(
                    shard=shard,
                    rank=int(part.rank),
                    row_offset=int(part.offset[0]),
                    column_offset=int(part.offset[1]),
                    use=shard_use(shard, setting, topology, batch_size),
                    times=_times(part.perf, shard),
                )
            )
    return tuple(placed)


def _times(perf: Any, shard: Shard) -> Times:
    reduced = shard.sharding_type == "data_parallel"
    return Times(
        lookup_ns=(perf.fwd_compute + perf.prefetch_compute) * NS_PER_MS,
        update_ns=perf.bwd_compute * NS_PER_MS,
        vectors_ns=0.0 if reduced else perf.fwd_comms * NS_PER_MS,
        gradients_ns=0.0 if reduced else perf.bwd_comms * NS_PER_MS,
        ids_ns=perf.input_dist_comms * NS_PER_MS,
        all_reduce_ns=perf.bwd_comms * NS_PER_MS if reduced else 0.0,
    )


def _sums(
    shards: Sequence[PlacedShard],
    model: ModelTables,
    topology: Topology,
    setting: Setting,
    batch_size: int,
    dense: Use,
) -> tuple[RankSum, ...]:
    dense_ns = _dense_ns(model, topology, setting, batch_size)
    over = _Over(topology, batch_size, setting.serving)
    reduced = Times(all_reduce_ns=_dense_all_reduce_ns(model, topology, setting))
    exchanges = _exchanges(shards)
    ranks = []
    for rank in range(topology.world_size):
        own = [shard for shard in shards if shard.rank == rank]
        use = sum((shard.use for shard in own), dense)
        times = sum((shard.times for shard in own), reduced)
        exchanged_ns = sum(
            _all_to_all_ns([shard for shard in exchange if shard.rank == rank], exchange, over)
            for exchange in exchanges
        )
        ranks.append(RankSum(rank, use, times, exchanged_ns, dense_ns, len(own)))
    return tuple(ranks)


def _exchanges(shards: Sequence[PlacedShard]) -> list[list[PlacedShard]]:
    """Group shards whose vectors travel together: of one collection and one way to shard."""
    found: dict[tuple[str, str], list[PlacedShard]] = {}
    for placed in shards:
        kind = placed.shard.sharding_type
        if kind != "data_parallel":
            found.setdefault((placed.shard.table.collection, kind), []).append(placed)
    return list(found.values())


@dataclass(frozen=True)
class _Over:
    """What an exchange goes over, and for how large a batch and how many ids it was made."""

    topology: Topology
    batch_size: int
    serving: bool


def _all_to_all_ns(
    own: Sequence[PlacedShard], everywhere: Sequence[PlacedShard], over: _Over
) -> float:
    """Add up the messages of a step: ids, vectors, gradients.

    Where the collective was measured by message size, its time is read off there: torchrec knows
    one bandwidth, which small messages do not reach. Its sharded modules also send how much will
    come, and how many ids each bag has, before they send ids and weights, all of them calls of
    their own, which every rank takes part in whatever it holds.
    """
    topology = over.topology
    times = sum((shard.times for shard in own), Times())
    messages = [times.ids_ns, times.vectors_ns, times.gradients_ns]
    within = topology.num_hosts == 1
    curve = topology.curve("all_to_all", within_host=within)
    if curve is None or topology.world_size == 1:
        return sum(messages)
    rate = topology.bandwidth("all_to_all", within_host=within) / NS_PER_S
    sizes = [message_ns * rate for message_ns in messages]
    if over.serving:
        sizes = sizes[:2]
    tables = {placed.shard.table.name for placed in everywhere}
    sizes.append(over.batch_size * len(tables) * ID_BYTES)  # lengths of bags
    sizes.append(1.0)  # how much will come
    if any(placed.shard.table.weighted for placed in everywhere):
        sizes.append(times.ids_ns * rate / 2)
    return sum(curve.time_ns(max(size, 1.0)) for size in sizes)


def _dense_ns(
    model: ModelTables, topology: Topology, setting: Setting, batch_size: int
) -> float | None:
    if topology.dense_tflop_per_s is None:
        return None
    operations = FORWARD_OPERATIONS if setting.serving else DENSE_OPERATIONS
    work = operations * model.dense_parameters * batch_size
    return work / (topology.dense_tflop_per_s * 1e12) * NS_PER_S


def _dense_all_reduce_ns(model: ModelTables, topology: Topology, setting: Setting) -> float:
    if setting.serving or topology.world_size == 1:
        return 0.0
    size_bytes = model.dense_parameters * 4
    within = topology.num_hosts == 1
    curve = topology.curve("all_reduce", within_host=within)
    if curve is not None:
        return curve.time_ns(size_bytes)
    ring = 2 * (topology.world_size - 1) / topology.world_size
    rate = topology.bandwidth("all_reduce", within_host=within)
    return ring * size_bytes / rate * NS_PER_S


def uses_cache(shards: Sequence[PlacedShard]) -> bool:
    """Tell whether any table is cached in device memory."""
    return any(shard.shard.kernel in CACHING_KERNELS for shard in shards)
