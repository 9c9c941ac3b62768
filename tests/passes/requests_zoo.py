"""Models with request-level inputs, their cards, and both forms of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.zoo import card, ids, ragged, seeded
from rankopt.artifact.contract import contract_of
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.capture.export import trace_example
from rankopt.capture.requests import REQUEST_INDEX, random_requests
from rankopt.models.card import ModelCard
from rankopt.models.dcnv2 import DCNv2
from rankopt.models.deepfm import DeepFM
from rankopt.models.din import DIN
from rankopt.models.dlrm import DLRM
from rankopt.models.hstu import HSTU

NUM_IDS = 12
SHARED = {"request_level": True}


class TwoSided(nn.Module):
    """Put the request's id columns between those of the candidate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, user: Tensor, ad: Tensor) -> Tensor:
        joined = torch.cat([ad[:, :1], user, ad[:, 1:]], dim=1)
        score: Tensor = self.model(dense, joined)
        return score


class SoftmaxSequence(nn.Module):
    """A causal transformer whose last token is the candidate, and a mask of -1e9."""

    causal: Tensor

    def __init__(self, dim: int = 8, length: int = 5) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_IDS, dim)
        self.project = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.out = nn.Linear(dim, 1)
        mask = torch.ones(length + 1, length + 1).tril().bool()
        self.register_buffer("causal", mask, persistent=False)

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        state = self.item(torch.cat([history, item.unsqueeze(1)], dim=1))
        for project in self.project:
            query, key, value = project(state).chunk(3, dim=-1)
            score = torch.bmm(query, key.transpose(1, 2))
            score = score.masked_fill(~self.causal.unsqueeze(0), -1e9)
            state = state + torch.bmm(score.softmax(dim=-1), value)
        logit: Tensor = self.out(state[:, -1])
        return logit.squeeze(1)


class Pieces(nn.Module):
    """Many small operators between two-part values: sums, means, splits, constants, D = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.ad = nn.Embedding(NUM_IDS, 6), nn.Embedding(NUM_IDS, 6)
        self.bias = nn.Parameter(torch.randn(1, 6))
        self.gate = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(6)
        self.slopes = nn.PReLU(8)
        self.deep = nn.Linear(12, 8)
        self.last = nn.Linear(8 + 6 + 6 + 3, 1)

    def forward(self, user: Tensor, ad: Tensor, dense: Tensor) -> Tensor:
        left, right = self.user(user), self.ad(ad)
        both = torch.stack([left - self.bias, right, right * left], dim=1)
        summed, mean = both.sum(dim=1), both.mean(dim=1)
        wide = torch.cat([left, right], dim=1)
        one, other = (wide * torch.sigmoid(self.gate(wide))).split(6, dim=1)
        deep = self.slopes(self.deep(torch.cat([one, other + left], dim=1)))
        cross = self.norm(both).amax(dim=1) - 2 * summed
        narrow = F.relu(dense) + (user.unsqueeze(1) % 3).float()
        logit: Tensor = self.last(torch.cat([deep, cross, mean, narrow], dim=1))
        return logit.squeeze(1)


class TwoScores(nn.Module):
    """A tower of the request alone, one of the candidate alone, and one of both."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.ad = nn.EmbeddingBag(NUM_IDS, 4), nn.Embedding(NUM_IDS, 4)
        self.shared = nn.Linear(4, 4)

    def forward(
        self, tags_values: Tensor, tags_lengths: Tensor, ad: Tensor
    ) -> tuple[Tensor, Tensor]:
        user = self.user(tags_values, tags_lengths.cumsum(0) - tags_lengths)
        # The same layer on both sides.
        one, other = self.shared(user), self.shared(self.ad(ad))
        return (one * other).sum(dim=1), one[:, 0]


class BatchMean(nn.Module):
    """A score that depends on the other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.ad = nn.Embedding(NUM_IDS, 4), nn.Embedding(NUM_IDS, 4)

    def forward(self, user: Tensor, ad: Tensor) -> Tensor:
        centred = self.user(user) - self.user(user).mean(dim=0, keepdim=True)
        return (centred * self.ad(ad)).sum(dim=1)


class MixedLists(nn.Module):
    """Ragged ids of the request and of the candidate, read by one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(NUM_IDS, 4)

    def forward(
        self, tags_values: Tensor, tags_lengths: Tensor, own_values: Tensor, own_lengths: Tensor
    ) -> Tensor:
        values = torch.cat([tags_values, own_values])
        lengths = torch.cat([tags_lengths, own_lengths])
        pooled = self.table(values, lengths.cumsum(0) - lengths).view(2, -1, 4)
        return (pooled[0] * pooled[1]).sum(dim=1)


def columns(name: str, count: int, **more: Any) -> dict[str, Any]:
    names = [f"{name}{index}" for index in range(count)]
    return {"kind": "ids", "name": name, "columns": names, "num_ids": NUM_IDS, **more}


def dense(count: int = 3, **more: Any) -> dict[str, Any]:
    names = [f"d{index}" for index in range(count)]
    return {"kind": "dense", "name": "dense", "columns": names, **more}


def _two_sided(name: str) -> ModelCard:
    return card(name, dense(**SHARED), columns("user", 3, **SHARED), columns("ad", 2))


def _din(name: str) -> ModelCard:
    return card(
        name,
        columns("user", 2, **SHARED),
        ids("item", NUM_IDS),
        ragged("history", NUM_IDS, max_length=9, **SHARED),
        ragged("genres", NUM_IDS, max_length=4),
    )


def _hstu() -> ModelCard:
    return card(
        "hstu",
        ids("item", NUM_IDS),
        ragged("history", NUM_IDS, max_length=9, **SHARED),
        columns("context", 2, **SHARED),
    )


def small_din(**more: Any) -> DIN:
    return DIN(
        NUM_IDS, [NUM_IDS] * 2, num_genres=NUM_IDS, embedding_dim=8, history_length=7,
        attention_mlp=[10, 6], top_mlp=[12], **more,
    )  # fmt: skip


def small_hstu() -> HSTU:
    return HSTU(
        NUM_IDS, num_context_ids=[NUM_IDS] * 2, embedding_dim=8, history_length=7, num_blocks=3,
        top_mlp=(8,),
    )  # fmt: skip


def small_dlrm() -> nn.Module:
    return TwoSided(
        DLRM([NUM_IDS] * 5, num_dense=3, embedding_dim=8, bottom_mlp=[16], top_mlp=[24, 16])
    )


SMALL: dict[str, Any] = {"num_dense": 3, "embedding_dim": 8}
SEQUENCE = ragged("history", NUM_IDS, max_length=5, layout="padded", **SHARED)

REQUEST_MODELS: dict[str, tuple[Callable[[], ModelCard], Callable[[], nn.Module]]] = {
    "dlrm": (lambda: _two_sided("dlrm"), small_dlrm),
    "dcnv2": (
        lambda: _two_sided("dcnv2"),
        lambda: TwoSided(
            DCNv2([NUM_IDS] * 5, bottom_mlp=(8,), cross_rank=4, top_mlp=(16,), **SMALL)
        ),
    ),
    "deepfm": (
        lambda: _two_sided("deepfm"),
        lambda: TwoSided(DeepFM([NUM_IDS] * 5, deep_mlp=(16,), **SMALL)),
    ),
    "din": (lambda: _din("din"), small_din),
    "din-softmax": (lambda: _din("din-softmax"), lambda: small_din(softmax=True)),
    "din-dice": (lambda: _din("din-dice"), lambda: small_din(activation="dice")),
    "hstu": (_hstu, small_hstu),
    "softmax": (lambda: card("softmax", SEQUENCE, ids("item", NUM_IDS)), SoftmaxSequence),
    "pieces": (
        lambda: card("pieces", {**ids("user", NUM_IDS), **SHARED}, ids("ad", NUM_IDS), dense()),
        Pieces,
    ),
}


LARGE_IDS, LARGE_DIM = 2_000, 8


def large_din() -> tuple[ModelCard, nn.Module]:
    """Make a DIN with tables larger than all of its layers: items, two of users, genres."""
    raw = _din("din").model_dump(mode="json")
    inputs = [{**item, "num_ids": LARGE_IDS} for item in raw["inputs"]]
    model = seeded(
        lambda: DIN(
            LARGE_IDS, [LARGE_IDS] * 2, num_genres=LARGE_IDS, embedding_dim=LARGE_DIM,
            history_length=7, attention_mlp=[10, 6], top_mlp=[12],
        )
    )  # fmt: skip
    return ModelCard.model_validate(raw | {"inputs": inputs}), model


def two_scores() -> tuple[ModelCard, nn.Module]:
    made = card("two", ragged("tags", NUM_IDS, max_length=5, **SHARED), ids("ad", NUM_IDS))
    outputs = [{"name": name, "label": "label", "index": i} for i, name in enumerate("ab")]
    raw = made.model_dump(mode="json") | {"outputs": outputs}
    return ModelCard.model_validate(raw), seeded(TwoScores)


def request_bundle(name: str) -> ModelBundle:
    make_card, make_model = REQUEST_MODELS[name]
    return bundle_for(make_card(), seeded(make_model))


def bundle_for(model_card: ModelCard, model: nn.Module) -> ModelBundle:
    return build_bundle(model_card, model, trace_example(model_card))


def both_forms(
    model_card: ModelCard, sizes: list[int], *, seed: int = 0, fill: float = 0.5
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make up requests whose candidates come in any order."""
    generator = torch.Generator().manual_seed(seed)
    plain, hoisted = random_requests(contract_of(model_card), sizes, generator, fill=fill)
    assert hoisted[REQUEST_INDEX].tolist() == sorted(hoisted[REQUEST_INDEX].tolist())
    return plain, hoisted
