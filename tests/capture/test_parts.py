"""Parts that stay eager: scores are the same, in the graph and in an artifact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capture.split_net import Made, eager, rows
from passes.zoo import apply_passes
from rankopt.artifact.manifest import MANIFEST, damaged_files, read_manifest
from rankopt.artifact.refresh import refresh_artifact
from rankopt.artifact.verify import verify_artifact
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.errors import ArtifactError
from rankopt.models.build import build_module
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.runtime import load_artifact

BATCHES = pytest.mark.parametrize("num_rows", [1, 2, 7, 513])
SHIFTS = pytest.mark.parametrize("shift", [-5.0, 0.0, 2.0])


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


@SHIFTS
@BATCHES
def test_the_graph_scores_as_the_model(made: Made, num_rows: int, shift: float) -> None:
    features = rows(made.card, num_rows, shift)
    torch.testing.assert_close(made.bundle.run(features)["click"], eager(made, features))


@SHIFTS
@BATCHES
def test_the_artifact_scores_as_the_model(made: Made, num_rows: int, shift: float) -> None:
    features = rows(made.card, num_rows, shift)
    artifact = load_artifact(made.folder)
    torch.testing.assert_close(artifact(features)["click"], eager(made, features))


def test_the_rows_take_both_sides_of_the_branches(made: Made) -> None:
    """Else the tests above would not compare what they are for."""
    low, high = (rows(made.card, 513, shift)["dense"] for shift in (-5.0, 2.0))
    assert low.mean() < 0.1 < high.mean()
    assert not (low[:, 0] > 0.3).any()
    assert (high[:, 0] > 0.3).sum() > 100


def test_a_fresh_process_proves_it(made: Made) -> None:
    found = verify_artifact(made.folder)
    assert found.passed, found.problems
    assert found.batch_sizes == (1, 2, 7, 64)


def test_the_manifest_lists_parts_and_their_files(made: Made) -> None:
    manifest = read_manifest(made.folder)
    entries = {entry.id: entry for entry in manifest.parts}
    assert set(entries) == {"boost", "selected", "tower.halve"}
    assert entries["selected"].module == "selected"
    assert entries["selected"].class_name == "Selected"
    assert "kept.shape[0] == 0" in entries["selected"].why
    assert sorted(manifest.part_code.values()) == [
        "parts/code/split_test_layers.py",
        "parts/code/split_test_net.py",
    ]
    inside = {f"parts/{path.name}" for path in (made.folder / "parts").glob("*.pt")}
    inside |= set(manifest.part_code.values())
    assert inside == {name for name in manifest.files if name.startswith("parts/")}
    assert damaged_files(made.folder, manifest) == []
    # Equal constants lie in the file once.
    constants = sum({entry.offset: entry.size_bytes for entry in manifest.constants}.values())
    parts = sum(part.size_bytes for part in made.bundle.parts.values())
    assert manifest.size_bytes == constants + parts


def test_passes_rewrite_what_lies_around_the_parts(made: Made) -> None:
    passes = (QuantizeEmbeddings(dtype="int8"), QuantizeDense(backend="native", min_inputs=1))
    quantised = apply_passes(made.bundle, *passes).bundle
    assert quantised.parts == made.bundle.parts
    assert quantised.size_bytes < made.bundle.size_bytes
    for num_rows in (1, 7, 64):
        features = rows(made.card, num_rows, 2.0)
        difference = quantised.run(features)["click"] - eager(made, features)
        assert 0 < difference.abs().max() < 0.1


def test_several_threads_may_call(made: Made) -> None:
    artifact = load_artifact(made.folder)
    batches = [rows(made.card, 1 + seed, seed % 3 - 1.0, seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda features: artifact(features)["click"].clone(), batches))
    for features, score in zip(batches, found, strict=True):
        torch.testing.assert_close(score, eager(made, features))


def test_an_error_of_a_part_is_told_and_the_artifact_lives_on(made: Made) -> None:
    artifact = load_artifact(made.folder)
    features = rows(made.card, 3)
    with pytest.raises(ArtifactError, match=r"part boost raised ValueError: a value is far too la"):
        artifact(features | {"dense": features["dense"] + 5000})
    torch.testing.assert_close(artifact(features)["click"], eager(made, features))


def _other_weights(made: Made, file: Path) -> nn.Module:
    other = build_module(made.card, allow_random=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    torch.save(other.state_dict(), file)
    return other


@pytest.fixture
def refreshed(made: Made, tmp_path: Path) -> Made:
    """Put other weights into the compiled artifact."""
    other = _other_weights(made, tmp_path / "other.pt")
    folder = refresh_artifact(made.folder, tmp_path / "other.pt", tmp_path / "refreshed")
    return replace(made, model=other, folder=folder)


def test_new_weights_reach_the_parts_and_two_artifacts_never_mix(
    made: Made, refreshed: Made
) -> None:
    old, new = load_artifact(made.folder), load_artifact(refreshed.folder)
    features = rows(made.card, 9, 0.5)
    wanted_old, wanted_new = eager(made, features), eager(refreshed, features)
    assert (wanted_old - wanted_new).abs().max() > 0.05
    for _ in range(2):
        torch.testing.assert_close(old(features)["click"], wanted_old)
        torch.testing.assert_close(new(features)["click"], wanted_new)
    old.close()
    torch.testing.assert_close(new(features)["click"], wanted_new)
    with pytest.raises(ArtifactError, match="was closed"):
        old(features)


def test_a_refresh_refuses_parts_that_changed(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _other_weights(made, tmp_path / "other.pt")

    def changed(*given: Any, **named: Any) -> ModelBundle:
        bundle = build_bundle(*given, **named)
        halve = bundle.parts["tower.halve"]
        part = replace(halve, calls=halve.calls * 2)  # the same handle
        return replace(bundle, parts={**bundle.parts, part.id: part})

    monkeypatch.setattr("rankopt.artifact.refresh.build_bundle", changed)
    with pytest.raises(ArtifactError, match=r"part tower\.halve: must be a Halve"):
        refresh_artifact(made.folder, tmp_path / "other.pt", tmp_path / "refreshed")
    assert not (tmp_path / "refreshed").exists()


def edit(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


def test_a_damaged_part_is_not_run(copy: Path, tmp_path: Path) -> None:
    """Unpickling runs code, so the hash comes first."""
    witness = tmp_path / "ran"
    torch.save({"module": _Bomb(witness), "calls": ()}, copy / "parts/boost.pt")
    with pytest.raises(ArtifactError, match=r"boost\.pt: differs from its hash"):
        load_artifact(copy)
    assert not witness.exists()


class _Bomb:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.witness,)


def test_damaged_code_is_not_run(copy: Path) -> None:
    file = copy / "parts/code/split_test_net.py"
    file.write_text(file.read_text() + "\n# changed\n")
    with pytest.raises(ArtifactError, match=r"split_test_net\.py: differs from its hash"):
        load_artifact(copy)


def test_a_missing_package_is_named(copy: Path) -> None:
    edit(copy, part_packages={"a-package-nobody-has": "1.2"})
    with pytest.raises(ArtifactError, match=r"a-package-nobody-has: must be .?1\.2") as caught:
        load_artifact(copy)
    assert "pip install a-package-nobody-has==1.2" in str(caught.value)


def test_missing_code_is_named_in_a_fresh_process(copy: Path) -> None:
    edit(copy, part_code={})
    (problem,) = verify_artifact(copy).problems
    assert "whose code needs the package" in problem
    assert "Traceback" not in problem
