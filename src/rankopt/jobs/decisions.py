"""passes.json: the recipe as it was run, and what became of each pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rankopt.artifact.manifest import PASSES
from rankopt.errors import InputError
from rankopt.models.card import ModelCard
from rankopt.recipe import Recipe, dump_recipe, parse_recipe
from rankopt.review.schema import PassRecord


def write_choices(
    file: Path, recipe: Recipe, card: ModelCard, records: Sequence[PassRecord]
) -> None:
    """Write passes.json: the recipe as it was run, and what became of each pass."""
    content = {
        "model": card.name,
        "recipe": dump_recipe(recipe),
        "passes": [record.model_dump(mode="json") for record in records],
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_passes(file: Path) -> tuple[Recipe, list[PassRecord]]:
    """Read passes.json: the recipe as it was run, and what became of each pass.

    Raises:
        InputError: the file is missing or no passes.json.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        records = [PassRecord.model_validate(entry) for entry in content["passes"]]
        return parse_recipe(content["recipe"], where=str(file)), records
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file}: is no passes.json of an artifact ({type(error).__name__}: {error}). "
            "It lies in every folder that `rankopt optimize` wrote."
        ) from error


def read_choices(file: Path) -> list[PassRecord]:
    """Read the decisions of an earlier run, its export step left out.

    Raises:
        InputError: the file is missing or no passes.json.
    """
    recipe, records = read_passes(file)
    kinds = {step.kind for step in recipe.passes if step.purpose == "artifact"}
    return [record for record in records if record.kind not in kinds]


def read_records(folder: Path) -> list[PassRecord]:
    """Read what became of each pass of an artifact."""
    return read_passes(folder / PASSES)[1]
