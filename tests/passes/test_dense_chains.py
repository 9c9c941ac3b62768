"""Layers that follow one another become one call, and no score changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from artifact.workshop import bundle_of
from passes.zoo import (
    SIZES,
    Mlp,
    apply_passes,
    exact,
    features_of,
    make_bundle,
    mlp_card,
    seeded,
)
from rankopt.bundle import ModelBundle
from rankopt.environment import collect_environment
from rankopt.passes.dense_chains import fuse_chains
from rankopt.passes.graph import find_linears
from rankopt.passes.quantize_dense import QuantizeDense


def quantised(bundle: ModelBundle, **more: Any) -> ModelBundle:
    settings = {"min_inputs": 1, "activation_bits": 7, **more}
    return apply_passes(bundle, QuantizeDense.model_validate(settings)).bundle


def calls(bundle: ModelBundle, name: str) -> list[tuple[Any, ...]]:
    operator = getattr(torch.ops.rankopt, name).default
    found = bundle.program.graph.find_nodes(op="call_function", target=operator)
    return [node.args for node in found]


def check_bits(bundle: ModelBundle, **more: Any) -> ModelBundle:
    """Quantise with chains and without; every score must be the same."""
    fused, single = quantised(bundle, **more), quantised(bundle, fuse=False, **more)
    assert not calls(single, "mlp_int8")
    for batch, fill in SIZES:
        features = features_of(bundle.card, batch, fill)
        for name, scores in fused.run(features).items():
            assert torch.equal(scores, single.run(features)[name]), batch
    assert fused.size_bytes == single.size_bytes
    return fused


@pytest.mark.parametrize("name", ["dlrm", "din", "zoo"])
def test_models_keep_their_scores_and_their_size(name: str) -> None:
    _, _, bundle = bundle_of(name)
    fused = check_bits(bundle, min_inputs=8, min_outputs=2)
    assert calls(fused, "mlp_int8")


def test_layers_that_stay_in_fp32_join_at_the_ends() -> None:
    _, _, bundle = bundle_of("dlrm")
    fused = check_bits(bundle, min_inputs=8, min_outputs=2)
    assert not calls(fused, "linear_int8")
    assert not calls(fused, "linear_fp32")
    found = calls(fused, "mlp_int8")
    assert [list(call[6]) for call in found] == [[32, 16], [32, 16, 1]]
    assert [[scale is not None for scale in call[2]] for call in found] == [
        [False, True],
        [True, True, False],
    ]


class Forked(nn.Module):
    """A chain of two, a result with two readers, an activation that no epilogue knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(5))
        self.last = nn.Linear(20, 1)

    def forward(self, dense: Tensor) -> Tensor:
        a, b, c, d, e = self.layers
        x = b(functional.relu(a(dense)))
        x = c(x) + d(x)
        score: Tensor = self.last(torch.tanh(e(x)))
        return score.squeeze(1)


def test_a_chain_ends_at_a_second_reader_and_at_any_other_operator() -> None:
    fused = check_bits(make_bundle(mlp_card(20), seeded(Forked)))
    assert [list(call[6]) for call in calls(fused, "mlp_int8")] == [[20, 20]]
    assert len(calls(fused, "linear_int8")) == 4


class Score(nn.Module):
    """A layer that is an operand twice, and a chain over lists."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.top = Mlp(4, 6, 1)

    def forward(self, dense: Tensor) -> Tensor:
        keys = self.keys(dense.reshape(-1, 4, 5))
        score: Tensor = self.top((keys * keys).sum(1))
        return score


class Smooth(nn.Module):
    """SiLU in its two spellings, a sigmoid, a gate that has another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(5))
        self.last = nn.Linear(20, 1)

    def forward(self, dense: Tensor) -> Tensor:
        a, b, c, d, e = self.layers
        x = b(functional.silu(a(dense)))
        x = c(x * torch.sigmoid(x))
        x = d(torch.sigmoid(x))
        gate = torch.sigmoid(x)
        x = e(x * gate) + gate
        score: Tensor = self.last(x)
        return score.squeeze(1)


def test_silu_and_sigmoid_go_into_the_epilogue() -> None:
    model = seeded(Smooth)
    bundle = make_bundle(mlp_card(20), model)
    linears = find_linears(bundle.program.module(check_guards=False))
    found = {linear.layer: linear.activation for linear in linears}
    assert found == {
        "layers.0": "silu",
        "layers.1": "silu",
        "layers.2": "sigmoid",
        "layers.3": "none",
        "layers.4": "none",
        "last": "none",
    }
    fused = check_bits(bundle)
    assert [list(call[8]) for call in calls(fused, "mlp_int8")] == [[3, 3, 2, 0]]
    in_fp32 = check_bits(bundle, rules=[{"select": "layers.[0-2]", "use": False}])
    assert [list(call[8]) for call in calls(in_fp32, "mlp_int8")] == [[3, 3, 2, 0]]


def test_smooth_scores_stay_near_those_of_float32() -> None:
    model = seeded(Smooth)
    bundle = make_bundle(mlp_card(20), model)
    truth = exact(bundle.card, model, bundle.sample)["score"]
    for settings in ({}, {"activations": "static"}):
        found = quantised(bundle, activation_bits=8, **settings)
        error = found.run(bundle.sample)["score"].double() - truth
        # Sigmoids leave scores that hardly differ: about 0.55 each.
        assert 0 < float(error.abs().max()) < 0.01


def test_hstu_projections_take_their_silu_along() -> None:
    _, _, bundle = bundle_of("hstu")
    linears = find_linears(bundle.program.module(check_guards=False))
    found = {linear.layer: linear.activation for linear in linears}
    assert {found[name] for name in found if name.endswith("project")} == {"silu"}
    assert {found[name] for name in found if name.endswith("transform")} == {"none"}


def test_lists_of_vectors_go_through_a_chain_too() -> None:
    fused = check_bits(make_bundle(mlp_card(20), seeded(Score)))
    assert [list(call[6]) for call in calls(fused, "mlp_int8")] == [[8, 4], [6, 1]]


def test_layers_of_different_activation_bits_stay_apart() -> None:
    bundle = quantised(make_bundle(mlp_card(20), seeded(lambda: Mlp(20, 16, 8, 1))), fuse=False)
    counts = []

    def rewrite(module: torch.fx.GraphModule) -> None:
        target = torch.ops.rankopt.linear_int8.default
        last = module.graph.find_nodes(op="call_function", target=target)[-1]
        last.update_arg(6, 8)
        counts.append(fuse_chains(module))

    mixed = bundle.edit(rewrite)
    assert counts == [1]
    assert [list(call[6]) for call in calls(mixed, "mlp_int8")] == [[16, 8]]


def test_other_backends_have_no_chains() -> None:
    bundle = make_bundle(mlp_card(20), seeded(lambda: Mlp(20, 16, 8, 1)))
    assert not calls(quantised(bundle, backend="fbgemm"), "mlp_int8")


def static(bundle: ModelBundle, **more: Any) -> Any:
    settings = {"min_inputs": 1, "activation_bits": 8, "activations": "static", **more}
    return apply_passes(bundle, QuantizeDense.model_validate(settings))


@pytest.mark.parametrize("name", ["dlrm", "din", "zoo"])
def test_static_scores_stay_near_those_of_float32(name: str) -> None:
    model_card, model, bundle = bundle_of(name)
    applied = static(bundle)
    assert not calls(applied.bundle, "linear_int8")
    features = bundle.sample
    truth = exact(model_card, model, features)["score"]
    error = applied.bundle.run(features)["score"].double() - truth
    assert 0 < float(error.square().mean().sqrt() / truth.std()) < 0.1


def test_a_static_scale_is_the_quantile_asked_for_and_says_what_it_cuts_off() -> None:
    model_card = mlp_card(20)
    bundle = make_bundle(model_card, seeded(lambda: Mlp(20, 16, 1)))
    largest = bundle.sample["dense"].abs().amax(1).sort().values
    for quantile, expected in ((1.0, largest[-1]), (0.5, largest[len(largest) // 2])):
        applied = static(bundle, quantile=quantile)
        (call,) = calls(applied.bundle, "mlp_int8")
        peaks = [applied.bundle.constants[layer_constant(applied.bundle, node)] for node in call[5]]
        assert float(peaks[0]) == float(expected)
        cut = float((bundle.sample["dense"].abs() > expected).double().mean())
        assert f"quantile {quantile:g} of {len(largest)} rows" in applied.notes[0]
        assert f"{cut:.2%} of the values saturate" in applied.notes[0]


def layer_constant(bundle: ModelBundle, node: Any) -> str:
    signature = bundle.program.graph_signature
    return str(
        signature.inputs_to_buffers.get(node.name) or signature.inputs_to_parameters[node.name]
    )


def test_a_layer_that_saw_only_zeros_keeps_a_scale_for_each_row() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(20, 16), nn.Linear(16, 1)

        def forward(self, dense: Tensor) -> Tensor:
            score: Tensor = self.second(functional.relu(self.first(dense) - 1e9))
            return score.squeeze(1)

    applied = static(make_bundle(mlp_card(20), seeded(Silent)))
    assert len(calls(applied.bundle, "linear_int8")) == 1
    assert any("second: its inputs were zero" in note for note in applied.notes)


def test_without_rows_nothing_is_calibrated() -> None:
    bundle = make_bundle(mlp_card(20), seeded(lambda: Mlp(20, 16, 1)))
    empty = replace(bundle, sample={"dense": bundle.sample["dense"][:0]})
    applied = static(empty)
    assert applied.bundle is empty
    assert "layers.0: there are no rows to calibrate its activations on" in applied.notes


def test_static_activations_are_refused_for_other_backends() -> None:
    step = QuantizeDense(backend="fbgemm", activations="static")
    (problem,) = step.check(collect_environment(), None)
    assert "quantize_dense.activations" in str(problem)
    assert step.needs_rows
    assert not QuantizeDense().needs_rows
