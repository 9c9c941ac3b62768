"""The verbs on a small trained model, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import small
from rankopt.artifact.manifest import CONSTANTS, MANIFEST, PROGRAM
from rankopt.units import NS_PER_MS

Cli = Callable[..., Any]

ONE_PASS = """
name: one-pass
objective: bytes
batch_sizes: [1]
passes: [{quantize_embeddings: {dtype: int8}}, export_aoti]
gates:
  quality: {ne: 0.1%}
  baselines: [{arm: aoti-fp32, batch_size: 1, min_speedup: 0.01}]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return small.model(root)


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    return small.trained(root)


@pytest.fixture(scope="module")
def artifact(root: Path) -> Path:
    return small.artifact(root)


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    changes = {"batch_sizes": (1,), "min_blocks": 4, "max_blocks": 4}
    return small.write_plan(tmp_path / "plan.yaml", small.PLAN.model_copy(update=changes))


def test_optimize_tells_what_became_of_each_pass(
    cli: Cli, model: Path, trained: Path, artifact: Path, tmp_path: Path
) -> None:
    result = cli(
        "optimize", model / "recipe.yaml", "--model", trained / "card.yaml",
        "--checkpoint", trained / "checkpoint.safetensors", "--out", tmp_path / "out",
        "--choices", artifact / "passes.json", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["artifact"] == str(tmp_path / "out")
    assert [step["kind"] for step in told["passes"]] == [
        "fuse_embeddings",
        "quantize_embeddings",
        "export_aoti",
    ]
    # In a pipe, progress is plain lines of stderr.
    assert "exporting the model ..." in result.stderr.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # The same weights and choices: the same constants, to the byte.
    assert (tmp_path / "out" / CONSTANTS).read_bytes() == (artifact / CONSTANTS).read_bytes()


def test_verify_passes_on_a_sound_artifact(cli: Cli, artifact: Path) -> None:
    result = cli("verify", artifact, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["passed"]
    assert told["problems"] == []
    assert told["batch_sizes"] == [1, 2, 7, 64]


@pytest.mark.parametrize("name", [CONSTANTS, PROGRAM, "checks.safetensors"])
def test_verify_fails_on_a_flipped_byte(
    cli: Cli, artifact: Path, tmp_path: Path, name: str
) -> None:
    copy = small.copy_of(artifact, tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    result = cli("verify", copy)
    assert result.exit_code == 1
    assert f"problem: {name} differs from its hash in {MANIFEST}" in result.stdout


def test_ab_writes_a_report_and_answers_with_its_verdict(
    cli: Cli, trained: Path, artifact: Path, quick: Path, tmp_path: Path
) -> None:
    result = cli(
        "ab", "--control", trained / "card.yaml", "--candidate", artifact, "--local",
        "--plan", quick, "--price-per-hour", "0.5", "--out", tmp_path / "ab", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told == json.loads((tmp_path / "ab" / "report.json").read_text())
    assert told["verdict"] == "pass"
    assert told["cost"]["price_per_hour"] == 0.5
    assert told["cost"]["candidate_usd_per_million"] > 0
    assert {path.name for path in (tmp_path / "ab").iterdir()} >= {
        "report.json",
        "report.md",
        "report.html",
    }


def test_ab_on_few_rows_is_inconclusive_and_exits_with_3(
    cli: Cli, root: Path, model: Path, artifact: Path, quick: Path, tmp_path: Path
) -> None:
    # The control is the same model from another seed: about as good, and different in every row.
    other = small.trained(root, seed=5) / "card.yaml"
    folder = tmp_path / "few"
    folder.mkdir()
    frame = pd.read_parquet(model / "data" / "test.parquet").head(40)
    for name in ("validation", "test"):
        frame.to_parquet(folder / f"{name}.parquet")
    result = cli(
        "ab", "--control", other, "--candidate", artifact, "--local",
        "--plan", quick, "--data", folder, "--out", tmp_path / "ab",
    )  # fmt: skip
    assert result.exit_code == 3, result.stdout + result.stderr
    assert "verdict: inconclusive" in result.stdout
    assert "would decide it" in result.stdout


def test_refresh_then_predict(
    cli: Cli, root: Path, model: Path, artifact: Path, tmp_path: Path
) -> None:
    other = small.trained(root, seed=5) / "checkpoint.safetensors"
    refreshed = cli("refresh", artifact, "--checkpoint", other, "--out", tmp_path / "new")
    assert refreshed.exit_code == 0, refreshed.stderr
    assert refreshed.stdout.strip() == f"artifact: {tmp_path / 'new'}"
    scores = []
    for folder in (artifact, tmp_path / "new"):
        out = tmp_path / f"{folder.name}.parquet"
        data = model / "data" / "validation.parquet"
        result = cli("predict", folder, "--data", data, "--out", out, "--batch-size", "100")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip() == f"{out}: 2,000 rows"
        scores.append(pd.read_parquet(out)["click"])
    assert scores[0].between(0, 1).all()
    # The two seeds learned the same thing differently.
    assert 0.5 < scores[0].corr(scores[1]) < 0.999


def test_a_killed_ab_is_taken_up_where_it_was(
    cli: Cli, trained: Path, artifact: Path, tmp_path: Path
) -> None:
    changes = {"min_blocks": 24, "max_blocks": 24, "block_duration_ns": 10 * NS_PER_MS}
    plan = small.write_plan(tmp_path / "plan.yaml", small.PLAN.model_copy(update=changes))
    out = tmp_path / "out" / "ab"
    arguments = [
        "ab", "--control", trained / "card.yaml", "--candidate", artifact, "--local",
        "--plan", plan, "--out", out,
    ]  # fmt: skip
    command = [sys.executable, "-m", "rankopt", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while _num_turns(out) < 10 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    kept = _num_turns(out)
    result = cli(*arguments, "--resume", "--json")
    assert result.exit_code == 0, result.stderr
    assert [path.name for path in out.parent.iterdir()] == ["ab"]
    report = json.loads(result.stdout)
    assert all(row["num_blocks"] == 24 for row in report["latency"])
    [note] = [text for text in report["environment"]["notes"] if text.startswith("resumed: ")]
    # The last block was perhaps half written.
    assert kept - 2 <= int(note.split()[1]) <= kept


def _num_turns(out: Path) -> int:
    files = out.parent.glob("ab.partial-*/ab/samples.jsonl") if out.parent.exists() else ()
    lines = [line for file in files for line in file.read_text().splitlines()]
    return sum('"type":"turn"' in line for line in lines)


@pytest.mark.slow
def test_run_does_it_all_on_ray(
    cli: Cli, model: Path, quick: Path, root: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "one-pass.yaml"
    recipe.write_text(ONE_PASS)
    card, out = small.trained(root) / "card.yaml", tmp_path / "out"
    result = cli("run", recipe, "--model", card, "--plan", quick, "--out", out)
    assert result.exit_code == 0, result.stdout + result.stderr
    assert f"report: {out / 'report.html'}" in result.stdout
    report = json.loads((out / "report.json").read_text())
    assert report["verdict"] == "pass"
    assert [row["arm"] for row in report["baselines"]] == ["aoti-fp32"]
    [tables, export] = report["passes"]
    assert tables["kept"]
    assert tables["reason"].startswith("saves ")
    assert tables["ci_low"] < tables["measured_speedup"] < tables["ci_high"]
    # Three tables of 200 rows of 8: 8 bytes and a 4-byte scale in place of 32.
    assert tables["bytes_before"] - tables["bytes_after"] == pytest.approx(600 * 20, abs=500)
    assert export["reason"].startswith("ran in a fresh process at batch 1, 2")
    assert report["size"]["candidate_bytes"] < report["size"]["control_bytes"]
    assert (out / "artifact" / MANIFEST).is_file()
    assert (out / "baseline" / MANIFEST).is_file()
    workers = {arm: env["omp_num_threads"] for arm, env in report["environment"]["arms"].items()}
    assert workers == {"control": "1", "candidate": "1", "aoti-fp32": "1"}
    assert report["reproduce"].startswith(f"rankopt run {recipe} --model {card}")
    again = cli("run", recipe, "--model", card, "--plan", quick, "--out", out)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_recipes_shows_checks_and_describes(cli: Cli, model: Path) -> None:
    listed = json.loads(cli("recipes", "ls", "--json").stdout)
    assert "serve-int8" in [item["name"] for item in listed["recipes"]]
    assert "quantize_embeddings" in listed["passes"]
    shown = cli("recipes", "show", "quantize_embeddings").stdout
    assert "dtype (default 'int8', one of" in shown
    assert "Forbids: artifact, quantized_embeddings" in shown
    assert cli("recipes", "show", "serve-int8").stdout.startswith("#")
    sound = cli("recipes", "validate", model / "recipe.yaml", "serve-int8")
    assert (sound.exit_code, sound.stdout.count(": sound")) == (0, 2)
    assert json.loads(cli("recipes", "schema").stdout)["title"] == "Recipe"
