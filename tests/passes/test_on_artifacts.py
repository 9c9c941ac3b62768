"""Every pass on the compiled artifact: parity with exact scores, and rows that stand alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from artifact.workshop import ZOO_DTYPES, built, loaded, scores_of
from passes.truth import dequantised, levelled
from passes.zoo import BATCHES, FILLS, exact, features_of, largest_error
from rankopt.artifact.rows import one_row
from rankopt.tables import TableDtype

ZOO_STORED: dict[str, TableDtype] = {**ZOO_DTYPES, "user_bias": "fp16"}
BAGS_STORED: dict[str, TableDtype] = {
    "plain.embedding_bags.shared": "int8",
    "plain.embedding_bags.mean": "int8",
    "weighted.embedding_bags.w": "int8",
    "weighted.embedding_bags.v": "int8",
}


def as_it_is(model: nn.Module) -> nn.Module:
    return model


EXACT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "zoo-plain": as_it_is,
    "zoo-fused": as_it_is,
    "zoo-fused-mixed": lambda model: dequantised(model, ZOO_STORED),
    "zoo-mixed": lambda model: dequantised(model, ZOO_STORED),
    "bags-int8": lambda model: dequantised(model, BAGS_STORED),
    "din-packed": as_it_is,
    "hstu-packed": as_it_is,
    "hstu-last": as_it_is,
}
"""Artifacts whose arithmetic is fp32 on known rows."""

NOISY: dict[str, float] = {
    "din-native": 0.05,
    "din-fbgemm": 0.05,
    "dlrm-native": 0.05,
    "dlrm-fbgemm": 0.05,
    "dlrm-torchao": 0.25,
    "dlrm-16bit": 0.02,
    "dlrm-fp16": 0.002,
}
"""Artifacts that round activations too: root mean square error allowed, over the spread."""

ROW_WISE = ("din-native", "din-fbgemm", "dlrm-native", "dlrm-fbgemm", "dlrm-fp16")


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", EXACT)
def test_scores_are_exact_at_every_size_and_every_length_of_bags(name: str, batch: int) -> None:
    made = built(name)
    truth_model = EXACT[name](made.model)
    for fill in FILLS:
        features = features_of(made.card, batch, fill)
        truth = exact(made.card, truth_model, features)
        assert largest_error(scores_of(name, features), truth) < 1e-4, f"fill {fill}"


@pytest.mark.parametrize("name", ["zoo-mixed", "bags-int8"])
def test_one_bag_as_long_as_the_card_allows_beside_empty_ones(name: str) -> None:
    made = built(name)
    for batch, at in ((1, 0), (7, 0), (7, 6), (7, 3)):
        features = features_of(made.card, batch, 1.0)
        for entry in loaded(name).manifest.inputs:
            if entry.role != "lengths":
                continue
            lengths = torch.zeros(entry.groups, batch, dtype=torch.int64)
            lengths[:, at] = torch.tensor(entry.longest)
            stem = entry.name.removesuffix(".lengths")
            generator = torch.Generator().manual_seed(at)
            count = int(lengths.sum())
            features[entry.name] = lengths.flatten()
            features[f"{stem}.values"] = torch.randint(0, 10, (count,), generator=generator)
            if f"{stem}.weights" in features:
                features[f"{stem}.weights"] = torch.rand(count, generator=generator)
        truth = exact(made.card, EXACT[name](made.model), features)
        assert largest_error(scores_of(name, features), truth) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISY)
def test_rounded_layers_stay_near_exact_scores(name: str) -> None:
    made = built(name)
    for batch in BATCHES:
        for fill in FILLS:
            features = features_of(made.card, batch, fill)
            scores = scores_of(name, features)["score"]
            truth = exact(made.card, made.model, features)["score"]
            assert scores.shape == truth.shape
            spread = exact(made.card, made.model, features_of(made.card, 513, 0.5))["score"].std()
            error = scores.double() - truth
            share = float(error.square().mean().sqrt() / spread)
            assert share < NOISY[name] * (1 if batch > 2 else 3), f"batch {batch}, fill {fill}"
            # The compiled graph rounds as the bundle's: next to nothing may differ.
            assert_near_bundle(name, features, scores, float(spread))


def assert_near_bundle(
    name: str, features: dict[str, Tensor], scores: Tensor, spread: float
) -> None:
    graph = built(name).bundle.run(features)["score"]
    difference = (scores - graph).abs() / spread
    # An activation at the border of two levels may fall to the other one.
    assert float(difference.max()) < 0.05
    assert float(difference.median()) < 1e-3


@pytest.mark.parametrize("name", ["din-fbgemm", "dlrm-fbgemm"])
def test_fbgemm_artifacts_compute_int8_products(name: str) -> None:
    made = built(name)
    features = features_of(made.card, 513, 0.5)
    truth = exact(made.card, levelled(made.model, 7), features)["score"]
    error = (scores_of(name, features)["score"].double() - truth).abs()
    assert float(error.median() / truth.std()) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_WISE)
def test_a_row_scores_the_same_bits_alone_and_at_any_position(name: str) -> None:
    made = built(name)
    contract = loaded(name).manifest.inputs
    features = features_of(made.card, 33, 0.3)
    together = scores_of(name, features)["score"]
    for row in range(33):
        alone = scores_of(name, one_row(contract, features, row))["score"]
        assert float(alone[0]) == float(together[row]), f"row {row}"
    for place in (0, 1, 15, 16, 17, 32):
        # Every row is the same one but at `place`.
        order = [5] * 33
        order[place] = 11
        moved = behind_each_other([one_row(contract, features, row) for row in order])
        scores = scores_of(name, moved)["score"]
        assert float(scores[place]) == float(together[11])
        assert len({float(score) for i, score in enumerate(scores) if i != place}) == 1


def behind_each_other(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join rows of a model without grouped inputs."""
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("name", ROW_WISE)
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan"), 1e6])
def test_rows_of_inf_nan_or_1e6_leave_their_neighbours_bits_alone(name: str, poison: float) -> None:
    made = built(name)
    features = features_of(made.card, 34, 0.3)
    calm = scores_of(name, features)["score"]
    poisoned = torch.tensor([0, 7, 16, 33])
    dense = features["dense"].clone()
    dense[poisoned] = poison
    dense[7, 1:] = 0.0  # one poisoned value is enough
    scores = scores_of(name, {**features, "dense": dense})["score"]
    healthy = [row for row in range(34) if row not in poisoned.tolist()]
    assert torch.equal(scores[healthy], calm[healthy])
    if poison == 1e6:
        assert bool(scores.isfinite().all())
    else:
        assert not bool(scores[poisoned].isfinite().any())


@pytest.mark.parametrize("name", ROW_WISE)
def test_rows_beside_poison_score_the_bits_that_they_score_alone(name: str) -> None:
    made = built(name)
    contract = loaded(name).manifest.inputs
    features = features_of(made.card, 9, 0.3)
    features["dense"][::2] = float("nan")
    scores = scores_of(name, features)["score"]
    for row in (1, 3, 5, 7):
        alone = scores_of(name, one_row(contract, features, row))["score"]
        assert float(alone[0]) == float(scores[row])


@pytest.mark.parametrize("name", ["zoo-fused-mixed", "bags-int8"])
def test_tables_alone_make_rows_independent_too(name: str) -> None:
    """The layer behind them is fp32, whose sums may differ in their last bits, and no further."""
    made = built(name)
    contract = loaded(name).manifest.inputs
    features = features_of(made.card, 9, 0.3)
    together = scores_of(name, features)["score"]
    for row in range(9):
        alone = scores_of(name, one_row(contract, features, row))["score"]
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


def test_notes_name_what_the_passes_left_alone() -> None:
    assert "item: left alone, a lookup of it has nothing to join" in built("zoo-fused").notes
    assert "alone: left alone, it has fewer than 2 rows" in built("zoo-mixed").notes
    # D = 6 and int2 were not asked of the same table; D = 1 takes fp16 as asked.
    assert not any(note.startswith("context") for note in built("zoo-mixed").notes)


def test_stored_bytes_fall_as_the_types_say() -> None:
    sizes = {name: built(name).bundle.size_bytes for name in EXACT if name.startswith("zoo")}
    assert sizes["zoo-mixed"] < 0.75 * sizes["zoo-plain"]
    assert sizes["zoo-fused-mixed"] < 0.75 * sizes["zoo-fused"]
    constants = built("zoo-fused").bundle.constants
    plans = sum(value.nbytes for name, value in constants.items() if "plan" in name)
    assert 0 < plans < 2_000
    assert sizes["zoo-fused"] < sizes["zoo-plain"] + plans + 500
