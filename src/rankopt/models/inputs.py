"""The kinds of input a card can name: what a column of the data becomes, and how `forward` gets it.

Shapes in this module: B batch (candidates), L ids of all rows together, F features of a
KeyedJaggedTensor, W columns of a packed matrix.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

IdType = Literal["int64", "int32", "float32"]
PadSide = Literal["end", "start"]
OutOfRange = Literal["error", "clamp", "hash"]
"""What becomes of an id outside of [0, num_ids): the call is refused, the nearest id is taken, or
one chosen by a hash of it."""

MAX_FLOAT_ID = 1 << 24
"""float32 holds every whole number up to here; beyond it two ids would become one."""


class Strict(BaseModel):
    """Part of a card: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Input(Strict):
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    argument: str | None = None
    """Where `forward` takes it; the input's own name when None. Dots lead into containers:
    `batch.sparse` is key `sparse` of what parameter `batch` gets, and keys that are the whole
    numbers 0, 1, ... make a list."""
    request_level: bool = False
    """True when all candidates of one request share the value (user and context features)."""

    @property
    def parameter(self) -> str:
        return self.argument or self.name

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the flat tensors that it becomes."""
        return (self.name,)


class DenseInput(_Input):
    """Real numbers, one per column: `name` float32 [B, len(columns)]."""

    kind: Literal["dense"]
    columns: tuple[str, ...] = Field(min_length=1)
    fill: float | None = None
    """Stands in for a missing value; without it a missing value is an error."""

    @property
    def data_columns(self) -> tuple[str, ...]:
        return self.columns


class IdsInput(_Input):
    """One id per column and row: `name` [B] for a single column, else [B, len(columns)]."""

    kind: Literal["ids"]
    columns: tuple[str, ...] = Field(default=(), min_length=1)
    """The column of the input's own name when none is named."""
    num_ids: int | tuple[int, ...]
    """Ids lie in [0, num_ids); one figure for all columns, or one each."""
    out_of_range: OutOfRange = "error"
    dtype: IdType = "int64"
    keep_width: bool = False
    """True keeps [B, 1] for a single column."""

    @model_validator(mode="before")
    @classmethod
    def _own_name(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "columns" not in raw and "name" in raw:
            return {**raw, "columns": (raw["name"],)}
        return raw

    @model_validator(mode="after")
    def _one_range_per_column(self) -> IdsInput:
        if min(self.ranges, default=0) < 1:
            raise ValueError(f"num_ids must be at least 1; got {min(self.ranges, default=0)}")
        if isinstance(self.num_ids, tuple) and len(self.num_ids) != len(self.columns):
            raise ValueError(
                f"num_ids must be one number or one per column ({len(self.columns)}); "
                f"got {len(self.num_ids)}"
            )
        _check_float_ids(self.dtype, max(self.ranges))
        return self

    @property
    def ranges(self) -> tuple[int, ...]:
        if isinstance(self.num_ids, tuple):
            return self.num_ids
        return (self.num_ids,) * len(self.columns)

    @property
    def data_columns(self) -> tuple[str, ...]:
        return self.columns


class RaggedIdsInput(_Input):
    """A list of ids per row: `name.values` [L] with `name.lengths` [B], weights [L] beside."""

    kind: Literal["ragged_ids"]
    column: str
    num_ids: int = Field(gt=0)
    out_of_range: OutOfRange = "error"
    max_length: int = Field(gt=0)
    """Longer lists keep their last `max_length` ids (the most recent of a history)."""
    weights_column: str | None = None
    dtype: IdType = "int64"
    layout: Literal["values_lengths", "values_offsets", "padded"] = "values_lengths"
    """How `forward` takes it: parameters `<p>_values` and `<p>_lengths` (or `<p>_offsets`,
    B + 1 of them), or one `<p>` [B, max_length] padded with `padding_id`.
    A weighted input adds `<p>_weights`."""
    padding_id: int = 0
    pad_side: PadSide = "end"
    """Where the padding of layout `padded` stands."""

    @model_validator(mode="after")
    def _ids_fit_the_type(self) -> RaggedIdsInput:
        _check_float_ids(self.dtype, self.num_ids)
        return self

    @property
    def tensor_names(self) -> tuple[str, ...]:
        names = (f"{self.name}.values", f"{self.name}.lengths")
        return (*names, f"{self.name}.weights") if self.weights_column else names

    @property
    def data_columns(self) -> tuple[str, ...]:
        return (self.column, self.weights_column) if self.weights_column else (self.column,)


class KjtFeature(Strict):
    """One key of a KeyedJaggedTensor."""

    key: str
    column: str
    num_ids: int = Field(gt=0)
    out_of_range: OutOfRange = "error"
    max_length: int = Field(default=1, gt=0)
    weights_column: str | None = None


class KjtInput(_Input):
    """Several id features as one torchrec KeyedJaggedTensor.

    Tensors: `name.values` [L], `name.lengths` [F * B] (feature-major), weights [L] beside.
    """

    kind: Literal["kjt"]
    features: tuple[KjtFeature, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _weights_for_all_or_none(self) -> KjtInput:
        weighted = [feature.key for feature in self.features if feature.weights_column]
        if weighted and len(weighted) != len(self.features):
            raise ValueError(
                f"weights_column must be given for every feature or for none; got {weighted}"
            )
        return self

    @property
    def weighted(self) -> bool:
        return self.features[0].weights_column is not None

    @property
    def tensor_names(self) -> tuple[str, ...]:
        names = (f"{self.name}.values", f"{self.name}.lengths")
        return (*names, f"{self.name}.weights") if self.weighted else names

    @property
    def data_columns(self) -> tuple[str, ...]:
        columns = [feature.column for feature in self.features]
        columns += [f.weights_column for f in self.features if f.weights_column]
        return tuple(columns)


class PackedColumn(Strict):
    """What stands in one place of a packed matrix.

    One of: a real number (`name`), an id (`name`, `num_ids`), a padded list of ids (`name`,
    `num_ids`, `length`: so many places), or the length of such a list (`length_of`).
    """

    name: str | None = None
    """The column of the data."""
    num_ids: int | None = Field(default=None, gt=0, le=MAX_FLOAT_ID)
    out_of_range: OutOfRange = "error"
    length: int | None = Field(default=None, gt=0)
    """Places of a list; a longer one keeps its last ids."""
    padding_id: int = 0
    pad_side: PadSide = "end"
    fill: float | None = None
    """Stands in for a real number that is missing; without it a missing one is an error."""
    length_of: str | None = None
    at_least: int = Field(default=0, ge=0)
    """The least length to report: 1 for a module that cannot take an empty list, which then
    looks like a list of one padding id."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> PackedColumn:
        if (self.name is None) == (self.length_of is None):
            raise ValueError("needs either name or length_of")
        if self.length_of is not None and (self.num_ids or self.length):
            raise ValueError("length_of stands alone: num_ids and length belong to the list")
        if self.out_of_range != "error" and self.num_ids is None:
            raise ValueError("out_of_range is for ids, and this column has no num_ids")
        if self.length is not None and self.num_ids is None:
            raise ValueError("a list (length) needs num_ids")
        if self.length is not None and not 0 <= self.padding_id < (self.num_ids or 0):
            raise ValueError(
                f"padding_id must be an id in [0, {self.num_ids}); got {self.padding_id}"
            )
        return self

    @property
    def width(self) -> int:
        return self.length or 1


class PackedInput(_Input):
    """Ids and real numbers side by side in one matrix: `name` float32 [B, W].

    The artifact takes the matrix as the module does.
    """

    kind: Literal["packed"]
    columns: tuple[PackedColumn, ...] = Field(min_length=1)
    """In the order of the matrix."""
    width: int | None = None
    """W, as a check on `columns`."""

    @model_validator(mode="after")
    def _columns_fit(self) -> PackedInput:
        if self.width is not None and self.width != self.num_places:
            raise ValueError(
                f"width is {self.width}, but the columns take {self.num_places} places"
            )
        names = [column.name for column in self.columns if column.name]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"columns must have different names; {twice} stand twice")
        lists = [column.name for column in self.columns if column.length]
        for index, column in enumerate(self.columns):
            if column.length_of is not None and column.length_of not in lists:
                raise ValueError(
                    f"columns[{index}].length_of must be one of the lists {lists}; "
                    f"got {column.length_of!r}"
                )
        return self

    @property
    def num_places(self) -> int:
        return sum(column.width for column in self.columns)

    def starts(self) -> tuple[int, ...]:
        """Return the first place of each column."""
        ends = itertools.accumulate((column.width for column in self.columns), initial=0)
        return tuple(ends)[:-1]

    def list_of(self, column: PackedColumn) -> PackedColumn:
        """Return the list whose length a column holds."""
        return next(item for item in self.columns if item.name == column.length_of)

    @property
    def data_columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if column.name)


def _check_float_ids(dtype: IdType, largest: int) -> None:
    if dtype == "float32" and largest > MAX_FLOAT_ID:
        raise ValueError(
            f"num_ids must be at most {MAX_FLOAT_ID} in float32, which holds no larger id exactly; "
            f"got {largest}"
        )


Input = Annotated[
    DenseInput | IdsInput | RaggedIdsInput | KjtInput | PackedInput, Field(discriminator="kind")
]
