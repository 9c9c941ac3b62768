"""Calls that write a concatenation: what they take in, what they leave, and that scores hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.lookups import check_scores
from passes.zoo import apply_passes, card, ids, make_bundle, ragged, seeded
from rankopt.bundle import ModelBundle
from rankopt.kernels.lookup import COPY, PlanRow, decode_plan
from rankopt.models.card import ModelCard
from rankopt.passes.base import Pass
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.graph import arguments, aten, constant
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.passes.table_batched import find_calls

FIELDS, DIM = 4, 8
Join = Callable[["Fields", list[Tensor], Tensor, Tensor], Tensor]


class Fields(nn.Module):
    """A row of each of some tables, read from columns of a matrix, and what is made of them."""

    def __init__(self, join: Join, width: int) -> None:
        super().__init__()
        self.join = join
        self.tables = nn.ModuleList(nn.Embedding(20, DIM) for _ in range(FIELDS))
        self.history = nn.EmbeddingBag(20, DIM, mode="mean")
        self.bottom = nn.Linear(3, DIM)
        self.top = nn.Linear(width, 1)

    def forward(
        self, dense: Tensor, sparse: Tensor, last_values: Tensor, last_lengths: Tensor
    ) -> Tensor:
        vectors = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        pooled = self.history(last_values, last_lengths.cumsum(0) - last_lengths)
        score: Tensor = self.top(self.join(self, vectors, pooled, dense))
        return score.squeeze(1)


def fields_card() -> ModelCard:
    return card(
        "fields",
        {"kind": "dense", "name": "dense", "columns": ["a", "b", "c"]},
        {"kind": "ids", "name": "sparse", "columns": ["p", "q", "r", "s"], "num_ids": 20},
        ragged("last", 20, max_length=6),
    )


def stacked(m: Fields, vectors: list[Tensor], pooled: Tensor, dense: Tensor) -> Tensor:
    bottom = m.bottom(dense).relu()
    together = torch.cat([bottom.unsqueeze(1), torch.stack([*vectors, pooled], dim=1)], dim=1)
    return together.flatten(1)


def twice(m: Fields, vectors: list[Tensor], pooled: Tensor, dense: Tensor) -> Tensor:
    """As a factorization machine beside an MLP: the same vectors joined in two ways."""
    narrow = [vector.unsqueeze(1) for vector in vectors]
    machine = torch.cat(narrow, dim=1)
    crossed = machine.sum(1).square() - machine.square().sum(1)
    deep = torch.cat([torch.cat(narrow, dim=-1).flatten(1), pooled, dense], dim=-1)
    return torch.cat([deep.tanh(), crossed], dim=1)


def attended(m: Fields, vectors: list[Tensor], pooled: Tensor, dense: Tensor) -> Tensor:
    """A piece depends on a lookup, so a call that wrote them all would wait for itself."""
    weight = torch.sigmoid((vectors[0] * pooled).sum(1, keepdim=True))
    return torch.cat([*vectors, pooled * weight, dense], dim=1)


def repeated(m: Fields, vectors: list[Tensor], pooled: Tensor, dense: Tensor) -> Tensor:
    return torch.cat([vectors[0], vectors[1], vectors[0], pooled], dim=1)


def in_rows(m: Fields, vectors: list[Tensor], pooled: Tensor, dense: Tensor) -> Tensor:
    """Behind each other as rows: no row of the result holds them side by side."""
    return torch.cat([vectors[0], vectors[1]], dim=0)[: dense.shape[0]] * pooled


JOINS: dict[str, tuple[Join, int]] = {
    "stacked": (stacked, (FIELDS + 2) * DIM),
    "twice": (twice, (FIELDS + 2) * DIM + 3),
    "attended": (attended, (FIELDS + 1) * DIM + 3),
    "repeated": (repeated, 4 * DIM),
    "in-rows": (in_rows, DIM),
}


def made(name: str, *steps: Pass) -> tuple[nn.Module, ModelBundle]:
    join, width = JOINS[name]
    model = seeded(lambda: Fields(join, width))
    return model, apply_passes(make_bundle(fields_card(), model), *steps).bundle


def plans_of(bundle: ModelBundle) -> list[list[PlanRow]]:
    module = bundle.program.module(check_guards=False)
    found = [constant(module, arguments(call)[1]) for call in find_calls(module)]
    return [decode_plan(plan) for plan in found if plan is not None]


def num_joins(bundle: ModelBundle) -> int:
    graph = bundle.program.module(check_guards=False).graph
    joins = (aten.cat.default, aten.stack.default)
    return sum(len(graph.find_nodes(op="call_function", target=target)) for target in joins)


@pytest.mark.parametrize("name", JOINS)
def test_scores_hold(name: str) -> None:
    model, bundle = made(name, FuseEmbeddings())
    check_scores(model, bundle)


def test_a_call_writes_the_concatenation_with_what_stands_beside_the_rows() -> None:
    _, bundle = made("stacked", FuseEmbeddings())
    (plan,) = plans_of(bundle)
    assert [row.mode == COPY for row in plan] == [True] + [False] * (FIELDS + 1)
    assert [row.out for row in plan] == [DIM * index for index in range(FIELDS + 2)]
    assert num_joins(bundle) == 0


def test_a_second_concatenation_of_the_same_rows_reads_the_first() -> None:
    _, bundle = made("twice", FuseEmbeddings())
    (plan,) = plans_of(bundle)
    assert len(plan) == FIELDS + 2
    assert num_joins(bundle) == 1  # that of what was computed


def test_a_piece_that_depends_on_a_lookup_is_left_to_the_graph() -> None:
    _, bundle = made("attended", FuseEmbeddings())
    (plan,) = plans_of(bundle)
    assert all(row.mode != COPY for row in plan)
    assert num_joins(bundle) == 1


def test_ids_are_read_from_the_columns_of_the_input() -> None:
    _, bundle = made("stacked", FuseEmbeddings())
    (plan,) = plans_of(bundle)
    assert [row.column for row in plan[1:-1]] == [0, 1, 2, 3]
    assert len({row.source for row in plan[1:-1]}) == 1
    graph = bundle.program.module(check_guards=False).graph
    assert not graph.find_nodes(op="call_function", target=aten.select.int)


class Cut(nn.Module):
    """Ids cut out of a matrix of floats in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, DIM) for _ in range(6))
        self.bag = nn.EmbeddingBag(20, DIM, mode="sum")

    def forward(self, x: Tensor, one: Tensor) -> Tensor:
        whole = x.long()
        first, second, *_ = whole.unbind(1)
        pieces = torch.split(whole, 2, dim=1)
        found = [
            self.tables[0](first),
            self.tables[1](second),
            self.tables[2](x[:, -1].long()),
            self.tables[3](whole[:, 2:3]).squeeze(1),
            self.tables[4](pieces[1].to(torch.int32)[:, 1]),
            self.tables[5](one.reshape(-1).long()),
            self.bag(whole[:, 1:4]),
        ]
        return torch.cat(found, 1).sum(1)


def test_ids_are_followed_through_slices_casts_and_splits() -> None:
    columns = [{"name": f"c{index}", "num_ids": 20} for index in range(5)]
    cut_card = card(
        "cut",
        {"kind": "packed", "name": "x", "columns": columns},
        {**ids("one", 20), "keep_width": True, "dtype": "int32"},
    )
    model = seeded(Cut)
    fused = apply_passes(make_bundle(cut_card, model), FuseEmbeddings()).bundle
    check_scores(model, fused)
    (plan,) = plans_of(fused)
    assert [(row.column, row.length) for row in plan] == [
        *((0, 1), (1, 1), (4, 1), (2, 1), (3, 1), (0, 1), (1, 3)),
    ]
    assert {row.source for row in plan if row is not plan[5]} == {plan[0].source}


@pytest.mark.parametrize("name", ["stacked", "twice"])
def test_quantising_afterwards_points_the_plan_at_the_packed_rows(name: str) -> None:
    model, bundle = made(name, FuseEmbeddings(), QuantizeEmbeddings())
    (plan,) = plans_of(bundle)
    assert {row.storage for row in plan if row.mode != COPY} == {2}
    fused: Any = made(name, FuseEmbeddings())[1]
    assert bundle.size_bytes < fused.size_bytes
    check_scores(model, bundle, allowed=0.1)
