"""What writing an artifact leaves behind, and what its manifest says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from artifact.workshop import built, bundle_of, copy_of, edit_manifest
from passes.zoo import apply_passes
from rankopt.artifact.build import CHECK_BATCHES, tolerance_of, write_artifact
from rankopt.artifact.manifest import (
    CHECKS,
    CONSTANTS,
    MANIFEST,
    PROGRAM,
    damaged_files,
    read_manifest,
)
from rankopt.environment import collect_environment
from rankopt.errors import ArtifactError, ExportError
from rankopt.hashes import sha256_file
from rankopt.models.card import ModelCard
from rankopt.passes.export_aoti import ExportAoti


def test_the_folder_holds_what_the_manifest_hashes() -> None:
    made = built("dlrm-native")
    manifest = read_manifest(made.folder)
    assert set(manifest.files) == {PROGRAM, CONSTANTS, CHECKS}
    for name, digest in manifest.files.items():
        assert sha256_file(made.folder / name) == digest
    assert damaged_files(made.folder, manifest) == []
    assert ModelCard.model_validate(manifest.card) == made.card


@pytest.mark.parametrize("name", ["zoo-plain", "zoo-fused-mixed", "dlrm-native", "dlrm-fbgemm"])
def test_sizes_are_those_of_what_is_stored(name: str) -> None:
    made = built(name)
    manifest = read_manifest(made.folder)
    # Constants of equal bytes lie in the file once.
    stored = {entry.offset: entry.size_bytes for entry in manifest.constants}
    assert manifest.size_bytes == sum(stored.values())
    # Constants that the compiled graph drops may be left out; nothing is stored beside them.
    assert 0.95 * made.bundle.size_bytes <= manifest.size_bytes <= made.bundle.size_bytes
    on_disk = (made.folder / CONSTANTS).stat().st_size
    assert manifest.size_bytes <= on_disk <= manifest.size_bytes + 64 * len(manifest.constants)
    assert manifest.code_bytes == (made.folder / PROGRAM).stat().st_size
    assert manifest.control_size_bytes == bundle_of(made.card.name)[2].size_bytes


def test_no_weight_is_compiled_into_the_library() -> None:
    """A table of distinct bytes would be found in the package if it were."""
    made = built("zoo-plain")
    package = (made.folder / PROGRAM).read_bytes()
    for entry in read_manifest(made.folder).constants:
        if entry.size_bytes < 256:
            continue
        with (made.folder / CONSTANTS).open("rb") as stream:
            stream.seek(entry.offset)
            needle = stream.read(64)
        assert needle not in package, entry.name


def test_the_manifest_says_where_it_was_made() -> None:
    manifest = read_manifest(built("dlrm-fbgemm").folder)
    here = collect_environment()
    assert manifest.target.device == "cpu"
    assert manifest.target.architecture == here.architecture
    assert manifest.target.isa == here.isa
    assert manifest.libraries["torch"] == here.libraries["torch"]
    assert [entry.name for entry in manifest.inputs] == ["dense", "sparse"]
    assert manifest.outputs[0].activation == "logit"
    assert len(manifest.packed_for_fbgemm) == 5
    assert "rankopt" in manifest.operators


def test_operators_are_named_for_the_loader() -> None:
    assert read_manifest(built("zoo-fused").folder).operators == ("rankopt",)
    assert read_manifest(built("zoo-plain").folder).operators == ()


def test_checks_are_made_up_rows_with_the_bundles_own_scores() -> None:
    made = built("zoo-fused-mixed")
    checks = load_file(made.folder / CHECKS)
    for batch in CHECK_BATCHES:
        features = {name: checks[f"{batch}/input/{name}"] for name in made.card.tensor_names}
        expected = made.bundle.run(features)["score"]
        assert torch.equal(checks[f"{batch}/output/score"], expected)
        assert expected.shape == (batch,)


def test_only_rounding_passes_loosen_the_tolerance() -> None:
    assert tolerance_of(built("zoo-fused").bundle) == tolerance_of(built("zoo-plain").bundle)
    assert tolerance_of(built("dlrm-native").bundle) > tolerance_of(built("zoo-plain").bundle)


def test_what_the_compiler_refuses_is_reported_with_its_reason(tmp_path: Path) -> None:
    _, _, bundle = bundle_of("dlrm")
    step = ExportAoti(inductor={"no_such_option_of_inductor": True})
    exported = apply_passes(bundle, step).bundle
    with pytest.raises(ExportError, match=r"AOTInductor refused the graph(.|\n)*no_such_option"):
        write_artifact(exported, tmp_path / "x", control_size_bytes=1)


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"holds no manifest\.json.*rankopt optimize"):
        read_manifest(tmp_path)
    with pytest.raises(ArtifactError, match=r"holds no manifest\.json"):
        read_manifest(tmp_path / "missing")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 1}', "\x00\xff"])
def test_a_damaged_manifest_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_a_manifest_with_a_key_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    edit_manifest(folder, format_version=99)
    with pytest.raises(ArtifactError, match=r"has format 99; this rankopt reads 1"):
        read_manifest(folder)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    edit_manifest(folder, format_version=1, shards=manifest["files"])
    with pytest.raises(ArtifactError, match="shards"):
        read_manifest(folder)
