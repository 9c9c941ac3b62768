"""Passes by kind: this package's own, and those of others through entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, ClassVar

import pytest

from rankopt import registry
from rankopt.errors import RecipeError
from rankopt.passes.base import Pass
from rankopt.recipe import parse_recipe


class Foreign(Pass):
    """A pass of another package."""

    kind: ClassVar[str] = "foreign"
    strength: int = 1


class NoPass:
    """Something else."""


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend that a package announces a pass under some kind."""

    def announce(kind: str, name: str = "Foreign") -> None:
        point = EntryPoint(kind, f"{__name__}:{name}", registry.ENTRY_POINT_GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])
        # Under importlib's import mode this file may not be importable by its name.
        monkeypatch.setitem(sys.modules, __name__, _module())
        registry.pass_kinds.cache_clear()

    yield announce
    registry.pass_kinds.cache_clear()


def _module() -> ModuleType:
    module = ModuleType(__name__)
    module.__dict__.update(Foreign=Foreign, NoPass=NoPass)
    return module


def test_every_kind_is_the_name_of_its_class_and_of_its_file() -> None:
    for kind, target in registry.PASSES.items():
        found = registry.pass_class(kind)
        assert found.kind == kind
        assert target == f"rankopt.passes.{kind}:{found.__name__}"
        assert found.__name__.lower() == kind.replace("_", "")


def test_a_pass_of_another_package_is_used_like_any(entry: Any) -> None:
    entry("foreign")
    assert registry.pass_class("foreign") is Foreign
    raw = {"name": "x", "passes": [{"foreign": {"strength": 3}}]}
    [step] = parse_recipe(raw, where="x").passes
    assert step == Foreign(strength=3)
    with pytest.raises(RecipeError, match=r"passes\[0\]\.foreign\.strenght: is not a known key"):
        parse_recipe({"name": "x", "passes": [{"foreign": {"strenght": 3}}]}, where="x")


def test_a_name_that_is_taken_is_refused(entry: Any) -> None:
    entry("quantize_dense")
    with pytest.raises(RecipeError, match=r"'quantize_dense', which .* already is"):
        registry.pass_kinds()


def test_what_is_no_pass_is_refused(entry: Any) -> None:
    entry("odd", "NoPass")
    with pytest.raises(RecipeError, match="registered as pass 'odd' but is no rankopt Pass"):
        registry.pass_class("odd")


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"'quantize_dens' is no pass kind\. Did you mean"):
        registry.pass_class("quantize_dens")
