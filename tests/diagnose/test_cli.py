"""`rankopt diagnose` as a user types it, and what it says to bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diagnose import planted
from rankopt.diagnose.schema import Diagnosis

Cli = Callable[..., Any]


def test_a_card_without_data_and_checkpoint_is_diagnosed(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli(
        "diagnose", planted.card_file(), "--out", out, "--batch-sizes", "2,2,256", "--quick",
        "--num-threads", "1", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    told = Diagnosis.model_validate(json.loads(result.stdout))
    assert told == Diagnosis.model_validate_json((out / "diagnose.json").read_bytes())
    assert (told.subject, told.model, told.num_threads) == ("eager", "planted", 1)
    assert [batch.batch_size for batch in told.batches] == [2, 256]
    assert told.batches[1].parts[0].part == "dense"
    assert "no checkpoint is named" in " ".join(told.notes)
    assert "ids are made up" in " ".join(told.notes)
    assert told.reproduce.startswith("rankopt diagnose ")
    assert (out / "diagnose.md").is_file()
    assert (out / "diagnose.html").is_file()
    assert "reading rows ..." in result.stderr.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("sizes", ["", "0", "1,x", "-4", "1.5", "1;2"])
def test_bad_batch_sizes(cli: Cli, tmp_path: Path, sizes: str) -> None:
    result = cli("diagnose", planted.card_file(), "--out", tmp_path / "o", f"--batch-sizes={sizes}")
    assert result.exit_code == 2
    assert "--batch-sizes must be whole numbers above 0" in result.stderr
    assert not (tmp_path / "o").exists()


def test_what_is_neither_card_nor_artifact(cli: Cli, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for source, said in ((empty, "holds no manifest.json"), (tmp_path / "none.yaml", "none.yaml")):
        result = cli("diagnose", source, "--out", tmp_path / "o")
        assert result.exit_code == 2
        assert said in result.stderr
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "o").exists()


def test_a_missing_checkpoint(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "diagnose", planted.card_file(), "--checkpoint", tmp_path / "x.pt", "--out", tmp_path / "o"
    )
    assert result.exit_code == 2
    assert "x.pt: is not there" in result.stderr


def test_missing_data(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "diagnose", planted.card_file(), "--data", tmp_path / "x.parquet", "--out", tmp_path / "o"
    )
    assert result.exit_code == 2
    assert "x.parquet" in result.stderr
    assert not (tmp_path / "o").exists()


def test_an_earlier_result_is_kept(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").write_text("x")
    result = cli("diagnose", planted.card_file(), "--out", tmp_path / "o")
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr
    assert (tmp_path / "o" / "mine").read_text() == "x"


def test_a_damaged_artifact(cli: Cli, tmp_path: Path) -> None:
    broken = tmp_path / "artifact"
    shutil.copytree(planted.artifact(), broken)
    (broken / "weights" / "constants.bin").write_bytes(b"x")
    result = cli(
        "diagnose", broken, "--out", tmp_path / "o", "--batch-sizes", "1", "--quick",
        "--num-threads", "1",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "is truncated" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "o").exists()
