"""fuse_attention on the graph: same scores, no rectangle left, and refusals that say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from artifact.workshop import bundle_of
from passes.zoo import (
    SIZES,
    Applied,
    apply_passes,
    card,
    exact,
    features_of,
    hstu_card,
    ids,
    largest_error,
    make_bundle,
    ragged,
    seeded,
    small_hstu,
)
from rankopt.bundle import ModelBundle
from rankopt.models.card import ModelCard
from rankopt.models.din import DIN
from rankopt.models.hstu import HSTU
from rankopt.models.layers import pad_ragged
from rankopt.passes.fuse_attention import FuseAttention
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings


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


def din_card(layout: str = "values_lengths", **more: Any) -> ModelCard:
    user = {**ids("user", 30), "keep_width": True}
    return card("din", user, ids("item", 40), ragged("history", 40, layout=layout, **more))


@pytest.mark.parametrize("activation", ["prelu", "relu", "sigmoid", "silu", "dice"])
def test_din_scores_present_ids_only(activation: str) -> None:
    model = seeded(
        lambda: DIN(
            40,
            [30],
            embedding_dim=16,
            history_length=8,
            attention_mlp=[16, 8],
            top_mlp=[12],
            activation="relu",
            attention_activation=activation,
        )
    )
    made = fused(din_card(), model)
    counts = operators(made.bundle)
    known = activation != "dice"
    assert counts.get("rankopt.target_attention", 0) == known
    assert counts.get("rankopt.ragged_sum", 0) == (not known)
    assert "aten.bmm" not in counts
    assert_same_scores(din_card(), model, made.bundle)


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


class Spelled(nn.Module):
    """Attention over a history, in ways that pad, mask and pool differently."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.item = nn.Embedding(40, 8)
        self.score = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, item: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        if self.form == "padded":
            ids_BH, present_BH = history, torch.arange(history.shape[1]) < lengths[:, None]
        else:
            ids_BH, present_BH = pad_ragged(history, lengths, 8, align="right")
        query, keys = self.item(item), self.item(ids_BH)
        wide = query.unsqueeze(1).expand_as(keys)
        pieces = [keys * wide, keys, wide, keys - wide]
        score = self.score(torch.cat(pieces, dim=-1)).squeeze(-1)
        if self.form == "no mask":
            weight = score
        elif self.form == "one more":
            hidden = torch.arange(8) < 8 - lengths[:, None].clamp(max=8) + 1
            weight = score.masked_fill(hidden, 0.0)
        elif self.form == "softmax":
            weight = score.masked_fill(~present_BH, -1e9).softmax(1)
        else:
            weight = score.masked_fill(~present_BH, 0.0)
        pooled = torch.bmm(weight.unsqueeze(1), keys).squeeze(1)
        return (pooled * query).sum(1) + user.squeeze(1).float() * 0.01


def spelled(form: str) -> tuple[ModelCard, nn.Module]:
    class Adapter(Spelled):
        def forward(  # type: ignore[override]
            self, user: Tensor, item: Tensor, history_values: Tensor, history_lengths: Tensor
        ) -> Tensor:
            return super().forward(user, item, history_values, history_lengths)

    return din_card(), seeded(lambda: Adapter(form))


def test_another_order_of_pieces_and_the_other_side_of_padding() -> None:
    model_card, model = spelled("plain")
    made = fused(model_card, model)
    assert operators(made.bundle)["rankopt.target_attention"] == 1
    assert_same_scores(model_card, model, made.bundle)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("no mask", "is not known to treat places alike"),
        ("one more", "does not hide just the places where no id stands"),
        ("softmax", "fills masked places with -1000000000.0, not with 0"),
    ],
)
def test_what_is_not_understood_stays_and_says_why(form: str, reason: str) -> None:
    model_card, model = spelled(form)
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
