"""README: what it promises is there, and its table is the measured one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from rankopt.bench.peers.result import PeerResult
from rankopt.cli.main import VERBS
from rankopt.models.card import ModelCard


def test_the_results_table_is_that_of_the_result_file(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/results.py", "check"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_peer_tables_are_those_of_the_result_file(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/peers.py", "check"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernel_tables_are_those_of_the_result_file(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/kernels.py", "check"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_training_table_is_that_of_the_result_file(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/training.py", "check"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_peer_result_keeps_its_schema(checkout: Path) -> None:
    text = (checkout / "benchmarks" / "results" / "peers.json").read_text()
    result = PeerResult.model_validate_json(text)
    assert {row.arm for row in result.rows} >= {"eager", "rankopt"}
    looked_into = {(row.model, row.batch_size) for row in result.time_breakdown}
    assert looked_into <= {(row.model, row.batch_size) for row in result.rows}


def test_every_target_that_is_named_is_in_the_makefile(checkout: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (checkout / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)", (checkout / "README.md").read_text()))
    assert {"demo", "test", "results"} <= named <= targets


def test_every_verb_that_is_named_exists(checkout: Path) -> None:
    text = (checkout / "README.md").read_text()
    named = set(re.findall(r"rankopt ([a-z]+)", "\n".join(re.findall(r"[`$].*rankopt .*", text))))
    known = {verb.name for verb in VERBS}
    assert named & known
    assert named <= known | {"takes", "ships"}


def test_the_card_it_shows_is_a_sound_one(checkout: Path) -> None:
    [card] = re.findall(r"```yaml\n(# card.yaml.*?)```", (checkout / "README.md").read_text(), re.S)
    assert ModelCard.model_validate(yaml.safe_load(card)).name == "my-ranker"
