"""Recipes: everything wrong with one is found at once, before any torch work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rankopt.content import list_content
from rankopt.environment import collect_environment
from rankopt.errors import RecipeError
from rankopt.recipe import dump_recipe, load_recipe, parse_recipe, recipe_schema
from rankopt.registry import pass_class, pass_kinds

SOUND: dict[str, Any] = {"name": "x", "passes": [{"fuse_embeddings": {}}, "export_aoti"]}


def messages(raw: Any, where: str = "r.yaml") -> list[str]:
    """Parse and check as the verbs do; return every problem as it would be printed."""
    try:
        recipe = parse_recipe(raw, where=where).model_copy(update={"path": Path(where)})
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return [str(problem) for problem in recipe.check(collect_environment())]


def with_passes(*passes: Any, **keys: Any) -> dict[str, Any]:
    return {"name": "x", "passes": list(passes), **keys}


def test_a_sound_recipe_has_no_problems() -> None:
    assert messages(SOUND) == []


def test_the_message_says_where_what_got_allowed_and_the_next_step() -> None:
    found = messages(
        with_passes({"quantize_embeddings": {"dtype": "int3"}}, "export_aoti"), "recipes/x.yaml"
    )
    assert found == [
        "recipes/x.yaml: passes[0].quantize_embeddings.dtype: must be one of int8, int4, int2, "
        "fp16; got 'int3'. See: rankopt recipes show quantize_embeddings"
    ]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (SOUND | {"objektive": "latency"}, "r.yaml: objektive: is not a known key. Did you mean"),
        (SOUND | {"objective": "speed"}, "r.yaml: objective: must be one of latency, bytes, cost;"),
        (SOUND | {"batch_sizes": []}, "r.yaml: batch_sizes: "),
        (SOUND | {"gates": {"qualty": {}}}, "r.yaml: gates.qualty: "),
        ({"passes": SOUND["passes"]}, "r.yaml: name: is required."),
        ({"name": "x"}, "r.yaml: passes: must be a list of passes"),
        (SOUND | {"passes": {"export_aoti": {}}}, "r.yaml: passes: must be a list of passes"),
        (with_passes({"a": 1, "b": 2}), "r.yaml: passes[0]: must be one pass"),
        (with_passes(7), "r.yaml: passes[0]: must be one pass"),
        (
            with_passes({"quantize_embedings": {}}, "export_aoti"),
            "r.yaml: passes[0].quantize_embedings: is not a known pass. "
            "Did you mean 'quantize_embeddings'",
        ),
        (
            with_passes({"quantize_dense": {"backnd": "native"}}, "export_aoti"),
            "r.yaml: passes[0].quantize_dense.backnd: is not a known key. Did you mean 'backend'?",
        ),
        (
            with_passes({"quantize_dense": {"min_inputs": "many"}}, "export_aoti"),
            "r.yaml: passes[0].quantize_dense.min_inputs: input should be a valid integer",
        ),
        (
            with_passes({"quantize_dense": {"rules": [{"select": "a", "use": "maybe"}]}}),
            "r.yaml: passes[0].quantize_dense.rules[0].use: input should be a valid boolean",
        ),
        (
            with_passes({"fuse_embeddings": [1]}),
            "r.yaml: passes[0].fuse_embeddings: must be a mapping of settings; got [1].",
        ),
        (["passes"], "r.yaml: must be a mapping; got 'list'."),
        ("", "r.yaml: must be a mapping; got 'str'."),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(raw: Any, expected: str) -> None:
    assert any(message.startswith(expected) for message in messages(raw)), messages(raw)


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        (
            [{"fuse_embeddings": {}}],
            "r.yaml: passes: must end with an export pass, or nothing could be deployed. "
            "Add `- export_aoti: {}` at the end.",
        ),
        (
            ["quantize_embeddings", "fuse_embeddings", "export_aoti"],
            "r.yaml: passes[1].fuse_embeddings: must stand before the pass that provides "
            "quantized_embeddings. Move it up in the list.",
        ),
        (
            ["export_aoti", "quantize_dense"],
            "r.yaml: passes[1].quantize_dense: must stand before the pass that provides artifact. "
            "Move it up in the list.",
        ),
        (
            ["quantize_dense", "precision", "export_aoti"],
            "r.yaml: passes[1].precision: must stand before the pass that provides "
            "low_precision_dense. Move it up in the list.",
        ),
    ],
)
def test_an_order_that_cannot_work_is_refused(passes: list[Any], expected: str) -> None:
    assert messages(with_passes(*passes)) == [expected]


def test_batch_sizes_that_a_module_cannot_score_are_raised_in_gates_too() -> None:
    raw = with_passes({"export_aoti": {}}, batch_sizes=[1, 2, 512])
    raw["gates"] = {
        "quality": {"ne": "0.1%"},
        "latency": [
            {"batch_size": 1, "min_speedup": 2.0},
            {"batch_size": 512, "min_speedup": 1.5},
        ],
    }
    lifted = parse_recipe(raw, where="r.yaml").at_least(2)
    assert lifted.batch_sizes == (2, 512)
    assert [gate.batch_size for gate in lifted.gates.latency] == [2, 512]
    assert lifted.gates.latency[0].min_speedup == 2.0
    assert lifted.gates.margins() == {"ne": 0.001}


def test_every_problem_is_listed_at_once() -> None:
    raw = with_passes(
        {"quantize_embeddings": {"dtype": "int3", "min_rows": 0, "colour": "red"}},
        {"quantise_dense": {}},
        "fuse_embeddings",
        objective="speed",
        gates={"quality": {"ne": "lots"}},
    )
    places = [message.split(": ")[1] for message in messages(raw)]
    assert places == [
        "passes[0].quantize_embeddings.dtype",
        "passes[0].quantize_embeddings.min_rows",
        "passes[0].quantize_embeddings.colour",
        "passes[1].quantise_dense",
        "objective",
        "gates.quality.ne",
    ]


def test_a_gate_and_an_order_are_both_named() -> None:
    raw = with_passes("export_aoti", "quantize_dense", {"export_aoti": {"target": "abacus"}})
    found = messages(raw)
    assert [message.split(": ")[1] for message in found] == [
        "passes[1].quantize_dense",
        "passes[2].export_aoti",
        "passes[2].export_aoti.target",
    ]
    assert "aoti-cpu" in found[2]


def test_a_file_that_is_no_yaml_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("passes: [unclosed")
    with pytest.raises(RecipeError, match=r"x\.yaml: is not readable YAML"):
        load_recipe(tmp_path / "x.yaml")
    (tmp_path / "y.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(RecipeError, match=r"y\.yaml"):
        load_recipe(tmp_path / "y.yaml")


def test_checking_a_recipe_imports_no_engine(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(with_passes({"quantize_dense": {"a": 1}})))
    # What is too heavy to wait for before a spelling mistake is told; torch itself comes with the
    # passes' classes.
    code = (
        "import sys; from rankopt.cli.main import main; code = main(sys.argv[1:]);"
        "print([m for m in ('ray', 'torchrec', 'fbgemm_gpu', 'plotly', 'torch._inductor.graph')"
        " if m in sys.modules]); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "recipes", "validate", str(tmp_path / "x.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (2, "[]")
    assert "is not a known key" in done.stderr


@pytest.mark.parametrize("path", list_content("recipes"), ids=lambda path: path.stem)
def test_every_recipe_that_ships_survives_being_written_down(path: Path) -> None:
    recipe = load_recipe(path)
    again = parse_recipe(yaml.safe_load(yaml.safe_dump(dump_recipe(recipe))), where="again")
    assert again.model_copy(update={"path": recipe.path}) == recipe


def test_the_example_of_every_pass_is_read_by_the_class_that_shows_it() -> None:
    for kind in pass_kinds():
        text = (pass_class(kind).__doc__ or "").split("```yaml")[1].split("```")[0]
        recipe = parse_recipe({"name": "x", "passes": yaml.safe_load(text)}, where=kind)
        assert [step.kind for step in recipe.passes] == [kind]


keys = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | keys
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
kinds = st.sampled_from(sorted(pass_kinds()))
steps = kinds | st.dictionaries(kinds | keys, values, max_size=2) | values


@given(raw=values | st.fixed_dictionaries({"name": scalars, "passes": st.lists(steps, max_size=3)}))
def test_whatever_yaml_holds_the_answer_is_a_recipe_or_a_list_of_problems(raw: Any) -> None:
    try:
        recipe, problems = parse_recipe(raw, where="any.yaml"), ()
    except RecipeError as error:
        recipe, problems = None, error.problems
    assert (recipe is None) == bool(problems)
    assert all(problem.where.startswith("any.yaml") for problem in problems)
    if recipe is not None:
        assert parse_recipe(dump_recipe(recipe), where="again") == recipe


@given(name=keys.filter(lambda name: name not in ("dtype", "rules", "min_rows")), value=scalars)
def test_an_unknown_setting_is_never_taken_silently(name: str, value: Any) -> None:
    raw = with_passes({"quantize_embeddings": {name: value}}, "export_aoti")
    assert any("is not a known key" in message for message in messages(raw))


def test_the_schema_knows_every_pass_and_refuses_what_the_parser_refuses() -> None:
    schema = recipe_schema()
    options = schema["properties"]["passes"]["items"]["anyOf"]
    named = {key for option in options for key in option.get("properties", {})}
    assert named == set(pass_kinds())
    assert options[-1]["enum"] == list(pass_kinds())
    for option in options[:-1]:
        assert option["additionalProperties"] is False
        [kind] = option["required"]
        settings = schema["$defs"][kind]
        assert settings["additionalProperties"] is False
        assert set(settings.get("properties", {})) == set(pass_class(kind).model_fields)
    assert schema["additionalProperties"] is False
    unresolved = _references(schema) - {f"#/$defs/{name}" for name in schema["$defs"]}
    assert unresolved == set()


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_references(value) for value in node))
    return set()
