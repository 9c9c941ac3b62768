"""The bundle: exported once, rewritten on copies, dims dynamic, each weight counted once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from artifact.workshop import bundle_of
from passes.zoo import (
    BATCHES,
    FILLS,
    LONGEST,
    MODELS,
    Mlp,
    Pooled,
    bag_card,
    card,
    exact,
    features_of,
    largest_error,
    make_bundle,
    mlp_card,
    ragged,
    seeded,
)
from rankopt.bundle import build_bundle
from rankopt.capture.export import MAX_BATCH, dynamic_shapes, max_ids_per_row
from rankopt.errors import ExportError
from rankopt.models.card import KjtInput, ModelCard


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_an_exported_graph_scores_as_the_module_at_every_size(name: str, batch: int) -> None:
    model_card, model, bundle = bundle_of(name)
    for fill in FILLS:
        features = features_of(model_card, batch, fill)
        assert largest_error(bundle.run(features), exact(model_card, model, features)) < 2e-5


def test_run_returns_named_scores_of_the_sample_that_nobody_shares() -> None:
    _, _, bundle = bundle_of("dlrm")
    first = bundle.run()
    assert list(first) == ["score"]
    assert first["score"].shape == (6,)
    kept = first["score"].clone()
    first["score"].zero_()
    assert torch.equal(bundle.run()["score"], kept)


def test_size_counts_parameters_and_tables() -> None:
    model_card = mlp_card(4)
    bundle = make_bundle(model_card, seeded(lambda: Mlp(4, 8, 1)))
    assert bundle.size_bytes == 4 * (4 * 8 + 8 + 8 * 1 + 1)


class Tied(nn.Module):
    """One table under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(30, 8)
        self.bag = nn.EmbeddingBag(30, 8, mode="sum")
        self.bag.weight = self.rows.weight

    def forward(self, bag_values: Tensor, bag_lengths: Tensor, recent: Tensor) -> Tensor:
        starts = bag_lengths.cumsum(0) - bag_lengths
        score: Tensor = self.bag(bag_values, starts).sum(1) + self.rows(recent).sum((1, 2))
        return score


def tied_card() -> ModelCard:
    return card("tied", ragged("bag", 30), ragged("recent", 30, layout="padded", max_length=5))


def test_a_table_with_two_names_counts_once() -> None:
    model_card = tied_card()
    assert make_bundle(model_card, seeded(Tied)).size_bytes == 30 * 8 * 4


def test_an_edit_leaves_the_bundle_it_came_from_alone() -> None:
    model_card, _, bundle = bundle_of("dlrm")
    before = bundle.run()["score"]

    def rewrite(module: GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.replace_all_uses_with(node.all_input_nodes[0])

    edited = bundle.edit(rewrite, provided=frozenset({"no_relu"}))
    assert not torch.equal(edited.run()["score"], before)
    assert torch.equal(bundle.run()["score"], before)
    assert edited.provided == {"no_relu"}
    assert bundle.provided == frozenset()
    for batch in BATCHES:
        assert edited.run(features_of(model_card, batch))["score"].shape == (batch,)


def test_an_edit_drops_weights_that_nothing_reads_any_more() -> None:
    model_card = mlp_card(4)
    bundle = make_bundle(model_card, seeded(lambda: Mlp(4, 8, 8, 1)))

    def skip_middle(module: GraphModule) -> None:
        linears = module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        linears[1].replace_all_uses_with(linears[1].all_input_nodes[0])

    edited = bundle.edit(skip_middle)
    assert edited.size_bytes == bundle.size_bytes - 4 * (8 * 8 + 8)


@pytest.mark.parametrize("num_ids", [0, 1])
def test_a_sample_with_hardly_any_ids_freezes_no_dim(num_ids: int) -> None:
    """The first rows of a history sorted by time are often empty."""
    model_card = bag_card(20)
    model = seeded(lambda: Pooled(20, 8, mode="sum"))
    lengths = torch.zeros(6, dtype=torch.int64)
    lengths[2] = num_ids
    sample = {"bag.values": torch.full((num_ids,), 4), "bag.lengths": lengths}
    bundle = build_bundle(model_card, model, sample)
    for batch in BATCHES:
        for fill in FILLS:
            features = features_of(model_card, batch, fill)
            assert largest_error(bundle.run(features), exact(model_card, model, features)) < 1e-4


def test_a_sample_whose_number_of_ids_is_the_number_of_rows_ties_no_dims() -> None:
    model_card = bag_card(20)
    model = seeded(lambda: Pooled(20, 8, mode="sum"))
    sample = {"bag.values": torch.arange(6), "bag.lengths": torch.ones(6, dtype=torch.int64)}
    bundle = build_bundle(model_card, model, sample)
    features = features_of(model_card, 7, 0.3)
    assert largest_error(bundle.run(features), exact(model_card, model, features)) < 1e-4


class Branching(nn.Module):
    def forward(self, dense: Tensor) -> Tensor:
        if float(dense.sum()) > 0:
            return dense.sum(dim=1)
        return dense.mean(dim=1)


class FixedBatch(nn.Module):
    def forward(self, dense: Tensor) -> Tensor:
        return dense.reshape(6, 4).sum(dim=1)


@pytest.mark.parametrize("module", [Branching, FixedBatch])
def test_a_model_that_cannot_be_exported_is_refused_with_its_line_and_advice(
    module: type[nn.Module],
) -> None:
    told = r"torch\.export refused the model(.|\n)*test_bundle\.py:\d+(.|\n)*next: "
    with pytest.raises(ExportError, match=told):
        make_bundle(mlp_card(4), module())


def test_dims_are_bounded_by_the_card() -> None:
    model_card, _, _ = bundle_of("bags")
    shapes = dynamic_shapes(model_card)
    assert len(shapes) == len(model_card.tensor_names)
    (values, lengths, *_) = shapes
    assert values[0].min == 0
    assert values[0].max == 3 * LONGEST * MAX_BATCH
    assert lengths[0] is not values[0]
    first = model_card.inputs[0]
    assert isinstance(first, KjtInput)
    assert max_ids_per_row(first) == 3 * LONGEST
