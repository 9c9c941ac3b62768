"""fuse_interaction on the graph: every spelling of an interaction, and what is left alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.zoo import apply_passes, card, exact, features_of, largest_error, make_bundle, seeded
from rankopt.artifact.build import write_artifact
from rankopt.bundle import ModelBundle
from rankopt.kernels.build import load_kernels
from rankopt.models.card import ModelCard
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.fuse_interaction import FuseInteraction
from rankopt.passes.graph import arguments, constant
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.runtime import load_artifact

load_kernels()
CLOSE, INT8_CLOSE = 1e-4, 0.05
NUM_TABLES, DIM = 6, 8
NUM_FIELDS = NUM_TABLES + 1
Score = Callable[[Any, Tensor, list[Tensor]], Tensor]
DOT = torch.ops.rankopt.dot_interaction.default
SUM = torch.ops.rankopt.fm_interaction.default


class Fields(nn.Module):
    """A dense vector and six looked-up ones; `score` says what is made of them."""

    def __init__(self, score: Score, width: int = 1) -> None:
        super().__init__()
        self.bottom = nn.Linear(4, DIM)
        self.tables = nn.ModuleList(nn.Embedding(20, DIM) for _ in range(NUM_TABLES))
        self.top = nn.Linear(width, 1)
        self.places: Tensor
        self.register_buffer("lower", torch.tril_indices(NUM_FIELDS, NUM_FIELDS, offset=-1))
        self.register_buffer("upper", torch.triu_indices(NUM_FIELDS, NUM_FIELDS, offset=1))
        self.register_buffer("whole", torch.triu_indices(NUM_FIELDS, NUM_FIELDS, offset=0))
        self._score = score

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        vectors = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        result: Tensor = self._score(self, torch.relu(self.bottom(dense)), vectors)
        return result.flatten(1).sum(1) if result.dim() > 1 else result


def fields_card() -> ModelCard:
    columns = [f"c{index}" for index in range(NUM_TABLES)]
    return card(
        "fields",
        {"kind": "dense", "name": "dense", "columns": ["a", "b", "c", "d"]},
        {"kind": "ids", "name": "sparse", "columns": columns, "num_ids": 20},
    )


def stacked(dense: Tensor, vectors: list[Tensor]) -> Tensor:
    return torch.stack([dense, *vectors], dim=1)


def fuse(score: Score, width: int = 1) -> tuple[nn.Module, ModelBundle, ModelBundle, list[str]]:
    model = seeded(lambda: Fields(score, width))
    before = make_bundle(fields_card(), model)
    after = apply_passes(before, FuseEmbeddings(), FuseInteraction())
    for batch in (1, 2, 7, 130):
        features = features_of(before.card, batch)
        truth = exact(before.card, model, features)
        assert largest_error(after.bundle.run(features), truth) < CLOSE
    return model, before, after.bundle, after.notes


def calls(bundle: ModelBundle, target: Any) -> list[torch.fx.Node]:
    module = bundle.program.module(check_guards=False)
    return list(module.graph.find_nodes(op="call_function", target=target))


def targets(bundle: ModelBundle) -> set[str]:
    """Name the operators that make floats: fused lookups concatenate their ids."""
    nodes = bundle.program.module(check_guards=False).graph.nodes
    values = {node: node.meta.get("val") for node in nodes if node.op == "call_function"}
    floats = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()]
    return {str(node.target) for node in floats}


def lower_flat(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = torch.cat([dense.unsqueeze(1), torch.stack(vectors, 1)], 1)
    places = m.lower[0] * NUM_FIELDS + m.lower[1]
    pairs = torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, places)
    return m.top(torch.cat([dense, pairs], 1))


def upper_two_indices(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    product = torch.matmul(x, x.permute(0, 2, 1))
    return m.top(torch.cat((dense, product[:, m.upper[0], m.upper[1]]), dim=1))


def dlrm_lists(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    """As facebookresearch/dlrm writes it."""
    x = torch.cat([dense, *vectors], dim=1).view(dense.shape[0], -1, DIM)
    product = torch.bmm(x, torch.transpose(x, 1, 2))
    rows = torch.tensor([i for i in range(NUM_FIELDS) for j in range(i)])
    columns = torch.tensor([j for i in range(NUM_FIELDS) for j in range(i)])
    return m.top(torch.cat([dense, product[:, rows, columns]], dim=1))


def einsum_with_diagonal(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    product = torch.einsum("bid,bjd->bij", x, x)
    return m.top(torch.cat([dense, product[:, m.whole[0], m.whole[1]]], 1))


PAIRS = NUM_FIELDS * (NUM_FIELDS - 1) // 2


@pytest.mark.parametrize(
    ("score", "width", "kind"),
    [
        (lower_flat, DIM + PAIRS, (False, False)),
        (upper_two_indices, DIM + PAIRS, (True, False)),
        (dlrm_lists, DIM + PAIRS, (False, False)),
        (einsum_with_diagonal, DIM + PAIRS + NUM_FIELDS, (True, True)),
    ],
)
def test_a_dot_interaction_is_one_call_on_what_the_lookup_wrote(
    score: Score, width: int, kind: tuple[bool, bool]
) -> None:
    _, _, bundle, notes = fuse(score, width)
    (call,) = calls(bundle, DOT)
    before, fields, dim, upper, diagonal, _ = arguments(call)
    assert [len(before), len(fields), dim] == [1, 1, DIM]
    assert (upper, diagonal) == kind
    assert notes == []
    gone = ("bmm", "matmul", "einsum", "cat", "stack", "index")
    assert not [
        name for name in targets(bundle) if name.startswith(tuple(f"aten.{g}" for g in gone))
    ]


def test_what_stands_behind_the_pairs_stays_behind_them() -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        x = stacked(dense, vectors)
        pairs = torch.bmm(x, x.transpose(1, 2))[:, m.lower[0], m.lower[1]]
        return m.top(torch.cat([dense, vectors[0], pairs, vectors[3]], 1))

    _, _, bundle, _ = fuse(score, 3 * DIM + PAIRS)
    (call,) = calls(bundle, DOT)
    assert len(arguments(call)[0]) == 2
    (behind,) = call.users
    assert behind.target is torch.ops.aten.cat.default
    assert arguments(behind)[0].index(call) == 0
    assert len(arguments(behind)[0]) == 2


def test_pairs_alone_have_nothing_in_front() -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        x = stacked(dense, vectors)
        pairs = torch.bmm(x, x.transpose(1, 2))[:, m.lower[0], m.lower[1]]
        return m.top(pairs) + pairs.sum(1, keepdim=True)

    _, _, bundle, _ = fuse(score, PAIRS)
    (call,) = calls(bundle, DOT)
    assert arguments(call)[0] == []


def test_a_stack_that_something_else_reads_is_read_as_it_is() -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        x = stacked(dense, vectors)
        pairs = torch.bmm(x, x.transpose(1, 2))[:, m.lower[0], m.lower[1]]
        return m.top(torch.cat([x.flatten(1), pairs], 1))

    _, _, bundle, _ = fuse(score, NUM_FIELDS * DIM + PAIRS)
    (call,) = calls(bundle, DOT)
    assert [len(part) for part in arguments(call)[:2]] == [1, 1]


def inner_products(keepdim: bool) -> Score:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        """As deepctr's PNN writes it."""
        each = [vector.unsqueeze(1) for vector in [dense, *vectors]]
        pairs = list(itertools.combinations(range(NUM_FIELDS), 2))
        left = torch.cat([each[i] for i, _ in pairs], dim=1)
        right = torch.cat([each[j] for _, j in pairs], dim=1)
        inner = torch.sum(left * right, dim=2, keepdim=keepdim).flatten(1)
        return m.top(torch.cat([torch.cat(each, dim=1).flatten(1), inner], dim=1))

    return score


@pytest.mark.parametrize("keepdim", [False, True])
def test_inner_products_of_listed_pairs_are_a_dot_interaction(keepdim: bool) -> None:
    _, _, bundle, _ = fuse(inner_products(keepdim), NUM_FIELDS * DIM + PAIRS)
    (call,) = calls(bundle, DOT)
    assert arguments(call)[3] is True
    assert calls(bundle, torch.ops.aten.mul.Tensor) == []


def own_order(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    return m.top(torch.bmm(x, x.transpose(1, 2))[:, m.lower[0].flip(0), m.lower[1].flip(0)])


def all_products(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    return m.top(torch.bmm(x, x.transpose(1, 2)).flatten(1))


def self_attention(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    return m.top((torch.bmm(x, x.transpose(1, 2)).softmax(2) @ x).flatten(1))


@pytest.mark.parametrize(
    ("score", "width", "words"),
    [
        (own_order, PAIRS, "order of their own"),
        (all_products, NUM_FIELDS**2, "all products are read"),
        (self_attention, NUM_FIELDS * DIM, "all products are read"),
    ],
)
def test_products_that_are_no_triangle_are_left_alone(score: Score, width: int, words: str) -> None:
    _, _, bundle, notes = fuse(score, width)
    assert calls(bundle, DOT) == []
    assert any("left alone" in note and words in note for note in notes)


def two_sided(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    left, right = torch.stack(vectors[:3], 1), torch.stack(vectors[3:], 1)
    return m.top(torch.bmm(left, right.transpose(1, 2)).flatten(1)) + dense.sum(1, keepdim=True)


def some_pairs(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    left, right = torch.stack(vectors[:3], 1), torch.stack(vectors[3:], 1)
    return m.top((left * right).sum(2)) + dense.sum(1, keepdim=True)


@pytest.mark.parametrize(("score", "width"), [(two_sided, 9), (some_pairs, 3)])
def test_products_of_other_things_are_no_interaction(score: Score, width: int) -> None:
    model = seeded(lambda: Fields(score, width))
    bundle = apply_passes(make_bundle(fields_card(), model), FuseEmbeddings()).bundle
    applied = apply_passes(bundle, FuseInteraction())
    assert applied.bundle is bundle


def machine(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    return 0.5 * (x.sum(dim=1).square() - x.square().sum(dim=1)).sum(dim=1)


def machine_deepctr(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = torch.cat([vector.unsqueeze(1) for vector in [dense, *vectors]], 1)
    square_of_sum = torch.pow(torch.sum(x, dim=1, keepdim=True), 2)
    sum_of_square = torch.sum(x * x, dim=1, keepdim=True)
    return 0.5 * torch.sum(square_of_sum - sum_of_square, dim=2, keepdim=False)


def machine_rechub(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    total = torch.sum(torch.sum(x, dim=1) ** 2 - torch.sum(x**2, dim=1), dim=1, keepdim=True)
    return 0.5 * total


def machine_without_half(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    return (x.sum(1) ** 2 - (x**2).sum(1)).sum(1)


def machine_divided(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
    x = stacked(dense, vectors)
    return ((x.sum(1) ** 2 - (x**2).sum(1)) / 2).sum(1)


@pytest.mark.parametrize(
    ("score", "doubled"),
    [
        (machine, False),
        (machine_deepctr, False),
        (machine_rechub, False),
        (machine_without_half, True),
        (machine_divided, False),
    ],
)
def test_a_factorization_machine_is_one_call(score: Score, doubled: bool) -> None:
    _, _, bundle, notes = fuse(score)
    (call,) = calls(bundle, SUM)
    fields, dim, total, _ = arguments(call)
    assert [len(fields), dim, total] == [1, DIM, True]
    assert len(calls(bundle, torch.ops.aten.mul.Tensor)) == doubled
    assert not targets(bundle) & {"aten.sub.Tensor", "aten.stack.default"}
    assert notes == []


def test_pooling_of_a_neural_factorization_machine_keeps_its_columns() -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        x = stacked(dense, vectors)
        square_of_sum = torch.pow(torch.sum(x, dim=1, keepdim=True), 2)
        pooled = 0.5 * (square_of_sum - torch.sum(x * x, dim=1, keepdim=True))
        return m.top(pooled.flatten(1))

    _, _, bundle, _ = fuse(score, DIM)
    (call,) = calls(bundle, SUM)
    assert arguments(call)[2] is False


def test_a_machine_whose_parts_are_read_elsewhere_is_left_alone() -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        x = stacked(dense, vectors)
        total = x.sum(1)
        return 0.5 * (total.square() - x.square().sum(1)).sum(1) + m.top(total).squeeze(1)

    _, _, bundle, notes = fuse(score, DIM)
    assert calls(bundle, SUM) == []
    assert any("something else reads a part of it" in note for note in notes)


def test_scalars_are_too_short_for_a_machine() -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        x = stacked(dense, vectors)[:, :, :2]
        return 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1)

    _, _, bundle, notes = fuse(score)
    assert calls(bundle, SUM) == []
    assert any("too short" in note for note in notes)


def test_forms_choose_and_rows_per_thread_are_the_recipes() -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        x = stacked(dense, vectors)
        pairs = torch.bmm(x, x.transpose(1, 2))[:, m.lower[0], m.lower[1]]
        return m.top(torch.cat([dense, pairs], 1)).squeeze(1) + machine(m, dense, vectors)

    model = seeded(lambda: Fields(score, DIM + PAIRS))
    bundle = make_bundle(fields_card(), model)
    dots = apply_passes(bundle, FuseInteraction(forms=("dot",), rows_per_thread=7)).bundle
    assert [len(calls(dots, target)) for target in (DOT, SUM)] == [1, 0]
    assert arguments(calls(dots, DOT)[0])[-1] == 7
    both = apply_passes(bundle, FuseInteraction()).bundle
    assert [len(calls(both, target)) for target in (DOT, SUM)] == [1, 1]
    assert apply_passes(both, FuseInteraction()).bundle is both


def test_indices_that_are_left_over_are_dropped() -> None:
    _, before, after, _ = fuse(upper_two_indices, DIM + PAIRS)
    module = after.program.module(check_guards=False)
    kinds = {constant(module, node).dtype for node in module.graph.find_nodes(op="get_attr")}
    assert after.size_bytes <= before.size_bytes + 400
    assert "model.upper" not in after.constants
    assert torch.float32 in kinds


def test_the_artifact_scores_as_the_model_does_and_a_row_as_it_does_alone(tmp_path: Path) -> None:
    def score(m: Any, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        return lower_flat(m, dense, vectors).squeeze(1) + machine_deepctr(m, dense, vectors).sum(1)

    model = seeded(lambda: Fields(score, DIM + PAIRS))
    bundle = make_bundle(fields_card(), model)
    steps = (FuseEmbeddings(), FuseInteraction(), QuantizeDense(), ExportAoti())
    fused = apply_passes(bundle, *steps).bundle
    assert [len(calls(fused, target)) for target in (DOT, SUM)] == [1, 1]
    write_artifact(fused, tmp_path, control_size_bytes=bundle.size_bytes)
    artifact = load_artifact(tmp_path)
    for batch in (1, 2, 7, 513):
        features = features_of(bundle.card, batch)
        scores = artifact(features)
        assert largest_error(scores, exact(bundle.card, model, features)) < INT8_CLOSE
        first = {name: value[:1] for name, value in features.items()}
        assert torch.equal(artifact(first)["score"][0], scores["score"][0])
