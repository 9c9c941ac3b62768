"""Predicted beside measured: `measured.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rankopt.sharding.setting import Communication, ShardingType
from rankopt.sharding.tables import Optimizer

Part = Literal[
    "step",
    "parts",
    "lookup",
    "update",
    "all_to_all",
    "all_reduce",
    "weights",
    "optimizer",
    "memory",
]
PARTS: dict[Part, str] = {
    "step": "step",
    "parts": "step, parts added up",
    "lookup": "lookup, forward",
    "update": "backward and update",
    "all_to_all": "all-to-all",
    "all_reduce": "all-reduce",
    "weights": "weights",
    "optimizer": "optimizer state",
    "memory": "peak memory above baseline",
}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Compared(_Strict):
    """One figure of a plan: times in ns of the slowest rank, memory in bytes of the fullest."""

    part: Part
    unit: Literal["ns", "bytes"]
    predicted: float
    measured: float | None
    """The middle of the blocks; None where there is nothing of the kind to measure."""
    ratio: float | None
    """measured / predicted; None where either is nothing."""
    ci_low: float | None
    """Of the ratio, 95 %; None for memory, which is counted once."""
    ci_high: float | None
    num_samples: int
    """Steps of a time, ranks of a size."""


class MeasuredPlan(_Strict):
    """One alternative."""

    name: str
    chosen: bool
    sharding: dict[ShardingType, int]
    """Number of tables that are sharded so."""
    same_as: str | None = None
    """The alternative that places every table alike: it was measured in its stead."""
    compared: tuple[Compared, ...] = ()

    def of(self, part: Part) -> Compared | None:
        """Return one figure."""
        return next((item for item in self.compared if item.part == part), None)


class Ordering(_Strict):
    """Whether the planner put the alternatives in the right order."""

    num_alternatives: int
    rank_correlation: float | None
    """Spearman's, of predicted and measured steps; None for fewer than three alternatives."""
    num_pairs: int
    """Pairs whose measured steps differ beyond their interval."""
    num_pairs_in_order: int
    """Those of them that the prediction puts in the same order."""
    fastest_predicted: str
    fastest_measured: str
    cost_of_choice: float
    """Measured step of what was predicted to be the fastest, over that of the fastest."""
    ci_low: float
    ci_high: float


class PlanMeasurement(_Strict):
    """Plans that were run, with what was predicted of them."""

    format_version: Literal[1] = 1
    made_at: str
    model: str
    source: str
    topology_name: str
    topology: dict[str, Any]
    collectives_measured: bool
    """Whether the topology's collectives were measured, or stated as bandwidths."""
    lookups_measured: bool
    backend: Literal["gloo", "nccl"]
    world_size: int
    batch_size: int
    """Rows of one rank."""
    optimizer: Optimizer
    communication: Communication
    zipf: float
    """Exponent of the law that ids follow; 0: all alike."""
    num_tables: int
    table_bytes: int
    dense_parameters: int
    num_blocks: int
    num_steps: int
    """Of each alternative."""
    plans: tuple[MeasuredPlan, ...]
    ordering: Ordering
    notes: tuple[str, ...] = ()
    environment: dict[str, Any] = Field(default_factory=dict)
    reproduce: str = ""
