"""What reading and updating rows costs here: the file that `diagnose --collectives` writes.

torchrec divides the bytes of a lookup by the bandwidth of memory. On CPUs a lookup of short rows is
bound by its instructions and by misses, and an update several times over, so a machine that can be
measured is.

Shapes: B rows of a rank's batch, W ranks, L ids of a row, D columns of a shard.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rankopt.sharding.measured_file import MeasuredFile

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
UpdatedBy = Literal["sgd", "row_wise_adagrad", "adagrad"]
UPDATED_BY: tuple[UpdatedBy, ...] = ("sgd", "row_wise_adagrad", "adagrad")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cost(_Strict):
    """What a lookup or an update takes: so much an id, and so much a vector that comes out."""

    id_ns: NotNegative
    vector_ns: NotNegative

    def time_ns(self, num_ids: float, num_vectors: float) -> float:
        return self.id_ns * num_ids + self.vector_ns * num_vectors


class RowCost(_Strict):
    """Rows of one width, fp32, read by one fbgemm call for several tables."""

    dim: int = Field(gt=0)
    lookup: Cost
    update: dict[UpdatedBy, Cost]


class LookupsFile(MeasuredFile):
    """`lookups.json`: every rank of a host at work at once, the slowest of them."""

    file_name = "lookups.json"

    world_size: int = Field(ge=1)
    num_rows: int = Field(gt=0)
    """Of each table that was read."""
    zipf: NotNegative
    num_samples: int = Field(gt=0)
    rows: tuple[RowCost, ...] = Field(min_length=1)
    copied_value_ns: dict[UpdatedBy, Positive]
    """An optimizer's step over one value of a table that every rank holds whole: the gradient of
    such a table is as large as the table."""
    host_memory_bytes_per_s: Positive
    """Read and written by a copy of a large array, of one rank."""
    hbm_bytes_per_s: Positive | None = None
    host_to_device_bytes_per_s: Positive | None = None
    environment: dict[str, Any] = Field(default_factory=dict)
    reproduce: str = ""

    @model_validator(mode="after")
    def _widths_rise(self) -> LookupsFile:
        dims = [row.dim for row in self.rows]
        if dims != sorted(set(dims)):
            raise ValueError("rows must rise in dim")
        return self

    def lookup_ns(self, dim: int, num_ids: float, num_vectors: float) -> float:
        """Time of reading and pooling rows of a width."""
        return self._read_off(dim, [row.lookup.time_ns(num_ids, num_vectors) for row in self.rows])

    def update_ns(
        self, dim: int, optimizer: str, num_ids: float, num_vectors: float
    ) -> float | None:
        """Time of the backward pass with a fused optimizer; None: that one was not measured."""
        costs = [row.update.get(optimizer) for row in self.rows]  # type: ignore[call-overload]
        times = [cost.time_ns(num_ids, num_vectors) for cost in costs if cost is not None]
        return self._read_off(dim, times) if len(times) == len(self.rows) else None

    def copied_ns(self, optimizer: str, num_values: int) -> float | None:
        """Time of an optimizer's step over the whole of a table; None: it was not measured."""
        each = self.copied_value_ns.get(optimizer)  # type: ignore[call-overload]
        return None if each is None else float(each * num_values)

    def _read_off(self, dim: int, times: list[float]) -> float:
        """Go linearly between the measured widths, in proportion beyond the widest."""
        dims = [row.dim for row in self.rows]
        if dim <= dims[0]:
            return times[0]
        if dim >= dims[-1]:
            return times[-1] * dim / dims[-1]
        place = next(index for index, width in enumerate(dims) if width >= dim)
        share = (dim - dims[place - 1]) / (dims[place] - dims[place - 1])
        return times[place - 1] + share * (times[place] - times[place - 1])
