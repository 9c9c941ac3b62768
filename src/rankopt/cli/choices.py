"""What the command line's words mean to the engine; imported when a verb runs."""

from __future__ import annotations

from typing import get_args

from rankopt.bench.backend import Backend
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.ray_backend import RayBackend
from rankopt.errors import UsageError
from rankopt.recipe import Objective, Recipe, load_recipe
from rankopt.units import NS_PER_MS


def with_objective(recipe: str, objective: str | None) -> Recipe:
    """Read a recipe and put another objective in its place when one is given."""
    loaded = load_recipe(recipe)
    if objective is None:
        return loaded
    allowed = get_args(Objective)
    if objective not in allowed:
        raise UsageError(f"--objective must be one of {', '.join(allowed)}; got {objective!r}.")
    return loaded.model_copy(update={"objective": objective})


def to_ns(milliseconds: float | None) -> float | None:
    """Convert a command line's milliseconds."""
    return None if milliseconds is None else milliseconds * NS_PER_MS


def choose_backend(ray_address: str | None, *, local: bool) -> Backend:
    """Return the backend that the command line asked for; local Ray when it said nothing."""
    if local and ray_address:
        raise UsageError("--local and --ray-address exclude each other.")
    return LocalBackend() if local else RayBackend(ray_address)
