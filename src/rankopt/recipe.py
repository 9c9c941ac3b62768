"""Recipes: an ordered list of passes, the objective, and the gates a candidate must meet.

Reading a recipe finds all its problems at once and does no torch work: unknown keys, wrong types,
passes in an order that cannot work, passes this machine or this card rules out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError

from rankopt.bench.plan import raised
from rankopt.environment import Environment
from rankopt.errors import Problem, RecipeError, nearest
from rankopt.models.card import ModelCard
from rankopt.passes.base import Pass
from rankopt.passes.training import TRAINING_PREFIX
from rankopt.problems import problems_of_validation, take_reserved
from rankopt.registry import pass_class, pass_kinds
from rankopt.review.gate import Scope
from rankopt.review.gates import Gates

Objective = Literal["latency", "bytes", "cost"]


class Recipe(BaseModel):
    """What to do to a model, and what must hold afterwards.

    Example:
        ```yaml
        name: serve-int8
        summary: int8 tables and dense layers, one AOTInductor package
        objective: latency
        batch_sizes: [1, 512]
        passes:
          - quantize_embeddings: {dtype: int8}
          - quantize_dense: {}
          - export_aoti: {}
        gates:
          quality: {ne: 0.1%}
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str = ""
    objective: Objective = "latency"
    batch_sizes: tuple[int, ...] = Field(default=(1, 512), min_length=1)
    """Where keep-or-drop decisions are measured; the objective is their geometric mean."""
    passes: tuple[SerializeAsAny[Pass], ...] = Field(min_length=1)
    gates: Gates = Field(default_factory=Gates)
    path: Path | None = Field(default=None, exclude=True)

    @property
    def where(self) -> str:
        return str(self.path) if self.path else f"recipe {self.name!r}"

    def check(
        self,
        environment: Environment,
        card: ModelCard | None = None,
        scope: Scope | None = None,
    ) -> list[Problem]:
        """List everything that rules the recipe out here, in order, without torch work.

        Args:
            environment: of this machine.
            card: of the model it is for, where that is known.
            scope: what the A/B will measure, where one follows: gates that it could not decide are
                problems. Without it the quality gates alone are checked.
        """
        problems = self._mixed()
        provided: set[str] = set()
        for index, step in enumerate(self.passes):
            where = f"{self.where}: passes[{index}].{step.kind}"
            missing = sorted(step.requires - provided)
            if missing:
                problems.append(
                    Problem(
                        where,
                        f"needs {', '.join(missing)} from an earlier pass",
                        hint=_order(missing),
                    )
                )
            clash = sorted(step.forbids & provided)
            if clash:
                problems.append(
                    Problem(
                        where,
                        f"must stand before the pass that provides {', '.join(clash)}",
                        hint="Move it up in the list.",
                    )
                )
            provided |= step.provides
            for problem in step.check(environment, card):
                suffix = f".{problem.where}" if problem.where else ""
                problems.append(
                    Problem(f"{where}{suffix}", problem.what, problem.got, problem.hint)
                )
        if scope is not None:
            problems += self.gates.check(replace(scope, where=self.where))
        else:
            names = tuple(output.name for output in card.outputs) if card else ()
            problems += self.gates.quality.check("gates.quality", Scope(self.where, outputs=names))
        if "artifact" not in provided and not any(map(_is_training, self.passes)):
            problems.append(
                Problem(
                    f"{self.where}: passes",
                    "must end with an export pass, or nothing could be deployed",
                    hint="Add `- export_aoti: {}` at the end.",
                )
            )
        return problems

    def at_least(self, rows: int) -> Recipe:
        """Return the recipe with batch sizes below `rows`, those of its gates too, raised to it."""
        sizes = raised(self.batch_sizes, rows)
        return self.model_copy(
            update={"batch_sizes": sizes, "gates": gates_at_least(self.gates, rows)}
        )

    @property
    def is_training(self) -> bool:
        """True when every pass is a training pass (`train_*`)."""
        return all(map(_is_training, self.passes))

    def _mixed(self) -> list[Problem]:
        """Refuse training passes beside serving ones: no command runs both."""
        training = [step.kind for step in self.passes if _is_training(step)]
        if self.is_training or not training:
            return []
        return [
            Problem(
                f"{self.where}: passes",
                "must be training passes alone or serving passes alone",
                f"{', '.join(training)} among {len(self.passes)}",
                "Write two recipes, for `rankopt train --recipe` and for `rankopt optimize`.",
            )
        ]


def _is_training(step: Pass) -> bool:
    return step.kind.startswith(TRAINING_PREFIX)


def gates_at_least(gates: Gates, rows: int) -> Gates:
    """Return gates whose batch sizes below `rows` are raised to it."""
    changes = {}
    for name in type(gates).model_fields:
        value = getattr(gates, name)
        if isinstance(value, tuple):
            lifted = [
                gate.model_copy(update={"batch_size": max(gate.batch_size, rows)})
                if hasattr(gate, "batch_size")
                else gate
                for gate in value
            ]
            changes[name] = tuple(dict.fromkeys(lifted))
    return gates.model_copy(update=changes)


def _order(missing: list[str]) -> str:
    sources = [kind for kind in pass_kinds() if set(missing) & set(pass_class(kind).provides)]
    return f"Put {' or '.join(sources)} before it." if sources else ""


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe by path or by the name of one that rankopt ships.

    Raises:
        RecipeError: missing, unreadable, or with problems; all of them are listed.
    """
    from rankopt.content import find, read_yaml

    file = find("recipes", path, error=RecipeError)
    raw = read_yaml(file, RecipeError)
    return parse_recipe(raw, where=str(file)).model_copy(update={"path": file.resolve()})


def parse_recipe(raw: Any, *, where: str) -> Recipe:
    """Build a recipe from what YAML gave; see `load_recipe`."""
    if not isinstance(raw, Mapping):
        raise RecipeError(problems=[Problem(where, "must be a mapping", type(raw).__name__)])
    raw = dict(raw)
    problems = take_reserved(where, raw, Recipe)
    passes, found = _parse_passes(raw.get("passes"), where)
    problems += found
    stand_in: Any = passes or (Pass(),)  # problems of the passes are already listed
    try:
        recipe = Recipe.model_validate({**raw, "passes": stand_in})
    except ValidationError as error:
        problems += problems_of_validation(where, error, Recipe)
    if problems:
        raise RecipeError(problems=problems)
    return recipe


def _parse_passes(raw: Any, where: str) -> tuple[tuple[Pass, ...], list[Problem]]:
    if not isinstance(raw, list) or not raw:
        got = None if raw is None else raw
        return (), [
            Problem(f"{where}: passes", "must be a list of passes, `- kind: {settings}`", got)
        ]
    passes, problems = [], []
    for index, item in enumerate(raw):
        at = f"passes[{index}]"
        if isinstance(item, str):
            item = {item: {}}
        if not isinstance(item, Mapping) or len(item) != 1:
            problems.append(Problem(f"{where}: {at}", "must be one pass, `kind: {settings}`", item))
            continue
        kind, settings = next(iter(item.items()))
        step, found = parse_pass(str(kind), settings, where=where, prefix=f"{at}.{kind}")
        problems += found
        if step is not None:
            passes.append(step)
    return tuple(passes), problems


def parse_pass(
    kind: str, settings: Any, *, where: str, prefix: str
) -> tuple[Pass | None, list[Problem]]:
    """Build one pass; the settings' problems come back instead of being raised."""
    if kind not in pass_kinds():
        return None, [
            Problem(f"{where}: {prefix}", "is not a known pass", hint=nearest(kind, pass_kinds()))
        ]
    found = pass_class(kind)
    if not isinstance(settings, Mapping | None):
        return None, [Problem(f"{where}: {prefix}", "must be a mapping of settings", settings)]
    try:
        return found.model_validate(dict(settings or {})), []
    except ValidationError as error:
        problems = problems_of_validation(where, error, found, prefix)
        hint = f"See: rankopt recipes show {kind}"
        return None, [p if p.hint else Problem(p.where, p.what, p.got, hint) for p in problems]


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    """Write a recipe as the mapping that `parse_recipe` reads."""
    raw = recipe.model_dump(mode="json", exclude_none=True)
    raw["passes"] = [
        {step.kind: step.model_dump(mode="json", exclude_none=True)} for step in recipe.passes
    ]
    return raw


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, every registered pass with its settings."""
    schema = Recipe.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    options = []
    for kind in pass_kinds():
        settings = pass_class(kind).model_json_schema(ref_template="#/$defs/{model}")
        definitions |= settings.pop("$defs", {})
        definitions[kind] = settings
        options.append(
            {
                "type": "object",
                "properties": {kind: {"anyOf": [{"$ref": f"#/$defs/{kind}"}, {"type": "null"}]}},
                "required": [kind],
                "additionalProperties": False,
            }
        )
    names = {"type": "string", "enum": list(pass_kinds())}
    schema["properties"]["passes"] = {"type": "array", "items": {"anyOf": [*options, names]}}
    return schema
