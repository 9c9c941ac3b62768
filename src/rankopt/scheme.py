"""Quantisation schemes: the files in `quantize/` that a recipe can name.

A scheme says which tables and layers get what, once, for several recipes. Where a pass names a
scheme, its own settings go first: its rules stand before the scheme's, and a setting that the
recipe spells out replaces the scheme's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rankopt.content import find, read_yaml
from rankopt.errors import Problem, RecipeError
from rankopt.problems import problems_of_validation
from rankopt.selectors import Rule
from rankopt.tables import TableDtype


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TableScheme(_Strict):
    """For `quantize_embeddings`."""

    dtype: Literal["fp16", "int8", "int4", "int2"] = "int8"
    rules: tuple[Rule[TableDtype], ...] = ()


class LayerScheme(_Strict):
    """For `quantize_dense`."""

    activation_bits: Literal["auto", 7, 8] = "auto"
    rules: tuple[Rule[bool], ...] = ()


class Scheme(_Strict):
    """One file in `quantize/`.

    Example:
        ```yaml
        name: tables-int4-dense-int8
        tables: {dtype: int4, rules: [{select: "user", use: int8}]}
        layers: {rules: [{select: "top.*", use: true}]}
        ```
    """

    name: str
    summary: str = ""
    tables: TableScheme | None = None
    layers: LayerScheme | None = None


def load_scheme(name: str) -> Scheme:
    """Read a scheme by path or name.

    Raises:
        RecipeError: it is not there, is not YAML, or breaks the schema.
    """
    file = find("quantize", name, error=RecipeError)
    raw = read_yaml(file, RecipeError)
    try:
        return Scheme.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(problems=problems_of_validation(str(file), error, Scheme)) from error


def scheme_problems(name: str | None, part: Literal["tables", "layers"]) -> list[Problem]:
    """List why a pass cannot use the scheme it names; empty when it can or names none."""
    if name is None:
        return []
    try:
        scheme = load_scheme(name)
    except RecipeError as error:
        found = error.problems or (Problem("", str(error).rstrip(".")),)
        return [Problem("scheme", p.what, name, p.hint) for p in found]
    if getattr(scheme, part) is None:
        return [Problem("scheme", f"must have a part `{part}`", name)]
    return []
