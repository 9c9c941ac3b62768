"""torchrec's planner, told everything it would assume: tables on meta, memory, bandwidths, bytes.

Nothing here holds a weight: a table is a tensor on the meta device. Where torchrec leaves an order
to a Python set, names are sorted, so that a plan does not depend on the hash seed of the process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.types import (
    CollectiveType,
    GeneralizedCommsBandwidth,
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.planner.types import Topology as PlannerTopology
from torchrec.distributed.types import CacheParams, CommOp
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from rankopt.sharding.memory import Shard, Use, shard_use
from rankopt.sharding.setting import (
    CACHING_KERNELS,
    Communication,
    Setting,
    ShardingType,
    supported_kernels,
    supported_types,
)
from rankopt.sharding.tables import Precision, Table
from rankopt.sharding.topology import Topology
from rankopt.units import BYTES_PER_GB

MIN_COLUMNS = 32
"""Narrower column shards would read less than a 128-byte sector of device memory a row."""
MS_PER_S = 1000
_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "int8": torch.int8,
}
_WIRE: dict[Communication, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_COMM_OPS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)


class SearchSpace:
    """One setting, in torchrec's terms.

    Attributes:
        tables: by name.
        module: collections of the tables on meta.
        sharders: what may be done with them.
        constraints: by table name.
        topology: with usable memory and the bandwidths.
        enumerator: lists the options, with what each takes and costs.
        reservation: takes what the dense layers need off every rank.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        topology: Topology,
        setting: Setting,
        batch_size: int,
        dense: Use,
    ) -> None:
        """Prepare the search.

        Args:
            tables: what is sharded.
            topology: over what.
            setting: what the planner may choose from.
            batch_size: rows of one rank.
            dense: what the other layers take on every rank.
        """
        self.tables = {table.name: table for table in tables}
        self.module = _meta_module(tables)
        self.sharders: list[Any] = [
            _TableSharder(EmbeddingBagCollection, self.tables, topology, setting),
            _TableSharder(EmbeddingCollection, self.tables, topology, setting),
        ]
        self.topology = planner_topology(topology)
        self.constraints = {table.name: _constraints(table, topology, setting) for table in tables}
        self.reservation = _DenseReservation(dense)
        self.enumerator = _SortedEnumerator(
            topology=self.topology,
            batch_size=batch_size,
            constraints=self.constraints,
            estimator=[
                _PerfEstimator(
                    self.tables,
                    EmbeddingPerfEstimatorFactory.create(
                        DEFAULT_PERF_ESTIMATOR,
                        topology=self.topology,
                        constraints=self.constraints,
                        is_inference=setting.serving,
                    ),
                ),
                _MemoryEstimator(self.tables, topology, setting, batch_size),
            ],
        )


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


def column_block(table: Table, topology: Topology) -> int:
    """Return the columns of a column-wise shard: as many shards as ranks, none too narrow."""
    at_least = max(MIN_COLUMNS, math.ceil(table.dim / topology.world_size))
    for columns in range(at_least, table.dim):
        if table.dim % columns == 0 and columns % 4 == 0:
            return columns
    return table.dim


def allowed_types(table: Table, topology: Topology, setting: Setting) -> tuple[ShardingType, ...]:
    """List the ways to shard one table; those that come to the same as another are left out.

    Where the setting names one way alone, it stays: it was asked for.
    """
    supported = supported_types(topology.device, serving=setting.serving)
    types = [kind for kind in setting.sharding_types if kind in supported]
    if "dense" not in setting.kernels:
        types = [kind for kind in types if kind != "data_parallel"]
    elif set(setting.kernels) == {"dense"}:
        # torchrec's planner takes the dense kernel for copies of a table alone.
        types = [kind for kind in types if kind == "data_parallel"]
    if len(types) > 1 and column_block(table, topology) == table.dim and "table_wise" in types:
        types = [kind for kind in types if kind != "column_wise"]
    if len(types) > 1 and topology.num_hosts == 1 and "row_wise" in types:
        types = [kind for kind in types if kind != "table_row_wise"]
    return tuple(types)


def shard_of(option: ShardingOption, table: Table, size: Sequence[int]) -> Shard:
    """Describe one shard of an option."""
    kind: Any = option.sharding_type
    kernel: Any = option.compute_kernel
    return Shard(table, kind, kernel, num_rows=int(size[0]), num_columns=int(size[1]))


def _per_ms(gb_per_s: float) -> float:
    return gb_per_s * BYTES_PER_GB / MS_PER_S


def _meta_module(tables: Sequence[Table]) -> nn.Module:
    module = nn.Module()
    pooled = [
        EmbeddingBagConfig(
            name=table.name,
            embedding_dim=table.dim,
            num_embeddings=table.num_rows,
            feature_names=[table.name],
        )
        for table in tables
        if table.pooled
    ]
    if pooled:
        collection = EmbeddingBagCollection(tables=pooled, device=torch.device("meta"))
        module.add_module("pooled", collection)
    # An EmbeddingCollection holds tables of one width.
    for dim in sorted({table.dim for table in tables if not table.pooled}):
        sequence = [
            EmbeddingConfig(
                name=table.name,
                embedding_dim=table.dim,
                num_embeddings=table.num_rows,
                feature_names=[table.name],
            )
            for table in tables
            if not table.pooled and table.dim == dim
        ]
        module.add_module(
            f"sequence_{dim}", EmbeddingCollection(tables=sequence, device=torch.device("meta"))
        )
    return module


def _constraints(table: Table, topology: Topology, setting: Setting) -> ParameterConstraints:
    caching = any(kernel in CACHING_KERNELS for kernel in setting.kernels)
    return ParameterConstraints(
        sharding_types=list(allowed_types(table, topology, setting)),
        compute_kernels=list(setting.kernels),
        min_partition=column_block(table, topology),
        pooling_factors=[table.ids_per_row],
        is_weighted=table.weighted,
        cache_params=CacheParams(load_factor=setting.load_factor) if caching else None,
        feature_names=[table.name],
    )


class _TableSharder:
    """What torchrec's planner asks of a sharder, for one class of collection."""

    fused_params: dict[str, Any] | None = None

    def __init__(
        self,
        module_type: type[nn.Module],
        tables: dict[str, Table],
        topology: Topology,
        setting: Setting,
    ) -> None:
        self.module_type = module_type
        self._tables = tables
        self._topology = topology
        self._setting = setting
        wire = SimpleNamespace(quantized_dtype=_WIRE[setting.communication])
        codecs = SimpleNamespace(forward=wire, backward=wire)
        # Without codecs torchrec takes the type of the rows; fbgemm's lookup gives fp32 from any.
        self.qcomm_codecs_registry = {op.name: codecs for op in _COMM_OPS}

    def shardable_parameters(self, module: Any) -> dict[str, torch.Tensor]:
        is_bags = isinstance(module, EmbeddingBagCollection)
        configs = module.embedding_bag_configs() if is_bags else module.embedding_configs()
        dtype = _DTYPES[self._setting.precision]
        return {
            config.name: torch.empty(
                (config.num_embeddings, config.embedding_dim), dtype=dtype, device="meta"
            )
            for config in configs
        }

    def sharding_types(self, device: str) -> list[str]:
        del device
        return list(supported_types(self._topology.device, serving=self._setting.serving))

    def compute_kernels(self, sharding_type: str, device: str) -> list[str]:
        del device
        kernels = supported_kernels(self._topology.device, self._setting.optimizer)
        if sharding_type == "data_parallel":
            return ["dense"]
        return list(kernels)


class _SortedEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """torchrec's enumerator without the order of Python's sets."""

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        return sorted(super()._filter_sharding_types(name, allowed_sharding_types, sharder_key))

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        # Gradients of every copy are reduced, which only the dense kernel leaves to be reduced.
        if sharding_type == "data_parallel":
            return ["dense"]
        return sorted(super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type))


class _PerfEstimator(ShardEstimator):  # type: ignore[misc]
    """torchrec's estimate of time, once for all tables of one shape.

    A model of hundreds of tables has a few shapes, and the estimates are half of a search's time.
    """

    def __init__(self, tables: dict[str, Table], inner: ShardEstimator) -> None:
        self._tables = tables
        self._inner = inner

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        known: dict[tuple[Any, ...], ShardingOption] = {}
        for option in sharding_options:
            table = self._tables[option.name]
            shape = table.num_rows, table.dim, table.ids_per_row, table.pooled, table.weighted
            key = (*shape, option.sharding_type, option.compute_kernel)
            if key not in known:
                self._inner.estimate([option], sharder_data_map)
                known[key] = option
                continue
            option.is_weighted = known[key].is_weighted
            for shard, same in zip(option.shards, known[key].shards, strict=True):
                shard.perf = copy.copy(same.perf)


class _MemoryEstimator(ShardEstimator):  # type: ignore[misc]
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


class _DenseReservation(StorageReservation):  # type: ignore[misc]
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
