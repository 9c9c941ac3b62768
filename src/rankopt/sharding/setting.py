"""What one alternative allows: ways to shard, kernels, precision, optimizer, cache size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankopt.sharding.tables import Optimizer, Precision
from rankopt.sharding.topology import Device

ShardingType = Literal["data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise"]
SHARDING_TYPES: tuple[ShardingType, ...] = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
)

Kernel = Literal[
    "dense", "fused", "fused_uvm", "fused_uvm_caching", "quant", "quant_uvm", "quant_uvm_caching"
]
KERNELS: tuple[Kernel, ...] = (
    "dense",
    "fused",
    "fused_uvm",
    "fused_uvm_caching",
    "quant",
    "quant_uvm",
    "quant_uvm_caching",
)
UVM_KERNELS: frozenset[Kernel] = frozenset({"fused_uvm", "quant_uvm"})
CACHING_KERNELS: frozenset[Kernel] = frozenset({"fused_uvm_caching", "quant_uvm_caching"})

Communication = Literal["fp32", "fp16", "bf16"]
"""What pooled vectors are sent as."""


@dataclass(frozen=True)
class Setting:
    """One alternative.

    Attributes:
        name: what it is called in the plan.
        sharding_types: what the planner may choose from.
        kernels: likewise.
        precision: of the stored rows.
        optimizer: of the tables; None when serving.
        load_factor: share of a cached table's rows that device memory holds.
        communication: what pooled vectors are sent as.
        changes: what it changes about the model's arithmetic; None: nothing.
        offered: False for what is shown beside the plan but never chosen without being asked for.
    """

    name: str
    sharding_types: tuple[ShardingType, ...]
    kernels: tuple[Kernel, ...]
    precision: Precision
    optimizer: Optimizer | None
    load_factor: float | None = None
    communication: Communication = "fp32"
    changes: str | None = None
    offered: bool = True

    @property
    def serving(self) -> bool:
        return self.optimizer is None

    @property
    def uses_host_memory(self) -> bool:
        return any(kernel in UVM_KERNELS | CACHING_KERNELS for kernel in self.kernels)


def supported_types(*, serving: bool) -> tuple[ShardingType, ...]:
    """List the ways to shard that can run.

    torchrec 1.8 names the row-wise ones for CUDA alone (`BaseEmbeddingSharder.sharding_types`), but
    its sharded modules run them over gloo as well, and `shard_module` does.
    """
    return ("table_wise", "row_wise", "column_wise") if serving else SHARDING_TYPES


def supported_kernels(device: Device, optimizer: Optimizer | None) -> tuple[Kernel, ...]:
    """List the kernels that can run on a device with an optimizer; None: serving."""
    if optimizer is None:
        return ("quant",) if device == "cpu" else ("quant", "quant_uvm", "quant_uvm_caching")
    if device == "cpu":
        # fbgemm's fused kernel asserts on Adam on the CPU.
        return ("dense",) if optimizer == "adam" else ("dense", "fused")
    return ("dense", "fused", "fused_uvm", "fused_uvm_caching")
