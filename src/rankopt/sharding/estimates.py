"""What torchrec's planner is told in place of its own assumptions: memory, bandwidths, bytes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import (
    CollectiveType,
    GeneralizedCommsBandwidth,
    HardwareConfig,
    KernelConfig,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.planner.types import Topology as PlannerTopology

from rankopt.sharding.lookup_times import lookup_times
from rankopt.sharding.memory import Shard, Use, shard_use
from rankopt.sharding.setting import Setting
from rankopt.sharding.tables import Table
from rankopt.sharding.topology import Topology
from rankopt.units import BYTES_PER_GB, NS_PER_MS

MS_PER_S = 1000


def planner_topology(topology: Topology) -> PlannerTopology:
    """Write a topology as torchrec's, with nothing left to its defaults."""
    rates = topology.bandwidth_gb_per_s
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=topology.world_size,
            local_world_size=topology.ranks_per_host,
            hbm_cap_bytes=topology.hbm_bytes,
            ddr_cap_bytes=topology.host_bytes,
            ssd_cap_bytes=0,
        ),
        HardwareConfig(
            hbm_mem_bw=None if rates.hbm is None else _per_ms(rates.hbm),
            ddr_mem_bw=_per_ms(rates.host_memory),
            hbm_to_ddr_mem_bw=(
                None if rates.host_to_device is None else _per_ms(rates.host_to_device)
            ),
        ),
        KernelConfig(
            compute_device=topology.device,
            use_hardware_based_bandwidth=True,
            generalized_comms_bandwidths=_Bandwidths(topology),
        ),
    )


def shard_of(option: ShardingOption, table: Table, size: Sequence[int]) -> Shard:
    """Describe one shard of an option."""
    kind: Any = option.sharding_type
    kernel: Any = option.compute_kernel
    return Shard(table, kind, kernel, num_rows=int(size[0]), num_columns=int(size[1]))


class PerfEstimator(ShardEstimator):  # type: ignore[misc]
    """torchrec's estimate of time, once for all tables of one shape.

    A model of hundreds of tables has a few shapes, and the estimates are half of a search's time.
    """

    def __init__(
        self,
        tables: dict[str, Table],
        inner: ShardEstimator,
        topology: Topology,
        setting: Setting,
        batch_size: int,
    ) -> None:
        self._tables = tables
        self._inner = inner
        self._topology = topology
        self._setting = setting
        self._batch_size = batch_size

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        known: dict[tuple[Any, ...], ShardingOption] = {}
        for option in sharding_options:
            table = self._tables[option.name]
            shape = table.num_rows, table.dim, table.ids_per_row, table.pooled, table.weighted
            key = (*shape, option.sharding_type, option.compute_kernel)
            if key not in known:
                self._inner.estimate([option], sharder_data_map)
                self._put_measured(option)
                known[key] = option
                continue
            option.is_weighted = known[key].is_weighted
            for shard, same in zip(option.shards, known[key].shards, strict=True):
                shard.perf = copy.copy(same.perf)

    def _put_measured(self, option: ShardingOption) -> None:
        """Put what lookups take on this machine in place of bytes over bandwidth."""
        for part in option.shards:
            shard = shard_of(option, self._tables[option.name], part.size)
            times = lookup_times(shard, self._setting, self._topology, self._batch_size)
            if times is not None:
                part.perf.fwd_compute, part.perf.bwd_compute = (t / NS_PER_MS for t in times)


class MemoryEstimator(ShardEstimator):  # type: ignore[misc]
    """Gives torchrec's planner the bytes of `rankopt.sharding.memory`."""

    def __init__(
        self, tables: dict[str, Table], topology: Topology, setting: Setting, batch_size: int
    ) -> None:
        self._tables = tables
        self._topology = topology
        self._setting = setting
        self._batch_size = batch_size

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        del sharder_data_map
        for option in sharding_options:
            for shard in option.shards:
                described = shard_of(option, self._tables[option.name], shard.size)
                use = shard_use(described, self._setting, self._topology, self._batch_size)
                shard.storage = Storage(hbm=use.hbm.total, ddr=use.host.total, ssd=0)


class DenseReservation(StorageReservation):  # type: ignore[misc]
    """Takes the dense layers off every rank; the margin is already off in the topology."""

    def __init__(self, dense: Use) -> None:
        self._dense = dense
        self._percentage = 0.0  # torchrec's planner prints it
        self._last: PlannerTopology | None = None

    def reserve(
        self,
        topology: PlannerTopology,
        batch_size: int,
        module: nn.Module,
        sharders: list[Any],
        constraints: Any = None,
    ) -> PlannerTopology:
        del batch_size, module, sharders, constraints
        reserved = copy.deepcopy(topology)
        for device in reserved.devices:
            device.storage = Storage(
                hbm=max(0, device.storage.hbm - self._dense.hbm.total),
                ddr=max(0, device.storage.ddr - self._dense.host.total),
                ssd=0,
            )
        self._last = reserved
        return reserved

    @property
    def last_reserved_topology(self) -> PlannerTopology | None:
        return self._last


class _Bandwidths(GeneralizedCommsBandwidth):  # type: ignore[misc]
    """Bytes a millisecond of one rank, measured where the topology says so."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        if collective_type == CollectiveType.ALL_REDUCE:
            return self._rate("all_reduce", within=self._topology.num_hosts == 1)
        return self._rate("all_to_all", within=world_size <= local_world_size)

    @property
    def intra_host_bw(self) -> float:
        return self._rate("all_to_all", within=True)

    @property
    def inter_host_bw(self) -> float:
        return self._rate("all_to_all", within=False)

    def _rate(self, collective: str, within: bool) -> float:
        return self._topology.bandwidth(collective, within_host=within) / MS_PER_S


def _per_ms(gb_per_s: float) -> float:
    return gb_per_s * BYTES_PER_GB / MS_PER_S
