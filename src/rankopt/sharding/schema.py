"""The plan as it is written: `plan.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rankopt.sharding.setting import Communication, Kernel, ShardingType
from rankopt.sharding.tables import Optimizer, Precision


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MemoryParts(_Strict):
    """Bytes in one kind of memory of one rank."""

    weights_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Embedding outputs before they are exchanged; dense activations are not known."""
    buffers_bytes: int
    """Ids of the batch, gradients of dense kernels, what a cache keeps beside its rows."""
    total_bytes: int
    capacity_bytes: int
    """What the topology has, less the reserved share."""

    @property
    def over_bytes(self) -> int:
        return max(0, self.total_bytes - self.capacity_bytes)


class RankLoad(_Strict):
    """What one rank holds and how long its part of a step takes."""

    rank: int
    host: int
    num_shards: int
    hbm: MemoryParts
    host_memory: MemoryParts
    lookup_ns: float
    """Forward: reading and pooling rows."""
    update_ns: float
    """Backward: gradients and the optimizer; 0 when serving."""
    all_to_all_ns: float
    """Pooled vectors and their gradients, and the ids; row-wise tables reduce and scatter."""
    all_reduce_ns: float
    """Gradients of data-parallel tables and of the dense layers."""
    dense_ns: float | None
    """The dense layers; None where the topology states no dense_tflop_per_s."""
    step_ns: float


class TableShard(_Strict):
    """One part of a table on one rank."""

    rank: int
    row_offset: int
    column_offset: int
    num_rows: int
    num_columns: int
    hbm_bytes: int
    host_bytes: int


class TablePlan(_Strict):
    """Where one table lies."""

    name: str
    path: str
    """The module that holds it."""
    key: str | None
    """Its name inside a torchrec collection; None for any other module."""
    num_rows: int
    dim: int
    ids_per_row: float
    pooled: bool
    size_bytes: int
    """Of the rows at the plan's precision."""
    sharding_type: ShardingType
    compute_kernel: Kernel
    cache_load_factor: float | None
    shards: tuple[TableShard, ...]


class Alternative(_Strict):
    """One setting that was tried."""

    name: str
    sharding_types: tuple[ShardingType, ...]
    kernels: tuple[Kernel, ...]
    precision: Precision
    optimizer: Optimizer | None
    load_factor: float | None
    communication: Communication
    changes: str | None
    """What it changes about the model's arithmetic."""
    fits: bool
    chosen: bool
    fullest_rank: int
    hbm_bytes: int
    """Of the rank that needs the most of its capacity, device or host."""
    hbm_capacity_bytes: int
    host_bytes: int
    host_capacity_bytes: int
    step_ns: float | None
    all_to_all_ns: float | None
    reason: str


class Remedy(_Strict):
    """One way to make a plan fit, in figures."""

    number: int
    what: str
    fits: bool
    hbm_bytes: int | None = None
    host_bytes: int | None = None
    text: str


class ShardPlan(_Strict):
    """A sharding plan, or the reason why there is none with the memory it would take."""

    format_version: Literal[1] = 1
    model: str
    source: str
    purpose: Literal["training", "serving"]
    fits: bool
    chosen: str
    reason: str
    batch_size: int
    """Rows of one rank."""
    precision: Precision
    optimizer: Optimizer | None
    communication: Communication
    load_factor: float | None
    num_tables: int
    table_bytes: int
    """All tables, once, at the precision of the plan."""
    dense_parameters: int
    world_size: int
    topology_name: str
    topology: dict[str, Any]
    step_ns: float | None
    """Of the slowest rank; None for a plan that does not fit."""
    all_to_all_ns: float | None
    tables: tuple[TablePlan, ...]
    ranks: tuple[RankLoad, ...]
    alternatives: tuple[Alternative, ...]
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    reproduce: str = ""
