"""run.json: everything that a training run's weights depend on, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankopt.data.identity import Hashed
from rankopt.errors import InputError, Problem
from rankopt.hashes import FileRecord
from rankopt.models.card import ModelCard
from rankopt.problems import problems_of_validation
from rankopt.recipe import Recipe, parse_recipe
from rankopt.train.settings import TrainSettings

FORMAT_VERSION = 1
RUN_MANIFEST = "run.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Code(_Frozen):
    """What was run."""

    rankopt_version: str
    git_commit: str | None
    """Of the checkout that rankopt ran from; ends in `-dirty` when it was changed since."""
    rankopt_sha256: str
    """Of the package's own sources."""
    module: dict[str, str]
    """The factory's file, and loaded files beside it or below -> sha256."""


class Machine(_Frozen):
    """Where it was run, and how many took part."""

    environment: dict[str, Any]
    """As beside every measurement: CPU, instruction sets, libraries."""
    variables: dict[str, str]
    """Environment variables that thread pools, math libraries and hashes go by."""
    arithmetic: dict[str, Any]
    """What decides the order and width of sums, threads aside."""
    num_threads: int
    world_size: int = 1
    launcher: str = "process"


class SplitRecord(_Frozen):
    """The rows of a split."""

    path: str
    """As given."""
    format: str
    num_rows: int
    hashed: Hashed
    """What the hash is of: the files' bytes, or the values that the card's columns have."""
    sha256: str
    """Of all the rows that a split by a hash takes its own from."""


class DataRecord(_Frozen):
    """The rows of a run."""

    given: str | None
    """What `--data` named in place of the card's own rows."""
    splits: dict[str, SplitRecord]


class Outcome(_Frozen):
    """What came of a run."""

    best_ne: float
    """On validation rows, of the weights that were kept."""
    test: dict[str, dict[str, float | int | None]]
    curve: tuple[dict[str, float | int], ...]
    num_rows_seen: int
    weights: dict[str, str]
    """Tensor -> sha256 of its type, shape and bytes, in the module's order."""
    weights_sha256: str
    """Of all tensors, whatever their order."""


class RunManifest(_Frozen):
    """The whole of run.json."""

    format_version: int = FORMAT_VERSION
    made_at: str
    command: str
    code: Code
    machine: Machine
    card: dict[str, Any]
    """Its content; paths in it are relative to `card_folder`."""
    card_folder: str
    card_file: str | None = None
    recipe: dict[str, Any] | None = None
    settings: TrainSettings
    """As run: the card's and the command line's together."""
    seeds: dict[str, int] = Field(default_factory=dict)
    data: DataRecord
    start: FileRecord | None = None
    """The checkpoint that the run began with."""
    start_optimizer: FileRecord | None = None
    outcome: Outcome

    def model_card(self) -> ModelCard:
        """Return the card, its relative paths still leading home."""
        card = ModelCard.model_validate(self.card)
        return card.model_copy(update={"path": Path(self.card_folder) / "card.yaml"})

    def training_recipe(self) -> Recipe | None:
        """Return the recipe; None for plain PyTorch."""
        return None if self.recipe is None else parse_recipe(self.recipe, where=RUN_MANIFEST)


def read_run(run: str | Path) -> tuple[Path, RunManifest]:
    """Read run.json, given itself or the folder that it lies in.

    Returns:
        The file, and what it says.

    Raises:
        InputError: there is none, it is damaged, or another version of rankopt wrote it.
    """
    file = Path(run)
    file = file / RUN_MANIFEST if file.is_dir() else file
    if not file.is_file():
        hint = f"`rankopt train` writes {RUN_MANIFEST} into its --out."
        raise InputError(problems=[Problem(str(file), "does not exist", hint=hint)])
    try:
        manifest = RunManifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problems = problems_of_validation(str(file), error, RunManifest)
        raise InputError(problems=problems) from error
    if manifest.format_version != FORMAT_VERSION:
        what = f"must have format {FORMAT_VERSION}, which this rankopt reads"
        hint = f"Use the version that wrote it: {manifest.code.rankopt_version}."
        raise InputError(problems=[Problem(str(file), what, manifest.format_version, hint)])
    return file, manifest
