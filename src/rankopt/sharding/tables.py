"""The tables of a model as a plan sees them: shapes and lookups, no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rankopt.errors import CardError, Problem, nearest
from rankopt.problems import problems_of_validation
from rankopt.train.settings import TrainSettings

Precision = Literal["fp32", "fp16", "int8"]
Optimizer = Literal["sgd", "row_wise_adagrad", "adagrad", "adam"]
ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "fp16": 2, "int8": 1}


@dataclass(frozen=True)
class Table:
    """One embedding table.

    Attributes:
        name: unique in the model.
        path: the module that holds it; the name again where no module does.
        num_rows: N.
        dim: D.
        ids_per_row: lookups that one row of the batch makes, on average.
        pooled: one vector a row comes out, else one an id.
        weighted: ids carry weights.
        key: its name inside a torchrec collection; None for any other module.
    """

    name: str
    path: str
    num_rows: int
    dim: int
    ids_per_row: float = 1.0
    pooled: bool = True
    weighted: bool = False
    key: str | None = None

    @property
    def num_values(self) -> int:
        return self.num_rows * self.dim

    @property
    def collection(self) -> str:
        """Name the torchrec collection that holds it, or that would: bags, or one width alone."""
        if self.key is not None:
            return self.path
        kind = "weighted" if self.weighted else "plain"
        return kind if self.pooled else f"sequence_{kind}_{self.dim}"


@dataclass(frozen=True)
class ModelTables:
    """What of a model is sharded, and how much is not.

    Attributes:
        name: the model's.
        source: the file it was read from.
        tables: in the order of the model.
        dense_parameters: values of every other weight; each rank holds them all.
        precision: of the tables as the model has them.
        optimizer: of the tables, where the card says it.
        notes: what was assumed.
    """

    name: str
    source: str
    tables: tuple[Table, ...]
    dense_parameters: int
    precision: Precision = "fp32"
    optimizer: Optimizer | None = None
    notes: tuple[str, ...] = ()

    def with_ids_per_row(self, ids_per_row: dict[str, float]) -> ModelTables:
        """Replace the lookups of tables by name.

        Raises:
            CardError: no table has the name; all of them are listed.
        """
        names = [table.name for table in self.tables]
        problems = [
            Problem(f"--ids-per-row {name}", "names no table", hint=nearest(name, names))
            for name in ids_per_row
            if name not in names
        ]
        if problems:
            raise CardError(problems=problems)
        tables = tuple(
            replace(table, ids_per_row=ids_per_row.get(table.name, table.ids_per_row))
            for table in self.tables
        )
        return replace(self, tables=tables)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TableLine(_Strict):
    """One line of a tables file: `count` tables of the same shape."""

    name: str = Field(min_length=1)
    num_rows: int = Field(gt=0, lt=1 << 48)
    dim: int = Field(gt=0, le=1 << 16)
    ids_per_row: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    pooling: Literal["sum", "mean", "none"] = "sum"
    weighted: bool = False
    count: int = Field(default=1, gt=0, le=10_000)


class TablesFile(_Strict):
    """Tables of a model that need not exist.

    Example:
        ```yaml
        name: one-terabyte
        tables:
          - {name: user, num_rows: 500_000_000, dim: 128, count: 2}
        dense_parameters: 20_000_000
        ```
    """

    name: str
    tables: tuple[TableLine, ...] = Field(min_length=1)
    dense_parameters: int = Field(default=0, ge=0)
    precision: Literal["fp32", "fp16"] = "fp32"

    @model_validator(mode="after")
    def _names_are_unique(self) -> TablesFile:
        names = [line.name for line in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tables must have different names; {twice} stand twice")
        return self


def is_tables_file(raw: Any) -> bool:
    """Tell a tables file from a model card."""
    return isinstance(raw, dict) and "tables" in raw and "factory" not in raw


def parse_tables_file(raw: dict[str, Any], file: Path) -> ModelTables:
    """Read the tables that a file lists.

    Raises:
        CardError: the file breaks the schema; every problem is listed.
    """
    try:
        read = TablesFile.model_validate(raw)
    except ValidationError as error:
        raise CardError(problems=problems_of_validation(str(file), error, TablesFile)) from error
    tables = []
    for line in read.tables:
        for index in range(line.count):
            name = line.name if line.count == 1 else f"{line.name}_{index}"
            table = Table(
                name=name,
                path=name,
                num_rows=line.num_rows,
                dim=line.dim,
                ids_per_row=line.ids_per_row,
                pooled=line.pooling != "none",
                weighted=line.weighted,
            )
            tables.append(table)
    names = [table.name for table in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what = f"counted tables take the names of others: {twice}"
        raise CardError(problems=[Problem(f"{file}: tables", what)])
    return ModelTables(
        read.name, str(file), tuple(tables), read.dense_parameters, precision=read.precision
    )


def optimizer_of(settings: TrainSettings) -> Optimizer | None:
    """Return what the card trains its tables with, where the card itself says so."""
    if "table_optimizer" not in settings.model_fields_set:
        return None
    return "adagrad" if settings.table_optimizer == "adagrad" else "adam"
