from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY = "name: tiny\ntables: [{name: t, num_rows: 1_000, dim: 16, count: 2}]\n"
HUGE = "name: huge\ntables: [{name: t, num_rows: 4_000_000_000, dim: 64}]\n"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return file


def test_a_plan_is_shown_and_written(cli: Any, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = cli("shard", "plan", tiny, "--topology", "2-cpu-hosts", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "t_0" in result.stdout
    assert "chosen" in result.stdout
    assert json.loads(out.read_text())["fits"] is True
    assert (tmp_path / "plan.html").is_file()
    again = cli("shard", "plan", tiny, "--topology", "2-cpu-hosts", "--out", out)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_json_on_stdout_is_one_document(cli: Any, tiny: Path) -> None:
    result = cli("shard", "plan", tiny, "--topology", "2-cpu-hosts", "--json")
    plan = json.loads(result.stdout)
    assert plan["reproduce"].startswith("rankopt shard plan")
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]


def test_what_does_not_fit_exits_1_and_keeps_its_breakdown(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    file.write_text(HUGE)
    out = tmp_path / "plan.json"
    result = cli("shard", "plan", file, "--topology", "2-cpu-hosts", "--out", out)
    assert result.exit_code == 1
    assert "No plan fits" in result.stdout
    assert "\n1. " in result.stdout
    plan = json.loads(out.read_text())
    assert plan["fits"] is False
    assert plan["remedies"][0]["number"] == 1
    assert sum(rank["host_memory"]["weights_bytes"] for rank in plan["ranks"]) == 4 * 64 * 4 * 10**9


def test_wrong_words_are_told_all_at_once(cli: Any, tiny: Path) -> None:
    result = cli(
        "shard", "plan", tiny, "--topology", "2-cpu-hosts", "--optimizer", "adagard",
        "--precision", "fp8", "--sharding-types", "row_wize", "--kernels", "fusd",
        "--load-factors", "much", "--communication", "int1", "--ids-per-row", "t",
    )  # fmt: skip
    assert result.exit_code == 2
    for said in (
        "Did you mean 'adagrad'", "fp8", "Did you mean 'row_wise'", "Did you mean 'fused'", "much",
        "int1", "TABLE=MEAN",
    ):  # fmt: skip
        assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("card", "topology", "said"),
    [
        ("dlrm-synthetic", "8xh10", "Did you mean '8xh100'"),
        ("no-such-card", "8xh100", "no-such-card"),
    ],
)
def test_unknown_names_exit_2(cli: Any, card: str, topology: str, said: str) -> None:
    result = cli("shard", "plan", card, "--topology", topology)
    assert result.exit_code == 2
    assert said in result.stderr
