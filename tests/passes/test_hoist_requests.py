"""hoist_requests: scores of the plain form, the operations that are left, what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from passes.requests_zoo import (
    LARGE_DIM,
    LARGE_IDS,
    NUM_IDS,
    REQUEST_MODELS,
    SHARED,
    BatchMean,
    MixedLists,
    both_forms,
    bundle_for,
    columns,
    dense,
    large_din,
    request_bundle,
    two_scores,
)
from passes.zoo import card, context, ids, ragged, seeded
from rankopt.artifact.constants import stored_bytes, write_constants
from rankopt.artifact.contract import contract_of
from rankopt.artifact.requests import named_for_requests
from rankopt.bundle import ModelBundle
from rankopt.capture.requests import REQUEST_INDEX, one_request_a_row
from rankopt.environment import collect_environment
from rankopt.kernels.dense_choice import DenseLayer
from rankopt.models.hstu import HSTU
from rankopt.passes import dense_choice
from rankopt.passes.base import Pass
from rankopt.passes.forms import REQUESTS, apply_to_forms
from rankopt.passes.fuse_attention import FuseAttention
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.graph import aten
from rankopt.passes.hoist_requests import HoistRequests, largest_difference
from rankopt.passes.hoisting.count import operations_left
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.recipe import parse_recipe

SIZES = ([1], [6], [2, 0, 5, 1])


@cache
def plain_bundle(name: str) -> ModelBundle:
    return request_bundle(name)


@cache
def hoisted_bundle(name: str) -> ModelBundle:
    return hoisted(plain_bundle(name))


def hoisted(bundle: ModelBundle) -> ModelBundle:
    about = context()
    result = HoistRequests().apply(bundle, about)
    assert result.requests is not None, about.notes
    return result


def form_of(bundle: ModelBundle) -> ModelBundle:
    assert bundle.requests is not None
    return bundle.requests


def linear_rows(bundle: ModelBundle) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map a linear layer's weight to the symbol of its input's first dim, and its shape."""
    found = {}
    graph_module = form_of(bundle).program.module(check_guards=False)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight = node.args[0].meta["val"], node.args[1]
        path = str(weight.target).removeprefix("model.")
        found[path] = (str(x.shape[0]), tuple(weight.meta["val"].shape))
    return found


def symbol_of(bundle: ModelBundle, name: str) -> str:
    form = form_of(bundle)
    nodes = form.program.module(check_guards=False).graph.find_nodes(op="placeholder")
    index = form.input_names.index(name)
    return str(nodes[index].meta["val"].shape[0])


@pytest.mark.parametrize("name", REQUEST_MODELS)
@pytest.mark.parametrize("fill", [0.0, 0.5, 1.0])
def test_scores_are_those_of_the_plain_form(name: str, fill: float) -> None:
    bundle = hoisted_bundle(name)
    for sizes in SIZES:
        plain, requests = both_forms(bundle.card, sizes, seed=len(sizes), fill=fill)
        expected, scores = bundle.run(plain), form_of(bundle).run(requests)
        for output, score in scores.items():
            torch.testing.assert_close(score, expected[output], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["din", "hstu", "dlrm"])
def test_candidates_may_come_in_any_order(name: str) -> None:
    bundle = hoisted_bundle(name)
    _, requests = both_forms(bundle.card, [3, 4, 2])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    shuffled = dict(requests)
    for entry in contract_of(bundle.card):
        if not entry.request_level and entry.role in ("ids", "dense"):
            shuffled[entry.name] = requests[entry.name][order]
    if name == "din":  # the candidates' lists keep their order: make them equal instead
        shuffled["genres.values"] = requests["genres.values"][:9] * 0 + 3
        shuffled["genres.lengths"] = torch.ones(9, dtype=torch.int64)
        requests = {**requests, **{k: v for k, v in shuffled.items() if k.startswith("genres")}}
    shuffled[REQUEST_INDEX] = requests[REQUEST_INDEX][order]
    expected = form_of(bundle).run(requests)["score"]
    torch.testing.assert_close(form_of(bundle).run(shuffled)["score"], expected[order])


def test_a_score_of_the_request_alone_and_a_layer_on_both_sides() -> None:
    bundle = hoisted(bundle_for(*two_scores()))
    plain, requests = both_forms(bundle.card, [2, 3])
    expected, scores = bundle.run(plain), form_of(bundle).run(requests)
    assert list(scores) == ["a", "b"]
    for output, score in scores.items():
        torch.testing.assert_close(score, expected[output])
    assert set(linear_rows(bundle)) == {"shared.weight"}


def test_dins_first_layer_is_split_into_query_key_and_their_product() -> None:
    bundle = hoisted_bundle("din")
    layers = linear_rows(bundle)
    split = {name: rows for name, rows in layers.items() if name.startswith("attention.score.0")}
    requests, candidates = (symbol_of(bundle, name) for name in ("user", "item"))
    assert sorted(rows for rows, _ in split.values()) == sorted([requests, candidates, candidates])
    assert {shape for _, shape in split.values()} == {(10, 8)}
    score = plain_bundle("din").constants["model.attention.score.0.weight"].double()
    query, key, apart, product = score.split(8, dim=1)
    constants = form_of(bundle).constants
    of_requests = [name for name, (rows, _) in split.items() if rows == requests]
    made = constants[f"model.{of_requests[0]}"].double()
    torch.testing.assert_close(made, key - apart, atol=1e-6, rtol=1e-6)
    others = [constants[f"model.{n}"].double() for n in split if n not in of_requests]
    for expected in (query + apart, product):
        assert any(torch.allclose(other, expected, atol=1e-6) for other in others)


def test_hstus_history_is_encoded_once_per_request_in_every_layer() -> None:
    bundle = hoisted_bundle("hstu")
    graph = form_of(bundle).program.graph_module.graph
    candidates = symbol_of(bundle, "item")
    sequences = [
        node.meta["val"].shape
        for node in graph.find_nodes(op="call_function", target=aten.linear.default)
        if str(node.meta["val"].shape[0]) == candidates and node.meta["val"].dim() == 3
    ]
    assert sequences
    assert all(shape[1] == 1 for shape in sequences)
    products = graph.find_nodes(op="call_function", target=torch.ops.rankopt.request_matmul.default)
    assert len(products) == 2 * 3  # keys and values of three layers


def test_operations_left_are_counted_from_the_shapes() -> None:
    bundle = hoisted_bundle("dlrm")
    left, before = operations_left(bundle, form_of(bundle), 100)
    # bottom 3-16-8; 6 fields of which 4 are the request's; top 8 + 15 - 24 - 16 - 1.
    bottom, top = 3 * 16 + 16 * 8, 24 * 16 + 16
    assert before == 100 * (bottom + 6 * 6 * 8 + 23 * 24 + top)
    per_request = bottom + 4 * 4 * 8 + (8 + 6) * 24
    # Pairs of an ad field and a field of the request lie on both sides of the diagonal.
    blocks = 2 * 2 * 8 + 2 * (2 * 4 * 8)
    assert left == per_request + 100 * (blocks + 9 * 24 + top)


@pytest.mark.parametrize(("length", "least"), [(32, 20.0), (128, 80.0)])
def test_a_long_history_leaves_few_operations(length: int, least: float) -> None:
    model = seeded(lambda: HSTU(NUM_IDS, embedding_dim=16, history_length=length, num_blocks=2))
    history = ragged("history", NUM_IDS, max_length=length, **SHARED)
    bundle = hoisted(bundle_for(card("hstu", ids("item", NUM_IDS), history), model))
    left, before = operations_left(bundle, form_of(bundle), 500)
    assert before / left > least


def test_cross_layers_share_the_first_product() -> None:
    layers = linear_rows(hoisted_bundle("dcnv2"))
    shares = [name for name in layers if name.startswith("model.cross.down.0")]
    assert len(shares) == 2
    assert not [name for name in layers if name.startswith("model.cross.down.1_")]


def test_rows_that_depend_on_each_other_are_left_alone() -> None:
    model_card = card("mean", {**ids("user", NUM_IDS), **SHARED}, ids("ad", NUM_IDS))
    bundle = bundle_for(model_card, seeded(BatchMean))
    about = context()
    assert HoistRequests().apply(bundle, about) is bundle
    assert "depend on each other" in about.notes[0]


def test_lists_that_one_operator_reads_together_are_left_alone() -> None:
    lists = (ragged("tags", NUM_IDS, max_length=4, **SHARED), ragged("own", NUM_IDS, max_length=4))
    bundle = bundle_for(card("mixed", *lists), seeded(MixedLists))
    about = context()
    assert HoistRequests().apply(bundle, about) is bundle
    assert "are read together" in about.notes[0]


@pytest.mark.parametrize("marked", [(False, False), (True, True)])
def test_a_card_that_marks_nothing_or_everything_is_a_problem(marked: tuple[bool, bool]) -> None:
    inputs = [
        {**item, "request_level": level}
        for item, level in zip((dense(), columns("ad", 2)), marked, strict=True)
    ]
    model_card = card("flat", *inputs)
    (problem,) = HoistRequests().check(collect_environment(), model_card)
    assert "request_level" in str(problem)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(5, 1)

        def forward(self, dense: torch.Tensor, ad: torch.Tensor) -> torch.Tensor:
            score: torch.Tensor = self.top(torch.cat([dense, ad.float()], dim=1))
            return score.squeeze(1)

    about = context()
    bundle = bundle_for(model_card, seeded(Flat))
    assert HoistRequests().apply(bundle, about) is bundle
    assert "not hoisted" in about.notes[0]


def test_it_stands_before_the_passes_that_pick_other_arithmetic() -> None:
    raw = {
        "name": "r",
        "passes": [{"quantize_dense": {}}, {"hoist_requests": {}}, {"export_aoti": {}}],
    }
    problems = parse_recipe(raw, where="r.yaml").check(collect_environment())
    assert any("must stand before" in str(problem) for problem in problems)


def test_both_forms_share_the_arithmetic_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def times(layer: DenseLayer, num_rows: int) -> dict[str, float]:
        asked.append(num_rows)
        # Every other question has another answer.
        fp16 = 0.5 if len(asked) % 4 < 2 else 2.0
        return {"int8": 1.0, "fp16": fp16, "fp32": 3.0, "fbgemm": 3.0}

    monkeypatch.setattr(dense_choice, "relative_times", times)
    about = context()
    bundle = hoisted_bundle("dlrm")
    bundle = apply_to_forms(QuantizeDense(backend="auto", min_inputs=1), bundle, about)
    other = form_of(bundle)
    shared = bundle.arithmetic.keys() & other.arithmetic.keys()
    assert shared
    assert all(bundle.arithmetic[layer] == other.arithmetic[layer] for layer in shared)
    assert about.chosen.keys() == bundle.arithmetic.keys() | other.arithmetic.keys()
    assert len(asked) == 2 * len(about.chosen)


@pytest.mark.parametrize("name", ["din", "dlrm"])
def test_passes_behind_it_rewrite_both_forms(name: str) -> None:
    bundle = hoisted_bundle(name)
    about = context()
    for step in (FuseEmbeddings(), QuantizeEmbeddings(), QuantizeDense(min_inputs=1)):
        bundle = apply_to_forms(step, bundle, about)
    targets = {str(node.target) for node in form_of(bundle).program.graph.nodes}
    assert "rankopt.linear_int8.default" in targets
    assert "aten.linear.default" not in targets
    plain, requests = both_forms(bundle.card, [3, 4])
    expected, scores = bundle.run(plain)["score"], form_of(bundle).run(requests)["score"]
    # Split layers round other numbers; the tables are the same.
    exact = plain_bundle(name).run(plain)["score"]
    allowed = 4 * float((expected - exact).abs().max()) + 0.02 * float(exact.std())
    assert float((scores - expected).abs().max()) < allowed


@pytest.mark.parametrize("name", ["din", "dlrm"])
def test_static_activations_are_calibrated_in_both_forms(name: str) -> None:
    bundle = hoisted_bundle(name)
    about = context()
    step = QuantizeDense(min_inputs=1, activation_bits=8, activations="static")
    bundle = apply_to_forms(step, bundle, about)
    peaks = [
        {n: float(v) for n, v in form.constants.items() if n.endswith("peak")}
        for form in (bundle, form_of(bundle))
    ]
    shared = peaks[0].keys() & peaks[1].keys()
    assert shared
    for layer in shared:
        assert peaks[0][layer] == pytest.approx(peaks[1][layer], rel=1e-4)
    assert any(note.startswith(REQUESTS) and "static scale up to" in note for note in about.notes)
    # Scores of the rows that the scales are of: beyond them values are cut off.
    rows = bundle.sample
    expected = bundle.run(rows)["score"]
    scores = form_of(bundle).run(one_request_a_row(rows, bundle.card))["score"]
    exact = plain_bundle(name).run(rows)["score"]
    allowed = 4 * float((expected - exact).abs().max()) + 0.02 * float(exact.std())
    assert float((scores - expected).abs().max()) < allowed


def test_tables_are_stored_once_where_both_forms_join_the_same_lookups() -> None:
    bundle = hoisted_bundle("dlrm")
    for step in (FuseEmbeddings(), QuantizeEmbeddings()):
        bundle = apply_to_forms(step, bundle, context())
    mine, other = bundle.constants, form_of(bundle).constants
    assert bundle.batches
    for store in bundle.batches:
        assert torch.equal(mine[store], other[store])


STEPS: dict[str, tuple[Pass, ...]] = {
    "fused": (FuseEmbeddings(),),
    "fused in two steps": (
        FuseEmbeddings(forms=("bag",)),
        FuseEmbeddings(forms=("single", "sequence")),
    ),
    "quantised": (QuantizeEmbeddings(),),
    "fused and quantised": (FuseEmbeddings(), QuantizeEmbeddings()),
    "packed, fused and quantised": (FuseAttention(), FuseEmbeddings(), QuantizeEmbeddings()),
}


@cache
def large_din_bundle() -> ModelBundle:
    return hoisted(bundle_for(*large_din()))


@pytest.mark.parametrize("steps", STEPS)
def test_every_table_of_din_is_stored_once(steps: str, tmp_path: Path) -> None:
    bundle = large_din_bundle()
    for step in STEPS[steps]:
        bundle = apply_to_forms(step, bundle, context())
    mine, other = bundle.constants, named_for_requests(form_of(bundle).constants)
    # The item table, two of users, genres; all layers of both forms take less than one of them.
    quantised = any(isinstance(step, QuantizeEmbeddings) for step in STEPS[steps])
    table = LARGE_IDS * (LARGE_DIM + 4 if quantised else LARGE_DIM * 4)
    assert 4 * table < stored_bytes(write_constants(mine | other, tmp_path / "both")) < 5 * table
    assert bundle.size_bytes < 5 * table


def test_a_form_reads_the_tables_that_the_plain_one_joined() -> None:
    plain = hoisted_bundle("din")
    bundle = apply_to_forms(FuseEmbeddings(), plain, context())
    ((store, batch),) = bundle.batches.items()
    names = {slot.name for slot in batch.slots}
    assert "item" not in names  # the plain form looks it up alone, once as rows and once as lists
    assert form_of(bundle).batches == {store: batch}
    assert torch.equal(form_of(bundle).constants[store], bundle.constants[store])
    _, requests = both_forms(bundle.card, [3, 4])
    expected, scores = form_of(plain).run(requests), form_of(bundle).run(requests)
    assert torch.equal(scores["score"], expected["score"])


@pytest.mark.parametrize("name", ["din", "hstu"])
def test_attention_is_packed_in_the_plain_form_and_left_padded_in_the_other(name: str) -> None:
    bundle, about = hoisted_bundle(name), context()
    packed = apply_to_forms(FuseAttention(), bundle, about)
    assert packed is not bundle
    assert any(note.startswith(f"{REQUESTS}history: stays padded") for note in about.notes)
    plain, requests = both_forms(bundle.card, [2, 0, 5])
    expected, score = packed.run(plain)["score"], form_of(packed).run(requests)["score"]
    torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-5)


def test_a_selector_that_only_the_plain_form_has_is_noted() -> None:
    bundle = hoisted_bundle("dlrm")
    rules = [{"select": "model.top.0", "use": False}]
    about = context()
    step = QuantizeDense(min_inputs=1, rules=rules)
    changed = apply_to_forms(step, bundle, about)
    assert changed is not bundle
    assert any(note.startswith(REQUESTS) for note in about.notes)


def test_nan_of_a_request_stays_with_its_candidates() -> None:
    bundle = hoisted_bundle("dlrm")
    _, requests = both_forms(bundle.card, [2, 3])
    requests["dense"][0] = torch.nan
    scores = form_of(bundle).run(requests)["score"]
    assert scores.isnan().tolist() == [True, True, False, False, False]


def test_the_largest_difference_sees_a_wrong_form() -> None:
    bundle = hoisted_bundle("dlrm")
    other = hoisted(
        bundle_for(plain_bundle("dlrm").card, seeded(REQUEST_MODELS["dlrm"][1], seed=8))
    )
    assert largest_difference(bundle, form_of(bundle)) < 1e-5
    assert largest_difference(bundle, form_of(other)) > 1e-3
