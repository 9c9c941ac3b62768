"""fuse_attention on HSTU: same scores, no rectangle left, and refusals that say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from artifact.workshop import bundle_of
from passes.attention import assert_same_scores, fused, operators
from passes.zoo import (
    SIZES,
    apply_passes,
    card,
    exact,
    features_of,
    hstu_card,
    ids,
    make_bundle,
    ragged,
    seeded,
    small_hstu,
)
from rankopt.models.card import ModelCard
from rankopt.models.hstu import HSTU
from rankopt.models.layers import pad_ragged
from rankopt.passes.fuse_attention import FuseAttention
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings


@pytest.mark.parametrize("max_length", [8, 300])
def test_hstu_computes_present_tokens_and_one_state_in_the_last_block(max_length: int) -> None:
    model_card = hstu_card(max_length=max_length)
    model = seeded(small_hstu)
    made = fused(model_card, model)
    assert made.bundle.provided == {"packed_attention"}
    assert_same_scores(model_card, model, made.bundle)
    counts = operators(made.bundle)
    assert counts["rankopt.hstu_attention"] == 1
    assert counts["rankopt.hstu_candidate_attention"] == 2
    assert "aten.matmul" not in counts
    assert "aten.masked_fill.Scalar" not in counts
    # Of the last block's projection the tokens before the candidate need keys and values alone.
    widths = [
        int(node.meta["val"].shape[1])
        for node in made.bundle.program.graph.nodes
        if str(node.target) == "aten.linear.default"
    ]
    assert sorted(widths) == sorted([64, 64, 16, 16, 64, 32, 16, 8, 1])


def test_hstu_without_context() -> None:
    model_card = card("hstu", ids("item", 40), ragged("history", 40))
    model = seeded(lambda: HSTU(40, embedding_dim=8, history_length=5, num_heads=1, num_blocks=3))
    made = fused(model_card, model)
    assert operators(made.bundle)["rankopt.hstu_attention"] == 2
    assert_same_scores(model_card, model, made.bundle)


def test_int8_passes_follow() -> None:
    for name in ("din", "hstu"):
        model_card, model, bundle = bundle_of(name)
        steps = (FuseAttention(), FuseEmbeddings(), QuantizeEmbeddings(), QuantizeDense())
        made = apply_passes(bundle, *steps)
        for batch, fill in SIZES:
            features = features_of(model_card, batch, fill)
            truth = exact(model_card, model, features)["score"]
            error = (made.bundle.run(features)["score"].double() - truth).abs()
            assert float(error.max()) < 0.3, (name, batch, fill)
            assert float(error.median()) < 0.05, (name, batch, fill)


class JoinedHstu(nn.Module):
    """In torch-rechub's style: the candidate's id behind the others', a place of its own for each.

    Keys are hidden by their ids, so an id of 0 inside a list is hidden too, and so may the
    candidate be.
    """

    def __init__(self, layout: str, fill: float, empty: int, causal: bool) -> None:
        super().__init__()
        self.layout, self.fill, self.empty, self.causal = layout, fill, empty, causal
        self.item, self.place = nn.Embedding(40, 16, padding_idx=0), nn.Embedding(8, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.inner = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.distance = nn.Parameter(torch.randn(2, 15))
        self.head = nn.Linear(16, 1)

    def forward(self, item: Tensor, history: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is not None:
            history, _ = pad_ragged(history, lengths, 7, align=self.layout)
        tokens = torch.cat([history, item.unsqueeze(1)], dim=1)
        shown = tokens.ne(self.empty)
        x = self.item(tokens) + self.place(torch.arange(8))
        x = x * shown.unsqueeze(-1).to(x.dtype)
        at = torch.arange(8)
        bias = self.distance[:, at[None, :] - at[:, None] + 7]
        visible = shown.unsqueeze(1).unsqueeze(1)
        if self.causal:
            visible = torch.ones(8, 8, dtype=torch.bool).tril()[None, None] & visible
        for index in range(2):
            h = nn.functional.silu(self.inner[index](self.norms[2 * index](x)))
            parts = [h[..., i * 16 : i * 16 + 16].reshape(-1, 8, 2, 8) for i in range(4)]
            q, k, v = (part.transpose(1, 2) for part in parts[:3])
            scores = torch.matmul(q, k.transpose(-2, -1)) * 0.4 + bias
            weight = nn.functional.silu(scores.masked_fill(~visible, self.fill)) / 8
            seen = torch.matmul(weight, v).transpose(1, 2).reshape(-1, 8, 16)
            gated = self.norms[2 * index + 1](seen) * parts[3].reshape(-1, 8, 16)
            x = x + self.outer[index](gated)
        return self.head(x * shown.unsqueeze(-1).to(x.dtype))[:, -1].squeeze(1)


def joined_hstu(
    layout: str, fill: float = -1e4, empty: int = 0, *, causal: bool = True
) -> tuple[ModelCard, nn.Module]:
    class FromLists(JoinedHstu):
        def forward(  # type: ignore[override]
            self, item: Tensor, history_values: Tensor, history_lengths: Tensor
        ) -> Tensor:
            return super().forward(item, history_values, history_lengths)

    padded: dict[str, Any] = {"max_length": 7, "layout": "padded", "pad_side": layout}
    side = layout in ("start", "end")
    history = ragged("history", 40, **(padded if side else {}))
    kind = JoinedHstu if side else FromLists
    model = seeded(lambda: kind(layout, fill, empty, causal))
    return card("joined", ids("item", 40), history), model


@pytest.mark.parametrize("layout", ["start", "end", "left", "right"])
def test_hstu_over_ids_joined_with_the_candidate(layout: str) -> None:
    model_card, model = joined_hstu(layout)
    made = fused(model_card, model)
    counts = operators(made.bundle)
    assert counts["rankopt.hstu_attention"] == 1
    assert counts["rankopt.hstu_candidate_attention"] == 2
    assert not {"aten.matmul", "aten.index.Tensor", "aten.where.ScalarOther"} & counts.keys()
    assert_same_scores(model_card, model, made.bundle)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"fill": -1.0}, "fills hidden pairs with -1, a weight too"),
        ({"empty": 5}, "does not hide just the keys where no id stands"),
        ({"causal": False}, "earlier tokens see the candidate's"),
    ],
)
def test_hstu_with_another_mask_stays(more: dict[str, Any], reason: str) -> None:
    model_card, model = joined_hstu("start", **more)
    bundle = make_bundle(model_card, model)
    made = apply_passes(bundle, FuseAttention())
    assert made.bundle is bundle
    assert any(reason in note for note in made.notes), made.notes


class Looking(HSTU):
    """Tokens that see the future, so the candidate's token is seen by all."""

    def encode(self, *args: Any) -> Tensor:
        self.causal.fill_(True)
        return super().encode(*args)


class Biased(HSTU):
    """A bias that depends on where a token stands, not on the distance alone."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for block in self.blocks:
            block.distance = block.distance.clone()
            block.distance[3, 1] = 0
            nn.init.normal_(block.position_bias)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Looking, "earlier tokens see"), (Biased, "depends on more than the distance")],
)
def test_other_attention_stays_and_says_why(kind: type[HSTU], reason: str) -> None:
    model_card = card("hstu", ids("item", 40), ragged("history", 40))
    model = seeded(lambda: kind(40, embedding_dim=8, history_length=5))
    if kind is Looking:
        model.causal.fill_(True)
    bundle = make_bundle(model_card, model)
    made = apply_passes(bundle, FuseAttention())
    assert made.bundle is bundle
    assert any(reason in note for note in made.notes), made.notes


def test_a_model_without_histories_is_left_alone() -> None:
    _, _, bundle = bundle_of("dlrm")
    assert apply_passes(bundle, FuseAttention()).bundle is bundle
