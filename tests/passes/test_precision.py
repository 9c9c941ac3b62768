"""precision on the graph: weights in 16 bits, results and kept layers in fp32."""

from __future__ import annotations

import pytest
import torch

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
from rankopt.errors import SelectorError
from rankopt.passes.precision import Precision
from rankopt.selectors import Rule


@pytest.mark.parametrize(("dtype", "unit"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
@pytest.mark.parametrize("name", ["dlrm", "din"])
def test_scores_differ_by_the_rounding_of_16_bits(dtype: str, unit: float, name: str) -> None:
    model_card, model, bundle = bundle_of(name)
    converted = apply_passes(bundle, Precision.model_validate({"dtype": dtype})).bundle
    spread = float(exact(model_card, model, features_of(model_card, 513))["score"].std())
    for batch, fill in SIZES:
        features = features_of(model_card, batch, fill)
        truth = exact(model_card, model, features)["score"]
        scores = converted.run(features)["score"]
        assert scores.dtype == torch.float32
        # Three roundings a layer (input, weight, product), five layers deep.
        assert float((scores.double() - truth).abs().max()) < 15 * unit * max(spread, 1)
    assert converted.provided == {"low_precision_dense"}


@pytest.mark.parametrize(("dtype", "held"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_held_in_16_bits_and_biases_in_32(dtype: str, held: torch.dtype) -> None:
    bundle = make_bundle(mlp_card(20), seeded(lambda: Mlp(20, 16, 1)))
    converted = apply_passes(bundle, Precision.model_validate({"dtype": dtype})).bundle
    matrices = [value for value in converted.constants.values() if value.dim() == 2]
    assert {value.dtype for value in matrices} == {held}
    assert {v.dtype for v in converted.constants.values() if v.dim() == 1} == {torch.float32}
    assert converted.size_bytes == bundle.size_bytes - 2 * (20 * 16 + 16)


def test_kept_layers_stay_exactly_as_they_were() -> None:
    _, _, bundle = bundle_of("dlrm")
    applied = apply_passes(bundle, Precision(rules=(Rule[bool](select="top.*", use=False),)))
    assert applied.notes == [f"top.{index}: kept in fp32 by the recipe" for index in (0, 2, 4)]
    kept = {k: v for k, v in applied.bundle.constants.items() if "top" in k and v.dim() == 2}
    assert len(kept) == 3
    for name, value in kept.items():
        assert torch.equal(value, bundle.constants[name])
    converted = [v for v in applied.bundle.constants.values() if v.dtype == torch.bfloat16]
    assert len(converted) == 2


def test_a_weight_beyond_fp16_stays_in_fp32_with_the_reason() -> None:
    model_card = mlp_card(20)
    model = seeded(lambda: Mlp(20, 16, 1))
    model.get_parameter("layers.0.weight").data[2, 2] = 7e4
    before = make_bundle(model_card, model)
    applied = apply_passes(before, Precision(dtype="fp16"))
    assert applied.notes == ["layers.0: kept in fp32, a weight exceeds fp16's range"]
    assert apply_passes(before, Precision(dtype="bf16")).notes == []


def test_a_row_does_not_feel_its_neighbours() -> None:
    model_card = mlp_card(20)
    bundle = make_bundle(model_card, seeded(lambda: Mlp(20, 16, 1)))
    converted = apply_passes(bundle, Precision()).bundle
    rows = features_of(model_card, 8)["dense"]
    calm = converted.run({"dense": rows})["score"]
    rows[0], rows[3] = float("nan"), 1e6
    beside = converted.run({"dense": rows})["score"]
    assert torch.equal(beside[[1, 2, 4, 5, 6, 7]], calm[[1, 2, 4, 5, 6, 7]])


def test_nothing_to_convert_returns_the_same_bundle() -> None:
    _, _, bundle = bundle_of("dlrm")
    none = Precision(rules=(Rule[bool](select="*", use=False),))
    assert apply_passes(bundle, none).bundle is bundle


def test_an_unmatched_rule_names_the_nearest_layers() -> None:
    _, _, bundle = bundle_of("dlrm")
    with pytest.raises(SelectorError, match=r"precision\.rules\[0\]\.select.*'top\.4'"):
        apply_passes(bundle, Precision(rules=(Rule[bool](select="topp.4", use=False),)))
