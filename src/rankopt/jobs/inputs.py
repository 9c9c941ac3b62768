"""What the jobs have in common: progress, data, the control arm, checks before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.bench.arms import ArmSpec
from rankopt.environment import Environment, collect_environment
from rankopt.errors import RecipeError
from rankopt.models.card import ModelCard, load_card, save_card
from rankopt.recipe import Recipe, load_recipe
from rankopt.review.gate import Scope

if TYPE_CHECKING:
    import pandas as pd
    import ray.data

    Data = str | Path | pd.DataFrame | ray.data.Dataset
    """A file, a folder of splits, a DataFrame or a Ray Dataset."""

Progress = Callable[[str], None]


def quiet(_: str) -> None:
    """Take progress and say nothing."""


def check_inputs(
    recipe: Recipe | str | Path, card: ModelCard | str | Path, scope: Scope | None = None
) -> tuple[Recipe, ModelCard, Environment]:
    """Read recipe and card and find everything wrong with them before any torch work.

    Args:
        recipe: a recipe, its path or its name.
        card: a model card, its path or its name.
        scope: what the A/B will measure, when one follows: gates it could not decide are problems.

    Raises:
        RecipeError: every problem of the recipe.
        CardError: every problem of the card.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    card = card if isinstance(card, ModelCard) else load_card(card)
    recipe = recipe.at_least(card.min_batch)
    environment = collect_environment()
    if recipe.is_training:
        raise RecipeError(
            f"{recipe.where}: holds training passes alone. Use it with: "
            f"rankopt train CARD --recipe {recipe.name} --out DIR"
        )
    problems = recipe.check(environment, card, scope)
    if problems:
        raise RecipeError(problems=problems)
    return recipe, card, environment


def eager_arm(
    card: ModelCard,
    checkpoint: str | Path | None,
    workdir: Path,
    label: str = "control",
    device: str = "cpu",
) -> ArmSpec:
    """Describe the control: built again from card and checkpoint in its own process.

    It runs where the candidate does: `device` is that of the candidate's target.
    """
    file = save_card(card, workdir / "control" / "card.yaml")
    given = Path(checkpoint).resolve() if checkpoint is not None else None
    options = {} if device == "cpu" else {"device": device}
    return ArmSpec(label=label, kind="eager", card=file, checkpoint=given, options=options)
