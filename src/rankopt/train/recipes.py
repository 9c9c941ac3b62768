"""Tell a training recipe from a serving one."""

from __future__ import annotations

from pathlib import Path

from rankopt.errors import Problem, UsageError
from rankopt.recipe import load_recipe
from rankopt.registry import pass_kinds

TRAINING_PREFIX = "train_"


def require_training_recipe(path: str | Path) -> None:
    """Refuse a recipe that holds a pass which works on a trained model.

    Raises:
        RecipeError: the recipe cannot be read.
        UsageError: a pass of it is not a `train_*` kind; all such are listed.
    """
    recipe = load_recipe(path)
    known = [kind for kind in pass_kinds() if kind.startswith(TRAINING_PREFIX)]
    allowed = f"Allowed here: {', '.join(known)}." if known else "No training pass is registered."
    problems = [
        Problem(
            f"{recipe.where}: passes[{index}]",
            f"must be a training pass ({TRAINING_PREFIX}*)",
            step.kind,
            f"{allowed} Serving passes belong to `rankopt optimize`; train without --recipe.",
        )
        for index, step in enumerate(recipe.passes)
        if not step.kind.startswith(TRAINING_PREFIX)
    ]
    if problems:
        raise UsageError(problems=problems)
