"""drop_dead_positions: the last state alone, computed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from artifact.workshop import bundle_of
from passes.zoo import (
    SIZES,
    apply_passes,
    card,
    exact,
    features_of,
    largest_error,
    make_bundle,
    seeded,
)
from rankopt.bundle import ModelBundle
from rankopt.models.card import ModelCard
from rankopt.passes.drop_dead_positions import DropDeadPositions


def assert_same_scores(model_card: ModelCard, model: nn.Module, bundle: ModelBundle) -> None:
    for batch, fill in SIZES:
        features = features_of(model_card, batch, fill)
        truth = exact(model_card, model, features)
        assert largest_error(bundle.run(features), truth) < 1e-5, (batch, fill)


def positions(bundle: ModelBundle, operator: str) -> list[object]:
    """Return the positions that each product computes: dim -2 of its result."""
    return [
        node.meta["val"].shape[-2]
        for node in bundle.program.graph.nodes
        if str(node.target) == f"aten.{operator}.default" and node.meta["val"].dim() > 2
    ]


def test_the_last_block_of_hstu_runs_on_one_position() -> None:
    model_card, model, bundle = bundle_of("hstu")
    made = apply_passes(bundle, DropDeadPositions())
    assert positions(bundle, "linear") == [11] * 4
    # The first block's two, keys and values of the last, then query, gate and transform.
    assert sorted(positions(made.bundle, "linear")) == [1, 1, 1, 11, 11, 11]
    assert sorted(positions(made.bundle, "matmul")) == [1, 1, 11, 11]
    assert_same_scores(model_card, model, made.bundle)


class Encoder(nn.Module):
    """Softmax attention over columns, with two layers, read at some position."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read
        self.column = nn.Embedding(40, 8)
        self.query = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.key = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.value = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.top = nn.Linear(8, 1)

    def forward(self, context: Tensor) -> Tensor:
        x = self.column(context)
        for query, key, value, norm in zip(
            self.query, self.key, self.value, self.norm, strict=True
        ):
            weight = F.softmax(query(x) @ key(x).transpose(1, 2) * 0.3, dim=-1)
            x = norm(x + torch.where(x > -9.0, weight @ value(x), x))
        if self.read == "first":
            x = x[:, 0]
        elif self.read == "two":
            x = x[:, 1:3].sum(1)
        elif self.read == "both":
            x = x[:, 0] + x[:, 3]
        else:
            x = x.mean(1)
        return self.top(x).squeeze(1)


def encoder(read: str) -> tuple[ModelCard, nn.Module]:
    columns = ["a", "b", "c", "d"]
    context = {"kind": "ids", "name": "context", "columns": columns, "num_ids": 40}
    return card("encoder", context), seeded(lambda: Encoder(read))


@pytest.mark.parametrize("read", ["first", "two"])
def test_attention_over_columns(read: str) -> None:
    model_card, model = encoder(read)
    made = apply_passes(make_bundle(model_card, model), DropDeadPositions())
    assert len(made.notes) == 1
    kept = {"first": 1, "two": 2}[read]
    assert positions(made.bundle, "matmul").count(kept) == 2
    assert_same_scores(model_card, model, made.bundle)


@pytest.mark.parametrize("read", ["both", "all"])
def test_positions_that_are_all_needed_stay(read: str) -> None:
    model_card, model = encoder(read)
    bundle = make_bundle(model_card, model)
    made = apply_passes(bundle, DropDeadPositions())
    assert_same_scores(model_card, model, made.bundle)
    assert made.bundle is bundle
