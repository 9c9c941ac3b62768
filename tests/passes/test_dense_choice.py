"""quantize_dense with `backend: auto` and `fp16`: one arithmetic a layer, chosen once, replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.zoo import Mlp, context, exact, features_of, make_bundle, mlp_card, seeded
from rankopt.bundle import ModelBundle
from rankopt.kernels import autotune
from rankopt.kernels import dense_choice as kernel_times
from rankopt.kernels.dense_choice import (
    ARITHMETICS,
    DenseLayer,
    has_fbgemm,
    relative_times,
)
from rankopt.passes import dense_choice, pipeline
from rankopt.passes.decision import Gain
from rankopt.passes.dense_choice import decide
from rankopt.passes.graph import find_linears
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.trial import Trial
from rankopt.recipe import parse_recipe
from rankopt.review.schema import MeasuredChoice, PassRecord

ALL = ARITHMETICS


def step(**settings: Any) -> QuantizeDense:
    return QuantizeDense.model_validate({"min_inputs": 1, **settings})


def targets(bundle: ModelBundle) -> list[str]:
    nodes = bundle.program.graph_module.graph.nodes
    return [str(node.target) for node in nodes if str(node.target).startswith("rankopt.")]


def three_layers() -> nn.Module:
    return seeded(lambda: Mlp(20, 32, 16, 1))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float]]:
    """Times by a layer's number of outputs; what was asked for is kept under `asked`."""
    table: dict[int, dict[str, float]] = {}

    def look_up(layer: DenseLayer, num_rows: int) -> dict[str, float]:
        calls.append((layer.num_outputs, num_rows))
        return table[layer.num_outputs]

    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(dense_choice, "relative_times", look_up)
    monkeypatch.setattr(dense_choice, "asked", calls, raising=False)
    return table


def asked() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = dense_choice.asked  # type: ignore[attr-defined]
    return found


def ns(int8: float, fp16: float, fp32: float, fbgemm: float) -> dict[str, float]:
    return {"int8": int8, "fp16": fp16, "fp32": fp32, "fbgemm": fbgemm}


def test_the_smallest_stays_unless_another_is_faster_by_its_margin() -> None:
    assert decide({1: ns(100, 96, 96, 96)}, ALL) == "int8"
    assert decide({1: ns(100, 90, 89, 89)}, ALL) == "fp16"
    assert decide({1: ns(100, 94, 80, 79)}, ALL) == "fp32"
    assert decide({1: ns(100, 100, 100, 91)}, ALL) == "int8"
    assert decide({1: ns(100, 100, 100, 80)}, ALL) == "fbgemm"
    assert decide({1: ns(100, 50, 100, 100)}, ("int8", "fp32", "fbgemm")) == "int8"
    # All batch sizes together: half the time at one, twice the time at the other.
    assert decide({1: ns(100, 50, 100, 100), 512: ns(100, 205, 100, 100)}, ALL) == "int8"
    assert decide({1: ns(100, 50, 100, 100), 512: ns(100, 150, 100, 100)}, ALL) == "fp16"
    without = {1: {"int8": 100.0, "fp16": 100.0, "fp32": 100.0}}
    assert decide(without, ALL) == "int8"


def test_each_layer_gets_its_own(times: dict[int, dict[str, float]]) -> None:
    times |= {32: ns(1, 2, 2, 2), 16: ns(2, 1, 2, 2), 1: ns(2, 2, 1, 2)}
    bundle = make_bundle(mlp_card(20), three_layers())
    work = replace(context(), batch_sizes=(1, 64))
    done = step(backend="auto", fuse=False).apply(bundle, work)
    assert targets(done) == [
        "rankopt.linear_int8.default",
        "rankopt.linear_fp16.default",
        "rankopt.linear_fp32.default",
    ]
    assert sorted(asked()) == [(1, 1), (1, 64), (16, 1), (16, 64), (32, 1), (32, 64)]
    assert list(done.arithmetic.values()) == ["int8", "fp16", "fp32"]
    assert {layer: choice.chosen for layer, choice in work.chosen.items()} == done.arithmetic
    second = list(work.chosen.values())[1]
    assert second.ratios == {batch: ns(2, 1, 2, 2) for batch in (1, 64)}
    assert any("fp16; times of the others over its own" in note for note in work.notes)
    # In one chain they give the same bits.
    fused = step(backend="auto").apply(bundle, context())
    assert targets(fused) == ["rankopt.mlp_int8.default"]
    features = features_of(bundle.card, 33)
    assert torch.equal(fused.run(features)["score"], done.run(features)["score"])


def test_fbgemm_joins_no_chain(times: dict[int, dict[str, float]]) -> None:
    times |= {32: ns(1, 2, 2, 2), 16: ns(2, 2, 2, 1), 1: ns(1, 2, 2, 2)}
    bundle = make_bundle(mlp_card(20), three_layers())
    done = step(backend="auto").apply(bundle, context())
    assert targets(done).count("rankopt.linear_fbgemm.default") == 1
    assert "rankopt.mlp_int8.default" not in targets(done)


def test_choices_are_replayed_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> dict[str, float]:
        raise AssertionError("measured")

    monkeypatch.setattr(dense_choice, "relative_times", refuse)
    bundle = make_bundle(mlp_card(20), three_layers())
    linears = find_linears(bundle.program.module(check_guards=False))
    names = [linear.layer for linear in linears]
    earlier = {names[0]: MeasuredChoice(chosen="fp32"), names[1]: MeasuredChoice(chosen="fp16")}
    work = replace(context(), choices=earlier)
    done = step(backend="auto", fuse=False).apply(bundle, work)
    assert [*done.arithmetic.values()] == ["fp32", "fp16", "int8"]
    assert any("the earlier run chose nothing" in note for note in work.notes)


class Untimed:
    """Stands for the bench: compiles nothing, and finds every pass faster."""

    def compile(self, bundle: ModelBundle, name: str) -> Trial:
        return Trial(bundle, Path(name))

    def time(self, before: Trial, after: Trial, name: str) -> Gain:
        return Gain(2.0, 1.9, 2.1, ())


def test_record_holds_the_choices_and_a_second_run_takes_them(
    times: dict[int, dict[str, float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proof = SimpleNamespace(passed=True, batch_sizes=(1,), rows_alone_equal=True, problems=())
    monkeypatch.setattr(pipeline, "verify_artifact", lambda _: proof)
    times |= {32: ns(1, 2, 2, 2), 16: ns(2, 1, 2, 2), 1: ns(2, 2, 1, 2)}
    steps = [{"quantize_dense": {"backend": "auto", "min_inputs": 1}}, {"export_aoti": {}}]
    recipe = parse_recipe({"name": "r", "batch_sizes": [2, 8], "passes": steps}, where="r")
    bundle = make_bundle(mlp_card(20), three_layers())
    bench: Any = Untimed()

    def run(choices: list[PassRecord] | None) -> PassRecord:
        environment = context().environment
        done = pipeline.run_pipeline(recipe, bundle, bench, environment, tmp_path, choices=choices)
        return done.records[0]

    first = run(None)
    assert [choice.chosen for choice in first.choices.values()] == ["int8", "fp16", "fp32"]
    assert {tuple(choice.ratios) for choice in first.choices.values()} == {(2, 8)}
    # As passes.json keeps it.
    kept = PassRecord.model_validate_json(first.model_dump_json())
    assert kept == first
    asked().clear()
    assert run([kept]).choices == first.choices
    assert not asked()


def test_rows_of_lists_count(times: dict[int, dict[str, float]]) -> None:
    """A layer that is applied to every token of a padded list has that many rows to a batch row."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Linear(5, 4)
            self.last = nn.Linear(4, 1)

        def forward(self, dense: Tensor) -> Tensor:
            score: Tensor = self.last(self.token(dense.reshape(-1, 4, 5)).sum(1))
            return score.squeeze(1)

    times |= {4: ns(1, 2, 2, 2), 1: ns(1, 2, 2, 2)}
    bundle = make_bundle(mlp_card(20), seeded(Tokens))
    step(backend="auto").apply(bundle, replace(context(), batch_sizes=(1, 512)))
    assert sorted(asked()) == [(1, 1), (1, 512), (4, 4), (4, 2048)]


def test_weights_beyond_fp16_are_left_out_with_a_note(
    times: dict[int, dict[str, float]],
) -> None:
    times |= {32: ns(2, 1, 2, 2), 16: ns(2, 1, 2, 2), 1: ns(2, 1, 2, 2)}
    model = three_layers()
    with torch.no_grad():
        next(model.parameters())[0, 0] = 7e4
    bundle = make_bundle(mlp_card(20), model)
    for settings, first in (({"backend": "auto"}, "int8"), ({"backend": "fp16"}, "fp32")):
        work = context()
        done = step(**settings, fuse=False).apply(bundle, work)
        assert targets(done)[0] == f"rankopt.linear_{first}.default"
        assert targets(done)[1] == "rankopt.linear_fp16.default"
        assert any("exceeds" in note for note in work.notes)


def test_fp16_scores_are_those_of_the_rounded_weights() -> None:
    model = three_layers()
    card = mlp_card(20)
    bundle = step(backend="fp16").apply(make_bundle(card, model), context())
    assert not bundle.arithmetic
    rounded = three_layers()
    with torch.no_grad():
        for layer in rounded.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(layer.weight.half())
    features = features_of(card, 513)
    truth = exact(card, rounded, features)["score"]
    error = (bundle.run(features)["score"].double() - truth).abs()
    assert float(error.max()) < 1e-5 * float(truth.abs().max())
    plain = exact(card, model, features)["score"]
    assert float((plain - truth).abs().max()) > 10 * float(error.max())


def test_times_are_kept_for_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(autotune, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(kernel_times, "BUDGET_NS", 1_000_000)
    monkeypatch.setattr(kernel_times, "BLOCK_NS", 1000)
    layer = DenseLayer(33, 17, has_bias=True, has_slope=True, activation_bits=7)
    found = relative_times(layer, 5)
    assert set(found) == {"int8", "fp16", "fp32"} | ({"fbgemm"} if has_fbgemm() else set())
    assert all(time > 0 for time in found.values())
    assert found["int8"] == 1
    assert relative_times(layer, 5) == found
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert relative_times(layer, 6) != found
