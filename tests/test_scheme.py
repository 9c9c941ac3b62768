"""Schemes: what a recipe names once for several passes, and how its own settings go first."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankopt.content import content_name, list_content
from rankopt.environment import collect_environment
from rankopt.errors import RecipeError
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.scheme import load_scheme


@pytest.fixture
def scheme(tmp_path: Path) -> str:
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "name: mixed\n"
        "tables: {dtype: int4, rules: [{select: user, use: int8}]}\n"
        "layers: {activation_bits: 7, rules: [{select: 'top.4', use: false}]}\n"
    )
    return str(file)


@pytest.mark.parametrize("path", list_content("quantize"), ids=content_name)
def test_every_shipped_scheme_is_sound_and_carries_its_own_name(path: Path) -> None:
    assert load_scheme(str(path)).name == content_name(path)


def test_a_pass_takes_what_it_does_not_say_itself_from_the_scheme(scheme: str) -> None:
    tables = QuantizeEmbeddings(scheme=scheme).resolved()
    assert (tables.dtype, [rule.use for rule in tables.rules]) == ("int4", ["int8"])
    layers = QuantizeDense(scheme=scheme).resolved()
    assert (layers.activation_bits, [rule.use for rule in layers.rules]) == (7, [False])


def test_the_settings_of_a_recipe_go_before_the_schemes(scheme: str) -> None:
    tables = QuantizeEmbeddings.model_validate(
        {"scheme": scheme, "dtype": "int8", "rules": [{"select": "user", "use": "fp16"}]}
    ).resolved()
    # The default written out is still the recipe's own word.
    assert tables.dtype == "int8"
    assert [rule.use for rule in tables.rules] == ["fp16", "int8"]
    layers = QuantizeDense.model_validate(
        {"scheme": scheme, "activation_bits": "auto", "rules": [{"select": "a", "use": True}]}
    ).resolved()
    assert layers.activation_bits == "auto"
    assert [rule.select for rule in layers.rules] == ["a", "top.4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\ntables: {dtype: int3}\n", "tables.dtype: must be one of"),
        ("name: x\ntable: {}\n", "table: is not a known key"),
        ("name: [\n", "is not readable YAML"),
    ],
)
def test_a_broken_scheme_says_where(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=r"broken\.yaml") as caught:
        load_scheme(str(file))
    assert expected in str(caught.value)
    [problem, *_] = QuantizeEmbeddings(scheme=str(file)).check(collect_environment(), None)
    assert problem.where == "scheme"


def test_a_scheme_without_the_part_that_a_pass_needs_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "tables-only.yaml"
    file.write_text("name: tables-only\ntables: {}\n")
    environment = collect_environment()
    assert not QuantizeEmbeddings(scheme=str(file)).check(environment, None)
    [problem] = QuantizeDense(scheme=str(file)).check(environment, None)
    assert "layers" in problem.what


def test_a_scheme_that_is_not_there_names_the_nearest() -> None:
    [problem] = QuantizeEmbeddings(scheme="int4-table").check(collect_environment(), None)
    assert "int4-tables" in str(problem)
