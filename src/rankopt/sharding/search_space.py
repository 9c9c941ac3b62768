"""torchrec's planner, told everything it would assume: tables on meta, memory, bandwidths, bytes.

Nothing here holds a weight: a table is a tensor on the meta device. Where torchrec leaves an order
to a Python set, names are sorted, so that a plan does not depend on the hash seed of the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, CommOp
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from rankopt.sharding.estimates import (
    DenseReservation,
    MemoryEstimator,
    PerfEstimator,
    planner_topology,
)
from rankopt.sharding.memory import Use
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

MIN_COLUMNS = 32
"""Narrower column shards would read less than a 128-byte sector of device memory a row."""
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
        self.reservation = DenseReservation(dense)
        self.enumerator = _SortedEnumerator(
            topology=self.topology,
            batch_size=batch_size,
            constraints=self.constraints,
            estimator=[
                PerfEstimator(
                    self.tables,
                    EmbeddingPerfEstimatorFactory.create(
                        DEFAULT_PERF_ESTIMATOR,
                        topology=self.topology,
                        constraints=self.constraints,
                        is_inference=setting.serving,
                    ),
                    topology,
                    setting,
                    batch_size,
                ),
                MemoryEstimator(self.tables, topology, setting, batch_size),
            ],
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
    supported = supported_types(serving=setting.serving)
    types = [kind for kind in setting.sharding_types if kind in supported]
    if topology.device == "cpu" and not setting.serving:
        types = [kind for kind in types if _runs_on_cpus(table, kind, topology)]
    if "dense" not in setting.kernels:
        types = [kind for kind in types if kind != "data_parallel"]
    elif set(setting.kernels) == {"dense"}:
        # torchrec's planner takes the dense kernel for copies of a table alone.
        types = [kind for kind in types if kind == "data_parallel"]
    if len(types) > 1 and column_block(table, topology) == table.dim and "table_wise" in types:
        types = [kind for kind in types if kind != "column_wise"]
    # Of one host all ranks are row-wise anyway; a host of one rank holds a table whole.
    same = "row_wise" if topology.num_hosts == 1 else "table_wise"
    one_of_each = topology.num_hosts == 1 or topology.ranks_per_host == 1
    if len(types) > 1 and one_of_each and same in types:
        types = [kind for kind in types if kind != "table_row_wise"]
    return tuple(types)


def _runs_on_cpus(table: Table, kind: ShardingType, topology: Topology) -> bool:
    if kind == "data_parallel":
        # fbgemm's dense lookup pools on CPUs whatever it is told: copies of sequences fail there.
        return table.pooled
    if kind in {"row_wise", "table_row_wise"}:
        # Where a rank is left without a row, fbgemm takes the lookup to be a GPU's.
        holders = topology.world_size if kind == "row_wise" else topology.ranks_per_host
        return math.ceil(table.num_rows / holders) * (holders - 1) < table.num_rows
    return True


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
        return list(supported_types(serving=self._setting.serving))

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
