"""verify --data: quality judged again with the kernels in use, and stamped into the artifact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import small
from rankopt.artifact.judged import read_judgement
from rankopt.artifact.manifest import damaged_files, read_manifest
from rankopt.artifact.refresh import refresh_artifact
from rankopt.errors import EnvironmentProblem
from rankopt.jobs import verify as job
from rankopt.jobs.verify import verify
from rankopt.kernels.ops import current_isa
from rankopt.models.build import make_module
from rankopt.models.card import load_card
from rankopt.models.checkpoint import save_checkpoint

pytestmark = pytest.mark.skipif(current_isa() == "scalar", reason="needs two instruction sets")

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def artifact(root: Path, tmp_path: Path) -> Path:
    return small.copy_of(small.artifact(root), tmp_path / "artifact")


def test_other_kernels_ask_for_rows_and_pass_with_them(
    cli: Cli, root: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKOPT_ISA", "scalar")
    before = cli("verify", artifact)
    assert before.exit_code == 3, before.stderr
    assert f"built and judged with {current_isa()} kernels, running with scalar" in before.stdout
    assert "verdict: inconclusive" in before.stdout
    judged = cli("verify", artifact, "--data", small.model(root) / "data", "--json")
    assert judged.exit_code == 0, judged.stderr
    told = json.loads(judged.stdout)
    assert (told["passed"], told["verdict"], told["isa"]) == (True, "pass", "scalar")
    assert told["metrics"]["ne"]["num_rows"] == 60_000
    assert told["metrics"]["ne"]["ci_high"] < 0.001
    stamp = read_judgement(artifact, "scalar")
    assert stamp is not None
    assert stamp.verdict == "pass"
    assert stamp.reproduce.startswith(f"rankopt verify {artifact} --data ")
    assert damaged_files(artifact, read_manifest(artifact)) == []
    after = cli("verify", artifact, "--json")
    assert after.exit_code == 0
    assert json.loads(after.stdout)["notes"] == []


def test_weights_that_lost_what_was_learned_fail(
    cli: Cli, root: Path, artifact: Path, tmp_path: Path
) -> None:
    card = load_card(small.trained(root) / "card.yaml")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blank = make_module(card)  # as its factory leaves it
    file = tmp_path / "blank.safetensors"
    save_checkpoint(blank.state_dict(), file)
    data = small.model(root) / "data"
    (artifact / "judged").mkdir()
    (artifact / "judged" / "scalar.json").write_text("of other weights")
    # Sound in itself, and another model than the card's checkpoint.
    refreshed = refresh_artifact(artifact, file, tmp_path / "blank")
    assert not (refreshed / "judged").exists()
    learned = small.trained(root) / "checkpoint.safetensors"
    result = cli("verify", refreshed, "--data", data, "--checkpoint", learned)
    assert result.exit_code == 1, result.stdout + result.stderr
    assert "beyond the margin" in result.stdout
    assert f"{learned} holds other bytes than the checkpoint" in result.stdout
    assert "verdict: fail" in result.stdout
    assert cli("verify", refreshed).exit_code == 1
    # Against the weights that it was made of, which its manifest names, it holds.
    found = cli("verify", refreshed, "--data", data)
    assert found.exit_code == 0, found.stdout + found.stderr
    assert cli("verify", refreshed).exit_code == 0
    # A copy has the same bytes.
    moved = shutil.move(file, tmp_path / "moved.safetensors")
    gone = cli("verify", refreshed, "--data", data)
    assert gone.exit_code == 2
    assert f"manifest.json: checkpoint: {file} is gone" in gone.stderr
    assert "--checkpoint" in gone.stderr
    copied = cli("verify", refreshed, "--data", data, "--checkpoint", moved)
    assert copied.exit_code == 0
    assert "holds other bytes" not in copied.stdout
    shutil.copy(learned, file)
    changed = cli("verify", refreshed, "--data", data)
    assert changed.exit_code == 2
    assert f"{file} has changed: its sha256 must be" in changed.stderr
    assert cli("verify", refreshed).exit_code == 0  # without rows no weights are needed


def test_few_rows_are_inconclusive(cli: Cli, root: Path, artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    frame = pd.read_parquet(small.model(root) / "data" / "test.parquet").head(40)
    for name in ("validation", "test"):
        frame.to_parquet(folder / f"{name}.parquet")
    other = small.trained(root, seed=5) / "checkpoint.safetensors"
    result = cli("verify", artifact, "--data", folder, "--checkpoint", other)
    assert result.exit_code == 3, result.stdout + result.stderr
    assert "would decide it" in result.stdout


def test_a_folder_that_cannot_be_written_keeps_the_answer(
    root: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise EnvironmentProblem("judged: cannot be written.")

    monkeypatch.setattr(job, "write_judgement", refuse)
    found = verify(artifact, small.model(root) / "data")
    assert found.verdict == "pass"
    assert any("could not be kept with the artifact" in note for note in found.notes)


def test_a_damaged_artifact_is_not_judged(cli: Cli, root: Path, artifact: Path) -> None:
    (artifact / "checks.safetensors").write_bytes(b"")
    result = cli("verify", artifact, "--data", small.model(root) / "data")
    assert result.exit_code == 1
    assert not (artifact / "judged").exists()


def test_rows_without_labels_are_told_so(cli: Cli, root: Path, artifact: Path) -> None:
    data = small.model(root) / "data" / "test.parquet"
    bare = artifact.parent / "bare.parquet"
    pd.read_parquet(data).drop(columns="label").to_parquet(bare)
    result = cli("verify", artifact, "--data", bare)
    assert result.exit_code == 2
    assert "column 'label': is missing" in result.stderr
