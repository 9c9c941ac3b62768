"""Ids out of range: the same in the eager model, in the C++ pass and in the data's reader."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from artifact.test_contract import kjt
from passes.zoo import apply_passes, card, ids, make_bundle, ragged, seeded
from rankopt.artifact.build import write_artifact
from rankopt.artifact.contract import contract_of, encode_contract, explain, random_features
from rankopt.data.encode import load_rows
from rankopt.data.frames import FrameSource
from rankopt.errors import ContractError, DataError
from rankopt.kernels.build import load_kernels
from rankopt.models.card import ModelCard
from rankopt.models.id_ranges import features_in_range, into_range, maps_ids
from rankopt.models.inputs import OutOfRange
from rankopt.models.serving import EagerModel
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.runtime import load_artifact

MAX_BATCH = 50


def mapped_card() -> ModelCard:
    sparse = kjt("sparse")
    sparse["features"][0]["out_of_range"] = "hash"
    sparse["features"][1]["out_of_range"] = "clamp"
    return card(
        "mapped",
        {**ids("user", 7), "out_of_range": "hash"},
        {
            "kind": "ids",
            "name": "wide",
            "columns": ["x", "y"],
            "num_ids": [3, 40],
            "out_of_range": "clamp",
        },
        {**ids("strict", 6), "dtype": "int32", "keep_width": True},
        {**ids("floats", 9), "dtype": "float32", "out_of_range": "hash"},
        {**ragged("bag", 11, max_length=3), "out_of_range": "hash", "dtype": "int32"},
        sparse,
        {
            "kind": "packed",
            "name": "packed",
            "columns": [
                {"name": "pa", "num_ids": 5, "out_of_range": "clamp"},
                {"name": "pb"},
                {"name": "pc", "num_ids": 8, "length": 2, "out_of_range": "hash"},
                {"length_of": "pc"},
                {"name": "pd", "num_ids": 5},
            ],
        },
    )


CARD = mapped_card()
CONTRACT = contract_of(CARD)
SPEC = encode_contract(CONTRACT)
NAMES = [entry.name for entry in CONTRACT]


def fitted(features: dict[str, Tensor]) -> dict[str, Tensor] | None:
    load_kernels()
    inputs = [features[name] for name in NAMES]
    found = torch.ops.rankopt.fitted_inputs(inputs, SPEC, MAX_BATCH)
    return dict(zip(NAMES, found, strict=True)) if found else None


def good(batch: int, seed: int = 0) -> dict[str, Tensor]:
    return random_features(CONTRACT, batch, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_clamp_takes_the_nearest_and_hash_spreads(dtype: torch.dtype) -> None:
    raw = torch.arange(-1000, 1000).to(dtype)
    inside = (raw >= 0) & (raw < 10)
    clamped = into_range(raw, 10, "clamp")
    assert torch.equal(clamped, raw.clamp(0, 9))
    hashed = into_range(raw, 10, "hash")
    assert torch.equal(hashed[inside], raw[inside])
    counts = torch.bincount(hashed[~inside].long(), minlength=10)
    assert int(counts.min()) > 140
    assert into_range(raw, 10, "error") is raw


def test_the_hash_is_splitmix64() -> None:
    """Written out in Python's own whole numbers."""

    def by_hand(value: int, num_ids: int) -> int:
        mask = 2**64 - 1
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return ((value ^ (value >> 31)) >> 1) % num_ids

    raw = [-(2**63), -1, 1000, 2**40, 2**63 - 1]
    expected = [by_hand(value & (2**64 - 1), 1000) for value in raw]
    assert into_range(torch.tensor(raw), 1000, "hash").tolist() == expected


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Tensor]:
    features = good(draw(st.integers(1, 6)), draw(st.integers(0, 2**16)))
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(NAMES))
        value = features[name]
        if not value.numel():
            continue
        changed = value.clone()
        at = draw(st.integers(0, value.numel() - 1))
        new = draw(st.sampled_from([-(2**31), -3, -1, 0, 5, 8, 11, 40, 2**24, 2**31 - 1]))
        if value.is_floating_point():
            new = draw(st.sampled_from([float(new), 0.5, torch.nan, torch.inf, 1e30, -0.5]))
        changed.view(-1)[at] = new
        features[name] = changed
    return features


@given(features=calls())
@settings(max_examples=400, deadline=None)
def test_the_pass_in_cpp_the_eager_model_and_the_explanation_agree(
    features: dict[str, Tensor],
) -> None:
    before = {name: value.clone() for name, value in features.items()}
    found = fitted(features)
    problems = explain(CONTRACT, features, MAX_BATCH)
    assert (found is None) == bool(problems), [str(problem) for problem in problems]
    for name, value in before.items():  # the caller's own tensors are never written into
        torch.testing.assert_close(features[name], value, rtol=0, atol=0, equal_nan=True)
    if found is not None:
        expected = features_in_range(CARD, features)
        for name in NAMES:
            torch.testing.assert_close(
                found[name], expected[name], rtol=0, atol=0, equal_nan=True, msg=name
            )


def test_inputs_in_range_are_passed_on_as_they_are() -> None:
    features = good(5)
    found = fitted(features)
    assert found is not None
    assert all(found[name].data_ptr() == features[name].data_ptr() for name in NAMES)


def test_a_card_without_a_policy_maps_nothing() -> None:
    plain = card("plain", ids("user", 7), kjt("sparse"))
    assert not maps_ids(plain)
    assert maps_ids(CARD)
    assert all(entry.out_of_range == () for entry in contract_of(plain))


def test_a_policy_on_a_column_without_ids_is_refused() -> None:
    with pytest.raises(ValidationError, match="out_of_range is for ids"):
        card(
            "wrong",
            {"kind": "packed", "name": "x", "columns": [{"name": "a", "out_of_range": "hash"}]},
        )


def test_rows_of_the_data_are_mapped_as_they_are_read() -> None:
    def reader(policy: OutOfRange) -> ModelCard:
        return card(
            "reader",
            {**ids("user", 7), "out_of_range": policy},
            {**ragged("bag", 5, max_length=2), "out_of_range": policy},
        )

    frame = pd.DataFrame(
        {"user": [1, 99, -4], "bag": [[1, 50], [], [4, 3, -1]], "label": [0, 1, 0]}
    )
    rows = load_rows(reader("clamp"), FrameSource(frame))
    assert rows.features["user"].tolist() == [1, 6, 0]
    assert rows.features["bag.values"].tolist() == [1, 4, 3, 0]
    hashed = load_rows(reader("hash"), FrameSource(frame)).features["user"]
    assert torch.equal(hashed, into_range(torch.tensor([1, 99, -4]), 7, "hash"))
    with pytest.raises(DataError, match="out_of_range in the card"):
        load_rows(reader("error"), FrameSource(frame))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(7, 8)
        self.pair = nn.ModuleList(nn.Embedding(rows, 8) for rows in (3, 40))
        self.bag = nn.EmbeddingBag(11, 8, mode="sum")
        self.top = nn.Linear(32, 1)

    def forward(self, user: Tensor, wide: Tensor, bag_values: Tensor, bag_lengths: Tensor) -> Any:
        rows = [self.user(user), *(table(wide[:, i]) for i, table in enumerate(self.pair))]
        rows.append(self.bag(bag_values, bag_lengths.cumsum(0) - bag_lengths))
        return self.top(torch.cat(rows, 1)).squeeze(1)


def test_an_artifact_scores_ids_out_of_range_as_the_eager_model_does(tmp_path: Any) -> None:
    small = card(
        "small",
        {**ids("user", 7), "out_of_range": "hash"},
        {
            "kind": "ids",
            "name": "wide",
            "columns": ["x", "y"],
            "num_ids": [3, 40],
            "out_of_range": "clamp",
        },
        ragged("bag", 11, max_length=4),
    )
    model = seeded(Small)
    bundle = apply_passes(make_bundle(small, model), FuseEmbeddings(), ExportAoti()).bundle
    write_artifact(bundle, tmp_path / "artifact", control_size_bytes=bundle.size_bytes)
    artifact, eager = load_artifact(tmp_path / "artifact"), EagerModel(small, model)
    for batch in (1, 2, 7, 513):
        generator = torch.Generator().manual_seed(batch)
        features = random_features(contract_of(small), batch, generator)
        wild = dict(features)
        wild["user"] = torch.randint(-100, 100, (batch,), generator=generator)
        wild["wide"] = torch.randint(-100, 100, (batch, 2), generator=generator)
        for call in (features, wild):
            torch.testing.assert_close(artifact(call), eager(call), rtol=1e-5, atol=1e-5)
        if len(features["bag.values"]):
            broken = dict(wild, **{"bag.values": features["bag.values"] + 11})
            with pytest.raises(ContractError, match=r"bag\.values\[0\]: must be an id"):
                artifact(broken)
