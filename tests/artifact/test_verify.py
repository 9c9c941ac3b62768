"""verify: passes on a sound artifact, names what is damaged, and can tell wrong scores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from artifact.workshop import alter_weights, built, copy_of, edit_manifest
from rankopt.artifact import verify
from rankopt.artifact.build import CHECK_BATCHES
from rankopt.artifact.judged import UnjudgedWarning
from rankopt.artifact.manifest import (
    CHECKS,
    CONSTANTS,
    MANIFEST,
    PROGRAM,
    read_manifest,
)
from rankopt.artifact.verify import Verification, verify_artifact
from rankopt.errors import ArtifactError
from rankopt.hashes import sha256_file


def verify_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> Verification:
    """Verify as the fresh process does, in this one: the way in is the same `main`."""
    capsys.readouterr()
    assert verify.main([str(folder)]) == 0
    return Verification.model_validate_json(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zoo-fused-mixed", "dlrm-fbgemm"])
def test_a_sound_artifact_passes_in_a_fresh_process(name: str) -> None:
    found = verify_artifact(built(name).folder)
    assert found.problems == ()
    assert found.passed
    assert found.batch_sizes == CHECK_BATCHES
    assert found.largest_difference is not None
    assert found.largest_difference < 0.05
    assert found.notes == ()
    assert found.isa == found.judged_isa


@pytest.mark.parametrize("name", ["din-native", "din-fbgemm", "dlrm-native", "dlrm-fbgemm"])
def test_rows_of_int8_artifacts_are_found_to_stand_alone(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verify_here(built(name).folder, capsys)
    assert found.passed
    assert found.rows_alone_equal is True


def flip(file: Path, position: int = -40) -> None:
    raw = bytearray(file.read_bytes())
    raw[position] ^= 0x10
    file.write_bytes(raw)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped weights": (lambda at: flip(at / CONSTANTS), f"{CONSTANTS} differs from its hash"),
    "flipped code": (lambda at: flip(at / PROGRAM), f"{PROGRAM} differs from its hash"),
    "flipped checks": (lambda at: flip(at / CHECKS), f"{CHECKS} differs from its hash"),
    "cut weights": (
        lambda at: (at / CONSTANTS).write_bytes((at / CONSTANTS).read_bytes()[:-100]),
        f"{CONSTANTS} differs from its hash",
    ),
    "no code": (lambda at: (at / PROGRAM).unlink(), f"{PROGRAM} is missing"),
    "no weights": (lambda at: shutil.rmtree(at / "weights"), f"{CONSTANTS} is missing"),
    "no checks": (lambda at: (at / CHECKS).unlink(), f"{CHECKS} is missing"),
    "foreign manifest": (
        lambda at: shutil.copy(built("dlrm-fbgemm").folder / MANIFEST, at / MANIFEST),
        f"{PROGRAM} differs from its hash",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_damaged_file_is_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    damage, words = DAMAGE[kind]
    damage(folder)
    found = verify_here(folder, capsys)
    assert not found.passed
    assert any(words in problem for problem in found.problems), found.problems
    assert found.largest_difference is None


@pytest.mark.parametrize("name", ["zoo-plain", "dlrm-native"])
def test_altered_weights_are_found_though_their_hashes_were_altered_too(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(name, tmp_path)

    def double_biases(constant: str, value: torch.Tensor) -> torch.Tensor:
        return value * 2 + 0.1 if constant.endswith(".bias") else value

    alter_weights(folder, double_biases)
    found = verify_here(folder, capsys)
    assert not found.passed
    assert {problem.split(" differs")[0] for problem in found.problems} >= {
        f"output score at batch {batch}" for batch in CHECK_BATCHES
    }
    assert found.largest_difference is not None
    assert found.largest_difference > read_manifest(folder).tolerance


def test_weights_of_nan_never_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of("zoo-plain", tmp_path)
    alter_weights(folder, lambda n, v: v * float("nan") if v.is_floating_point() else v)
    found = verify_here(folder, capsys)
    assert len(found.problems) == len(CHECK_BATCHES)


def test_weights_written_again_unchanged_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("zoo-plain", tmp_path)
    alter_weights(folder, lambda _, value: value)
    assert verify_here(folder, capsys).passed


def test_an_artifact_of_another_machine_is_a_problem_and_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    target = read_manifest(folder).target.model_dump(mode="json")
    edit_manifest(folder, target={**target, "isa": [*target["isa"], "avx1024"]})
    found = verify_here(folder, capsys)
    assert "avx1024" in found.problems[0]


def test_other_kernels_than_it_was_judged_on_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    edit_manifest(folder, judged_isa="another")
    with pytest.warns(UnjudgedWarning, match="judged with another"):
        found = verify_here(folder, capsys)
    assert found.passed
    assert found.verdict == "inconclusive"
    assert "judged with another" in found.notes[0]


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    # A file of checks that hashes right and is none: the process cannot go on.
    (folder / CHECKS).write_bytes(b"no tensors here")
    manifest = read_manifest(folder)
    edit_manifest(folder, files={**manifest.files, CHECKS: sha256_file(folder / CHECKS)})
    with pytest.raises(ArtifactError, match="the process that loaded it ended with 1"):
        verify_artifact(folder)


def test_what_is_no_artifact_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"holds no manifest\.json"):
        verify_artifact(tmp_path)
