"""fuse_attention on DIN and its like: scored where an id counts, and nothing else taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.attention import assert_same_scores, fused, operators
from passes.zoo import (
    apply_passes,
    card,
    ids,
    make_bundle,
    ragged,
    seeded,
)
from rankopt.models.card import ModelCard
from rankopt.models.din import DIN
from rankopt.models.layers import pad_ragged
from rankopt.passes.fuse_attention import FuseAttention


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
    assert counts["rankopt.target_attention"] == 1
    assert "rankopt.ragged_sum" not in counts
    assert "aten.bmm" not in counts
    assert_same_scores(din_card(), model, made.bundle)


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
        elif self.form == "shares masked":
            weight = score.softmax(1).masked_fill(~present_BH, 0.0)
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


@pytest.mark.parametrize("form", ["no mask", "one more"])
def test_a_mask_that_is_not_of_the_lengths_is_read_as_it_is(form: str) -> None:
    model_card, model = spelled(form)
    made = fused(model_card, model)
    assert operators(made.bundle)["rankopt.masked_target_attention"] == 1
    assert any("stays padded" in note for note in made.notes), made.notes
    assert_same_scores(model_card, model, made.bundle)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("shares masked", "is not known to treat places alike"),
        ("shares masked", "its scores are not an MLP of candidate and id that is understood"),
    ],
)
def test_what_is_not_understood_stays_and_says_why(form: str, reason: str) -> None:
    model_card, model = spelled(form)
    bundle = make_bundle(model_card, model)
    made = apply_passes(bundle, FuseAttention())
    assert made.bundle is bundle
    assert any(reason in note for note in made.notes), made.notes


class RowDice(nn.Module):
    """Dice as torch-rechub writes it: on the mean of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.randn(1))

    def forward(self, x_BN: Tensor) -> Tensor:
        mean = x_BN.mean(dim=1).unsqueeze(dim=1)
        deviation = torch.sqrt((torch.pow(x_BN - mean, 2) + 1e-3).sum(dim=1).unsqueeze(dim=1))
        gate = torch.sigmoid((x_BN - mean) / deviation)
        return gate * x_BN + (1 - gate) * self.alpha * x_BN


class UnitDice(nn.Module):
    """Dice as deepctr-torch writes it: on [B, H, N], turned for the batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-8)
        self.alpha = nn.Parameter(torch.randn(width, 1))
        for each in (self.norm.weight, self.norm.bias, self.norm.running_mean):
            nn.init.normal_(each)
        nn.init.uniform_(self.norm.running_var, 0.2, 3.0)

    def forward(self, x_BHN: Tensor) -> Tensor:
        x = x_BHN.transpose(1, 2)
        gate = torch.sigmoid(self.norm(x))
        return (self.alpha * (1 - gate) * x + gate * x).transpose(1, 2)


class PackedDin(nn.Module):
    """In deepctr-torch's style: ids and lists in one matrix of floats, two lists joined as keys."""

    def __init__(self, activation: str = "dice", fill: float = 0.0) -> None:
        super().__init__()
        self.item, self.genre = nn.Embedding(40, 8), nn.Embedding(6, 4)
        self.fill = fill
        act = {"dice": UnitDice, "sigmoid": lambda _: nn.Sigmoid(), "prelu": lambda _: nn.PReLU()}
        make = act[activation]
        self.score = nn.Sequential(nn.Linear(48, 17), make(17), nn.Linear(17, 5), make(5))
        self.last = nn.Linear(5, 1)
        self.top = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = x.long()
        query = torch.cat([self.item(columns[:, 0:1]), self.genre(columns[:, 1:2])], dim=-1)
        keys = torch.cat([self.item(columns[:, 2:9]), self.genre(columns[:, 10:17])], dim=-1)
        mask = torch.arange(7).repeat(x.shape[0], 1) < columns[:, 9:10].view(-1, 1)
        queries = query.expand(-1, 7, -1)
        pairs = torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)
        score = self.last(self.score(pairs)).transpose(1, 2)
        filled = torch.ones_like(score) * self.fill if self.fill else torch.zeros_like(score)
        weight = torch.where(mask.unsqueeze(1), score, filled)
        if self.fill:
            weight = weight.softmax(dim=-1)
        pooled = torch.matmul(weight, keys)
        return self.top(torch.cat([pooled, query], dim=-1).flatten(1)).squeeze(1)


def packed_din_card() -> ModelCard:
    columns: list[dict[str, Any]] = [
        {"name": "item", "num_ids": 40},
        {"name": "genre", "num_ids": 6},
        {"name": "items", "num_ids": 40, "length": 7},
        {"length_of": "items"},
        {"name": "genres", "num_ids": 6, "length": 7},
    ]
    return card("packed", {"kind": "packed", "name": "x", "columns": columns})


SHARED = -(2**32) + 1
"""deepctr-torch's score of a place without an id: a row without ids shares equally."""


@pytest.mark.parametrize("fill", [0.0, SHARED])
@pytest.mark.parametrize("activation", ["dice", "sigmoid", "prelu"])
def test_lists_of_a_packed_matrix_are_scored_where_the_mask_is_true(
    activation: str, fill: float
) -> None:
    model = seeded(lambda: PackedDin(activation, fill))
    made = fused(packed_din_card(), model)
    assert operators(made.bundle)["rankopt.masked_target_attention"] == 1
    assert "aten.matmul" not in operators(made.bundle)
    assert_same_scores(packed_din_card(), model, made.bundle)


class PaddedDin(nn.Module):
    """In torch-rechub's style: padded ids, the places found by the padding id, if at all."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.item = nn.Embedding(40, 8, padding_idx=0)
        layers = [nn.Linear(32, 16), nn.BatchNorm1d(16), RowDice(), nn.Linear(16, 1)]
        self.score = nn.Sequential(*layers)

    def forward(self, item: Tensor, history: Tensor) -> Tensor:
        keys, query = self.item(history), self.item(item)
        wide = query.unsqueeze(1).expand(-1, keys.shape[1], -1)
        pairs = torch.cat([wide, keys, wide - keys, wide * keys], dim=-1)
        score = self.score(pairs.view(-1, 32)).view(-1, keys.shape[1])
        empty = history == 0
        if self.form == "shares of all":
            score = score.softmax(dim=-1)
        elif self.form == "by id":
            score = (score / 3).masked_fill(empty, -torch.inf).softmax(dim=-1)
            score = score.nan_to_num(0.1)
        elif self.form == "scaled":
            score = torch.where(empty, -1e4, score).div(8**0.5).softmax(dim=-1)
        elif self.form == "product":
            score = score * (~empty).float()
        pooled = (score.unsqueeze(-1) * keys).sum(dim=1)
        return (pooled * query).sum(1) + pooled.mean(1)


def padded_din_card() -> ModelCard:
    return card("padded", ids("item", 40), ragged("history", 40, max_length=9, layout="padded"))


def padded_din(form: str, *, zero_row: bool = True) -> nn.Module:
    model = seeded(lambda: PaddedDin(form))
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    if zero_row:
        with torch.no_grad():
            model.item.weight[0] = 0.0
    return model


@pytest.mark.parametrize("form", ["no mask", "shares of all", "scaled", "product"])
def test_padded_ids_are_scored_where_they_count(form: str) -> None:
    """Ids of 0 inside a list are drawn too: what counts is what the model says, not the length."""
    model = padded_din(form, zero_row=form == "no mask")
    made = fused(padded_din_card(), model)
    assert operators(made.bundle)["rankopt.masked_target_attention"] == 1
    assert_same_scores(padded_din_card(), model, made.bundle)
    empty = operators(made.bundle).get("aten.ne.Scalar", 0)
    assert empty == (form == "no mask")  # rows of zeros add nothing, so they are left out


def test_without_a_row_of_zeros_every_place_counts() -> None:
    model = padded_din("no mask", zero_row=False)
    made = fused(padded_din_card(), model)
    assert operators(made.bundle)["rankopt.masked_target_attention"] == 1
    assert "aten.ne.Scalar" not in operators(made.bundle)
    assert_same_scores(padded_din_card(), model, made.bundle)


def test_what_a_model_makes_of_its_shares_stays_with_them() -> None:
    model = padded_din("by id")
    bundle = make_bundle(padded_din_card(), model)
    made = apply_passes(bundle, FuseAttention())
    assert made.bundle is bundle


class Softmax(nn.Module):
    """Shares over the places with an id; a row without any is NaN, or what the model puts there."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill
        self.item, self.genre = nn.Embedding(40, 8), nn.Embedding(6, 8)
        self.score = nn.Sequential(nn.Linear(48, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(
        self,
        item: Tensor,
        items_values: Tensor,
        items_lengths: Tensor,
        genres_values: Tensor,
        genres_lengths: Tensor,
    ) -> Tensor:
        items_BH, present_BH = pad_ragged(items_values, items_lengths, 8, align="right")
        genres_BH, _ = pad_ragged(genres_values, genres_lengths, 8, align="left")
        keys = torch.cat([self.item(items_BH), self.genre(genres_BH)], dim=-1)
        query = torch.cat([self.item(item), self.genre(item % 6)], dim=-1)
        pairs = torch.cat([query.unsqueeze(1) * keys, keys, query.unsqueeze(1).expand_as(keys)], -1)
        score = self.score(pairs).squeeze(-1).masked_fill(~present_BH, self.fill)
        pooled = torch.bmm(score.softmax(1).unsqueeze(1), keys).squeeze(1)
        return pooled.nan_to_num(0.25).sum(1)


@pytest.mark.parametrize("fill", [-torch.inf, -1e9, 0.5])
def test_shares_over_two_joined_lists_of_different_lengths(fill: float) -> None:
    model_card = card("two", ids("item", 40), ragged("items", 40), ragged("genres", 6))
    model = seeded(lambda: Softmax(fill))
    made = fused(model_card, model)
    assert operators(made.bundle)["rankopt.masked_target_attention"] == 1
    assert_same_scores(model_card, model, made.bundle)


class Gate(nn.Module):
    """What looks like dice and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.alpha = nn.BatchNorm1d(16), nn.Parameter(torch.zeros(16))

    def forward(self, x_BN: Tensor) -> Tensor:
        gate = torch.sigmoid(self.norm(x_BN)) ** 2
        return x_BN * (self.alpha + gate * (1 - self.alpha))


def test_what_only_looks_like_dice_stays() -> None:
    model = padded_din("product")
    model.score[2] = Gate()
    made = apply_passes(make_bundle(padded_din_card(), model), FuseAttention())
    assert "rankopt.masked_target_attention" not in operators(made.bundle)
    assert any("not an MLP of candidate and id" in note for note in made.notes), made.notes
