"""The whole bench on a small model, through the command line."""

from __future__ import annotations

import json

import pytest
import yaml

import small
from bench.peers.fake_peers import install
from rankopt.bench.peers import breakdown
from rankopt.errors import ArtifactError
from rankopt.kernels.build import cache_dir

QUICK = {
    "num_threads": 1,
    "min_blocks": 4,
    "max_blocks": 4,
    "calls_per_block": 3,
    "block_duration_ns": 1_000_000,
    "max_block_duration_ns": 5_000_000,
    "min_num_samples": 1,
    "warm_up_calls": 3,
    "warm_up_duration_ns": 0,
    "lead_in_duration_ns": 0,
    "idle_cpu_limit": 0.5,
}
PLAIN_RECIPE = """
name: plain
passes:
  - export_aoti: {}
"""


@pytest.fixture
def suite(tmp_path, tmp_path_factory, monkeypatch):
    """Write a suite of the trained small model; return what makes its file."""
    kernels = cache_dir() / "kernels"
    monkeypatch.setenv("RANKOPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    if kernels.is_dir():  # compiling them again takes a minute
        (tmp_path / "cache" / "kernels").symlink_to(kernels)
    install(tmp_path, monkeypatch)
    card = small.trained(tmp_path_factory.getbasetemp()) / "card.yaml"

    def write(*arms, **changes):
        content = {
            "models": [{"name": "small", "card": str(card)}],
            "arms": list(arms),
            "plan": {"batch_sizes": [1, 16], **QUICK},
            "search": QUICK,
            "prepare_timeout_s": 120,
        }
        file = tmp_path / "suite.yaml"
        file.write_text(yaml.safe_dump(content | changes))
        return file

    return write


def test_arms_that_run_and_arms_that_do_not(suite, cli, tmp_path):
    arms = [
        "eager",
        {"fake_busy": {"busy_us": [3_000, 1_000]}},
        {"torch_int8": {"engine": ["x86"], "tables": [False]}},
        *(f"fake_{kind}" for kind in ("wrong", "filed", "dies", "broken", "missing")),
        "torchrec_int8",
    ]
    out = tmp_path / "peers.json"
    done = cli("bench", suite(*arms), "--out", out)
    assert done.exit_code == 0, done.stderr
    result = json.loads(out.read_text())

    rows = {(row["arm"], row["batch_size"]): row for row in result["rows"]}
    ran = {"eager", "fake_busy", "torch_int8", "fake_wrong", "fake_filed"}
    assert set(rows) == {(arm, size) for arm in ran for size in (1, 16)}
    assert {"model", "batch_size", "arm", "p50_ns", "quality_ok", "num_samples"} <= set(
        next(iter(rows.values()))
    )
    assert rows["eager", 1]["quality_ok"]
    assert rows["fake_filed", 16]["quality_ok"]
    assert not rows["fake_wrong", 1]["quality_ok"]
    assert rows["fake_wrong", 1]["p50_ns"] < rows["eager", 1]["p50_ns"]
    # The faster of the two settings, although it came second.
    assert rows["fake_busy", 1]["setting"] == {"busy_us": 1_000}
    assert rows["fake_busy", 1]["p50_ns"] > 0.9e6

    errors = {item["arm"]: item["error"] for item in result["not_run"]}
    assert set(errors) == {"fake_dies", "fake_broken", "fake_missing", "torchrec_int8"}
    assert "signal 6" in errors["fake_dies"]
    assert "no kernel for this model" in errors["fake_broken"]
    assert "no_such_engine" in errors["fake_missing"]
    assert "make peers" in errors["fake_missing"]
    assert "does not apply" in errors["torchrec_int8"]

    tried = [item for item in result["settings"] if item["arm"] == "fake_filed"]
    by_way = {item["setting"]["way"]: item for item in tried}
    assert by_way["bad"]["error"] == "ValueError: cannot export this and more lines"
    assert (by_way["bad"]["chosen_for"], by_way["good"]["chosen_for"]) == ([], [1, 16])
    [slow, fast] = [item for item in result["settings"] if item["arm"] == "fake_busy"]
    assert slow["p50_ns"]["1"] > 3e6 > fast["p50_ns"]["1"] > 1e6

    assert [row["best_peer"] for row in result["summary"]].count("fake_wrong") == 0
    assert {row["reason"] for row in result["summary"]} == {"rankopt was not run"}
    assert result["command"].startswith("rankopt bench ")
    assert {"made_at", "environment", "command", "geometric_means"} <= set(result)
    assert not list(tmp_path.glob("peers.json.*"))
    assert "not run: small: fake_broken" in done.stdout


def test_rankopt_is_compared_with_the_best_peer_and_with_eager(suite, cli, tmp_path):
    recipe = tmp_path / "plain.yaml"
    recipe.write_text(PLAIN_RECIPE)
    out = tmp_path / "peers.json"
    arms = ("eager", "fake_wrong", {"rankopt": {"recipes": [str(recipe)]}})
    # No model is a million times faster than eager.
    file = suite(*arms, goals={"best_peer": {"ci_low": 0.001}, "eager": {"geometric_mean": 1e6}})
    done = cli("bench", file, "--batch-sizes", "4", "--out", out, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    [summary], [eager] = result["summary"], result["against_eager"]
    assert summary["batch_size"] == 4
    assert summary["best_peer"] == "eager"
    assert summary["ci_low"] < summary["ratio"] < summary["ci_high"]
    assert summary["ratio"] == pytest.approx(eager["ratio"])
    p50 = {row["arm"]: row["p50_ns"] for row in result["rows"]}
    assert p50["eager"] / p50["rankopt"] == pytest.approx(summary["ratio"])
    assert {mean["against"] for mean in result["geometric_means"]} == {"best_peer", "eager"}

    [times], [peaks], [missed] = (
        result[name] for name in ("time_breakdown", "peaks", "missed_goals")
    )
    assert (times["model"], times["batch_size"]) == ("small", 4)
    assert times["setting"] == {"recipe": str(recipe)}
    parts = {part["part"]: part["share"] for part in times["parts"]}
    assert {"dense", "lookup", "framework overhead"} <= set(parts)
    assert sum(parts.values()) + times["unexplained_share"] == pytest.approx(1.0)
    assert peaks["int8_per_s"] > peaks["fp32_per_s"] > 0
    assert (missed["against"], missed["wanted"]) == ("eager", {"geometric_mean": 1e6})
    assert missed["bound"] in ("operations", "bytes", "overhead")
    assert missed["bound_share"] > 0
    assert missed["largest_part"] == times["parts"][0]["part"]


def test_a_breakdown_that_fails_or_is_not_asked_for_leaves_the_times(
    suite, cli, tmp_path, monkeypatch
):
    recipe = tmp_path / "plain.yaml"
    recipe.write_text(PLAIN_RECIPE)

    def refuse(artifact, *rest, **named):
        raise ArtifactError(f"{artifact.name}: cannot be profiled")

    monkeypatch.setattr(breakdown, "look_into", refuse)
    file = suite("eager", {"rankopt": {"recipes": [str(recipe)]}}, goals={"eager": {"ci_low": 1e6}})
    out = tmp_path / "peers.json"
    said = cli("bench", file, "--out", out).stdout
    result = json.loads(out.read_text())
    assert {row["arm"] for row in result["rows"]} == {"eager", "rankopt"}
    [failed] = result["not_broken_down"]
    assert failed["batch_sizes"] == [1, 16]
    assert failed["error"] == "artifact: cannot be profiled"
    assert "time not broken down: small: batch 1, 16: artifact: cannot be profiled" in said
    assert {cell["bound"] for cell in result["missed_goals"]} == {None}
    assert "what bounds it was not looked into" in said

    done = cli("bench", file, "--out", out, "--overwrite", "--no-breakdown")
    assert done.exit_code == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["suite"]["breakdown"] is False
    assert result["time_breakdown"] == result["not_broken_down"] == result["peaks"] == []
    assert len(result["rows"]) == 4


def test_a_result_is_replaced_only_when_asked(suite, cli, tmp_path):
    out = tmp_path / "peers.json"
    file = suite("eager")
    out.write_text("mine")
    done = cli("bench", file, "--out", out)
    assert done.exit_code == 2
    assert "--overwrite" in done.stderr
    assert out.read_text() == "mine"
    assert cli("bench", file, "--out", out, "--overwrite", "--batch-sizes", "2").exit_code == 0
    assert [row["arm"] for row in json.loads(out.read_text())["rows"]] == ["eager"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "1,x"], "--batch-sizes"),
        (["--models", "smal"], "Did you mean 'small'?"),
        (["--arms", "eagre"], "Did you mean 'eager'?"),
    ],
)
def test_bad_usage_is_said_before_any_work(suite, cli, tmp_path, arguments, message):
    out = tmp_path / "peers.json"
    done = cli("bench", suite("eager"), "--out", out, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not out.exists()
