from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "one.pt"
    torch.save({"embedding_bags.t.weight": torch.randn(1000, 4), "b": torch.randn(3)}, file)
    return file


def test_reshard_and_verify(cli: Any, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "four"
    done = cli("shard", "reshard", saved, "--world-size", 4, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "rank 3" in done.stdout
    assert f"checkpoint: {out}" in done.stdout
    again = cli("shard", "reshard", saved, "--world-size", 4, "--out", out)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    same = cli("shard", "verify", saved, out)
    assert same.exit_code == 0, same.stderr
    assert "same: 2 tensors" in same.stdout
    whole = cli("shard", "verify", out)
    assert whole.exit_code == 0
    assert "whole" in whole.stdout


def test_json_on_stdout_is_one_document(cli: Any, saved: Path, tmp_path: Path) -> None:
    done = cli("shard", "reshard", saved, "--world-size", 2, "--out", tmp_path / "two", "--json")
    answer = json.loads(done.stdout)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    same = cli("shard", "verify", saved, tmp_path / "two", "--json")
    assert json.loads(same.stdout)["same"] is True


def test_a_damaged_shard_exits_1_and_is_named(cli: Any, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "four"
    cli("shard", "reshard", saved, "--world-size", 4, "--out", out)
    shard = out / "__2_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = cli("shard", "verify", out)
    assert done.exit_code == 1
    assert "__2_0.distcp: embedding_bags.t.weight, rows 500 to 749" in done.stdout
    refused = cli("shard", "reshard", out, "--world-size", 1, "--out", tmp_path / "x.pt")
    assert refused.exit_code == 2
    assert "__2_0.distcp" in refused.stderr


def test_bad_input_exits_2(cli: Any, saved: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (("reshard", saved, "--out", tmp_path / "x"), "--world-size"),
        (("reshard", saved, "--world-size", 0, "--out", tmp_path / "x"), "world-size"),
        (("reshard", tmp_path / "no", "--world-size", 2, "--out", tmp_path / "x"), "not exist"),
        (
            ("reshard", saved, "--plan", saved, "--out", tmp_path / "x"),
            "must be a readable sharding plan",
        ),
        (("verify", tmp_path / "no"), "not exist"),
    ):
        done = cli("shard", *arguments)
        assert done.exit_code == 2, arguments
        assert said in done.stderr
        assert "Traceback" not in done.stderr
