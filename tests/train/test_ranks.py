"""Several processes train the model that one process trains, and fail together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rankopt.bench.backend import driver_import_path
from rankopt.cli.main import main
from rankopt.data.synthetic import SyntheticOptions, generate
from rankopt.jobs.shard_plan import plan_shards
from rankopt.models.build import build_module
from rankopt.models.card import load_card
from train.run_ranks import run

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("run_ranks.py")
KEYS = ["c1", "c2", "c3"]
NUM_IDS = 40
# 1,027 rows: the last batch of 64 has three.
DATA = SyntheticOptions(
    num_train=1_027,
    num_validation=301,
    num_test=301,
    num_dense=4,
    num_tables=3,
    ids_per_table=NUM_IDS,
)
TRAIN = {
    "epochs": 2,
    "batch_size": 64,
    "learning_rate": 0.01,
    "table_optimizer": "adagrad",
    "table_learning_rate": 0.05,
    "evaluations_per_epoch": 2,
    "row_shards": 2,
    "num_threads": 1,
}
DENSE = {"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]}
SHAPE = {"num_dense": 4, "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]}
PLAIN = {
    "factory": "rankopt.models.dlrm:DLRM",
    "config": {"num_ids": [NUM_IDS] * 3, **SHAPE},
    "inputs": [
        DENSE,
        {"name": "sparse", "kind": "ids", "columns": ["C1", "C2", "C3"], "num_ids": NUM_IDS},
    ],
}
COLLECTION = {
    "factory": "rankopt.models.dlrm_torchrec:DLRMTorchrec",
    "config": {"keys": KEYS, "num_ids": [NUM_IDS] * 3, **SHAPE},
    "inputs": [
        DENSE,
        {
            "name": "sparse",
            "kind": "kjt",
            "features": [{"key": k, "column": k.upper(), "num_ids": NUM_IDS} for k in KEYS],
        },
    ],
}
RECIPES: dict[str, list[dict[str, Any]]] = {
    "fused": [{"train_fuse_embeddings": {}}, {"train_accumulate": {"parts": 2}}],
    "sharded": [{"train_shard": {"topology": "2-cpu-hosts"}}],
    "planned": [{"train_shard": {"plan": "plan.json"}}],
    "planned-bf16": [{"train_shard": {"plan": "plan.json", "communication": "bf16"}}],
    "mixed": [
        {"train_dedup_ids": {}},
        {"train_checkpoint_activations": {}},
        {"train_dense_optimizer": {}},
        {"train_pipeline": {}},
    ],
}
BROKEN = """
import os
import signal
from rankopt.models.dlrm import DLRM


def make(**config):
    if os.environ.get("RANK") == "1":
        raise ValueError("the table is not there")
    return DLRM(**config)


def make_killed(**config):
    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return DLRM(**config)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of cards, recipes and data."""
    root = tmp_path_factory.mktemp("ranks")
    generate(DATA, root / "data")
    rest = {
        "outputs": [{"name": "click", "label": "label"}],
        "data": {name: f"data/{name}.parquet" for name in ("train", "validation", "test")},
        "train": TRAIN,
    }
    adam = {**TRAIN, "table_optimizer": "adam", "row_shards": 1, "learning_rate": 0.003}
    cards = {
        "plain": {**PLAIN, **rest},
        "adam": {**PLAIN, **rest, "train": adam},
        "collection": {**COLLECTION, **rest},
        "broken": {**PLAIN, **rest, "factory": "broken.py:make"},
        "killed": {**PLAIN, **rest, "factory": "broken.py:make_killed"},
    }
    for name, raw in cards.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **raw}))
    plan = plan_shards(root / "collection.yaml", "2-cpu-hosts", sharding_types=("table_wise",))
    (root / "plan.json").write_text(plan.model_dump_json())
    for name, passes in RECIPES.items():
        text = yaml.safe_dump({"name": name, "passes": passes})
        (root / f"{name}.yaml").write_text(text.replace("plan.json", str(root / "plan.json")))
    (root / "broken.py").write_text(BROKEN)
    return root


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": driver_import_path(), "OMP_NUM_THREADS": "1", **more}


def ranks_of(command: list[str], world_size: int) -> list[tuple[int, str, str]]:
    """Run a command once per rank, with torchrun's variables; return codes and what they said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    told = [process.communicate(timeout=400) for process in started]
    return [(one.returncode, *said) for one, said in zip(started, told, strict=True)]


ONE_PROCESS = ["plain:", "plain:fused", "plain:mixed", "adam:", "collection:sharded"]
TWO_PROCESSES = [*ONE_PROCESS, "collection:planned", "collection:planned-bf16"]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """Train everything in one process and in two; OUT is CARD-RECIPE-RANKS."""
    for what in ONE_PROCESS:
        run(folder, f"{what}:{what.replace(':', '-')}-1")
    jobs = [f"{what}:{what.replace(':', '-')}-2" for what in TWO_PROCESSES]
    jobs.append("collection:planned:collection-in-parts")
    for code, _, errors in ranks_of([str(SCRIPT), str(folder), *jobs], 2):
        assert code == 0, errors
    return folder


def metrics_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


def assert_same(first: Path, second: Path, rtol: float = 1e-5, atol: float = 2e-5) -> None:
    """Compare curves, quality and weights of two runs."""
    one, other = metrics_of(first), metrics_of(second)
    assert len(one["curve"]) == len(other["curve"]) > 2
    for before, after in zip(one["curve"], other["curve"], strict=True):
        assert after == pytest.approx(before, rel=rtol)
    assert other["test"]["click"] == pytest.approx(one["test"]["click"], rel=rtol)
    assert other["num_rows_seen"] == one["num_rows_seen"]
    weights, others = (load_file(out / "checkpoint.safetensors") for out in (first, second))
    assert list(weights) == list(others)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("what", ONE_PROCESS)
def test_two_processes_train_the_model_of_one(trained: Path, what: str) -> None:
    name = what.replace(":", "-")
    assert_same(trained / f"{name}-1", trained / f"{name}-2")
    ranks = metrics_of(trained / f"{name}-2")["ranks"]
    assert ranks == {"world_size": 2, "backend": "gloo", "launcher": "torchrun"}
    assert metrics_of(trained / f"{name}-1")["ranks"]["world_size"] == 1


def test_tables_were_cut_and_the_checkpoint_is_the_cards(trained: Path) -> None:
    assert_same(trained / "collection-sharded-1", trained / "collection-planned-2")
    [record] = metrics_of(trained / "collection-planned-2")["passes"]
    assert record["kept"]
    assert record["reason"] == "3 tables cut over 2 ranks: table_wise"
    card = load_card(trained / "collection-planned-2" / "card.yaml")
    state = build_module(card).state_dict()
    assert state["tables.embedding_bags.t_c1.weight"].shape == (NUM_IDS, 8)
    parts = load_card(trained / "collection-in-parts" / "card.yaml")
    assert parts.checkpoint == "checkpoint"
    others = build_module(parts).state_dict()
    assert all(torch.equal(others[name], value) for name, value in state.items())


def test_bf16_communication_rounds_and_stays_close(trained: Path) -> None:
    exact, rounded = (
        load_file(trained / f"collection-{name}-2" / "checkpoint.safetensors")
        for name in ("planned", "planned-bf16")
    )
    change = max(float((rounded[name] - exact[name]).abs().max()) for name in exact)
    assert 1e-6 < change < 0.1
    losses = [
        metrics_of(trained / f"collection-{name}-2")["test"]["click"]["log_loss"]
        for name in ("planned", "planned-bf16")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_torchrun_runs_the_verb(trained: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["--nproc-per-node", "2", "-m", "rankopt", "train", str(trained / "plain.yaml")]
    out = trained / "torchrun"
    done = subprocess.run(
        [*torchrun, *command, "--out", str(out)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test, click: NE") == 1
    assert_same(trained / "plain--1", out)


@pytest.mark.parametrize("card", ["broken", "missing"])
def test_a_rank_that_fails_ends_all_with_one_message(folder: Path, card: str) -> None:
    command = ["-m", "rankopt", "train", str(folder / f"{card}.yaml"), "--out", str(folder / "no")]
    told = ranks_of(command, 2)
    assert [code for code, _, _ in told] == [2, 2]
    errors = "".join(said for _, _, said in told)
    wanted = "the table is not there" if card == "broken" else "missing.yaml"
    assert sum(wanted in line for line in errors.splitlines()) == 1
    assert "Traceback" not in errors
    assert not (folder / "no").exists()
    assert not list(folder.glob("no.partial*"))


def test_a_rank_that_is_killed_ends_all(folder: Path) -> None:
    card, out = folder / "killed.yaml", folder / "killed"
    first, second = ranks_of(["-m", "rankopt", "train", str(card), "--out", str(out)], 2)
    assert (first[0], second[0]) == (2, -9)
    assert "rank 0: lost another rank" in first[2]
    assert "Traceback" not in first[2]
    assert not out.exists()


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """Start Ray once for all tests that need it."""
    from rankopt.train.distributed.launch import connected

    with connected(None, 2):
        yield


def test_ray_train_trains_the_model_of_one(
    trained: Path, ray_here: None, capfd: pytest.CaptureFixture[str]
) -> None:
    out = trained / "ray"
    code = main(
        ["train", str(trained / "plain.yaml"), "--num-workers", "2", "--out", str(out), "--json"]
    )
    said = capfd.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["ranks"] == {"world_size": 2, "backend": "gloo", "launcher": "ray"}
    assert "epoch 2" in said.err  # the first worker's progress
    assert_same(trained / "plain--1", out)


def test_a_ray_worker_that_fails_ends_all(
    folder: Path, ray_here: None, capfd: pytest.CaptureFixture[str]
) -> None:
    out = folder / "none"
    card = str(folder / "broken.yaml")
    assert main(["train", card, "--num-workers", "2", "--out", str(out)]) == 2
    errors = capfd.readouterr().err
    assert sum("the table is not there" in line for line in errors.splitlines()) == 1
    assert "Traceback" not in errors
    assert not out.exists()
