"""The model card: where a module comes from, what goes in, what comes out.

A card is the one file a user writes about their own model. It names code (the factory), so it is
trusted the way a script is; a recipe never does. Kinds of input: `models/inputs.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from rankopt.data.report.limits import DataLimits
from rankopt.errors import CardError, Problem, nearest
from rankopt.models.inputs import (
    DenseInput,
    IdsInput,
    Input,
    KjtFeature,
    KjtInput,
    PackedColumn,
    PackedInput,
    RaggedIdsInput,
    Strict,
)
from rankopt.problems import problems_of_validation, take_reserved
from rankopt.train.settings import TrainSettings

__all__ = [
    "DataSpec",
    "DenseInput",
    "IdsInput",
    "Input",
    "KjtFeature",
    "KjtInput",
    "ModelCard",
    "Output",
    "PackedColumn",
    "PackedInput",
    "RaggedIdsInput",
    "load_card",
    "save_card",
]


class Output(Strict):
    """One score per row.

    `index` picks it from what the module returns: a key of a dict, a position of a tuple, a
    column of a [B, tasks] tensor; None when the module returns just this score.
    """

    name: str = Field(default="score", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    activation: Literal["logit", "probability"] = "logit"
    label: str
    index: int | str | None = None


class DataSpec(Strict):
    """Where the labelled rows are.

    `files` reads `train`, `validation` and `test` (paths relative to the card); `movielens` and
    `synthetic` are made at run time from `options`.
    """

    source: Literal["files", "movielens", "synthetic"] = "files"
    format: Literal["parquet", "csv", "criteo"] | None = None
    """None goes by the file's suffix."""
    train: str | None = None
    validation: str | None = None
    test: str | None = None
    request_key: str | None = None
    """The column whose rows belong to one request or user: the unit of the statistics."""
    time_column: str | None = None
    """When each row was: times, dates, ISO text, or numbers since 1970."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Of a time column that holds numbers."""
    limits: DataLimits | None = None
    """What training refuses to begin with, and `rankopt data report` holds the rows against."""
    options: dict[str, Any] = Field(default_factory=dict)


class ModelCard(Strict):
    """A ranking model as rankopt sees it.

    Example:
        ```yaml
        name: din-movielens
        factory: rankopt.models.din:DIN
        config: {num_users: 944, num_items: 1683, embedding_dim: 64}
        inputs:
          - {name: user, kind: ids, columns: [user_id], num_ids: 944, request_level: true}
          - {name: history, kind: ragged_ids, column: history, num_ids: 1683, max_length: 50}
        outputs:
          - {name: click, activation: logit, label: label}
        data: {source: movielens, request_key: user_id}
        ```
    """

    name: str
    factory: str = Field(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_.]*$")
    """`file.py:function` (relative to the card) or `package.module:function`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    inputs: tuple[Input, ...] = Field(min_length=1)
    call: Literal["keywords", "positional", "dict", "list"] = "keywords"
    """`forward(**inputs)`, `forward(a, b)`, `forward({name: a})` or `forward([a, b])`."""
    outputs: tuple[Output, ...] = Field(min_length=1)
    min_batch: int = Field(default=1, ge=1)
    """Fewest rows that the module's own code can score: 2 where it squeezes the batch away. The
    control is then never asked for fewer, and batch sizes of recipes and plans are raised to it."""
    checkpoint: str | None = None
    """Relative to the card; `--checkpoint` overrides it."""
    data: DataSpec = Field(default_factory=DataSpec)
    train: TrainSettings = Field(default_factory=TrainSettings)
    """What `rankopt train` uses where no flag says otherwise."""
    path: Path | None = Field(default=None, exclude=True)
    """The file it was read from; None for a card made in Python."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> ModelCard:
        for kind, names in (
            ("inputs", [item.name for item in self.inputs]),
            ("outputs", [item.name for item in self.outputs]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} must have different names; {twice} stand twice")
        return self

    @model_validator(mode="after")
    def _limits_name_columns(self) -> ModelCard:
        known = {*self.data_columns, *self.labels}
        for column in self.data.limits.columns if self.data.limits else ():
            if column not in known:
                raise ValueError(
                    f"data.limits names column {column!r}, which no input or output reads. "
                    f"{nearest(column, known)}"
                )
        return self

    @property
    def where(self) -> str:
        return str(self.path) if self.path else f"card {self.name!r}"

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path else Path.cwd()

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the flat input tensors, in the order every arm takes them."""
        return tuple(name for item in self.inputs for name in item.tensor_names)

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Columns that scoring needs; labels and the request key come on top."""
        seen = dict.fromkeys(column for item in self.inputs for column in item.data_columns)
        return tuple(seen)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(output.label for output in self.outputs))


def load_card(path: str | Path) -> ModelCard:
    """Read a model card.

    Raises:
        CardError: the file is missing, is not YAML, or breaks the schema; every problem is listed.
    """
    # Here, to keep the import light: the finder reads the installed wheel.
    from rankopt.content import find, read_yaml

    file = find("models", path, error=CardError)
    raw = read_yaml(file, CardError)
    if not isinstance(raw, dict):
        raise CardError(problems=[Problem(str(file), "must be a mapping", type(raw).__name__)])
    problems = take_reserved(str(file), raw, ModelCard)
    try:
        card = ModelCard.model_validate(raw)
    except ValidationError as error:
        problems += problems_of_validation(str(file), error, ModelCard)
        raise CardError(problems=problems) from error
    if problems:
        raise CardError(problems=problems)
    return card.model_copy(update={"path": file.resolve()})


def save_card(card: ModelCard, file: Path) -> Path:
    """Write a card so that it can be read from another folder: its paths become absolute."""
    raw: dict[str, Any] = card.model_dump(mode="json", exclude_defaults=True)
    target, _, function = card.factory.rpartition(":")
    if target.endswith(".py"):
        raw["factory"] = f"{_absolute(card, target)}:{function}"
    data = raw.get("data", {})
    for split in ("train", "validation", "test"):
        if data.get(split):
            data[split] = _absolute(card, data[split])
    if card.checkpoint:
        raw["checkpoint"] = _absolute(card, card.checkpoint)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(raw, sort_keys=False, width=100), encoding="utf-8")
    return file


def _absolute(card: ModelCard, path: str) -> str:
    return path if "://" in path else str((card.folder / path).resolve())
