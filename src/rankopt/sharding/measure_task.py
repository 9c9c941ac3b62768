"""What the processes of a measurement are told, and what each of them answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.tables import Table


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskTable(_Strict):
    """A table of the model."""

    name: str
    num_rows: int
    dim: int
    ids_per_row: float
    pooled: bool
    weighted: bool
    path: str
    key: str | None

    @staticmethod
    def of(table: Table) -> TaskTable:
        return TaskTable(
            name=table.name,
            num_rows=table.num_rows,
            dim=table.dim,
            ids_per_row=table.ids_per_row,
            pooled=table.pooled,
            weighted=table.weighted,
            path=table.path,
            key=table.key,
        )

    def table(self) -> Table:
        return Table(**self.model_dump())


class MeasureTask(_Strict):
    """`task.json`."""

    tables: tuple[TaskTable, ...]
    plans: dict[str, ShardPlan]
    """By the name of the alternative."""
    backend: Literal["gloo", "nccl"]
    ranks_per_host: int
    batch_size: int
    """Rows of one rank."""
    zipf: float
    dense_parameters: int
    num_blocks: int
    steps_per_block: int
    seed: int = 0


class PartTimes(_Strict):
    """One step: as a whole, and in its parts run one by one."""

    step_ns: float
    ids_ns: float
    lookup_ns: float
    vectors_ns: float
    gradients_ns: float
    update_ns: float
    all_reduce_ns: float


class RankPlan(_Strict):
    """What one rank measured of one plan."""

    weights_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """Above what was in use before the plan was set up."""
    blocks: list[list[PartTimes]]


class RankFile(_Strict):
    """`rank-N.json`."""

    rank: int
    plans: dict[str, RankPlan]
