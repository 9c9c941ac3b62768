"""What each training pass does to steps, seen from weights, memory, batches and refusals."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from rankopt.data.prefetch import Waits, ahead
from rankopt.data.rows import Rows
from rankopt.environment import collect_environment
from rankopt.models.build import make_module
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule
from rankopt.recipe import parse_recipe
from rankopt.train.setup import apply_passes, plain_setup
from rankopt.train.step import Step

CARD = ModelCard.model_validate(
    {
        "name": "planted",
        "factory": "rankopt.models.dlrm:DLRM",
        "config": {
            "num_ids": [30] * 3,
            "num_dense": 4,
            "embedding_dim": 8,
            "bottom_mlp": [16],
            "top_mlp": [64, 32],
        },
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]},
            {"name": "sparse", "kind": "ids", "columns": ["C1", "C2", "C3"], "num_ids": 30},
        ],
        "outputs": [{"name": "click", "label": "label"}],
        "train": {"batch_size": 64, "table_optimizer": "adagrad", "learning_rate": 0.01},
    }
)
BF16 = collect_environment().model_copy(update={"isa": ("avx2", "avx512_bf16")})


def make_batch(seed, num_rows=64):
    generator = torch.Generator().manual_seed(seed)
    features = {
        "dense": torch.randn(num_rows, 4, generator=generator),
        "sparse": torch.randint(0, 30, (num_rows, 3), generator=generator),
    }
    labels = np.random.default_rng(seed).integers(0, 2, num_rows).astype(np.float64)
    return Rows(features, {"label": labels}, None, num_rows)


def set_up(*passes, environment=BF16, card=CARD):
    torch.manual_seed(0)
    serving = ServingModule(card, make_module(card)).train()
    recipe = parse_recipe({"name": "x", "passes": list(passes)}, where="x") if passes else None
    setup = plain_setup(card, card.train, environment, serving)
    return apply_passes(setup, recipe.passes if recipe else [])


def weights_after(*passes, steps=4, num_rows=64, environment=BF16):
    setup, records = set_up(*passes, environment=environment)
    step = Step(setup)
    for index in range(steps):
        step(make_batch(index, num_rows))
    state = setup.module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}, records


def difference(first, second):
    assert list(first) == list(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def problems_of(*passes):
    recipe = parse_recipe({"name": "x", "passes": list(passes)}, where="x.yaml")
    return [str(problem) for problem in recipe.check(BF16, CARD)]


PLAIN, _ = weights_after()


@pytest.mark.parametrize(
    "pass_",
    [
        {"train_fuse_embeddings": {}},
        {"train_dense_optimizer": {}},
        {"train_dense_optimizer": {"implementation": "foreach"}},
        {"train_accumulate": {"parts": 4}},
        {"train_accumulate": {"parts": 3}},
        {"train_checkpoint_activations": {}},
        {"train_dedup_ids": {}},
        {"train_compile": {"backend": "aot_eager"}},
    ],
    ids=str,
)
def test_the_weights_are_those_of_plain_training(pass_) -> None:
    weights, [record] = weights_after(pass_)
    assert record.changed
    assert record.kept
    assert difference(weights, PLAIN) < 2e-5


def test_passes_work_together() -> None:
    weights, records = weights_after(
        {"train_fuse_embeddings": {}},
        {"train_accumulate": {"parts": 2}},
        {"train_checkpoint_activations": {"modules": ["top"]}},
        {"train_dense_optimizer": {}},
        {"train_compile": {"backend": "aot_eager"}},
        {"train_pipeline": {}},
    )
    assert all(record.changed for record in records)
    assert difference(weights, PLAIN) < 2e-5


def test_a_batch_of_another_size_runs_uncompiled() -> None:
    weights, _ = weights_after({"train_compile": {"backend": "aot_eager"}}, num_rows=50)
    assert difference(weights, weights_after(num_rows=50)[0]) < 2e-5


def test_a_part_is_never_a_single_row() -> None:
    setup, _ = set_up({"train_accumulate": {"parts": 4}})
    step = Step(setup)
    for num_rows in (2, 3, 5, 33, 64):
        parts = step.parts(make_batch(0, num_rows))
        assert sum(part.num_rows for part in parts) == num_rows
        assert min(part.num_rows for part in parts) >= 2


def test_bf16_changes_products_and_leaves_weights_and_loss_in_float32() -> None:
    weights, [record] = weights_after({"train_precision": {}})
    assert record.changed
    assert 1e-6 < difference(weights, PLAIN) < 0.1
    assert {value.dtype for value in weights.values()} == {torch.float32}
    setup, _ = set_up({"train_precision": {}})
    loss = Step(setup).loss(make_batch(0))
    assert loss.dtype == torch.float32
    exact = Step(set_up()[0]).loss(make_batch(0))
    assert 0 < float((loss - exact).detach().abs()) < 0.02


def test_bf16_without_the_instructions_changes_nothing_and_says_so() -> None:
    plain = BF16.model_copy(update={"isa": ("avx2",)})
    weights, [record] = weights_after({"train_precision": {}}, environment=plain)
    assert not record.changed
    assert not record.kept
    assert "avx512_bf16" in record.reason
    assert difference(weights, PLAIN) == 0


def saved_bytes(setup):
    """Count what a step keeps for its backward."""
    held = {}

    def pack(tensor):
        held[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Step(setup).loss(make_batch(0, 1024))
    return sum(held.values())


def test_checkpointed_activations_are_not_kept() -> None:
    plain = saved_bytes(set_up()[0])
    less = saved_bytes(set_up({"train_checkpoint_activations": {"modules": ["top"]}})[0])
    assert plain - less >= 1024 * (64 + 32) * 4  # the two hidden layers at least


def test_a_module_with_tables_and_an_unknown_one_are_not_checkpointed() -> None:
    step = {"train_checkpoint_activations": {"modules": ["tables", "topp"]}}
    _, [record] = set_up(step)
    assert not record.changed
    assert "tables holds tables" in record.reason
    assert "no module is named 'topp'" in record.reason


def test_distinct_ids_have_one_gradient_row_each() -> None:
    setup, _ = set_up({"train_dedup_ids": {}})
    step = Step(setup)
    step.loss(make_batch(0)).backward()
    for column, bag in enumerate(setup.module.tables.bags):
        gradient = bag.weight.grad
        assert gradient.is_sparse
        distinct = make_batch(0).features["sparse"][:, column].unique()
        assert torch.equal(gradient._indices()[0], distinct)


def test_a_pass_with_nothing_to_do_says_so() -> None:
    _, records = set_up({"train_fuse_embeddings": {}}, "train_dedup_ids", "train_fuse_embeddings")
    assert [record.changed for record in records] == [True, False, False]
    assert "own step" in records[1].reason
    assert "fused already" in records[2].reason


def test_tables_are_fused_before_ids_are_made_distinct() -> None:
    [problem] = problems_of("train_dedup_ids", "train_fuse_embeddings", "train_pipeline")
    assert "must stand before the pass that provides distinct_ids" in problem


def test_another_optimizer_than_the_cards_is_noted() -> None:
    _, [record] = set_up({"train_fuse_embeddings": {"optimizer": "rowwise_adagrad"}})
    assert record.changed
    assert "rowwise_adagrad, not with the card's adagrad" in record.reason


@pytest.mark.parametrize(
    ("pass_", "told"),
    [
        ({"train_fuse_embeddings": {"optimizer": "adam"}}, "optimizer: Adam has no fused step"),
        ({"train_fuse_embeddings": {"table_dtype": "fp16"}}, "stochastic rounding"),
        ({"train_precision": {"dtype": "fp16"}}, "dtype: fp16 is for GPUs"),
        ({"train_accumulate": {"parts": 40}}, "parts: must leave each part two rows"),
    ],
)
def test_what_cannot_be_done_rightly_is_refused_by_name(pass_, told) -> None:
    [problem] = problems_of(pass_)
    assert told in problem


def test_serving_and_training_passes_do_not_mix() -> None:
    problems = problems_of("train_pipeline", "export_aoti")
    assert problems[0].startswith("recipe 'x': passes: must be training passes alone or serving")
    assert "train_pipeline among 2" in problems[0]


def test_prefetched_batches_are_the_same_in_order_and_never_more_than_depth_ahead() -> None:
    made, taken, leads = [], [], []

    def batches():
        for index in range(12):
            made.append(index)
            yield make_batch(index, 4)

    for batch in ahead(batches(), 2, Waits()):
        time.sleep(0.01)
        leads.append(len(made) - len(taken) - 1)
        taken.append(batch)
    assert len(taken) == 12
    assert max(leads) <= 3  # two ready, one being made
    expected = [make_batch(index, 4).features["dense"] for index in range(12)]
    assert all(torch.equal(b.features["dense"], e) for b, e in zip(taken, expected, strict=True))


def test_an_error_of_the_reader_is_raised_where_its_batch_would_have_come() -> None:
    def batches():
        yield make_batch(0)
        raise ValueError("bad row")

    ready = ahead(batches(), 3, Waits())
    next(ready)
    with pytest.raises(ValueError, match="bad row"):
        next(ready)


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    ready = ahead((make_batch(i) for i in range(1000)), 2, Waits())
    next(ready)
    ready.close()
    assert threading.active_count() == before
