"""What fuse_attention makes of the listed classes that hold an attention, on redrawn weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compat.suite import entries
from passes.zoo import apply_passes
from rankopt.artifact.contract import contract_of, random_features
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.models.build import build_module
from rankopt.models.card import ModelCard, load_card
from rankopt.models.serving import EagerModel
from rankopt.passes.drop_dead_positions import DropDeadPositions
from rankopt.passes.fuse_attention import FuseAttention

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute.*assigned during export")

CARDS = {entry.name: entry.card_file for entry in entries()}
SIZES = ((1, 0.0), (1, 1.0), (2, 0.5), (7, 0.0), (7, 1.0), (513, 0.2))


def redrawn(card: ModelCard) -> nn.Module:
    """Build the class with weights under which attention matters; rows of padding stay zeros."""
    torch.manual_seed(5)
    module = build_module(card, allow_random=True)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 2:
                still = (weight == 0).all(1)
                weight.copy_(torch.randn_like(weight) * (0.5 if "embed" in name else 0.15))
                weight[still] = 0.0
            else:
                weight.add_(torch.randn_like(weight) * 0.2)
        for name, moment in module.named_buffers():
            if "running" in name:
                moment.copy_(torch.rand_like(moment) + 0.3)
    return module


def captured(name: str) -> tuple[ModelCard, nn.Module, ModelBundle]:
    card = load_card(CARDS[name])
    module = redrawn(card)
    sample = random_features(contract_of(card), 6, torch.Generator().manual_seed(0))
    return card, module, build_bundle(card, module, sample)


def operators(bundle: ModelBundle) -> set[str]:
    return {str(node.target).removesuffix(".default") for node in bundle.program.graph.nodes}


@pytest.mark.parametrize(
    ("name", "operator", "gone"),
    [
        ("deepctr-torch-DIN", "masked_target_attention", {"aten.matmul", "aten.batch_norm"}),
        ("deepctr-torch-DIEN", "masked_target_attention", {"aten.matmul", "aten.softmax.int"}),
        ("torch-rechub-DIN", "masked_target_attention", {"aten.expand"}),
        ("torch-rechub-HSTUModel", "hstu_attention", {"aten.matmul", "aten.masked_fill.Scalar"}),
    ],
)
def test_attention_is_an_operator(name: str, operator: str, gone: set[str]) -> None:
    card, module, bundle = captured(name)
    made = apply_passes(bundle, FuseAttention(), DropDeadPositions())
    assert f"rankopt.{operator}" in operators(made.bundle)
    assert not gone & operators(made.bundle)
    eager = EagerModel(card, module)
    for batch, fill in SIZES:
        generator = torch.Generator().manual_seed(batch)
        features = random_features(contract_of(card), batch, generator, fill=fill)
        expected, found = eager(features)["like"], made.bundle.run(features)["like"]
        torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)
        assert batch < 513 or float(expected.std()) > 0.01


@pytest.mark.parametrize("name", ["torch-rechub-BST", "torch-rechub-DIEN"])
def test_other_attention_stays_and_says_why(name: str) -> None:
    _, _, bundle = captured(name)
    made = apply_passes(bundle, FuseAttention())
    assert made.bundle is bundle
    reason = "history: stays padded, unsqueeze_5 (unsqueeze) is not known to treat places alike"
    assert reason in made.notes
