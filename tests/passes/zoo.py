"""Small models that hold every kind of lookup and layer, their cards, inputs and exact scores."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankopt.artifact.contract import contract_of, random_features
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.environment import collect_environment
from rankopt.models.card import ModelCard
from rankopt.models.din import DIN
from rankopt.models.dlrm import DLRM
from rankopt.models.hstu import HSTU
from rankopt.models.serving import ServingModule
from rankopt.passes.base import Pass, PassContext

LONGEST = 300
"""Longest bag: far above what a vector or an unrolled loop takes at once."""
MAX_BATCH = 513
BATCHES = (1, 2, 7, MAX_BATCH)
FILLS = (0.0, 0.01, 1.0)
"""Mean length of bags as a share of the longest: all empty, some empty, most of them full."""
SIZES = ((1, 0.0), (2, 1.0), (7, 0.01), (513, 0.0), (513, 0.01))
"""Batch and fill for tests on the graph; artifacts are run on every pair."""


class Zoo(nn.Module):
    """One of each: rows, sequences, sums, means, weights, padding, a shared table, D = 1."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.item = nn.Embedding(40, dim)
        self.user = nn.Embedding(30, dim)
        self.user_bias = nn.Embedding(30, 1)
        self.alone = nn.Embedding(1, dim)
        self.context = nn.ModuleList(nn.EmbeddingBag(12, 6, mode="sum") for _ in range(2))
        self.history = nn.EmbeddingBag(50, dim, mode="mean", include_last_offset=True)
        self.tags = nn.EmbeddingBag(25, dim, mode="sum")
        self.cats = nn.EmbeddingBag(15, dim, mode="sum", padding_idx=3)
        width = 4 + 7 * dim + 2 * 6 + 1
        self.top = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(
        self,
        dense: Tensor,
        user: Tensor,
        item: Tensor,
        context: Tensor,
        history_values: Tensor,
        history_offsets: Tensor,
        tags_values: Tensor,
        tags_lengths: Tensor,
        tags_weights: Tensor,
        cats_values: Tensor,
        cats_lengths: Tensor,
        recent: Tensor,
    ) -> Tensor:
        vectors = [dense, self.user(user), self.user_bias(user), self.item(item)]
        vectors += [self.alone(torch.zeros_like(user))]
        vectors += [bag(context[:, i : i + 1]) for i, bag in enumerate(self.context)]
        vectors += [self.history(history_values, history_offsets)]
        tag_starts = tags_lengths.cumsum(0) - tags_lengths
        vectors += [self.tags(tags_values, tag_starts, per_sample_weights=tags_weights)]
        vectors += [self.cats(cats_values, cats_lengths.cumsum(0) - cats_lengths)]
        # The item table a second time, as a sequence.
        vectors += [self.item(recent).mean(dim=1)]
        score: Tensor = self.top(torch.cat(vectors, dim=1))
        return score.squeeze(1)


def zoo_card() -> ModelCard:
    return card(
        "zoo",
        {"kind": "dense", "name": "dense", "columns": ["a", "b", "c", "d"]},
        ids("user", 30),
        ids("item", 40),
        {"kind": "ids", "name": "context", "columns": ["x", "y"], "num_ids": 12},
        ragged("history", 50, layout="values_offsets"),
        ragged("tags", 25, weights_column="tag_weights"),
        ragged("cats", 15),
        ragged("recent", 40, max_length=6, layout="padded", padding_id=5),
    )


class Bags(nn.Module):
    """torchrec's collection: two features on one table, a mean, unequal widths; weights on top."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

        self.plain = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="shared", embedding_dim=8, num_embeddings=30, feature_names=["a", "b"]
                ),
                EmbeddingBagConfig(
                    name="mean",
                    embedding_dim=4,
                    num_embeddings=20,
                    feature_names=["c"],
                    pooling=PoolingType.MEAN,
                ),
            ],
            device=torch.device("cpu"),
        )
        self.weighted = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="w", embedding_dim=8, num_embeddings=25, feature_names=["d"]
                ),
                EmbeddingBagConfig(
                    name="v", embedding_dim=4, num_embeddings=10, feature_names=["e"]
                ),
            ],
            is_weighted=True,
            device=torch.device("cpu"),
        )
        self.top = nn.Linear(8 + 8 + 4 + 8 + 4, 1)

    def forward(self, sparse: Any, heavy: Any) -> Tensor:
        pooled = torch.cat([self.plain(sparse).values(), self.weighted(heavy).values()], dim=1)
        # torchrec pools in float32 even where its tables are wider.
        score: Tensor = self.top(pooled.to(self.top.weight.dtype))
        return score.squeeze(1)


def bags_card() -> ModelCard:
    def feature(key: str, num_ids: int, **more: Any) -> dict[str, Any]:
        return {"key": key, "column": key, "num_ids": num_ids, "max_length": LONGEST, **more}

    return card(
        "bags",
        {
            "kind": "kjt",
            "name": "sparse",
            "features": [feature("a", 30), feature("b", 30), feature("c", 20)],
        },
        {
            "kind": "kjt",
            "name": "heavy",
            "features": [
                feature("d", 25, weights_column="dw"),
                feature("e", 10, weights_column="ew"),
            ],
        },
    )


def small_dlrm() -> nn.Module:
    return DLRM([40, 30, 20], num_dense=4, embedding_dim=16, bottom_mlp=[32], top_mlp=[32, 16])


def dlrm_card() -> ModelCard:
    return card(
        "dlrm",
        {
            "kind": "dense",
            "name": "dense",
            "columns": ["a", "b", "c", "d"],
            "request_level": True,
        },
        {
            "kind": "ids",
            "name": "sparse",
            "columns": ["x", "y", "z"],
            "num_ids": [40, 30, 20],
        },
    )


class DenseDin(nn.Module):
    """DIN with real numbers beside its ids, so that a row can hold inf or NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.din = DIN(
            40,
            [30],
            num_genres=6,
            embedding_dim=16,
            history_length=8,
            attention_mlp=[16, 8],
            top_mlp=[24, 16],
        )
        self.wide = nn.Linear(4, 1)

    def forward(
        self,
        dense: Tensor,
        user: Tensor,
        item: Tensor,
        history_values: Tensor,
        history_lengths: Tensor,
        genres_values: Tensor,
        genres_lengths: Tensor,
    ) -> Tensor:
        score: Tensor = self.din(
            user,
            item,
            history_values,
            history_lengths,
            genres_values=genres_values,
            genres_lengths=genres_lengths,
        )
        return score + self.wide(dense).squeeze(1)


def din_card() -> ModelCard:
    return card(
        "din",
        {"kind": "dense", "name": "dense", "columns": ["a", "b", "c", "d"]},
        {**ids("user", 30), "keep_width": True},
        ids("item", 40),
        ragged("history", 40),
        ragged("genres", 6),
    )


def small_hstu() -> nn.Module:
    model = HSTU(
        40,
        num_context_ids=[6, 5],
        embedding_dim=16,
        history_length=8,
        num_blocks=2,
        num_heads=2,
        top_mlp=[8],
    )
    for block in model.blocks:
        nn.init.normal_(block.position_bias, std=0.5)
    return model


def hstu_card(**history: Any) -> ModelCard:
    return card(
        "hstu",
        ids("item", 40),
        ragged("history", 40, **history),
        {"kind": "ids", "name": "context", "columns": ["x", "y"], "num_ids": [6, 5]},
    )


MODELS: dict[str, tuple[Callable[[], ModelCard], Callable[[], nn.Module]]] = {
    "zoo": (zoo_card, Zoo),
    "bags": (bags_card, Bags),
    "dlrm": (dlrm_card, small_dlrm),
    "din": (din_card, DenseDin),
    "hstu": (hstu_card, small_hstu),
}


def card(name: str, *inputs: Mapping[str, Any]) -> ModelCard:
    return ModelCard.model_validate(
        {
            "name": name,
            "factory": "made.in:tests",
            "inputs": inputs,
            "outputs": [{"name": "score", "label": "label"}],
        }
    )


def ids(name: str, num_ids: int) -> dict[str, Any]:
    return {"kind": "ids", "name": name, "columns": [name], "num_ids": num_ids}


def ragged(name: str, num_ids: int, **more: Any) -> dict[str, Any]:
    base = {"kind": "ragged_ids", "name": name, "column": name, "num_ids": num_ids}
    return {"max_length": LONGEST, **base, **more}


def seeded(factory: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """Build a module; rows of all sizes, and rows that padding_idx had zeroed are not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = factory().eval()
        for child in module.modules():
            if isinstance(child, nn.Embedding | nn.EmbeddingBag):
                rows = torch.arange(1, child.num_embeddings + 1)[:, None]
                scale = 0.3 + 0.05 * (rows % 7)
                child.weight.data = torch.randn_like(child.weight) * scale
        return module


def features_of(model_card: ModelCard, batch: int, fill: float = 0.01) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + batch)
    return random_features(contract_of(model_card), batch, generator, fill=fill)


def make_bundle(model_card: ModelCard, model: nn.Module) -> ModelBundle:
    """Export on a sample that is neither 0 nor 1 long anywhere."""
    return build_bundle(model_card, model, features_of(model_card, 6, fill=0.5))


def exact(
    model_card: ModelCard, model: nn.Module, features: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Score in float64 with plain PyTorch."""
    module = ServingModule(model_card, copy.deepcopy(model).double().eval())
    inputs = [features[name] for name in model_card.tensor_names]
    inputs = [value.double() if value.is_floating_point() else value for value in inputs]
    with torch.no_grad():
        scores = module(*inputs)
    names = [output.name for output in model_card.outputs]
    return dict(zip(names, scores, strict=True))


def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Copy a model and put other rows into some of its tables."""
    changed = copy.deepcopy(model)
    for name, weight in weights.items():
        changed.get_parameter(f"{name}.weight").data = weight.clone()
    return changed


def context(workdir: Path | None = None) -> PassContext:
    return PassContext(collect_environment(), workdir or Path("unused"))


@dataclass
class Applied:
    """A bundle after some passes, and what they said."""

    bundle: ModelBundle
    notes: list[str] = field(default_factory=list)


def apply_passes(bundle: ModelBundle, *steps: Pass) -> Applied:
    notes: list[str] = []
    for step in steps:
        about = context()
        bundle = step.apply(bundle, about)
        notes += about.notes
    return Applied(bundle, notes)


def largest_error(scores: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Largest difference of any score, relative to the larger of 1 and the truth itself."""
    assert scores.keys() == truth.keys()
    worst = 0.0
    for name, reference in truth.items():
        assert scores[name].shape == reference.shape
        assert scores[name].dtype == torch.float32
        error = (scores[name].double() - reference).abs() / reference.abs().clamp(min=1)
        worst = max(worst, float(error.max()) if not error.isnan().any() else float("inf"))
    return worst


class Pooled(nn.Module):
    """One bag, summed up: its error is that of the rows it read."""

    def __init__(self, num_rows: int, dim: int, **settings: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(num_rows, dim, **settings)

    def forward(self, bag_values: Tensor, bag_lengths: Tensor) -> Tensor:
        starts = bag_lengths.cumsum(0) - bag_lengths
        pooled: Tensor = self.table(bag_values, starts)
        return pooled.sum(dim=1)


class Mlp(nn.Module):
    """Dense layers alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for left, right in pairwise(sizes):
            layers += [nn.Linear(left, right), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, dense: Tensor) -> Tensor:
        score: Tensor = self.layers(dense)
        return score.squeeze(1)


def mlp_card(width: int) -> ModelCard:
    columns = [f"c{index}" for index in range(width)]
    return card("mlp", {"kind": "dense", "name": "dense", "columns": columns})


def bag_card(num_rows: int) -> ModelCard:
    return card("bag", ragged("bag", num_rows))
