"""Selectors: which tables or layers a setting is for.

A rule's `select` is a shell-style pattern over names (`*`, `?`, `[ab]`). It is held against the
full name (`model.tables.user`) and against the name without the leading parts (`user`). The first
rule that matches a name decides; names no rule matches take the default.
A rule that decides nothing is an error: a silent one would leave a model unquantised unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from rankopt.errors import Problem, SelectorError, nearest

Setting = TypeVar("Setting")


class Rule(BaseModel, Generic[Setting]):
    """One selector and what it sets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    select: str
    use: Setting


def matches(pattern: str, name: str) -> bool:
    """Tell whether a pattern means this name, whole or from any dot on."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


def resolve(
    names: Sequence[str], rules: Sequence[Rule[Setting]], default: Setting, *, where: str, noun: str
) -> dict[str, Setting]:
    """Give every name its setting.

    Args:
        names: tables or layers of the model.
        rules: in order of precedence.
        default: for names that no rule selects.
        where: the recipe key, for the message.
        noun: `table` or `layer`.

    Raises:
        SelectorError: a rule selects nothing; every such rule is listed with the nearest names.
    """
    chosen: dict[str, Setting] = {}
    problems = []
    for index, rule in enumerate(rules):
        selected = [name for name in names if matches(rule.select, name)]
        if not selected:
            problems.append(
                Problem(
                    f"{where}[{index}].select",
                    f"matches no {noun} of this model",
                    rule.select,
                    nearest(rule.select, [*names, *{name.rsplit(".", 1)[-1] for name in names}]),
                )
            )
        for name in selected:
            chosen.setdefault(name, rule.use)
    if problems:
        raise SelectorError(problems=problems)
    return {name: chosen.get(name, default) for name in names}
