"""quantize_embeddings on the graph: rows in fewer bits, bounded by each row's own step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from artifact.workshop import ZOO_DTYPES, bundle_of
from passes.lookups import Lookups, bag, check_scores, lookups_card, rows, total
from passes.truth import dequantised, half_step, read_rows
from passes.zoo import (
    LONGEST,
    SIZES,
    Mlp,
    Pooled,
    apply_passes,
    bag_card,
    exact,
    features_of,
    largest_error,
    make_bundle,
    mlp_card,
    seeded,
)
from rankopt.errors import SelectorError
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.selectors import Rule
from rankopt.tables import BITS, TableDtype, pack_rows, table_weight

Choice = Rule[TableDtype]


def mixed(dtype: str = "fp16") -> QuantizeEmbeddings:
    rules = tuple(Choice(select=name, use=use) for name, use in ZOO_DTYPES.items())
    return QuantizeEmbeddings.model_validate({"dtype": dtype, "rules": rules})


@pytest.mark.parametrize("fused_first", [False, True], ids=["alone", "after-fuse"])
def test_scores_are_those_of_the_dequantised_rows(fused_first: bool) -> None:
    _, model, bundle = bundle_of("zoo")
    steps = (FuseEmbeddings(), mixed()) if fused_first else (mixed(),)
    quantised = apply_passes(bundle, *steps).bundle
    truth = dequantised(model, {**ZOO_DTYPES, "user_bias": "fp16"})
    check_scores(truth, quantised)
    assert quantised.provided >= {"quantized_embeddings"}


def test_quantising_after_fusing_gives_the_bits_of_quantising_alone() -> None:
    model_card, _, bundle = bundle_of("bags")
    alone = apply_passes(bundle, QuantizeEmbeddings()).bundle
    after = apply_passes(bundle, FuseEmbeddings(), QuantizeEmbeddings()).bundle
    for batch, fill in SIZES:
        features = features_of(model_card, batch, fill)
        assert torch.equal(alone.run(features)["score"], after.run(features)["score"])


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bags_error_is_at_most_half_a_step_per_row_and_column(
    dtype: TableDtype, mode: str
) -> None:
    model_card, dim = bag_card(40), 16
    model = seeded(lambda: Pooled(40, dim, mode=mode))
    quantised = apply_passes(
        make_bundle(model_card, model), QuantizeEmbeddings.model_validate({"dtype": dtype})
    ).bundle
    weight = model.get_parameter("table.weight").detach().double().numpy()
    bound_of_row = half_step(weight, BITS[dtype])[:, 0] * dim
    for batch, fill in SIZES:
        features = features_of(model_card, batch, fill)
        values, lengths = features["bag.values"], features["bag.lengths"]
        truth = exact(model_card, model, features)["score"]
        error = (quantised.run(features)["score"].double() - truth).abs().numpy()
        owner = np.repeat(np.arange(batch), lengths.numpy())
        bound = np.bincount(owner, weights=bound_of_row[values.numpy()], minlength=batch)
        if mode == "mean":
            bound = bound / np.maximum(lengths.numpy(), 1)
        assert (error <= bound + 1e-3).all()
        # Empty bags score exactly zero.
        assert (error[lengths.numpy() == 0] == 0).all()
        if fill == 0.01:
            assert error.max() > 0


def test_each_table_takes_the_type_its_rule_names() -> None:
    _, model, bundle = bundle_of("zoo")
    applied = apply_passes(bundle, FuseEmbeddings(), mixed())
    found: dict[str, str] = {
        slot.name: slot.dtype for batch in applied.bundle.batches.values() for slot in batch.slots
    }
    wanted = {**ZOO_DTYPES, "user_bias": "fp16", "alone": "fp32"}
    # The item table has no lookup to join with and lies in constants of its own.
    assert found == {name: dtype for name, dtype in wanted.items() if name != "item"}
    constants = applied.bundle.constants
    assert any("item_int4" in name for name in constants)
    ((store, batch),) = applied.bundle.batches.items()
    for slot in batch.slots:
        weight = model.get_parameter(f"{slot.name}.weight").detach().clone()
        if slot.name == "cats":
            weight[3] = 0  # its padding row
        expected = read_rows(pack_rows(weight, slot.dtype), slot.dim, slot.dtype)
        stored = table_weight(batch, constants[store], slot.name).numpy()
        np.testing.assert_allclose(stored, expected, rtol=1e-6, atol=1e-6)


def test_a_table_pooled_and_read_as_a_sequence_is_stored_once() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.b(values, starts)) + total(m.a(recent)) + total(m.a(user))
            ),
            a=rows(),
            b=bag(mode="sum"),
        )
    )
    model.b.weight = model.a.weight
    before = make_bundle(lookups_card(), model)
    quantised = apply_passes(before, QuantizeEmbeddings()).bundle
    assert 30 * (8 + 4) <= quantised.size_bytes < 30 * (8 + 4) + 400
    (batch,) = quantised.batches.values()
    (slot,) = batch.slots
    check_scores(dequantised(model, {"a": "int8"}), quantised)
    assert slot.dtype == "int8"


@pytest.mark.parametrize(
    ("asked", "dim", "got", "reason"),
    [
        ("int8", 1, "fp16", "5 bytes against 4"),
        ("int4", 1, "fp16", "5 bytes against 4"),
        ("int2", 6, "int4", "int2 packs 4 values a byte"),
        ("int4", 7, "int8", "int4 packs 2 values a byte"),
    ],
)
@pytest.mark.parametrize("pooled", [True, False], ids=["bag", "row"])
def test_a_table_that_does_not_fit_stays_finer_with_the_reason(
    asked: TableDtype, dim: int, got: TableDtype, reason: str, pooled: bool
) -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.odd(values, starts) if pooled else m.odd(user)) + total(m.plain(user))
            ),
            odd=bag(dim=dim, mode="sum") if pooled else rows(dim=dim),
            plain=rows(dim=16),
        )
    )
    step = QuantizeEmbeddings.model_validate({"dtype": asked})
    before = make_bundle(lookups_card(), model)
    applied = apply_passes(before, step)
    assert any(
        note.startswith(f"odd: stays finer than {asked}") and reason in note
        for note in applied.notes
    )
    assert not any(note.startswith("plain") for note in applied.notes)
    assert applied.bundle.size_bytes < before.size_bytes
    for batch, fill in SIZES:
        features = features_of(before.card, batch, fill)
        truth = exact(before.card, dequantised(model, {"odd": got, "plain": asked}), features)
        assert largest_error(applied.bundle.run(features), truth) < 1e-4


def test_a_table_of_one_row_stays_as_it_is() -> None:
    _, _, bundle = bundle_of("zoo")
    applied = apply_passes(bundle, QuantizeEmbeddings())
    assert "alone: left alone, it has fewer than 2 rows" in applied.notes
    kept = applied.bundle.constants
    assert any(value.shape == (1, 8) and value.dtype == torch.float32 for value in kept.values())
    both = apply_passes(bundle, QuantizeEmbeddings(min_rows=1))
    assert not any(note.startswith("alone") for note in both.notes)


def test_a_table_written_while_scoring_keeps_its_float_rows_and_its_scores() -> None:
    """One lookup scales the rows it reads to max_norm, another reads the table as it stands."""

    def score(m: Lookups, user: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
        plain = functional.embedding(user, m.odd.weight)
        return total(m.odd(v, s)) + total(plain) + total(m.b(user))

    model = seeded(lambda: Lookups(score, odd=bag(mode="sum", max_norm=0.5), b=rows()))
    before = make_bundle(lookups_card(), model)
    applied = apply_passes(before, QuantizeEmbeddings())
    assert any(note.startswith("odd: left alone") and "max_norm" in note for note in applied.notes)
    assert applied.bundle.size_bytes == before.size_bytes - 30 * 8 * 4 + 30 * (8 + 4)
    features = features_of(before.card, 7, 0.01)
    before.run(features)  # the rows that it scales stay scaled
    truth = before.run(features)["score"]
    bound = half_step(model.get_parameter("b.weight").detach().double().numpy(), 8).max() * 8
    error = (applied.bundle.run(features)["score"] - truth).abs().max()
    assert float(error) <= bound + 1e-4


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16"])
@pytest.mark.parametrize(
    "settings",
    [{"mode": "max"}, {"mode": "max", "padding_idx": 3}],
    ids=["max", "max-padding"],
)
def test_a_bag_that_no_call_can_pool_pools_unpacked_rows(
    settings: dict[str, object], dtype: TableDtype
) -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.odd(values, starts)) + total(m.odd(recent)) + total(m.b(user))
            ),
            odd=bag(**settings),
            b=rows(),
        )
    )
    before = make_bundle(lookups_card(), model)
    applied = apply_passes(before, QuantizeEmbeddings.model_validate({"dtype": dtype}))
    assert applied.notes == []
    check_scores(dequantised(model, {"odd": dtype, "b": dtype}), applied.bundle)
    row_bytes = {"int8": 12, "int4": 8, "fp16": 16}[dtype]
    assert applied.bundle.size_bytes - before.size_bytes == 2 * 30 * (row_bytes - 32)


def test_a_table_pooled_by_sum_and_by_maximum_is_stored_once() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.a(values, starts)) - total(m.b(values, starts)) + total(m.a(recent))
            ),
            a=bag(mode="sum"),
            b=bag(mode="max"),
        )
    )
    model.b.weight = model.a.weight
    quantised = apply_passes(make_bundle(lookups_card(), model), QuantizeEmbeddings()).bundle
    (batch,) = quantised.batches.values()
    assert len(batch.slots) == 1
    assert quantised.size_bytes < 30 * (8 + 4) + 400
    check_scores(dequantised(model, {"a": "int8"}), quantised)


def test_a_table_that_is_a_layers_weight_too_is_left_whole() -> None:
    def score(m: Lookups, user: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
        every = m.a(user) @ m.a.weight.t()
        return total(every) + total(m.b(user))

    model = seeded(lambda: Lookups(score, a=rows(), b=rows()))
    before = make_bundle(lookups_card(), model)
    applied = apply_passes(before, QuantizeEmbeddings())
    (note,) = applied.notes
    assert note.startswith("a: left alone, its rows are the operand of 'linear' too (tied weights)")
    assert applied.bundle.size_bytes == before.size_bytes - 30 * 8 * 4 + 30 * (8 + 4)
    fused = apply_passes(before, FuseEmbeddings())
    assert fused.bundle is before
    check_scores(dequantised(model, {"b": "int8"}), applied.bundle)


def test_lookups_whose_ids_depend_on_rows_of_the_same_table_take_calls_one_after_another() -> None:
    def score(m: Lookups, user: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
        first: Tensor = m.b(user[:, None])
        chosen = (first[:, 0].abs() * 10).long() % 30
        second: Tensor = m.b(chosen[:, None])
        third: Tensor = m.c((second[:, 0].abs() * 10).long()[:, None] % 30)
        return total(first) + total(second) + total(third) + total(m.c(v, s))

    model = seeded(lambda: Lookups(score, b=bag(mode="sum"), c=bag(mode="sum")))
    # Rows that int8 holds exactly, so that the ids cut from them do not move.
    levels = torch.arange(30)[:, None] * 8 + torch.arange(8)
    levels[:, 6:] = torch.tensor([0, 255])
    for name in ("b", "c"):
        model.get_parameter(f"{name}.weight").data = levels.float() / 16
    before = make_bundle(lookups_card(), model)
    applied = apply_passes(before, QuantizeEmbeddings())
    assert applied.notes == []
    (batch,) = applied.bundle.batches.values()
    assert {slot.name for slot in batch.slots} == {"b", "c"}
    check_scores(model, applied.bundle)


@pytest.mark.parametrize("dtype", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("pooled", [True, False], ids=["bag", "row"])
def test_rows_beyond_the_range_of_fp16_never_score_nan(dtype: str, pooled: bool) -> None:
    """Scale and bias of a packed row are fp16, whose largest value is 65504."""
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.big(user[:, None]) if pooled else m.big(user)) + total(m.b(user))
            ),
            big=bag(mode="sum") if pooled else rows(),
            b=rows(),
        )
    )
    model.get_parameter("big.weight").data[:, 0] = -1e6
    before = make_bundle(lookups_card(), model)
    applied = apply_passes(before, QuantizeEmbeddings.model_validate({"dtype": dtype}))
    features = features_of(before.card, 7)
    torch.testing.assert_close(
        applied.bundle.run(features)["score"], before.run(features)["score"], rtol=0.01, atol=0.0
    )
    assert any(note.startswith("big: ") for note in applied.notes)


def test_a_table_of_nan_is_left_alone_with_the_reason() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: total(m.a(user)) + total(m.b(user)),
            a=rows(),
            b=rows(),
        )
    )
    model.get_parameter("a.weight").data[4, 2] = float("nan")
    before = make_bundle(lookups_card(), model)
    applied = apply_passes(before, QuantizeEmbeddings())
    assert any(note.startswith("a: left alone") for note in applied.notes)
    features = features_of(before.card, 513)
    nan_before = before.run(features)["score"].isnan()
    assert bool(nan_before.any())
    assert torch.equal(applied.bundle.run(features)["score"].isnan(), nan_before)


def test_an_unmatched_rule_names_the_nearest_tables() -> None:
    _, _, bundle = bundle_of("zoo")
    step = QuantizeEmbeddings(
        rules=(Choice(select="contxt.*", use="int4"), Choice(select="usr", use="int4"))
    )
    with pytest.raises(SelectorError) as caught:
        apply_passes(bundle, step)
    first, second = caught.value.problems
    assert first.where == "quantize_embeddings.rules[0].select"
    assert "'context.0'" in str(first)
    assert "'user'" in str(second)


def test_rules_on_a_model_without_tables_are_refused() -> None:
    bundle = make_bundle(mlp_card(4), seeded(lambda: Mlp(4, 8, 1)))
    with pytest.raises(SelectorError, match="has no embedding table"):
        apply_passes(bundle, QuantizeEmbeddings(rules=(Choice(select="user", use="int4"),)))
    assert apply_passes(bundle, QuantizeEmbeddings()).bundle is bundle


def test_nothing_to_quantise_returns_the_same_bundle() -> None:
    _, _, bundle = bundle_of("zoo")
    everything = QuantizeEmbeddings(rules=(Choice(select="*", use="fp32"),))
    assert apply_passes(bundle, everything).bundle is bundle
    assert apply_passes(bundle, QuantizeEmbeddings(min_rows=1000)).bundle is bundle
    assert apply_passes(bundle, QuantizeEmbeddings()).bundle is not bundle


def test_size_falls_as_the_packing_says() -> None:
    model_card = bag_card(LONGEST)
    model = seeded(lambda: Pooled(LONGEST, 64, mode="sum"))
    before = make_bundle(model_card, model)
    sizes = {
        dtype: apply_passes(
            before, QuantizeEmbeddings.model_validate({"dtype": dtype})
        ).bundle.size_bytes
        for dtype in ("fp16", "int8", "int4", "int2")
    }
    rows_bytes = {"fp16": 128, "int8": 68, "int4": 36, "int2": 20}
    for dtype, size_bytes in sizes.items():
        packed = LONGEST * rows_bytes[dtype]
        # Offsets, widths and types of the call, and padding to a cache line.
        assert packed <= size_bytes <= packed + 128
