"""The input contract: the C++ check and the explanation agree on every call, good or broken."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.zoo import card, ids, ragged
from rankopt.artifact.contract import (
    contract_of,
    encode_contract,
    explain,
    random_features,
)
from rankopt.artifact.rows import one_row
from rankopt.kernels.build import load_kernels
from rankopt.models.card import ModelCard

MAX_BATCH = 8


def kjt(name: str, *, weighted: bool = False) -> dict[str, Any]:
    features = [
        {"key": key, "column": key, "num_ids": num_ids, "max_length": longest}
        for key, num_ids, longest in (("p", 5, 2), ("q", 9, 4))
    ]
    if weighted:
        for feature in features:
            feature["weights_column"] = f"w{feature['key']}"
    return {"kind": "kjt", "name": name, "features": features}


def everything() -> ModelCard:
    return card(
        "everything",
        {"kind": "dense", "name": "dense", "columns": ["a", "b", "c"]},
        ids("user", 7),
        {"kind": "ids", "name": "wide", "columns": ["x", "y"], "num_ids": [3, 4]},
        {**ids("small", 6), "dtype": "int32", "keep_width": True},
        ragged("bag", 11, max_length=3),
        ragged("heavy", 8, max_length=5, weights_column="hw", dtype="int32"),
        kjt("sparse"),
        kjt("weighted", weighted=True),
    )


CONTRACT = contract_of(everything())
SPEC = encode_contract(CONTRACT)
NAMES = [entry.name for entry in CONTRACT]


def fits(features: dict[str, Tensor]) -> bool:
    load_kernels()
    inputs = [features[name] for name in NAMES]
    return bool(torch.ops.rankopt.inputs_fit(inputs, SPEC, MAX_BATCH))


def good(batch: int, seed: int = 0, fill: float = 0.5) -> dict[str, Tensor]:
    return random_features(CONTRACT, batch, torch.Generator().manual_seed(seed), fill=fill)


def check_agreement(features: dict[str, Tensor]) -> bool:
    """Return whether the call fits, and insist that both ways of checking say so."""
    problems = explain(CONTRACT, features, MAX_BATCH)
    assert fits(features) == (not problems), [str(problem) for problem in problems]
    return not problems


def test_the_contract_has_the_cards_tensors_in_order() -> None:
    assert tuple(NAMES) == everything().tensor_names
    roles = {entry.name: entry.role for entry in CONTRACT}
    assert roles["wide"] == "ids"
    assert roles["heavy.weights"] == "weights"
    assert roles["weighted.lengths"] == "lengths"
    shapes = {entry.name: entry.shape for entry in CONTRACT}
    assert shapes["dense"] == ("B", 3)
    assert shapes["user"] == ("B",)
    assert shapes["small"] == ("B", 1)
    assert shapes["sparse.lengths"] == ("2 * B",)
    assert shapes["bag.values"] == ("L",)


@given(
    batch=st.integers(1, MAX_BATCH),
    seed=st.integers(0, 2**31),
    fill=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_made_up_calls_keep_the_contract(batch: int, seed: int, fill: float) -> None:
    features = good(batch, seed, fill)
    assert list(features) != []
    assert check_agreement(features)


@st.composite
def altered(draw: st.DrawFn) -> dict[str, Tensor]:
    """Break a call in one to three ways, or leave it good by chance."""
    features = good(draw(st.integers(1, MAX_BATCH)), draw(st.integers(0, 2**16)))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(NAMES))
        features[name] = draw(alteration(features[name]))
    return features


def alteration(value: Tensor) -> st.SearchStrategy[Tensor]:
    choices: list[st.SearchStrategy[Tensor]] = [
        st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32]).map(value.to),
        st.sampled_from([value[:-1], value[1:], torch.cat([value, value[:1]])]),
        st.just(value.unsqueeze(-1)),
        st.just(value.reshape(-1)),
        st.just(value.repeat_interleave(2, 0)[::2]),
        st.just(value[:0]),
    ]
    if value.numel():
        position = st.integers(0, value.numel() - 1)
        entry = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 2**31 - 1])
        choices.append(st.tuples(position, entry).map(lambda at: with_entry(value, *at)))
    if value.dim() == 2:
        choices += [st.just(value.t().contiguous()), st.just(torch.cat([value, value], 1))]
        choices.append(st.just(value.t().contiguous().t()))
    return st.one_of(choices)


def with_entry(value: Tensor, position: int, entry: int) -> Tensor:
    changed = value.contiguous().clone()
    changed.reshape(-1)[position] = entry
    return changed


@given(features=altered())
@settings(max_examples=400, deadline=None)
def test_the_fast_check_and_the_explanation_agree(features: dict[str, Tensor]) -> None:
    check_agreement(features)


def broken(batch: int = 4, **changes: Any) -> str:
    features: dict[str, Any] = good(batch, fill=0.9)
    for name, change in changes.items():
        key = name.replace("__", ".")
        features[key] = change(features[key])
    return "\n".join(str(problem) for problem in explain(CONTRACT, features, MAX_BATCH))


def put(position: int, entry: int) -> Any:
    return lambda value: with_entry(value, position, entry)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dense": lambda v: torch.cat([v, v], 1)}, r"input dense: .*\[B, 3\].*got \[4, 6\]"),
        ({"dense": lambda v: v.double()}, r"input dense: must be float32; got 'float64'"),
        ({"dense": lambda v: v[0]}, r"input dense: must have shape \[B, 3\]; got \[3\]"),
        ({"dense": lambda v: v.tolist()}, r"input dense: must be a torch\.Tensor; got 'list'"),
        ({"user": lambda v: v[:-1]}, r"input user: must have 4 rows .*got 3\.$"),
        ({"user": put(2, 7)}, r"input user\[2\]: must be an id in \[0, 6\]; got 7\. 1 ids"),
        ({"user": put(0, -1)}, r"input user\[0\]: must be an id in \[0, 6\]; got -1"),
        ({"wide": put(3, 4)}, r"input wide\[1, 1\]: must be an id in \[0, 3\]; got 4"),
        ({"small": lambda v: v.long()}, r"input small: must be int32; got 'int64'"),
        ({"small": put(1, 6)}, r"input small\[1, 0\]: must be an id in \[0, 5\]; got 6"),
        ({"bag__values": put(0, 11)}, r"input bag\.values\[0\]: must be an id in \[0, 10\]"),
        ({"bag__values": lambda v: v[:-1]}, r"input bag\.values: must hold as many ids as bag\."),
        ({"bag__lengths": put(0, -2)}, r"bag\.lengths\[0\]: must lie in \[0, 3\]; got -2"),
        ({"bag__lengths": put(1, 4)}, r"bag\.lengths\[1\]: must lie in \[0, 3\]; got 4"),
        ({"heavy__weights": lambda v: v[1:]}, r"input heavy\.weights: must have one weight per"),
        ({"sparse__lengths": lambda v: v[:-1]}, r"sparse\.lengths: must hold a multiple of 2"),
        ({"dense": lambda v: v.t().contiguous().t()}, r"input dense: must be contiguous"),
        ({"dense": lambda v: v.to("meta")}, r"input dense: must be on the CPU; got 'meta'"),
        ({"dense": lambda v: v.to_sparse()}, r"input dense: must be"),
    ],
)
def test_the_explanation_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    text = broken(**changes)
    assert re.search(words, text), text


def test_an_id_of_the_second_feature_is_held_against_its_own_range() -> None:
    features = good(4, fill=0.9)
    first = int(features["sparse.lengths"][:4].sum())
    features["sparse.values"][0] = 5  # out of p's range, within q's
    assert not check_agreement(features)
    (problem,) = explain(CONTRACT, features, MAX_BATCH)
    assert "must be an id in [0, 4]; got 5" in str(problem)
    features["sparse.values"][0] = 0
    features["sparse.values"][first] = 8
    assert check_agreement(features)


def test_too_many_rows_and_none_are_refused() -> None:
    assert "must have 1 to 8 rows; got 9" in broken(batch=9)
    empty = {name: value[:0] for name, value in good(2, fill=0.0).items()}
    assert not check_agreement(empty)
    assert "must have 1 to 8 rows; got 0" in str(explain(CONTRACT, empty, MAX_BATCH)[0])


def test_a_missing_input_names_what_was_given_instead() -> None:
    features = good(4)
    features["users"] = features.pop("user")
    (problem,) = explain(CONTRACT, features, MAX_BATCH)
    assert str(problem) == "input user: is missing. Did you mean 'users'?"
    assert len(explain(CONTRACT, {}, MAX_BATCH)) == len(CONTRACT)


def test_several_problems_are_told_at_once() -> None:
    text = broken(user=put(1, 99), wide=put(0, 3), bag__values=put(0, -5))
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "input user[1]",
        "input wide[0, 0]",
        "input bag.values[0]",
    ]


def test_all_lists_empty_is_a_good_call() -> None:
    features = good(5, fill=0.0)
    assert features["bag.values"].shape == (0,)
    assert check_agreement(features)


def test_made_up_lists_reach_both_ends_of_their_lengths() -> None:
    lengths = good(8, fill=0.5)["heavy.lengths"]
    many = torch.cat([good(8, seed)["heavy.lengths"] for seed in range(20)])
    assert set(many.tolist()) == {0, 1, 2, 3, 4, 5}
    assert lengths.shape == (8,)


def test_one_row_cuts_every_kind_of_input() -> None:
    features = good(6, seed=3, fill=0.6)
    parts = [one_row(CONTRACT, features, row) for row in range(6)]
    for part in parts:
        assert check_agreement(part)
    for name in ("dense", "user", "wide", "bag.values", "heavy.values", "heavy.weights"):
        assert torch.equal(torch.cat([part[name] for part in parts]), features[name])
    # Feature-major: the rows of one feature lie behind each other.
    lengths = torch.stack([part["sparse.lengths"] for part in parts], dim=1).flatten()
    assert torch.equal(lengths, features["sparse.lengths"])
    first, second = [], []
    for part in parts:
        cut = int(part["weighted.lengths"][0])
        first.append(part["weighted.values"][:cut])
        second.append(part["weighted.values"][cut:])
    assert torch.equal(torch.cat([*first, *second]), features["weighted.values"])
