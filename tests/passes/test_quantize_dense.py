"""quantize_dense on the graph: int8 layers, one activation scale per row, whatever the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from artifact.workshop import bundle_of
from passes.truth import levelled
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
from rankopt.errors import SelectorError
from rankopt.kernels.ops import set_isa, supported_isas
from rankopt.passes.precision import Precision
from rankopt.passes.quantize_dense import QuantizeDense, fbgemm_layers
from rankopt.selectors import Rule

INT8_BACKENDS = ("native", "fbgemm")


def step(backend: str = "native", **more: Any) -> QuantizeDense:
    return QuantizeDense.model_validate({"backend": backend, "min_inputs": 1, **more})


def check(model: nn.Module, bundle: ModelBundle, allowed: float) -> None:
    """Compare with exact scores; one activation in a thousand may round the other way."""
    for batch, fill in SIZES:
        features = features_of(bundle.card, batch, fill)
        truth = exact(bundle.card, model, features)["score"]
        error = (bundle.run(features)["score"].double() - truth).abs()
        assert float(error.max()) < allowed * float(truth.std() if batch > 2 else 1), batch
        assert float(error.median()) < 1e-5 + allowed / 20, batch


@pytest.mark.parametrize("backend", INT8_BACKENDS)
@pytest.mark.parametrize("activation_bits", [7, 8])
def test_scores_are_those_of_int8_weights_and_row_scaled_activations(
    backend: str, activation_bits: int
) -> None:
    model_card = mlp_card(20)
    model = seeded(lambda: Mlp(20, 33, 17, 1))
    bundle = apply_passes(
        make_bundle(model_card, model), step(backend, activation_bits=activation_bits)
    ).bundle
    bits = 7 if backend == "fbgemm" else activation_bits
    check(levelled(model, bits), bundle, 0.02)


@pytest.mark.parametrize("backend", INT8_BACKENDS)
@pytest.mark.parametrize("name", ["dlrm", "din", "zoo"])
def test_scores_stay_near_those_of_float32(backend: str, name: str) -> None:
    model_card, model, bundle = bundle_of(name)
    quantised = apply_passes(bundle, step(backend)).bundle
    assert quantised.provided == {"low_precision_dense"}
    features = features_of(model_card, 513)
    truth = exact(model_card, model, features)["score"]
    assert 0 < noise_share(quantised, features, truth) < 0.05


@pytest.mark.parametrize("backend", INT8_BACKENDS)
def test_a_row_does_not_feel_its_neighbours(backend: str) -> None:
    model_card = mlp_card(20)
    model = seeded(lambda: Mlp(20, 32, 16, 1))
    bundle = apply_passes(make_bundle(model_card, model), step(backend)).bundle
    features = features_of(model_card, 7)["dense"]
    calm = bundle.run({"dense": features})["score"]
    features = features.clone()
    features[0], features[2], features[5] = float("inf"), float("nan"), 1e6
    beside = bundle.run({"dense": features})["score"]
    for row in (1, 3, 4, 6):
        assert float(beside[row]) == float(calm[row])
        alone = bundle.run({"dense": features[row : row + 1]})["score"]
        assert float(alone[0]) == float(calm[row])
    assert bool(beside[[0, 2]].isnan().all())
    assert bool(beside[5].isfinite())


def noise_share(bundle: ModelBundle, features: dict[str, Tensor], truth: Tensor) -> float:
    """Root mean square of the error over the spread of the exact scores."""
    error = bundle.run(features)["score"].double() - truth
    return float(error.square().mean().sqrt() / truth.std())


class Activations(nn.Module):
    """A layer before each kind of activation, alone and shared with another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16, bias=False)
        self.fourth = nn.Linear(16, 16)
        self.fifth = nn.Linear(16, 1)
        self.per_channel = nn.PReLU(16, init=0.1)
        self.scalar = nn.PReLU(init=-0.4)

    def forward(self, dense: Tensor) -> Tensor:
        x = functional.relu(self.first(dense))
        x = functional.leaky_relu(self.second(x), 0.2)
        x = self.per_channel(self.third(x))
        before = self.fourth(x)
        # Two readers: the activation must not join the layer.
        score: Tensor = self.fifth(self.scalar(before) + before)
        return score.squeeze(1)


@pytest.mark.parametrize("backend", INT8_BACKENDS)
def test_activations_keep_their_slopes(backend: str) -> None:
    model_card = mlp_card(20)

    def make() -> nn.Module:
        model = Activations()
        model.per_channel.weight.data = torch.linspace(-0.5, 1.5, 16)
        return model

    model = seeded(make)
    bundle = apply_passes(make_bundle(model_card, model), step(backend, activation_bits=7)).bundle
    check(levelled(model, 7), bundle, 0.05)


def test_prelu_over_a_middle_dim_stays_outside_the_layer() -> None:
    """Of a 3-D input PReLU's channels are dim 1, not the last, which the kernel scales."""

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)
            self.slope = nn.PReLU(4, init=0.1)

        def forward(self, dense: Tensor) -> Tensor:
            return self.slope(self.layer(dense.reshape(-1, 4, 5))).sum((1, 2))

    def make() -> nn.Module:
        model = Middle()
        model.slope.weight.data = torch.tensor([-1.0, 0.2, 0.5, 2.0])
        return model

    model = seeded(make)
    bundle = apply_passes(make_bundle(mlp_card(20), model), step(activation_bits=7)).bundle
    check(levelled(model, 7), bundle, 0.05)


def test_a_layer_used_twice_is_stored_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(16, 16)

        def forward(self, dense: Tensor) -> Tensor:
            score: Tensor = self.shared(torch.tanh(self.shared(dense)))
            return score.sum(1)

    bundle = make_bundle(mlp_card(16), seeded(Twice))
    for backend in INT8_BACKENDS:
        quantised = apply_passes(bundle, step(backend)).bundle
        # int8 weights and their sums, scales, bias, and at most a handle.
        assert quantised.size_bytes <= 16 * 16 + 3 * 16 * 4 + 16


def test_small_layers_and_ruled_out_layers_stay_in_float() -> None:
    _, model, bundle = bundle_of("dlrm")
    rules = (Rule[bool](select="top.0", use=False),)
    applied = apply_passes(
        bundle, QuantizeDense(min_inputs=8, min_outputs=2, activation_bits=7, rules=rules)
    )
    assert applied.notes == [
        "bottom.0: 4 x 32 is too small to gain",
        "top.0: kept in fp32 by the recipe",
        "top.4: 16 x 1 is too small to gain",
    ]
    constants = applied.bundle.constants
    levels = {name for name, value in constants.items() if value.dtype == torch.int8}
    assert {name.rpartition("_")[0] for name in levels} == {"bottom_2", "top_2"}
    check(levelled(model, 7, "bottom.0", "top.0", "top.4"), applied.bundle, 0.05)


@pytest.mark.parametrize("backend", ["native", "fbgemm", "torchao"])
def test_weights_that_are_not_finite_are_left_alone(backend: str) -> None:
    model = seeded(lambda: Mlp(20, 16, 1))
    model.get_parameter("layers.0.weight").data[3, 3] = float("inf")
    applied = apply_passes(make_bundle(mlp_card(20), model), step(backend))
    assert "layers.0: its weights are not all finite" in applied.notes


def test_nothing_to_do_returns_the_same_bundle() -> None:
    _, _, bundle = bundle_of("dlrm")
    assert apply_passes(bundle, QuantizeDense(min_inputs=1000)).bundle is bundle
    none = step(rules=[{"select": "*", "use": False}])
    assert apply_passes(bundle, none).bundle is bundle
    done = apply_passes(bundle, step()).bundle
    assert apply_passes(done, step()).bundle is done


def test_an_unmatched_rule_names_the_nearest_layers() -> None:
    _, _, bundle = bundle_of("dlrm")
    rules = (Rule[bool](select="botom.0", use=False),)
    with pytest.raises(SelectorError, match=r"rules\[0\]\.select.*no layer.*'bottom\.0'"):
        apply_passes(bundle, QuantizeDense(rules=rules))


def test_activations_take_the_bits_that_the_kernels_in_use_multiply_safely() -> None:
    model_card = mlp_card(20)
    bundle = make_bundle(model_card, seeded(lambda: Mlp(20, 16, 1)))
    features = features_of(model_card, 7)
    scores = {
        bits: apply_passes(bundle, step(activation_bits=bits)).bundle.run(features)["score"]
        for bits in (7, 8)
    }
    assert not torch.equal(scores[7], scores[8])
    for isa in supported_isas():
        set_isa(isa)
        try:
            chosen = apply_passes(bundle, step()).bundle.run(features)["score"]
        finally:
            set_isa("auto")
        # VNNI adds in 32 bits; the byte products of the others add pairs in 16, where 8-bit
        # operands overflow.
        assert torch.equal(chosen, scores[8 if isa == "avx512_vnni" else 7]), isa


def test_fbgemm_names_the_constants_that_a_loader_must_pack() -> None:
    _, _, bundle = bundle_of("dlrm")
    quantised = apply_passes(bundle, step("fbgemm")).bundle
    layers = fbgemm_layers(quantised.program.module(check_guards=False))
    assert len(layers) == 5
    constants = quantised.constants
    for handle, (weight, scale) in layers.items():
        assert constants[handle].tolist() == [0]
        assert constants[weight].dtype == torch.int8
        assert constants[scale].shape == (constants[weight].shape[0],)


@pytest.mark.parametrize(
    ("configuration", "allowed", "smaller"),
    [
        ("int8_dynamic", 0.05, True),
        ("int8_weight_only", 0.02, True),
        ("int4_weight_only", 0.3, None),
    ],
)
def test_torchao_is_unwrapped_into_plain_operators(
    configuration: str, allowed: float, smaller: bool | None
) -> None:
    model_card = mlp_card(64)
    model = seeded(lambda: Mlp(64, 96, 64, 1))
    before = make_bundle(model_card, model)
    after = apply_passes(before, step("torchao", torchao=configuration)).bundle
    assert after is not before
    assert {type(value) for value in after.constants.values()} <= {Tensor, nn.Parameter}
    if smaller:
        assert after.size_bytes < 0.5 * before.size_bytes
    features = features_of(model_card, 513)
    truth = exact(model_card, model, features)["score"]
    assert 0 < noise_share(after, features, truth) < allowed
    for batch, fill in SIZES:
        assert after.run(features_of(model_card, batch, fill))["score"].shape == (batch,)


def test_torchaos_int4_leaves_layers_that_its_groups_do_not_divide() -> None:
    model = seeded(lambda: Mlp(20, 64, 1))
    applied = apply_passes(
        make_bundle(mlp_card(20), model), step("torchao", torchao="int4_weight_only")
    )
    assert "layers.0: left alone, int4 groups 32 inputs, and 20 is no multiple" in applied.notes
    assert any("int4 weights take a byte each" in note for note in applied.notes)


def test_float8_is_refused_without_a_gpu() -> None:
    here = collect_environment().model_copy(update={"gpus": ()})
    (problem,) = step("torchao", torchao="float8_dynamic").check(here, None)
    assert "CUDA" in str(problem)
    assert "int8_dynamic" in str(problem)
    assert step("torchao").check(here, None) == []
    assert step("native", torchao="float8_dynamic").check(here, None) == []


def test_precision_and_quantize_dense_exclude_each_other() -> None:
    for kind in (Precision, QuantizeDense):
        assert kind.provides <= Precision.forbids
        assert kind.provides <= QuantizeDense.forbids
