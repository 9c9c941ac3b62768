"""What a shard takes of device and host memory, part by part.

The formulas follow what fbgemm allocates (`split_table_batched_embeddings_ops_training`), where
torchrec's own estimate differs: optimizer state is fp32 whatever the rows are, a cache holds rows
and no state, and row-wise state of a table in host memory stays on the device. Sizes of inputs and
outputs are torchrec's (`_calculate_shard_io_sizes`).

Shapes: B rows of a rank's batch, W ranks, L ids of a row, D columns of a shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rankopt.sharding.setting import (
    CACHING_KERNELS,
    UVM_KERNELS,
    Kernel,
    Setting,
    ShardingType,
)
from rankopt.sharding.tables import ELEMENT_BYTES, Optimizer, Table
from rankopt.sharding.topology import Topology

ID_BYTES = 8
STATE_BYTES = 4
OUTPUT_BYTES = 4
QUANTISED_ROW_BYTES = 4
"""Scale and bias of a quantised row, both fp16."""
CACHE_ROW_BYTES = 4
"""`cache_index_table_map`, for every row of a cached table."""
CACHE_SLOT_BYTES = 16
"""`lxu_cache_state` and `lru_state`, for every row that the cache can hold."""
FULL_STATES: dict[Optimizer, int] = {"sgd": 0, "row_wise_adagrad": 0, "adagrad": 1, "adam": 2}
DENSE_WEIGHT_BYTES = 4
DENSE_STATE_BYTES = 8
"""Adam's two moments."""
DENSE_BUFFER_BYTES = 8
"""Gradients, and the buckets in which they are reduced."""


@dataclass(frozen=True)
class Parts:
    """Bytes in one kind of memory."""

    weights: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.buffers

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.weights + other.weights,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
            self.buffers + other.buffers,
        )


@dataclass(frozen=True)
class Use:
    """Device memory (HBM) and host memory."""

    hbm: Parts = Parts()
    host: Parts = Parts()

    def __add__(self, other: Use) -> Use:
        return Use(self.hbm + other.hbm, self.host + other.host)


@dataclass(frozen=True)
class Shard:
    """A part of a table, before it has a place."""

    table: Table
    sharding_type: ShardingType
    kernel: Kernel
    num_rows: int
    num_columns: int


def shard_use(shard: Shard, setting: Setting, topology: Topology, batch_size: int) -> Use:
    """Say what one shard takes on its rank."""
    if shard.num_rows == 0 or shard.num_columns == 0:
        return Use()
    weights = shard.num_rows * row_bytes(shard.num_columns, setting)
    state = optimizer_bytes(shard, setting.optimizer)
    inputs, outputs = _batch_bytes(shard, topology, batch_size)
    batch = Parts(activations=outputs, buffers=inputs)
    if topology.device == "cpu":
        return Use(host=_resident(shard, weights, state) + batch)
    if shard.kernel in UVM_KERNELS | CACHING_KERNELS:
        cache = _cache(shard, weights, setting) if shard.kernel in CACHING_KERNELS else Parts()
        if setting.optimizer == "row_wise_adagrad":
            return Use(Parts(optimizer=state) + cache + batch, Parts(weights=weights))
        return Use(cache + batch, Parts(weights=weights, optimizer=state))
    return Use(hbm=_resident(shard, weights, state) + batch)


def dense_use(num_parameters: int, setting: Setting, topology: Topology) -> Use:
    """Say what the layers outside of the tables take on every rank.

    Their activations are not known without running them; the reserved share is for those.
    """
    parts = Parts(weights=num_parameters * DENSE_WEIGHT_BYTES)
    if not setting.serving:
        parts += Parts(
            optimizer=num_parameters * DENSE_STATE_BYTES,
            buffers=num_parameters * DENSE_BUFFER_BYTES,
        )
    return Use(host=parts) if topology.device == "cpu" else Use(hbm=parts)


def row_bytes(num_columns: int, setting: Setting) -> int:
    """Size of one stored row."""
    extra = QUANTISED_ROW_BYTES if setting.precision == "int8" else 0
    return num_columns * ELEMENT_BYTES[setting.precision] + extra


def optimizer_bytes(shard: Shard, optimizer: Optimizer | None) -> int:
    """Size of a shard's optimizer state."""
    if optimizer is None:
        return 0
    if optimizer == "row_wise_adagrad":
        return shard.num_rows * STATE_BYTES
    return FULL_STATES[optimizer] * shard.num_rows * shard.num_columns * STATE_BYTES


def _resident(shard: Shard, weights: int, state: int) -> Parts:
    # A dense kernel writes the gradient of the whole shard; a fused one updates rows in place.
    gradient = weights if shard.kernel == "dense" else 0
    return Parts(weights=weights, optimizer=state, buffers=gradient)


def _cache(shard: Shard, weights: int, setting: Setting) -> Parts:
    factor = setting.load_factor or 0.0
    slots = math.ceil(shard.num_rows * factor)
    return Parts(
        weights=math.ceil(weights * factor),
        buffers=shard.num_rows * CACHE_ROW_BYTES + slots * CACHE_SLOT_BYTES,
    )


def _batch_bytes(shard: Shard, topology: Topology, batch_size: int) -> tuple[int, int]:
    table = shard.table
    num_ids = batch_size * table.ids_per_row
    num_vectors = batch_size * min(1.0, table.ids_per_row) if table.pooled else num_ids
    # A rank looks up for the batches of all ranks, its share of the rows where rows are split.
    ranks_in = {
        "data_parallel": 1.0,
        "row_wise": 1.0,
        "table_row_wise": topology.world_size / topology.ranks_per_host,
    }.get(shard.sharding_type, float(topology.world_size))
    ranks_out = 1 if shard.sharding_type == "data_parallel" else topology.world_size
    if not table.pooled and shard.sharding_type in {"row_wise", "table_row_wise"}:
        ranks_out = max(1, round(ranks_in))
    id_bytes = ID_BYTES * (2 if table.weighted else 1)
    return (
        math.ceil(num_ids * ranks_in * id_bytes),
        math.ceil(num_vectors * ranks_out * shard.num_columns * OUTPUT_BYTES),
    )
