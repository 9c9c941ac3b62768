"""fuse_attention on a graph, and what holds of it whatever was fused."""

from __future__ import annotations

from torch import nn

from passes.zoo import (
    SIZES,
    Applied,
    apply_passes,
    exact,
    features_of,
    largest_error,
    make_bundle,
)
from rankopt.bundle import ModelBundle
from rankopt.models.card import ModelCard
from rankopt.passes.fuse_attention import FuseAttention


def operators(bundle: ModelBundle) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in bundle.program.graph.nodes:
        name = str(node.target).removesuffix(".default")
        counts[name] = counts.get(name, 0) + 1
    return counts


def fused(model_card: ModelCard, model: nn.Module) -> Applied:
    return apply_passes(make_bundle(model_card, model), FuseAttention())


def assert_same_scores(model_card: ModelCard, model: nn.Module, bundle: ModelBundle) -> None:
    for batch, fill in (*SIZES, (7, 0.5)):
        features = features_of(model_card, batch, fill)
        truth = exact(model_card, model, features)
        assert largest_error(bundle.run(features), truth) < 1e-5, (batch, fill)
