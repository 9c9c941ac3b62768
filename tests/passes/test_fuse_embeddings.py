"""fuse_embeddings on the graph: every kind of lookup, and what must stay as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from artifact.workshop import bundle_of
from passes.lookups import Lookups, Score, bag, check_scores, lookups_card, rows, total
from passes.zoo import (
    BATCHES,
    Applied,
    apply_passes,
    features_of,
    make_bundle,
    seeded,
)
from rankopt.bundle import ModelBundle
from rankopt.errors import SelectorError
from rankopt.kernels.lookup import FIELDS
from rankopt.models.serving import EagerModel
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.table_batched import find_calls
from rankopt.selectors import Rule
from rankopt.tables import table_weight

PLAN_ROW_BYTES = 8 * len(FIELDS)


def fuse(model: nn.Module, step: FuseEmbeddings | None = None) -> tuple[ModelBundle, Applied]:
    before = make_bundle(lookups_card(), model)
    return before, apply_passes(before, step or FuseEmbeddings())


def num_calls(bundle: ModelBundle) -> int:
    return len(find_calls(bundle.program.module(check_guards=False)))


def num_plain_lookups(bundle: ModelBundle) -> int:
    names = ("aten.embedding.default", "aten.embedding_bag", "aten._embedding_bag")
    return sum(str(node.target).startswith(names) for node in bundle.program.graph.nodes)


def rewired(scale: float = 1.0) -> Lookups:
    """Two bags and two rows, the shapes that fuse most readily."""
    return Lookups(
        lambda m, user, narrow, values, starts, recent: (
            scale * (total(m.a(user)) + total(m.b(values, starts)))
            + total(m.c(narrow))
            + total(m.d(narrow))
        ),
        a=rows(),
        b=bag(mode="sum"),
        c=rows(dim=4),
        d=bag(mode="sum", dim=16),
    )


@pytest.mark.parametrize("name", ["zoo", "bags"])
def test_every_lookup_of_a_mixed_model_is_fused(name: str) -> None:
    _, model, bundle = bundle_of(name)
    fused = apply_passes(bundle, FuseEmbeddings()).bundle
    check_scores(model, fused)
    assert num_calls(fused) <= 3
    # The zoo's item table is read as a row and as a sequence with nothing to join.
    assert num_plain_lookups(fused) == {"zoo": 2, "bags": 0}[name]


def test_bags_and_rows_of_unequal_width_become_one_call() -> None:
    model = seeded(rewired)
    _, fused = fuse(model)
    assert num_calls(fused.bundle) == 1
    assert num_plain_lookups(fused.bundle) == 0
    check_scores(model, fused.bundle)


def test_readers_of_an_early_lookup_follow_the_call_that_replaces_it() -> None:
    """The first lookup's reader stands in the graph before the second lookup's ids are ready."""

    def score(m: Any, user: Tensor, narrow: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
        early = torch.tanh(total(m.a(user)))
        late = (user * 3 + narrow.squeeze(1)) % 30
        return early * total(m.b(late))

    model = seeded(lambda: Lookups(score, a=rows(), b=rows()))
    _, fused = fuse(model)
    assert num_calls(fused.bundle) == 1
    check_scores(model, fused.bundle)


def test_sequences_of_equal_width_become_one_call() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.a(recent)) + total(m.b(recent)) - total(m.a(recent[:, :2]))
            ),
            a=rows(),
            b=rows(),
        )
    )
    before, fused = fuse(model)
    assert num_calls(fused.bundle) == 1
    check_scores(model, fused.bundle)
    assert {slot.name for slot in fused.bundle.batches["tables"].slots} == {"a", "b"}
    assert fused.bundle.size_bytes < before.size_bytes + 3 * PLAN_ROW_BYTES + 100


def test_rectangular_bags_are_fused() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.a(recent)) + total(m.b(recent)) + total(m.c(values, starts))
            ),
            a=bag(mode="mean"),
            b=bag(mode="sum"),
            c=bag(mode="mean"),
        )
    )
    _, fused = fuse(model)
    assert num_calls(fused.bundle) == 1
    check_scores(model, fused.bundle)


def test_a_sum_leaves_out_its_padding_row() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.a(values, starts)) + total(m.b(values, starts))
            ),
            a=bag(mode="sum", padding_idx=3),
            b=bag(mode="sum", padding_idx=0),
        )
    )
    assert float(model.get_parameter("a.weight")[3].detach().abs().sum()) > 0
    _, fused = fuse(model)
    assert num_plain_lookups(fused.bundle) == 0
    check_scores(model, fused.bundle)


def shared_padding(other: nn.Module) -> Lookups:
    model = Lookups(
        lambda m, user, narrow, values, starts, recent: (
            total(m.a(values, starts)) + total(m.b(user if m.one_each else recent))
        ),
        a=bag(mode="sum", padding_idx=3),
        b=other,
    )
    model.one_each = isinstance(other, nn.Embedding)
    return model


@pytest.mark.parametrize(
    "make",
    [rows, lambda: bag(mode="sum"), lambda: bag(mode="sum", padding_idx=5)],
    ids=["row", "plain-bag", "other-padding"],
)
def test_a_padding_row_that_another_lookup_reads_keeps_its_value(
    make: Callable[[], nn.Module],
) -> None:
    model = seeded(lambda: shared_padding(make()))
    model.b.weight = model.a.weight
    _, fused = fuse(model)
    check_scores(model, fused.bundle)


def half_scaled(m: Any, user: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
    """A max_norm table, which a lookup without it reads too: its rows change while scoring."""
    plain = functional.embedding(user, m.odd.weight)
    return total(m.odd(v, s)) + total(plain) + total(m.b(user)) + total(m.c(user))


def with_maximum(m: Any, user: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
    return total(m.odd(v, s)) + total(m.b(user)) + total(m.c(user))


@pytest.mark.parametrize(
    ("score", "settings", "words"),
    [
        (with_maximum, {"mode": "max"}, "takes the maximum"),
        (half_scaled, {"mode": "sum", "max_norm": 0.5}, "max_norm"),
    ],
    ids=["max", "max-norm"],
)
def test_a_lookup_that_cannot_be_fused_is_left_alone_with_the_reason(
    score: Score, settings: dict[str, Any], words: str
) -> None:
    model = seeded(lambda: Lookups(score, odd=bag(**settings), b=rows(), c=rows()))
    before, fused = fuse(model)
    assert any(note.startswith("odd: left alone") and words in note for note in fused.notes)
    assert num_calls(fused.bundle) == 1
    assert [slot.name for slot in fused.bundle.batches["tables"].slots] == ["b", "c"]
    features = features_of(before.card, 7, 0.01)
    before.run(features)  # the rows that it scales stay scaled
    assert torch.equal(fused.bundle.run(features)["score"], before.run(features)["score"])
    if score is with_maximum:
        check_scores(model, fused.bundle)


def test_a_mean_with_padding_and_a_max_norm_table_are_fused() -> None:
    model = seeded(
        lambda: Lookups(
            with_maximum,
            odd=bag(mode="mean", padding_idx=3),
            b=rows(max_norm=0.5),
            c=rows(max_norm=0.7, norm_type=1.0),
        )
    )
    _, fused = fuse(model)
    assert fused.notes == []
    assert num_calls(fused.bundle) == 1
    check_scores(model, fused.bundle)


def chained(m: Any, user: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
    first = m.a(user)
    chosen = (first[:, 0].abs() * 10).long() % 30
    return total(first) + total(m.b(chosen)) + total(m.c(user)) + total(m.d(chosen))


def check_chained(model: nn.Module, bundle: ModelBundle) -> None:
    eager = EagerModel(bundle.card, model)
    for batch in BATCHES:  # in float32: the ids are cut from a float
        features = features_of(bundle.card, batch)
        torch.testing.assert_close(bundle.run(features), eager(features), rtol=1e-5, atol=1e-5)


def test_ids_computed_from_another_tables_rows_are_looked_up_in_a_later_call() -> None:
    model = seeded(lambda: Lookups(chained, a=rows(), b=rows(), c=rows(), d=rows()))
    _, fused = fuse(model)
    assert num_calls(fused.bundle) == 2
    assert num_plain_lookups(fused.bundle) == 0
    (batch,) = fused.bundle.batches.values()
    assert {slot.name for slot in batch.slots} == {"a", "b", "c", "d"}
    check_chained(model, fused.bundle)


def test_a_lone_lookup_behind_another_has_nothing_to_join() -> None:
    def score(m: Any, user: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
        first = m.a(user)
        return total(first) + total(m.c(user)) + total(m.b((first[:, 0].abs() * 10).long() % 30))

    model = seeded(lambda: Lookups(score, a=rows(), b=rows(), c=rows()))
    _, fused = fuse(model)
    assert fused.notes == ["b: left alone, a lookup of it has nothing to join"]
    assert [slot.name for slot in fused.bundle.batches["tables"].slots] == ["a", "c"]
    check_chained(model, fused.bundle)


def three_ways() -> Lookups:
    model = Lookups(
        lambda m, user, narrow, values, starts, recent: (
            total(m.a(user)) + total(m.b(values, starts)) + total(m.a(recent)) + total(m.c(recent))
        ),
        a=rows(),
        b=bag(mode="sum"),
        c=rows(),
    )
    model.b.weight = model.a.weight
    return model


def test_a_table_read_as_row_bag_and_sequence_is_stored_once() -> None:
    model = seeded(three_ways)
    _, fused = fuse(model)
    (batch,) = fused.bundle.batches.values()
    assert len(batch.slots) == 2
    # Two tables of 30 x 8 floats, and a plan of four lookups.
    stored = 2 * 30 * 8 * 4 + 4 * PLAN_ROW_BYTES
    assert stored <= fused.bundle.size_bytes < stored + 100
    check_scores(model, fused.bundle)


def test_the_common_store_holds_the_models_rows() -> None:
    model = seeded(rewired)
    _, fused = fuse(model)
    ((store, batch),) = fused.bundle.batches.items()
    for slot in batch.slots:
        stored = table_weight(batch, fused.bundle.constants[store], slot.name)
        assert torch.equal(stored, model.get_parameter(f"{slot.name}.weight").detach())


def test_forms_and_rules_choose_what_is_fused() -> None:
    model = seeded(rewired)
    _, bags_alone = fuse(model, FuseEmbeddings(forms=("bag",)))
    assert [slot.name for slot in bags_alone.bundle.batches["tables"].slots] == ["b", "d"]
    check_scores(model, bags_alone.bundle)
    _, without = fuse(model, FuseEmbeddings(rules=(Rule[bool](select="b", use=False),)))
    assert "b" not in {slot.name for slot in without.bundle.batches["tables"].slots}
    check_scores(model, without.bundle)


def test_an_unmatched_rule_names_the_nearest_tables() -> None:
    _, _, bundle = bundle_of("zoo")
    step = FuseEmbeddings(rules=(Rule[bool](select="histroy", use=False),))
    with pytest.raises(SelectorError, match=r"rules\[0\].*matches no table.*'history'"):
        apply_passes(bundle, step)


def test_nothing_to_fuse_returns_the_same_bundle() -> None:
    lone = seeded(
        lambda: Lookups(lambda m, user, narrow, values, starts, recent: total(m.a(user)), a=rows())
    )
    before, after = fuse(lone)
    assert after.bundle is before
    assert after.notes == ["a: left alone, a lookup of it has nothing to join"]
    every = FuseEmbeddings(rules=(Rule[bool](select="*", use=False),))
    _, _, zoo = bundle_of("zoo")
    assert apply_passes(zoo, every).bundle is zoo
    fused = apply_passes(zoo, FuseEmbeddings()).bundle
    assert apply_passes(fused, FuseEmbeddings()).bundle is fused
