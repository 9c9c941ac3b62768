"""What holds for every registered pass: its sample runs, its order, its settings, its refusals."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from artifact.workshop import bundle_of
from passes.zoo import apply_passes
from rankopt.errors import RecipeError, SelectorError
from rankopt.passes.base import Pass
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.training import TrainingPass
from rankopt.recipe import Recipe, dump_recipe, parse_pass, parse_recipe
from rankopt.registry import PASSES, pass_class, pass_kinds

MODEL_WITH = {"fuse_attention": "din", "drop_dead_positions": "hstu"}
"""What a pass needs that a plain model of tables and layers does not have."""
SERVING = [kind for kind in PASSES if not issubclass(pass_class(kind), TrainingPass)]
"""Training passes have no bundle: tests/train runs them."""
SAMPLE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


def sample_of(kind: str) -> list[Any]:
    text = inspect.getdoc(pass_class(kind)) or ""
    found = SAMPLE.findall(text)
    assert found, f"{kind} has no YAML sample in its docstring"
    return [step for block in found for step in yaml.safe_load(textwrap.dedent(block))]


@pytest.mark.parametrize("kind", PASSES)
def test_the_sample_in_the_docstring_is_a_recipe_of_that_pass(kind: str) -> None:
    steps = sample_of(kind)
    recipe = parse_recipe({"name": "sample", "passes": steps}, where="docstring")
    assert [step.kind for step in recipe.passes] == [kind] * len(steps)
    again = parse_recipe(dump_recipe(recipe), where="dumped")
    assert again == recipe


@pytest.mark.parametrize("kind", SERVING)
def test_the_sample_runs_on_a_model_but_for_names_that_it_lacks(kind: str) -> None:
    _, _, bundle = bundle_of(MODEL_WITH.get(kind, "dlrm"))
    for raw in sample_of(kind):
        ((name, settings),) = raw.items()
        step, problems = parse_pass(name, settings, where="docstring", prefix=name)
        assert step is not None, problems
        try:
            applied = apply_passes(bundle, step)
        except SelectorError:  # the sample selects by names of an imagined model
            applied = apply_passes(bundle, step.model_copy(update={"rules": ()}))
        assert applied.bundle is not bundle
        assert applied.bundle.provided >= type(step).provides


def test_the_sample_of_the_recipe_parses() -> None:
    (sample,) = SAMPLE.findall(inspect.getdoc(Recipe) or "")
    recipe = parse_recipe(yaml.safe_load(sample), where="docstring")
    assert len(recipe.passes) == 3


@pytest.mark.parametrize("kind", PASSES)
def test_kind_file_and_key_are_the_same_word(kind: str) -> None:
    found = pass_class(kind)
    assert found.kind == kind
    assert found.__module__.rsplit(".", 1)[-1] == kind
    assert found.__name__ == "".join(word.capitalize() for word in kind.split("_"))


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_is_frozen_and_refuses_keys_that_it_does_not_know(kind: str) -> None:
    found = pass_class(kind)
    with pytest.raises(ValidationError, match="surprise"):
        found.model_validate({"surprise": 1})
    step = found()
    with pytest.raises(ValidationError, match="frozen"):
        step.surprise = 1
    assert step == found()


@pytest.mark.parametrize("kind", PASSES)
def test_every_setting_says_what_it_does(kind: str) -> None:
    fields = pass_class(kind).model_fields
    silent = [name for name, field in fields.items() if not field.description]
    # `dtype` of a pass named for it, and the pattern that every pass shares, speak for themselves.
    assert set(silent) <= {"dtype", "backend", "rules", "min_inputs"}


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="'quantize_embeddings'"):
        pass_class("quantise_embeddings")
    step, problems = parse_pass("export_aot", {}, where="r.yaml", prefix="passes[0].export_aot")
    assert step is None
    assert "'export_aoti'" in str(problems[0])
    assert set(PASSES) <= set(pass_kinds())


def test_all_problems_of_a_recipe_are_listed_at_once() -> None:
    raw = {
        "name": "bad",
        "passes": [
            {"quantize_embeddings": {"dtype": "int3", "rows": 2}},
            {"quantize_dense": {"backend": "mkl"}},
            {"nothing": {}},
            {"export_aoti": 7},
        ],
    }
    with pytest.raises(RecipeError) as caught:
        parse_recipe(raw, where="r.yaml")
    text = str(caught.value)
    assert "r.yaml: passes[0].quantize_embeddings.dtype: must be one of" in text
    assert "int3" in text
    assert "passes[0].quantize_embeddings.rows" in text
    assert "passes[1].quantize_dense.backend" in text
    assert "passes[2].nothing: is not a known pass" in text
    assert "passes[3].export_aoti: must be a mapping" in text


def test_a_pass_without_apply_says_so() -> None:
    class Empty(Pass):
        kind = "empty"

    _, _, bundle = bundle_of("dlrm")
    with pytest.raises(TypeError, match="Empty defines no apply"):
        apply_passes(bundle, Empty())


def test_export_puts_its_targets_options_on_the_bundle_and_leaves_the_graph() -> None:
    _, _, bundle = bundle_of("dlrm")
    exported = apply_passes(bundle, ExportAoti(inductor={"max_autotune": False})).bundle
    assert exported.program is bundle.program
    assert exported.inductor_options["max_autotune"] is False
    assert "artifact" in exported.provided
    assert bundle.inductor_options == {}
