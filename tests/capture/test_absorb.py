"""Linear layers take in batch norms, biases and activations behind them, exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from capture.layers import WIDTH, Layers, canonical, check, layers, operators, random
from passes.zoo import seeded


def normalised(num: int, seed: int = 5) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(num)
    norm.running_mean = random(num, seed=seed)
    norm.running_var = random(num, seed=seed + 1).abs() + 0.3
    norm.weight.data = random(num, seed=seed + 2) + 1
    norm.bias.data = random(num, seed=seed + 3)
    return norm


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_goes_into_the_layer_before_it(biased: bool, affine: bool) -> None:
    norm = normalised(5)
    if not affine:
        norm.weight = norm.bias = None  # type: ignore[assignment]
    model = seeded(
        lambda: Layers(
            lambda m, x: m.act(m.norm(m.layer(x))),
            layer=nn.Linear(WIDTH, 5, bias=biased),
            norm=norm,
            act=nn.ReLU(inplace=True),
        )
    )
    bundle, notes = canonical(model)
    (linear,) = layers(bundle).values()
    assert linear.slope == 0.0
    assert linear.layer == "layer"
    assert operators(bundle) == Counter(linear=1, relu=1, flatten=1, sum=1)
    assert len(bundle.constants) == 2
    assert "1 x batch normalisation folded into the layer before it" in notes
    check(model, bundle)


def test_batch_norm_over_channels_of_a_sequence_is_folded_through_the_transposes() -> None:
    model = seeded(
        lambda: Layers(
            lambda m, x: m.norm(m.layer(x.view(-1, 3, 4)).transpose(1, 2)).transpose(1, 2).relu(),
            layer=nn.Linear(4, 5),
            norm=normalised(5),
        )
    )
    bundle, _ = canonical(model)
    assert "batch_norm" not in operators(bundle)
    check(model, bundle)


@pytest.mark.parametrize(
    "score",
    [
        lambda m, x: m.norm(m.layer(x)) + m.layer(x.tanh()),
        lambda m, x: (lambda y: m.norm(y) + y)(m.layer(x)),
        lambda m, x: m.norm(m.layer(x).view(-1, 5, 1)) @ m.layer(x).view(-1, 1, 5),
        lambda m, x: m.norm(m.layer(x).view(-1, 5, 1).expand(-1, -1, 2)),
        lambda m, x: m.norm(x[:, :5]) + m.layer(x),
    ],
    ids=["layer-twice", "two-readers", "twice-and-3d", "expanded", "norm-of-an-input"],
)
def test_batch_norm_stays_where_folding_would_change_something_else(score: Any) -> None:
    model = seeded(lambda: Layers(score, layer=nn.Linear(WIDTH, 5), norm=normalised(5)))
    bundle, notes = canonical(model)
    assert operators(bundle)["batch_norm"] == 1
    assert not any("normalisation" in note for note in notes)
    check(model, bundle, 1e-4)


def one_normalised_of_two() -> nn.Module:
    return seeded(
        lambda: Layers(
            lambda m, x: m.norm(m.layer(x)) + m.other(x.tanh()),
            layer=nn.Linear(WIDTH, 5),
            other=nn.Linear(WIDTH, 5),
            norm=normalised(5),
        )
    )


def test_batch_norm_of_layers_with_tied_weights_stays() -> None:
    model = one_normalised_of_two()
    model.other.weight = model.layer.weight
    bundle, _ = canonical(model)
    assert operators(bundle)["batch_norm"] == 1
    check(model, bundle)


def test_a_bias_that_two_layers_share_is_folded_into_one_of_them_alone() -> None:
    model = one_normalised_of_two()
    model.other.bias = model.layer.bias
    bundle, _ = canonical(model)
    assert "batch_norm" not in operators(bundle)
    check(model, bundle)


@pytest.mark.parametrize(
    ("score", "taken"),
    [
        (lambda m, x: x @ m.w + m.b, True),
        (lambda m, x: m.b + x @ m.w, True),
        (lambda m, x: m.w.t() @ x.unsqueeze(2) + m.b.unsqueeze(1), True),
        (lambda m, x: (x @ m.w).unsqueeze(1) + m.b, True),
        (lambda m, x: x @ m.w + m.b.sum().view(1), True),
        (lambda m, x: x @ m.w - m.b, True),
        (lambda m, x: m.b - x @ m.w, False),
        (lambda m, x: torch.add(x @ m.w, m.b, alpha=2), False),
        (lambda m, x: (x @ m.w)[:, :, None] + m.b, False),
        (lambda m, x: (lambda y: (y + m.b) * y)(x @ m.w), False),
    ],
    ids=[
        "after",
        "before",
        "column",
        "unsqueezed",
        "one-number",
        "subtracted",
        "subtracted-from",
        "alpha",
        "other-dim",
        "read-twice",
    ],
)
def test_a_constant_after_a_product_is_its_bias(score: Any, taken: bool) -> None:
    model = Layers(score, w=random(WIDTH, 5), b=random(5, seed=4))
    bundle, _ = canonical(model)
    (linear,) = layers(bundle).values()
    assert (linear.bias is not None) == taken
    check(model, bundle, 1e-4)


@pytest.mark.parametrize(
    ("score", "slope"),
    [
        (lambda m, x: m.layer(x).relu(), 0.0),
        (lambda m, x: torch.relu_(m.layer(x)), 0.0),
        (lambda m, x: m.layer(x).view(-1, 5, 1).relu(), 0.0),
        (lambda m, x: functional.leaky_relu(m.layer(x).unsqueeze(1), 0.2), 0.2),
        (lambda m, x: functional.leaky_relu_(m.layer(x.unsqueeze(1)), 0.2), 0.2),
        (lambda m, x: m.layer(x).reshape(-1, 5, 1).relu_(), 0.0),
        (lambda m, x: m.prelu(m.layer(x).unsqueeze(1)), "model.prelu.weight"),
        (lambda m, x: m.wide(m.layer(x)), "model.wide.weight"),
        (lambda m, x: m.wide(m.layer(x).unsqueeze(2)), None),
        (lambda m, x: (lambda y: y.unsqueeze(1).relu() + y.sum())(m.layer(x)), None),
        (lambda m, x: m.layer(x)[:, :3].relu(), None),
    ],
    ids=[
        "direct",
        "in-place",
        "view",
        "leaky",
        "leaky-in-place",
        "reshape-in-place",
        "prelu",
        "prelu-per-channel",
        "prelu-per-channel-moved",
        "read-twice",
        "sliced",
    ],
)
def test_an_activation_stands_right_behind_its_layer(score: Any, slope: float | str | None) -> None:
    wide = nn.PReLU(5)
    wide.weight.data = random(5).abs()
    model = seeded(lambda: Layers(score, layer=nn.Linear(WIDTH, 5), prelu=nn.PReLU(), wide=wide))
    bundle, _ = canonical(model)
    (linear,) = layers(bundle).values()
    assert linear.slope == slope
    check(model, bundle, 1e-4)
