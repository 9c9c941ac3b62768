"""Training recipes: told from serving ones, and checked before a run."""

from __future__ import annotations

from pathlib import Path

from rankopt.content import find, read_yaml
from rankopt.environment import collect_environment
from rankopt.errors import Problem, RecipeError, UsageError
from rankopt.models.card import ModelCard
from rankopt.passes.training import TRAINING_PREFIX, TrainingPass
from rankopt.recipe import Recipe, load_recipe
from rankopt.registry import pass_kinds


def load_training_recipe(path: str | Path) -> Recipe:
    """Read a recipe, and refuse one that holds a pass which works on a trained model.

    Raises:
        RecipeError: the recipe cannot be read.
        UsageError: a pass of it is not a `train_*` kind; all such are listed.
    """
    recipe = load_recipe(path)
    known = [kind for kind in pass_kinds() if kind.startswith(TRAINING_PREFIX)]
    problems = [
        Problem(
            f"{recipe.where}: passes[{index}]",
            f"must be a training pass ({TRAINING_PREFIX}*)",
            step.kind,
            f"Allowed here: {', '.join(known)}. Serving passes belong to `rankopt optimize`.",
        )
        for index, step in enumerate(recipe.passes)
        if not step.kind.startswith(TRAINING_PREFIX)
    ]
    if problems:
        raise UsageError(problems=problems)
    return recipe


def find_training_recipe(name: str | Path) -> Recipe | None:
    """Read a training recipe; None when there is no recipe of that name, or it is a serving one.

    Raises:
        RecipeError: it is a recipe with problems.
    """
    if Path(name).is_dir():
        return None
    try:
        file = find("recipes", name, error=RecipeError)
    except RecipeError:
        return None
    recipe = load_recipe(file) if _has_passes(file) else None
    return recipe if recipe is not None and recipe.is_training else None


def _has_passes(file: Path) -> bool:
    raw = read_yaml(file, RecipeError)
    return isinstance(raw, dict) and "passes" in raw


def require_sound(recipe: Recipe | None, card: ModelCard) -> None:
    """Find everything wrong with a training recipe before any torch work.

    Raises:
        RecipeError: every problem of the recipe.
    """
    problems = [] if recipe is None else recipe.check(collect_environment(), card)
    if problems:
        raise RecipeError(problems=problems)


def training_passes(recipe: Recipe | None) -> list[TrainingPass]:
    """List the passes of a training recipe; none without one.

    Raises:
        RecipeError: a pass works on a trained model.
    """
    passes = [] if recipe is None else list(recipe.passes)
    others = [step.kind for step in passes if not isinstance(step, TrainingPass)]
    if recipe is not None and others:
        raise RecipeError(
            f"{recipe.where}: {', '.join(others)} can only be used by `rankopt optimize`."
        )
    return [step for step in passes if isinstance(step, TrainingPass)]
