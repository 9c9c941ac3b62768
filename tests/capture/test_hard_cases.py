"""Modules on which a rewrite that looks at shapes alone, or moves nodes freely, would go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.zoo import card, features_of, ids, make_bundle, ragged, seeded
from rankopt.environment import collect_environment
from rankopt.models.card import ModelCard
from rankopt.models.serving import EagerModel
from rankopt.passes.base import Pass, PassContext
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings

DENSE = {"kind": "dense", "name": "dense", "columns": ["a", "b", "c", "d"]}
USER_AND_ITEM = card("m", DENSE, ids("user", 30), ids("item", 40))


class BothWays(nn.Module):
    """One large square weight, read as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 520)
        self.weight = nn.Parameter(torch.randn(520, 520) / 20)
        self.down = nn.Linear(520, 1)

    def forward(self, dense: Tensor) -> Tensor:
        hidden = self.up(dense)
        back: Tensor = self.down((hidden @ self.weight) @ self.weight.t())
        return back.squeeze(1)


class WritesABuffer(nn.Module):
    """What reads the buffer has no edge to the copy into it."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(30, 8)
        self.item = nn.Embedding(40, 8)
        self.first = nn.Linear(16, 8)
        self.top = nn.Linear(16, 1)

    def forward(self, dense: Tensor, user: Tensor, item: Tensor) -> Tensor:
        buffer = dense.new_zeros(dense.shape[0], 16)
        buffer[:, :8] = self.user(user)
        hidden = self.first(buffer)
        buffer[:, 8:] = self.item(item + 0)
        score: Tensor = self.top(torch.cat([hidden, buffer[:, 8:]], dim=1))
        return score.squeeze(1)


class NegativePadding(nn.Module):
    """The functional bag counts padding_idx from the end."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.table = nn.Parameter(torch.randn(20, 8))
        self.other = nn.EmbeddingBag(20, 8, mode="sum")
        self.top = nn.Linear(8, 1)

    def forward(self, bag_values: Tensor, bag_lengths: Tensor) -> Tensor:
        starts = bag_lengths.cumsum(0) - bag_lengths
        pooled = F.embedding_bag(bag_values, self.table, starts, mode=self.mode, padding_idx=-1)
        score: Tensor = self.top(pooled + self.other(bag_values, starts))
        return score.squeeze(1)


class ViewAfterConvolution(nn.Module):
    """A convolution of width one becomes a product, whose result lies in memory otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(2, 3, 1)
        self.top = nn.Linear(6, 1)

    def forward(self, dense: Tensor) -> Tensor:
        mixed = self.mix(dense.view(-1, 2, 2))
        score: Tensor = self.top(mixed.view(-1, 6))
        return score.squeeze(1)


class WritesItsInput(nn.Module):
    """The caller's rows must come back as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 1)

    def forward(self, dense: Tensor) -> Tensor:
        dense += 1.0
        score: Tensor = self.top(dense)
        return score.squeeze(1)


class OneDimWeight(nn.Module):
    """F.linear takes a vector for a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(1))

    def forward(self, dense: Tensor) -> Tensor:
        return F.linear(dense, self.weight) + self.shift


class AllPairs(nn.Module):
    """Every field's vector stands once per pair."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in (30, 40))
        self.lift = nn.ModuleList(nn.Linear(1, 4) for _ in range(4))
        self.top = nn.Linear(4, 1)

    def forward(self, dense: Tensor, user: Tensor, item: Tensor) -> Tensor:
        fields = [table(x) for table, x in zip(self.tables, (user, item), strict=True)]
        fields += [lift(dense[:, i : i + 1]) for i, lift in enumerate(self.lift)]
        fields = [field.unsqueeze(1) for field in fields]
        pairs = [(a, b) for i, a in enumerate(fields) for b in fields[i + 1 :]]
        left, right = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
        score: Tensor = self.top((left * right).sum(1))
        return score.squeeze(1)


CASES = {
    "both ways": (BothWays, card("m", DENSE)),
    "writes a buffer": (WritesABuffer, USER_AND_ITEM),
    "negative padding, sum": (lambda: NegativePadding("sum"), card("m", ragged("bag", 20))),
    "negative padding, mean": (lambda: NegativePadding("mean"), card("m", ragged("bag", 20))),
    "view after a convolution": (ViewAfterConvolution, card("m", DENSE)),
    "one dim": (OneDimWeight, card("m", DENSE)),
    "all pairs": (AllPairs, USER_AND_ITEM),
}
STEPS: tuple[Pass | None, ...] = (None, FuseEmbeddings(), QuantizeEmbeddings(dtype="fp16"))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kind if step else "captured")
@pytest.mark.parametrize("case", CASES)
def test_scores_stay_those_of_the_module(case: str, step: Pass | None, tmp_path: Path) -> None:
    factory, model_card = CASES[case]
    model = seeded(factory)
    bundle = make_bundle(model_card, model)
    if step is not None:
        bundle = step.apply(bundle, PassContext(collect_environment(), tmp_path))
    eager = EagerModel(model_card, model)
    for batch, fill in ((1, 0.5), (2, 0.0), (7, 0.01), (40, 0.02)):
        features = features_of(model_card, batch, fill=fill)
        expected = eager(features)["score"]
        allowed = 1e-2 if isinstance(step, QuantizeEmbeddings) else 1e-4
        torch.testing.assert_close(
            bundle.run(features)["score"], expected, rtol=allowed, atol=allowed
        )


def test_a_concatenation_of_pairs_is_a_selection() -> None:
    bundle = make_bundle(USER_AND_ITEM, seeded(AllPairs))
    assert any("repeats its pieces" in note for note in bundle.capture)


def test_rows_that_a_model_writes_into_stay_the_callers() -> None:
    model_card: ModelCard = card("m", DENSE)
    bundle = make_bundle(model_card, seeded(WritesItsInput))
    features = features_of(model_card, 5, fill=0.5)
    before = features["dense"].clone()
    first = bundle.run(features)["score"]
    assert torch.equal(features["dense"], before)
    assert torch.equal(bundle.run(features)["score"], first)
