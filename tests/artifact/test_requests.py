"""An artifact of both forms: its contract, its check in a fresh process, new weights, old errors.

DLRM has two tables' calls and an fbgemm layer in each form, DIN the table that both forms read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from artifact.two_forms import NUM_IDS, both, din, dlrm_card, save_weights
from artifact.workshop import edit_manifest, loaded
from passes.requests_zoo import LARGE_DIM, LARGE_IDS, both_forms
from passes.zoo import features_of
from rankopt.artifact.contract import contract_of
from rankopt.artifact.manifest import (
    REQUEST_CHECKS,
    REQUEST_CONSTANTS,
    REQUEST_PROGRAM,
    read_manifest,
)
from rankopt.artifact.refresh import refresh_artifact
from rankopt.artifact.requests import RequestContract
from rankopt.artifact.verify import verify_artifact
from rankopt.bench.arms import ArmSpec, load_arm
from rankopt.bench.request_rows import RequestArm
from rankopt.capture.requests import REQUEST_INDEX
from rankopt.errors import ArtifactError, ContractError, UsageError
from rankopt.runtime import LoadedArtifact, load_artifact


@cache
def artifact() -> LoadedArtifact:
    return load_artifact(both().folder)


def test_both_forms_score_alike() -> None:
    for sizes in ([1], [30], [3, 0, 4, 2]):
        plain, requests = both_forms(both().card, sizes)
        expected = artifact()(plain)["score"].clone()
        score = artifact()(requests)["score"]
        assert score.shape == (sum(sizes),)
        # One layer quantises what differs in its last bits.
        assert float((score - expected).abs().max()) < 0.02 * max(1.0, float(expected.abs().max()))


def test_a_sound_artifact_passes_in_a_fresh_process() -> None:
    found = verify_artifact(both().folder)
    assert found.problems == ()


def test_only_the_shares_of_split_layers_are_stored_twice() -> None:
    manifest = read_manifest(both().folder)
    assert manifest.requests is not None
    plain = {entry.sha256 for entry in manifest.constants}
    more = [e for e in manifest.requests.constants if e.sha256 not in plain]
    assert all(entry.name.startswith(REQUEST_CONSTANTS) for entry in more)
    tables = sum(NUM_IDS) * 8 * 4
    largest = max(manifest.constants, key=lambda entry: entry.size_bytes)
    assert largest.size_bytes >= tables
    assert sum(entry.size_bytes for entry in more) < tables
    assert manifest.size_bytes < sum(e.size_bytes for e in manifest.constants) + tables
    assert manifest.requests.operations < manifest.requests.operations_before
    assert {REQUEST_PROGRAM, REQUEST_CHECKS} <= set(manifest.files)


def test_each_table_of_din_is_stored_once() -> None:
    manifest = read_manifest(din()[1])
    table = LARGE_IDS * LARGE_DIM * 4
    # Items, two of users, genres; the layers of both forms together are smaller than one of them.
    assert 4 * table < manifest.size_bytes < 5 * table


def changed(features: dict[str, Tensor], **tensors: Tensor) -> dict[str, Tensor]:
    return {**features, **tensors}


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "index too large": (
        lambda f: changed(f, request_index=torch.tensor([0, 0, 2, 1, 1])),
        r"request_index\[2\].*0 to 1.*got 2",
    ),
    "index negative": (
        lambda f: changed(f, request_index=torch.tensor([0, 0, 1, -1, 1])),
        r"request_index\[3\]",
    ),
    "index too short": (
        lambda f: changed(f, request_index=torch.tensor([0, 1])),
        "input request_index: must have 5 rows",
    ),
    "index of another type": (
        lambda f: changed(f, request_index=torch.zeros(5)),
        "request_index: must be int64",
    ),
    "request-level input with a row per candidate": (
        lambda f: changed(f, user=f["user"].repeat(3, 1)[:5]),
        "input user: must have 2 rows",
    ),
    "candidates' input with a row per request": (
        lambda f: changed(f, ad=f["ad"][:2].contiguous()),
        "input request_index: must have 2 rows",
    ),
    "id out of range": (lambda f: changed(f, ad=f["ad"] + 100), r"input ad\[0, 0\]"),
    "input missing": (
        lambda f: {name: value for name, value in f.items() if name != "dense"},
        "input dense: is missing",
    ),
    "no candidates": (
        lambda f: changed(f, ad=f["ad"][:0], request_index=f["request_index"][:0]),
        "must have 1 to",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_breaks_the_contract_is_told_what_is_wrong(name: str) -> None:
    change, said = BROKEN[name]
    _, requests = both_forms(both().card, [2, 3])
    with pytest.raises(ContractError, match=said):
        artifact()(change(requests))


def test_the_contract_agrees_with_its_explanation() -> None:
    contract = RequestContract(contract_of(both().card), 8)
    _, requests = both_forms(both().card, [3, 5])
    assert contract.fits([requests[name] for name in contract.names])
    assert contract.explain(requests) == []
    _, many = both_forms(both().card, [9])
    assert not contract.fits([many[name] for name in contract.names])
    assert "must have 1 to 8 rows" in str(contract.explain(many)[0])


def test_an_artifact_without_the_form_says_how_to_get_it() -> None:
    features = features_of(dlrm_card(), 2)
    with pytest.raises(ContractError, match="hoist_requests"):
        loaded("dlrm-native")({**features, REQUEST_INDEX: torch.zeros(2, dtype=torch.int64)})


def test_a_closed_artifact_scores_in_neither_form() -> None:
    closed = load_artifact(both().folder)
    _, requests = both_forms(both().card, [2])
    closed.close()
    with pytest.raises(ArtifactError, match="closed"):
        closed(requests)


def test_new_weights_reach_both_forms(tmp_path: Path) -> None:
    given = both()
    checkpoint = save_weights(given.card, 4, tmp_path / "new.safetensors")
    target = refresh_artifact(given.folder, checkpoint, tmp_path / "new")
    plain, requests = both_forms(given.card, [4, 3])
    fresh = load_artifact(target)
    expected, score = fresh(plain)["score"].clone(), fresh(requests)["score"].clone()
    assert float((score - expected).abs().max()) < 0.02 * max(1.0, float(expected.abs().max()))
    assert float((score - artifact()(requests)["score"]).abs().max()) > 0.01


def test_a_damaged_program_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(both().folder, tmp_path / "damaged"))
    (folder / REQUEST_PROGRAM).unlink()
    with pytest.raises(ArtifactError, match=r"requests\.pt2 is missing"):
        load_artifact(folder)


def test_wrong_scores_of_the_other_form_fail_the_check(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(both().folder, tmp_path / "strict"))
    edit_manifest(folder, tolerance=-1.0)
    found = verify_artifact(folder)
    assert any("with request_index" in problem for problem in found.problems)


def test_an_arm_of_kind_requests_scores_rows_that_stand_together() -> None:
    spec = ArmSpec(
        label="requests", kind="requests", artifact=both().folder, options={"request_size": 4}
    )
    arm = load_arm(spec)
    assert isinstance(arm, RequestArm)
    plain, _ = both_forms(both().card, [4, 4, 2])
    prepared = arm.prepare(plain)
    assert prepared["dense"].shape[0] == 3
    assert prepared[REQUEST_INDEX].tolist() == [0] * 4 + [1] * 4 + [2] * 2
    expected = artifact()(plain)["score"].clone()
    assert float((arm(prepared)["score"] - expected).abs().max()) < 0.02


@pytest.mark.parametrize("options", [{}, {"request_size": 0}, {"request_size": 2, "more": 1}])
def test_wrong_options_of_such_an_arm_are_named(options: dict[str, int]) -> None:
    spec = ArmSpec(label="r", kind="requests", artifact=both().folder, options=options)
    with pytest.raises(UsageError, match="options"):
        load_arm(spec)
