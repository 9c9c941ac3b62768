"""The forms of an exported graph: what serving does not need is gone, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from capture.layers import WIDTH, Layers, canonical, check, layers, operators, random
from passes.zoo import seeded


def test_dropout_and_writes_in_place_leave_nothing_behind() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 5)
            self.drop = nn.Dropout(0.4)

        def forward(self, dense: Tensor) -> Tensor:
            score = dense.new_zeros(dense.shape[0], 1)
            score += self.drop(torch.relu_(self.layer(self.drop(dense)))).sum(1, keepdim=True)
            score += dense[:, :1]
            return score.squeeze(1)

    model = seeded(Summed)
    bundle, notes = canonical(model)
    assert "2 x dropout outside training removed" in notes
    assert operators(bundle)["relu_"] == operators(bundle)["add_"] == 0
    check(model, bundle)


def test_a_write_that_somebody_else_sees_stays_one() -> None:
    def score(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        seen = y[:, :2]
        torch.relu_(y)
        return y.sum(1, keepdim=True) + seen

    model = seeded(lambda: Layers(score, layer=nn.Linear(WIDTH, 5)))
    bundle, _ = canonical(model)
    check(model, bundle)


def test_dropout_in_training_mode_is_left() -> None:
    model = Layers(lambda m, x: functional.dropout(x, 0.5, training=True))
    bundle, notes = canonical(model)
    assert operators(bundle)["dropout"] == 1
    assert notes == ()


def test_small_results_of_constants_are_computed_once_and_large_ones_are_not() -> None:
    model = Layers(
        lambda m, x: x * m.gate.softmax(0) + (m.big[:, None] * m.big).sum(0)[:WIDTH] + m.big.mean(),
        gate=random(WIDTH),
        big=random(700),
    )
    bundle, _ = canonical(model)
    assert "softmax" not in operators(bundle)
    assert bundle.size_bytes <= 2 * 4 * 700
    check(model, bundle, 1e-4)
    spread = Layers(
        lambda m, x: (m.row.exp() * m.column).sum(1) * x[:, :1],
        row=random(700),
        column=random(700, 1),
    )
    bundle, _ = canonical(spread)
    # 700 x 700 would be 1.9 MB in place of 5.6 KB.
    assert bundle.size_bytes < 10_000
    check(spread, bundle, 1e-4)


def test_a_weight_made_of_two_constants_is_named_after_the_larger() -> None:
    """Weight normalisation, as torch.nn.utils.weight_norm writes it."""
    model = Layers(
        lambda m, x: functional.linear(x, m.v * (m.a / m.v.norm(dim=1, keepdim=True))),
        v=random(5, WIDTH),
        a=random(5, 1),
    )
    bundle, _ = canonical(model)
    assert list(layers(bundle)) == ["v"]
    assert bundle.size_bytes == 4 * 5 * WIDTH
    check(model, bundle)


def test_a_graph_with_nothing_to_do_is_left_as_it_is() -> None:
    model = seeded(lambda: Layers(lambda m, x: m.layer(x).relu(), layer=nn.Linear(WIDTH, 5)))
    bundle, notes = canonical(model)
    assert notes == ()
    assert operators(bundle) == Counter(linear=1, relu=1, flatten=1, sum=1)
