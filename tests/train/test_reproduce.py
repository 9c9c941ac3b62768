"""run.json, and training again by it: the same bits, or what is not as it was."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rankopt.bench.backend import driver_import_path
from rankopt.data.source import open_source
from rankopt.data.splits import Splits, open_splits
from rankopt.data.synthetic import SyntheticOptions, generate
from rankopt.errors import OutputExistsError
from rankopt.models.card import ModelCard, load_card
from rankopt.recipe import parse_recipe
from rankopt.train.loop import train
from rankopt.train.reproducibility.describe import hash_of_hashes, hash_tensors
from rankopt.train.reproducibility.determinism import repeatable
from rankopt.train.reproducibility.differences import find_differences
from rankopt.train.reproducibility.reproduce import reproduce
from rankopt.train.reproducibility.run_manifest import RunManifest, read_run
from rankopt.train.settings import TrainSettings

Cli = Callable[..., Any]

NUM_IDS, DIM = 5, 16

# A table read as users do it, by indexing: the backward adds the gradients of equal ids up.
NET = """
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_ids, dim):
        super().__init__()
        self.table = nn.Parameter(torch.randn(num_ids, dim) * np.random.uniform(0.5, 1.5))
        self.top = nn.Sequential(nn.Linear(2 * dim + 2, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        self.scale = nn.Parameter(torch.tensor(random.uniform(0.9, 1.1)))

    def forward(self, dense, sparse):
        rows = self.table[sparse].flatten(1)
        return self.scale * self.top(torch.cat([dense, rows], dim=1)).squeeze(1)
"""

RECIPE = {
    "name": "fast",
    "passes": [
        {"train_fuse_embeddings": {"optimizer": "adagrad", "learning_rate": 0.05}},
        {"train_dense_optimizer": {}},
        {"train_pipeline": {"depth": 2}},
    ],
}


def raw_card(factory: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "again",
        "factory": factory,
        "config": config,
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": ["I1", "I2"]},
            {"name": "sparse", "kind": "ids", "columns": ["C1", "C2"], "num_ids": NUM_IDS},
        ],
        "outputs": [{"name": "click", "label": "label"}],
        "data": {name: f"data/{name}.parquet" for name in ("train", "validation", "test")},
        "train": {"epochs": 1, "batch_size": 2048, "learning_rate": 0.02, "num_threads": 2},
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with net.py, card.yaml, recipe.yaml, data/, and run/ as trained from it."""
    folder = tmp_path_factory.mktemp("made")
    options = SyntheticOptions(
        num_train=4_096,
        num_validation=500,
        num_test=500,
        num_dense=2,
        num_tables=2,
        ids_per_table=NUM_IDS,
    )
    generate(options, folder / "data")
    (folder / "net.py").write_text(NET)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    card = raw_card("net.py:Net", {"num_ids": NUM_IDS, "dim": DIM})
    (folder / "card.yaml").write_text(yaml.safe_dump(card))
    loaded = load_card(folder / "card.yaml")
    train(loaded, open_splits(loaded), folder / "run", command="rankopt train card.yaml")
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder whose run.json names it, to change things in."""
    folder = shutil.copytree(made, tmp_path / "place")
    edit_run(folder, card_folder=str(folder))
    return folder


def edit_run(folder: Path, **changes: Any) -> None:
    file = folder / "run" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "indexing": ("net.py:Net", {"num_ids": NUM_IDS, "dim": DIM}),
    "deepfm": (
        "rankopt.models.deepfm:DeepFM",
        {"num_ids": [NUM_IDS] * 2, "num_dense": 2, "embedding_dim": 8, "deep_mlp": [32]},
    ),
}


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "recipe"])
@pytest.mark.parametrize("name", MODELS)
def test_two_runs_with_two_threads_give_the_same_bits(
    made: Path, tmp_path: Path, name: str, recipe: dict[str, Any] | None
) -> None:
    card = ModelCard.model_validate(raw_card(*MODELS[name]))
    card = card.model_copy(update={"path": made / "card.yaml"})
    chosen = None if recipe is None else parse_recipe(recipe, where="recipe")
    runs = []
    for index in range(2):
        torch.rand(index)  # what was drawn before must not matter
        np.random.rand(index)
        train(card, open_splits(card), tmp_path / str(index), recipe=chosen)
        runs.append(read_run(tmp_path / str(index))[1])
    assert runs[0].machine.num_threads == 2
    assert runs[0].outcome == runs[1].outcome


def test_gradients_of_a_table_that_is_indexed_are_added_up_in_one_order() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (200_000,), generator=generator)
    weights = torch.randn(200_000, 16, generator=generator)
    found = set()
    with repeatable(TrainSettings(num_threads=2)):
        for _ in range(6):
            table = torch.ones(3, 16, requires_grad=True)
            (table[ids] * weights).sum().backward()
            assert table.grad is not None
            found.add(table.grad.numpy().tobytes())
    assert len(found) == 1


def test_the_process_is_left_as_it_was() -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.random.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
        )

    before = state()
    drawn = []
    for num_threads in (1, 3):
        with repeatable(TrainSettings(num_threads=num_threads, seed=4)):
            assert torch.get_num_threads() == num_threads
            assert torch.are_deterministic_algorithms_enabled()
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
        assert state() == before
    assert drawn[0] == drawn[1]


def test_the_machine_is_described_as_the_run_used_it(made: Path, tmp_path: Path) -> None:
    card = load_card(made / "card.yaml")
    settings = card.train.model_copy(update={"num_threads": 3})
    assert torch.get_num_threads() != 3
    train(card, open_splits(card), tmp_path / "run", settings)
    machine = read_run(tmp_path / "run")[1].machine
    assert machine.num_threads == 3
    assert machine.arithmetic["torch_deterministic"] is True


def test_an_earlier_result_is_refused_before_rows_are_hashed(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(
        "rankopt.train.reproducibility.describe.hash_split",
        lambda card, source, by: hashed.append(source.name) or "",
    )
    card = load_card(made / "card.yaml")
    with pytest.raises(OutputExistsError):
        train(card, open_splits(card), made / "run")
    assert hashed == []


def test_the_manifest_says_what_the_weights_depend_on(made: Path) -> None:
    file, run = read_run(made / "run")
    assert read_run(file)[1] == run
    assert run.command == "rankopt train card.yaml"
    assert list(run.code.module) == ["net.py"]
    assert len(run.code.rankopt_sha256) == 64
    assert run.machine.environment["libraries"]["torch"]
    assert (run.machine.num_threads, run.machine.world_size) == (2, 1)
    assert run.model_card() == load_card(made / "card.yaml")
    assert run.training_recipe() is None
    assert run.settings.batch_size == 2048
    assert set(run.seeds) == {"torch", "numpy", "python", "rows"}
    rows = {name: split.num_rows for name, split in run.data.splits.items()}
    assert rows == {"train": 4_096, "validation": 500, "test": 500}
    assert {split.format for split in run.data.splits.values()} == {"parquet"}
    metrics = json.loads((made / "run" / "metrics.json").read_text())
    assert run.outcome.best_ne == min(point["validation_ne"] for point in metrics["curve"])
    state = load_file(made / "run" / "checkpoint.safetensors")
    backwards = dict(reversed(list(state.items())))
    assert hash_of_hashes(hash_tensors(backwards)) == run.outcome.weights_sha256
    state["scale"] += 1e-3
    assert hash_of_hashes(hash_tensors(state)) != run.outcome.weights_sha256


def test_a_run_is_the_same_in_a_fresh_process(made: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    card = load_card(made / "card.yaml")
    train(card, open_splits(card), first, recipe=parse_recipe(RECIPE, where="recipe"))
    command = [sys.executable, "-P", "-m", "rankopt", "train", "--reproduce", str(first)]
    settings = {"PYTHONPATH": driver_import_path(), "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "pass"
    assert told["out"] is None
    assert told["weights"]["differing"] == []
    assert told["ne"]["change"] == 0
    hash_seed = [item for item in told["differences"] if item["what"] == "$PYTHONHASHSEED"]
    assert [item["now"] for item in hash_seed] == ["77"]


def test_card_and_settings_come_from_the_manifest(cli: Cli, place: Path, tmp_path: Path) -> None:
    (place / "card.yaml").write_text("of another day")
    again = tmp_path / "again"
    found = cli("train", "--reproduce", place / "run", "--out", again)
    assert found.exit_code == 0, found.stderr
    assert "tensors are the same, bit for bit" in found.stdout
    assert "verdict: pass" in found.stdout
    then, now = (read_run(folder)[1] for folder in (place / "run", again))
    assert now.outcome == then.outcome
    assert now.command.startswith("rankopt train --reproduce")
    # What came of it is a run like any other; the first one's manifest alone would do as well.
    alone = tmp_path / "alone.json"
    shutil.copy(again / "run.json", alone)
    third = cli("train", "--reproduce", alone, "--json")
    assert third.exit_code == 0, third.stderr


def test_another_module_is_named_first_and_the_change_told(cli: Cli, place: Path) -> None:
    text = (place / "net.py").read_text()
    (place / "net.py").write_text(text.replace("0.9, 1.1", "0.9, 1.2"))
    found = cli("train", "--reproduce", place / "run", "--json")
    assert found.exit_code == 1, found.stderr
    told = json.loads(found.stdout)
    assert told["differences"][0]["of"] == "code"
    assert told["differences"][0]["what"] == "module's net.py"
    assert told["weights"]["num_tensors"] == 6
    assert "scale" in told["weights"]["differing"]
    assert 0 < told["weights"]["largest"] < 10
    assert 0 < told["weights"]["relative"] < 10
    assert told["ne"]["now"] != told["ne"]["then"]
    plain = cli("train", "--reproduce", place / "run")
    assert plain.exit_code == 1
    assert "of 6 tensors differ, by up to" in plain.stdout
    assert "best validation NE" in plain.stdout
    assert "- code: module's net.py was " in plain.stdout
    # The weights of then are gone: which tensors differ can still be told.
    (place / "run" / "checkpoint.safetensors").unlink()
    bare = json.loads(cli("train", "--reproduce", place / "run", "--json").stdout)
    assert bare["weights"]["differing"] == told["weights"]["differing"]
    assert bare["weights"]["largest"] is None


def test_rows_that_are_gone_or_others_cannot_be_tried(cli: Cli, place: Path) -> None:
    train_rows, test_rows = place / "data" / "train.parquet", place / "data" / "test.parquet"
    moved = shutil.copytree(place / "data", place / "moved")
    frame = pd.read_parquet(train_rows)
    frame.loc[7, "I1"] += 1
    frame.to_parquet(train_rows)
    pd.read_parquet(test_rows).iloc[1:].to_parquet(test_rows)
    found = cli("train", "--reproduce", place / "run")
    assert found.exit_code == 2
    assert f"data.splits.train: {train_rows} holds other rows than the run saw" in found.stderr
    assert "data.splits.test" in found.stderr
    assert "data.splits.validation" not in found.stderr
    shutil.rmtree(place / "data")
    gone = cli("train", "--reproduce", place / "run")
    assert gone.exit_code == 2
    assert all(f"{name}.parquet" in gone.stderr for name in ("train", "validation", "test"))
    assert "--data PATH" in gone.stderr
    there = cli("train", "--reproduce", place / "run", "--data", moved, "--json")
    assert there.exit_code == 0, there.stderr
    told = json.loads(there.stdout)["differences"]
    assert {item["what"] for item in told if item["of"] == "data"} == {
        f"path of {name}" for name in ("train", "validation", "test")
    }


def test_flags_that_the_manifest_decides_are_refused(cli: Cli, place: Path) -> None:
    given = ["--recipe", "train-fast", "--epochs", "1", "--batch-size", "9", "--seed", "3"]
    given += ["--learning-rate", "0.1", "--num-threads", "1", "--start", place / "run"]
    found = cli("train", place / "card.yaml", "--reproduce", place / "run", *given)
    assert found.exit_code == 2
    for flag in ("CARD", *given[::2]):
        assert f"{flag}: goes not with --reproduce" in found.stderr
    neither = cli("train")
    assert neither.exit_code == 2
    assert "CARD: is required" in neither.stderr
    assert "--out: is required" in neither.stderr


def test_a_run_that_went_on_from_another_needs_that_one(
    cli: Cli, place: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    card = load_card(place / "card.yaml")
    splits = open_splits(card)
    train(card, splits, first, save_optimizer=True)
    train(card, splits, second, start=first)
    run = read_run(second)[1]
    assert run.start is not None
    assert run.start_optimizer is not None
    found = cli("train", "--reproduce", second)
    assert found.exit_code == 0, found.stderr
    (first / "optimizer.pt").unlink()
    (first / "checkpoint.safetensors").write_bytes(b"other weights")
    refused = cli("train", "--reproduce", second)
    assert refused.exit_code == 2
    assert "start: " in refused.stderr
    assert f"{first / 'checkpoint.safetensors'} has changed" in refused.stderr
    assert f"start_optimizer: {first / 'optimizer.pt'} is gone" in refused.stderr


def test_frames_are_known_by_their_values(cli: Cli, place: Path, tmp_path: Path) -> None:
    card = load_card(place / "card.yaml")
    card = card.model_copy(update={"data": card.data.model_copy(update=dict.fromkeys(SPLITS))})
    sources = [open_source(pd.read_parquet(place / "data" / f"{name}.parquet")) for name in SPLITS]
    train(card, Splits(*sources, {}), tmp_path / "run")
    run = read_run(tmp_path / "run")[1]
    assert {split.hashed for split in run.data.splits.values()} == {"values"}
    assert run.data.splits["train"].format == "DataFrame"
    refused = cli("train", "--reproduce", tmp_path / "run")
    assert refused.exit_code == 2
    assert "--data PATH" in refused.stderr
    found = cli("train", "--reproduce", tmp_path / "run", "--data", place / "data")
    assert found.exit_code == 0, found.stderr


SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("{", "invalid json"),
        ('{"format_version": 1}', "settings: is required"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(
    cli: Cli, tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    found = cli("train", "--reproduce", tmp_path)
    assert found.exit_code == 2
    assert said in found.stderr.lower()


def test_a_later_format_and_other_ranks_are_refused(cli: Cli, place: Path) -> None:
    _, run = read_run(place / "run")
    machine = run.machine.model_copy(update={"world_size": 4})
    edit_run(place, machine=machine.model_dump(mode="json"))
    ranks = cli("train", "--reproduce", place / "run")
    assert ranks.exit_code == 2
    assert "machine.world_size: must be 4; got 1" in ranks.stderr
    edit_run(place, format_version=99)
    later = cli("train", "--reproduce", place / "run")
    assert later.exit_code == 2
    assert "must have format 1" in later.stderr


def test_differences_come_with_the_likeliest_first(made: Path) -> None:
    _, run = read_run(made / "run")
    assert list(find_differences(run, run)) == []
    code = run.code.model_copy(update={"module": {"net.py": "x"}, "rankopt_sha256": "y"})
    environment = {**run.machine.environment, "cpu_model": "Another", "os": "Plan 9"}
    environment["libraries"] = {**environment["libraries"], "torch": "9.9", "scipy": "9.9"}
    machine = run.machine.model_copy(
        update={
            "environment": environment,
            "num_threads": 7,
            "variables": {"MKL_CBWR": "AVX2"},
            "arithmetic": {**run.machine.arithmetic, "torch_cpu_capability": "DEFAULT"},
        }
    )
    split = run.data.splits["test"].model_copy(update={"path": "elsewhere"})
    data = run.data.model_copy(update={"splits": {**run.data.splits, "test": split}})
    order = dict(reversed(list(run.outcome.weights.items())))
    outcome = run.outcome.model_copy(update={"weights": order})
    other: RunManifest = run.model_copy(
        update={"code": code, "machine": machine, "data": data, "outcome": outcome}
    )
    found = list(find_differences(run, other))
    told = [item.what.split(" (")[0] for item in found if not item.what.startswith("$")]
    assert told == [
        "module's net.py",
        "the order in which the factory makes its tensors",
        "rankopt",
        "number of threads",
        "torch",
        "torch_cpu_capability",
        "cpu_model",
        "scipy",
        "os",
        "path of test",
    ]
    assert "$MKL_CBWR" in {item.what for item in found}
    assert "environment: number of threads was 2, is 7" in [str(item) for item in found]


def test_a_module_that_is_not_seeded_is_said_to_be_the_likely_cause(place: Path) -> None:
    text = (place / "net.py").read_text()
    text = text.replace("random.uniform(0.9, 1.1)", "random.SystemRandom().uniform(0.9, 1.1)")
    (place / "net.py").write_text(text)
    card = load_card(place / "card.yaml")
    train(card, open_splits(card), place / "fickle")
    found = reproduce(place / "fickle")
    assert found.verdict == "fail"
    assert found.differences == ()
    assert "something that is not seeded" in found.reasons[-1]
