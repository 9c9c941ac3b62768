"""Bags on parts of an input of lists: read where they lie, with no split, number or check left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from artifact.workshop import bundle_of, loaded
from passes.lookups import CLOSE
from passes.zoo import (
    SIZES,
    apply_passes,
    bag_card,
    card,
    exact,
    features_of,
    largest_error,
    make_bundle,
    seeded,
)
from rankopt.bundle import ModelBundle
from rankopt.errors import ContractError
from rankopt.kernels.lookup import PlanRow, decode_plan
from rankopt.models.card import ModelCard
from rankopt.models.dlrm_torchrec import DLRMTorchrec
from rankopt.passes import table_batched
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.graph import arguments, constant
from rankopt.passes.table_batched import find_calls

KEYS, NUM_IDS = ["a", "b", "c"], [30, 20, 25]
SCALARS = (
    "item",
    "_local_scalar_dense",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)


def operators(bundle: ModelBundle) -> Counter[str]:
    nodes = bundle.program.graph.nodes
    names = (str(n.target).removeprefix("aten.") for n in nodes if n.op == "call_function")
    return Counter(name.partition(".")[0] for name in names)


def num_scalars(bundle: ModelBundle) -> int:
    found = operators(bundle)
    return sum(found[name] for name in SCALARS)


def calls(bundle: ModelBundle) -> list[tuple[list[PlanRow], int]]:
    """Return the plan of every call, and how many inputs it reads."""
    module = bundle.program.module(check_guards=False)
    found = []
    for node in find_calls(module):
        plan = constant(module, arguments(node)[1])
        assert plan is not None
        found.append((decode_plan(plan), len(arguments(node)[2])))
    return found


def kjt_card(*, max_length: int = 3, dense: bool = False) -> ModelCard:
    features = [
        {"key": key, "column": key, "num_ids": num_ids, "max_length": max_length}
        for key, num_ids in zip(KEYS, NUM_IDS, strict=True)
    ]
    sparse = {"kind": "kjt", "name": "sparse", "features": features}
    if not dense:
        return card("keyed", sparse)
    return card("keyed", {"kind": "dense", "name": "dense", "columns": ["x", "y"]}, sparse)


def check_equal(
    before: ModelBundle, after: ModelBundle, model: nn.Module, patch: pytest.MonkeyPatch
) -> None:
    """Compare with the module, and bit for bit with a call that reads the parts."""
    patch.setattr(table_batched, "find_list_inputs", lambda *_: [])
    parts = apply_passes(before, FuseEmbeddings()).bundle
    assert all(not row.groups for plan, _ in calls(parts) for row in plan)
    for batch, fill in SIZES:
        features = features_of(before.card, batch, fill)
        scores = after.run(features)
        assert largest_error(scores, exact(before.card, model, features)) < CLOSE
        for name, score in parts.run(features).items():
            assert torch.equal(score, scores[name]), f"batch {batch}, fill {fill}"


@pytest.mark.parametrize("max_length", [1, 3])
def test_a_dlrm_of_torchrec_reads_values_and_lengths_alone(
    max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {"num_dense": 2, "embedding_dim": 4}
    model = seeded(lambda: DLRMTorchrec(KEYS, NUM_IDS, bottom_mlp=(5,), top_mlp=(6,), **shape))
    before = make_bundle(kjt_card(max_length=max_length, dense=True), model)
    assert num_scalars(before) > 0
    fused = apply_passes(before, FuseEmbeddings()).bundle
    assert num_scalars(fused) == 0
    found = operators(fused)
    assert not {name for name in found if "split" in name or "cumsum" in name}
    ((plan, num_inputs),) = calls(fused)
    assert [(row.groups, row.column) for row in plan if row.groups] == [(3, 0), (3, 1), (3, 2)]
    assert num_inputs == 3  # what the bottom layers give, values, lengths
    check_equal(before, fused, model, monkeypatch)


def test_tables_of_all_kinds_read_values_lengths_and_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model, before = bundle_of("bags")
    fused = apply_passes(before, FuseEmbeddings()).bundle
    assert num_scalars(fused) == 0
    rows = [row for plan, _ in calls(fused) for row in plan]
    assert sorted((row.groups, row.column, row.weights >= 0) for row in rows) == [
        (2, 0, True),
        (2, 1, True),
        (3, 0, False),
        (3, 1, False),
        (3, 2, False),
    ]
    check_equal(before, fused, model, monkeypatch)


class Keyed(nn.Module):
    """A score made of a KeyedJaggedTensor and three tables."""

    def __init__(self, score: Callable[[Any, KeyedJaggedTensor], Tensor]) -> None:
        super().__init__()
        self.score = score
        self.bags = nn.ModuleDict(
            {
                key: nn.EmbeddingBag(num_ids, 4, mode="sum", include_last_offset=True)
                for key, num_ids in zip(KEYS, NUM_IDS, strict=True)
            }
        )

    def pooled(self, key: str, lists: Any) -> Tensor:
        pooled: Tensor = self.bags[key](lists.values(), lists.offsets())
        return pooled

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        return self.score(self, sparse)


def by_key(model: Keyed, sparse: KeyedJaggedTensor) -> Tensor:
    return torch.cat([model.pooled(key, sparse[key]) for key in reversed(KEYS)], 1).sum(1)


def some_keys(model: Keyed, sparse: KeyedJaggedTensor) -> Tensor:
    lists = sparse.to_dict()
    return torch.cat([model.pooled(key, lists[key]) for key in ("c", "a")], 1).sum(1)


@pytest.mark.parametrize("score", [by_key, some_keys])
def test_other_ways_to_take_a_key_are_known(
    score: Callable[[Any, KeyedJaggedTensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(lambda: Keyed(score))
    before = make_bundle(kjt_card(), model)
    fused = apply_passes(before, FuseEmbeddings()).bundle
    assert num_scalars(fused) == 0
    assert all(row.groups == 3 for plan, _ in calls(fused) for row in plan)
    check_equal(before, fused, model, monkeypatch)


def with_unknown_id(model: Keyed, sparse: KeyedJaggedTensor) -> Tensor:
    """An id of the feature stands for another: what is looked up is not what the input holds."""
    lists = sparse.to_dict()
    ids = torch.where(lists["a"].values() == 17, 3, lists["a"].values())
    changed = model.bags["a"](ids, lists["a"].offsets())
    return torch.cat([changed, model.pooled("b", lists["b"])], 1).sum(1)


def without_first(model: Keyed, sparse: KeyedJaggedTensor) -> Tensor:
    """Each list ends one id earlier."""
    lists = sparse.to_dict()
    starts = lists["a"].offsets()[:-1]
    shorter = (lists["a"].lengths() - 1).clamp(min=0)
    offsets = torch.stack([starts, starts + shorter], dim=1).flatten()
    offsets = torch.cat([offsets, lists["a"].offsets()[-1:]])
    pooled = model.bags["a"](lists["a"].values(), offsets).view(-1, 2, 4)[:, 0]
    return torch.cat([pooled, model.pooled("b", lists["b"])], 1).sum(1)


@pytest.mark.parametrize("score", [with_unknown_id, without_first])
def test_other_ids_and_other_lists_are_left_as_they_are(
    score: Callable[[Any, KeyedJaggedTensor], Tensor],
) -> None:
    model = seeded(lambda: Keyed(score))
    before = make_bundle(kjt_card(), model)
    fused = apply_passes(before, FuseEmbeddings()).bundle
    assert num_scalars(fused) > 0
    for batch, fill in SIZES:
        features = features_of(before.card, batch, fill)
        truth = exact(before.card, model, features)
        assert largest_error(fused.run(features), truth) < CLOSE


def refusing(model: Keyed, sparse: KeyedJaggedTensor) -> Tensor:
    """The model's own limit is narrower than the card's."""
    counts = sparse.length_per_key()
    torch._check(counts[1] <= 40, lambda: "too many")
    return by_key(model, sparse)


def test_a_check_that_the_contract_does_not_imply_stays() -> None:
    model = seeded(lambda: Keyed(refusing))
    fused = apply_passes(make_bundle(kjt_card(), model), FuseEmbeddings()).bundle
    assert operators(fused)["_assert_scalar"] > 0
    few = features_of(fused.card, 7, 0.5)
    fused.run(few)
    many = {"sparse.lengths": torch.full((150,), 1), "sparse.values": torch.ones(150).long()}
    with pytest.raises(RuntimeError):
        fused.run(many)


class Sequences(nn.Module):
    """Rows of two features as they are, beside bags of the same input."""

    def __init__(self) -> None:
        super().__init__()
        device = torch.device("cpu")
        features = list(zip(KEYS, NUM_IDS, strict=True))
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"r_{key}", embedding_dim=4, num_embeddings=rows, feature_names=[key]
                )
                for key, rows in features
            ],
            device=device,
        )
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{key}", embedding_dim=4, num_embeddings=rows, feature_names=[key]
                )
                for key, rows in features
            ],
            device=device,
        )

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(sparse)
        total = torch.stack([rows[key].values().sum() for key in KEYS]).sum()
        pooled: Tensor = self.bags(sparse).values()
        return pooled.sum(1) + total.to(pooled.dtype)


def test_numbers_that_something_else_needs_stay() -> None:
    model = seeded(Sequences)
    before = make_bundle(kjt_card(), model)
    fused = apply_passes(before, FuseEmbeddings()).bundle
    assert num_scalars(fused) > 0
    assert {row.groups for plan, _ in calls(fused) for row in plan} == {0, 3}
    for batch, fill in SIZES:
        features = features_of(before.card, batch, fill)
        scores, truth = fused.run(features), before.run(features)
        torch.testing.assert_close(scores["score"], truth["score"], rtol=1e-4, atol=1e-3)


class OneInput(nn.Module):
    """A bag on a ragged input, its offsets in one of the usual spellings."""

    def __init__(self, closed: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(30, 8, mode="mean", include_last_offset=closed)
        self.closed = closed

    def forward(self, bag_values: Tensor, bag_lengths: Tensor) -> Tensor:
        ends = bag_lengths.cumsum(0)
        edges = torch.cat([ends.new_zeros(1), ends]) if self.closed else ends - bag_lengths
        pooled: Tensor = self.table(bag_values, edges)
        return pooled.sum(1)


@pytest.mark.parametrize("closed", [False, True])
def test_a_bag_on_a_ragged_input_needs_no_offsets(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(lambda: OneInput(closed))
    before = make_bundle(bag_card(30), model)
    fused = apply_passes(before, FuseEmbeddings()).bundle
    assert operators(fused)["cumsum"] == 0
    check_equal(before, fused, model, monkeypatch)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sparse.values": lambda v: v[:-1]}, r"must hold as many ids as sparse\.lengths"),
        ({"sparse.lengths": lambda v: torch.cat([v[:-1], v[-1:] + 1])}, "must hold as many ids"),
        (
            {"sparse.lengths": lambda v: torch.cat([v[:1] - 301, v[1:2] + 301, v[2:]])},
            r"sparse\.lengths\[0\]: must lie in",
        ),
        ({"heavy.weights": lambda v: v[:-1]}, "must have one weight per id"),
        ({"heavy.lengths": lambda v: v[:-1]}, "must hold a multiple of 2"),
    ],
    ids=["a-value-less", "a-length-more", "negative", "a-weight-less", "no-multiple"],
)
def test_an_artifact_refuses_what_the_checks_refused(
    change: dict[str, Callable[[Tensor], Tensor]], words: str
) -> None:
    artifact = loaded("bags-int8")
    features = features_of(bundle_of("bags")[0], 7, 0.01)
    artifact(features)
    broken = {name: change.get(name, lambda v: v)(value) for name, value in features.items()}
    with pytest.raises(ContractError, match=words):
        artifact(broken)
    # The call itself refuses lengths that do not fit, wherever it is run.
    if "heavy.weights" not in change:
        fused = apply_passes(bundle_of("bags")[2], FuseEmbeddings()).bundle
        with pytest.raises(RuntimeError):
            fused.run(broken)
