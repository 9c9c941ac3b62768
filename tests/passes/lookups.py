"""A model that is nothing but lookups: tables, and a score made of their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from passes.zoo import SIZES, card, exact, features_of, ids, largest_error, ragged
from rankopt.bundle import ModelBundle
from rankopt.models.card import ModelCard

CLOSE = 1e-4
"""fp32 sums of up to 300 rows in another order than PyTorch's."""

Score = Callable[[Any, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Lookups(nn.Module):
    """Some tables, and what a score is made of."""

    def __init__(self, score: Score, **tables: nn.Module) -> None:
        super().__init__()
        self.score = score
        for name, table in tables.items():
            self.add_module(name, table)

    def forward(
        self,
        user: Tensor,
        narrow: Tensor,
        bag_values: Tensor,
        bag_lengths: Tensor,
        recent: Tensor,
    ) -> Tensor:
        starts = bag_lengths.cumsum(0) - bag_lengths
        return self.score(self, user, narrow, bag_values, starts, recent)


def lookups_card() -> ModelCard:
    return card(
        "lookups",
        ids("user", 30),
        {**ids("narrow", 30), "keep_width": True, "dtype": "int32"},
        ragged("bag", 30),
        ragged("recent", 30, layout="padded", max_length=5),
    )


def rows(num_rows: int = 30, dim: int = 8, **more: Any) -> nn.Embedding:
    return nn.Embedding(num_rows, dim, **more)


def bag(num_rows: int = 30, dim: int = 8, **more: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(num_rows, dim, **more)


def total(vectors: Tensor) -> Tensor:
    return vectors.flatten(1).sum(1)


def check_scores(model: nn.Module, bundle: ModelBundle, allowed: float = CLOSE) -> None:
    for batch, fill in SIZES:
        features = features_of(bundle.card, batch, fill)
        truth = exact(bundle.card, model, features)
        error = largest_error(bundle.run(features), truth)
        assert error < allowed, f"batch {batch}, fill {fill}: {error}"
