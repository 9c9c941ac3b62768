"""Turn pydantic's validation errors into the one-line form every rankopt error has."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ValidationError

from rankopt.errors import Problem, nearest


def location(parts: tuple[int | str, ...]) -> str:
    """Join a pydantic location: ('inputs', 0, 'dtype') reads `inputs[0].dtype`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def problems_of_validation(
    where: str, error: ValidationError, model: type[BaseModel], prefix: str = ""
) -> list[Problem]:
    """List every validation error as a `Problem`, unknown keys with their nearest names.

    Args:
        where: the file read.
        error: what pydantic raised.
        model: the schema, for the names it allows.
        prefix: where in the file `model` stands, such as `passes[0].quantize_dense`.
    """
    problems = []
    for item in error.errors(include_url=False):
        path = location(item["loc"])
        full = ".".join(piece for piece in (prefix, path) if piece)
        problems.append(_problem(f"{where}: {full}" if full else where, item, model))
    return problems


def _problem(where: str, item: Any, model: type[BaseModel]) -> Problem:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        own = [name for name, field in model.model_fields.items() if not field.exclude]
        allowed = own if len(item["loc"]) == 1 else []
        hint = nearest(str(item["loc"][-1]), allowed) if allowed else "Check the spelling."
        return Problem(where, "is not a known key", hint=hint)
    if kind == "missing":
        return Problem(where, "is required")
    if kind in {"literal_error", "enum"}:
        return Problem(where, f"must be one of {_choices(context['expected'])}", item["input"])
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        expected = context.get("expected_tags", "a known kind")
        return Problem(where, f"kind must be one of {expected}", context.get("tag"))
    if kind == "value_error":
        return Problem(where, str(context["error"]))
    return Problem(where, item["msg"].lower(), item["input"])


def _choices(expected: str) -> str:
    """Turn pydantic's `'a', 'b' or 'c'` into `a, b, c`."""
    return ", ".join(re.findall(r"'([^']*)'", expected)) or expected


def take_reserved(where: str, raw: dict[str, Any], model: type[BaseModel]) -> list[Problem]:
    """Remove keys that a file may not set (`path`: rankopt fills it in) and list them."""
    reserved = [name for name, field in model.model_fields.items() if field.exclude and name in raw]
    for name in reserved:
        del raw[name]
    return [Problem(f"{where}: {name}", "is not a known key") for name in reserved]
