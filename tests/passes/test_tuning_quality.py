"""A pass that plainly breaks the recipe's quality gates is found on the tuning rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from passes.zoo import Mlp, make_bundle, mlp_card, seeded
from rankopt.bundle import ModelBundle
from rankopt.data.rows import Rows
from rankopt.models.card import ModelCard
from rankopt.passes.tuning_quality import TuningQuality
from rankopt.review.gates import Gates

NUM_ROWS = 4000
GATES = Gates.model_validate({"quality": {"ne": "0.1%"}})


class Biased(nn.Module):
    """A model whose logit is moved by a constant."""

    def __init__(self, model: nn.Module, shift: float) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, dense: Tensor) -> Tensor:
        score: Tensor = self.model(dense) + self.shift
        return score


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return seeded(lambda: Mlp(6, 16, 1))


def rows_of(model: nn.Module, *, one_class: bool = False) -> Rows:
    """Rows whose labels are drawn from the model's own probabilities: nothing can beat it."""
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(NUM_ROWS, 6, generator=generator)
    with torch.no_grad():
        drawn = torch.bernoulli(torch.sigmoid(model(dense)), generator=generator)
    labels = np.zeros(NUM_ROWS) if one_class else drawn.double().numpy()
    return Rows({"dense": dense}, {"label": labels}, None, NUM_ROWS)


def bundle_of(model: nn.Module, shift: float) -> ModelBundle:
    return make_bundle(mlp_card(6), Biased(copy.deepcopy(model), shift))


def test_the_same_scores_lose_nothing(model: nn.Module) -> None:
    quality = TuningQuality(bundle_of(model, 0.0), rows_of(model), GATES)
    assert quality.lost(bundle_of(model, 0.0)) is None


def test_a_change_below_the_margin_is_borne(model: nn.Module) -> None:
    quality = TuningQuality(bundle_of(model, 0.0), rows_of(model), GATES)
    assert quality.lost(bundle_of(model, 0.004)) is None


@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_a_planted_damage_is_named_with_its_figures(model: nn.Module, shift: float) -> None:
    quality = TuningQuality(bundle_of(model, 0.0), rows_of(model), GATES)
    lost = quality.lost(bundle_of(model, shift))
    assert lost is not None
    assert "ormalized entropy changes by +" in lost
    assert "against a margin of 0.100 %" in lost
    assert "4,000 tuning rows" in lost


def test_a_wider_margin_bears_more(model: nn.Module) -> None:
    wide = Gates.model_validate({"quality": {"ne": "50%"}})
    quality = TuningQuality(bundle_of(model, 0.0), rows_of(model), wide)
    assert quality.lost(bundle_of(model, 0.5)) is None


def test_rows_of_one_class_decide_nothing(model: nn.Module) -> None:
    quality = TuningQuality(bundle_of(model, 0.0), rows_of(model, one_class=True), GATES)
    assert quality.lost(bundle_of(model, 0.5)) is None


def test_each_output_is_held_to_its_own_margin(model: nn.Module) -> None:
    class Two(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.inner = Biased(copy.deepcopy(model), 0.0)
            self.moved = Biased(copy.deepcopy(model), shift)

        def forward(self, dense: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(dense), self.moved(dense)

    raw = mlp_card(6).model_dump()
    outputs = [{"name": name, "label": "label", "index": i} for i, name in enumerate("ab")]
    card = ModelCard.model_validate({**raw, "outputs": outputs})
    control, moved = make_bundle(card, Two(0.0)), make_bundle(card, Two(0.5))
    lost = TuningQuality(control, rows_of(model), GATES).lost(moved)
    assert lost is not None
    assert "b" in lost
    own = Gates.model_validate({"quality": {"ne": "0.1%", "b.ne": "50%"}})
    assert TuningQuality(control, rows_of(model), own).lost(moved) is None
