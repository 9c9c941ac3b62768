"""A rank killed by kill -9 under torchrun: all go on from the last checkpoint by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankopt.bench.backend import driver_import_path
from rankopt.data.synthetic import generate
from rankopt.jobs.shard_plan import plan_shards
from rankopt.train.fault_tolerance.journal import read_journal
from train import run_killed

SCRIPT = Path(__file__).with_name("run_killed_rank.py")
# 31 steps an epoch; the last batch has 46 rows.
DATA = run_killed.DATA.model_copy(update={"num_train": 3_046})
SETTINGS = {
    **run_killed.BASE,
    "epochs": 1,
    "evaluations_per_epoch": 2,
    "table_optimizer": "adagrad",
    "row_shards": 2,
}
KEYS = ["c1", "c2", "c3"]
COLLECTION = {
    "factory": "rankopt.models.dlrm_torchrec:DLRMTorchrec",
    "config": {
        "keys": KEYS,
        "num_ids": [50] * 3,
        "num_dense": 4,
        "embedding_dim": 8,
        "bottom_mlp": [16],
        "top_mlp": [16],
    },
    "inputs": [
        {"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]},
        {
            "name": "sparse",
            "kind": "kjt",
            "features": [{"key": k, "column": k.upper(), "num_ids": 50} for k in KEYS],
        },
    ],
}
RUNS = {"copied": ("net", ""), "cut": ("collection", "sharded")}


def train(folder: Path, name: str, kills: str = "") -> str:
    """Train with two ranks, which torchrun starts again twice at most; return what they said."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    runs = [f"{card}:{recipe}:{name}-{run}" for run, (card, recipe) in RUNS.items()]
    done = subprocess.run(
        [sys.executable, *torchrun, "--max-restarts", "2", str(SCRIPT), str(folder), *runs],
        env={
            **os.environ,
            "PYTHONPATH": driver_import_path(),
            "OMP_NUM_THREADS": "1",
            "KILLS": kills,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train tables on every rank, and tables cut over them: undisturbed, and rank 1 killed."""
    root = tmp_path_factory.mktemp("ranks")
    (root / "net.py").write_text(run_killed.NET)
    generate(DATA, root / "data")
    net: dict[str, Any] = run_killed.card_of(root).model_dump(mode="json", exclude_defaults=True)
    # Without batch statistics, which each rank would take of its own rows.
    cards = {"net": {**net, "config": {"normalises": False}}, "collection": {**net, **COLLECTION}}
    for name, card in cards.items():
        files = {split: f"data/{split}.parquet" for split in ("train", "validation", "test")}
        text = yaml.safe_dump({**card, "data": files, "train": SETTINGS})
        (root / f"{name}.yaml").write_text(text)
    plan = plan_shards(root / "collection.yaml", "2-cpu-hosts", sharding_types=("table_wise",))
    (root / "plan.json").write_text(plan.model_dump_json())
    passes = [{"train_shard": {"plan": str(root / "plan.json")}}]
    (root / "sharded.yaml").write_text(yaml.safe_dump({"name": "sharded", "passes": passes}))
    train(root, "undisturbed")
    (root / "said").write_text(train(root, "killed", "killed-copied:18,killed-cut:24"))
    return root


@pytest.mark.parametrize("run", RUNS)
def test_the_run_ends_with_the_weights_and_the_curve_of_an_undisturbed_one(
    folder: Path, run: str
) -> None:
    outs = [folder / f"{name}-{run}" for name in ("undisturbed", "killed")]
    weights = [(out / "checkpoint.safetensors").read_bytes() for out in outs]
    assert weights[0] == weights[1]
    metrics = [json.loads((out / "metrics.json").read_text()) for out in outs]
    for name in ("curve", "validation", "test", "num_rows_seen"):
        assert metrics[0][name] == metrics[1][name]
    assert len(metrics[0]["curve"]) == 2


@pytest.mark.parametrize(("run", "kill"), [("copied", 18), ("cut", 24)])
def test_it_went_on_by_itself_from_the_last_checkpoint(folder: Path, run: str, kill: int) -> None:
    out = folder / f"killed-{run}"
    events = read_journal(out / "journal.jsonl")
    [restart] = [event for event in events if event["event"] == "restart"]
    assert restart["cause"] == "launcher"
    [resumed] = [event["step"] for event in events if event["event"] == "resume"]
    # The last one before the kill, or the one before that if it was being written.
    last = (kill - 1) // 7 * 7
    assert resumed in (last - 7, last)
    lines = (folder / "said").read_text().splitlines()
    assert lines.count(f"{out.name}: goes on after step {resumed}") == 1  # by the first rank alone
    told = json.loads((out / "metrics.json").read_text())["goodput"]
    assert told["num_restarts"] == 1
    assert told["num_redone_steps"] <= kill - 1 - resumed
    assert sum(told["times_ns"].values()) == told["wall_ns"]
    assert not list(folder.glob("*.partial*"))
