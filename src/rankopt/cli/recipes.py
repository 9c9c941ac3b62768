"""`rankopt recipes`: what recipes there are, what they say, and whether a recipe is sound."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rankopt.cli.console import AsJson, print_json, print_table

app = typer.Typer(no_args_is_help=True)


@app.command("ls")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that can be named, and the kinds of pass."""
    from rankopt.content import content_name, list_content
    from rankopt.recipe import load_recipe
    from rankopt.registry import pass_class, pass_kinds

    recipes = []
    for path in list_content("recipes"):
        recipe = load_recipe(path)
        recipes.append(
            {
                "name": content_name(path),
                "objective": recipe.objective,
                "passes": [step.kind for step in recipe.passes],
                "summary": recipe.summary,
            }
        )
    kinds = {kind: _summary(pass_class(kind)) for kind in pass_kinds()}
    if as_json:
        print_json({"recipes": recipes, "passes": kinds})
        return
    print_table(
        ("recipe", "objective", "summary"),
        [(str(item["name"]), str(item["objective"]), str(item["summary"])) for item in recipes],
    )
    print_table(("pass", "what it does"), list(kinds.items()))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe, or a kind of pass.")],
) -> None:
    """Print a recipe, or a pass with its settings, their meaning and an example."""
    from rankopt.content import find
    from rankopt.errors import RecipeError
    from rankopt.registry import pass_class, pass_kinds

    if name in pass_kinds():
        typer.echo(_describe(name, pass_class(name)))
        return
    typer.echo(find("recipes", name, error=RecipeError).read_text(encoding="utf-8").rstrip())


@app.command()
def validate(
    paths: Annotated[list[str], typer.Argument(help="Recipes: paths or names.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Check against this model card too.")
    ] = None,
) -> None:
    """Check recipes without any torch work; every problem of every recipe is listed."""
    from rankopt.environment import collect_environment
    from rankopt.errors import Problem, RecipeError
    from rankopt.models.card import load_card
    from rankopt.recipe import load_recipe

    card = load_card(model) if model else None
    environment = collect_environment()
    problems: list[Problem] = []
    sound = []
    for path in paths:
        try:
            recipe = load_recipe(path)
            found = recipe.check(environment, card)
        except RecipeError as error:
            found = list(error.problems) or [Problem(path, str(error).rstrip("."))]
        problems += found
        if not found:
            sound.append(path)
    for path in sound:
        typer.echo(f"{path}: sound")
    if problems:
        raise RecipeError(problems=problems)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for an editor that checks while you type."""
    from rankopt.recipe import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _describe(name: str, kind: Any) -> str:
    import inspect

    lines = [f"{name}: {inspect.cleandoc(kind.__doc__ or '')}", "", "Settings:"]
    properties = kind.model_json_schema().get("properties", {})
    for key, field in kind.model_fields.items():
        text = field.description or ""
        default = "required" if field.is_required() else f"default {field.get_default()!r}"
        allowed = properties.get(key, {}).get("enum")
        choices = f", one of {', '.join(map(str, allowed))}" if allowed else ""
        lines.append(f"  {key} ({default}{choices}): {text}".rstrip(": "))
    for label in ("requires", "forbids", "provides"):
        values = sorted(getattr(kind, label))
        if values:
            lines.append(f"{label.capitalize()}: {', '.join(values)}")
    return "\n".join(lines)
