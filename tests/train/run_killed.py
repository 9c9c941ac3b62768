"""Train small models in processes that are killed and go on; used by test_resume.py.

    run_killed.py FOLDER

FOLDER holds `plan.json`: variant -> list of runs, each a list of kills, one process after another;
after the last kill the run goes on to its end. Every process is forked from this one, which has
imported everything and has computed nothing. The answer, on stdout, is JSON: variant -> one
description per run of what it left, the first that of a run which nothing disturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx

from rankopt.data.splits import open_splits
from rankopt.data.synthetic import SyntheticOptions, generate
from rankopt.environment import Environment, collect_environment
from rankopt.errors import RankoptError
from rankopt.models.card import ModelCard
from rankopt.recipe import parse_recipe
from rankopt.sharding.checkpoint import _AtomicWriter
from rankopt.train import loop
from rankopt.train.fault_tolerance.checkpoints import Checkpoints
from rankopt.train.settings import TrainSettings
from rankopt.train.step import Step

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, normalises=True, dim=8):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(50, dim) for _ in range(3)])
        norm = nn.BatchNorm1d(16) if normalises else nn.Identity()
        self.top = nn.Sequential(
            nn.Linear(4 + 3 * dim, 16), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, dense, sparse):
        rows = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        return self.top(torch.cat([dense, *rows], dim=1)).squeeze(1)


def make(**config):
    return Net(**config)
"""

DATA = SyntheticOptions(
    num_train=3_000, num_validation=800, num_test=300, num_dense=4, num_tables=3, ids_per_table=50
)
BASE = {"batch_size": 100, "learning_rate": 0.02, "window_rows": 700, "num_threads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {
        "settings": {"epochs": 2, "evaluations_per_epoch": 3, "patience": 9},
    },
    "sparse": {
        "settings": {
            "epochs": 2,
            "evaluations_per_epoch": 2,
            "table_optimizer": "sparse_adam",
            "patience": 9,
        },
        "passes": [{"train_pipeline": {"depth": 2}}],
        "save_optimizer": True,
    },
    "stops": {
        # Rates that overfit at once: the best weights are old when the patience runs out.
        "settings": {
            "epochs": 9,
            "evaluations_per_epoch": 2,
            "patience": 3,
            "learning_rate": 0.3,
            "table_optimizer": "adagrad",
        },
    },
    "fused": {
        "settings": {"epochs": 2, "evaluations_per_epoch": 2, "patience": 9},
        "passes": [
            {"train_fuse_embeddings": {"optimizer": "rowwise_adagrad"}},
            {"train_dense_optimizer": {}},
            {"train_accumulate": {"parts": 2}},
            {"train_pipeline": {"depth": 3}},
        ],
    },
    "compiled": {
        "settings": {"epochs": 1, "evaluations_per_epoch": 2, "patience": 9},
        "passes": [
            {"train_fuse_embeddings": {"optimizer": "adagrad"}},
            {"train_precision": {"dtype": "bf16"}},
            {"train_compile": {"backend": "aot_eager"}},
        ],
    },
}
EVERY = 7


def card_of(folder: Path) -> ModelCard:
    raw = {
        "name": "killed",
        "factory": f"{folder}/net.py:make",
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]},
            {"name": "sparse", "kind": "ids", "columns": ["C1", "C2", "C3"], "num_ids": 50},
        ],
        "outputs": [{"name": "click", "label": "label"}],
    }
    return ModelCard.model_validate(raw)


def with_bf16() -> Environment:
    return collect_environment().model_copy(update={"isa": ("avx2", "avx512_bf16")})


def train(folder: Path, variant: str, out: Path, **options: Any) -> None:
    told = VARIANTS[variant]
    card = card_of(folder)
    passes = told.get("passes")
    recipe = parse_recipe({"name": "x", "passes": passes}, where="x") if passes else None
    settings = TrainSettings.model_validate({**BASE, **told["settings"]})
    loop.train(
        card,
        open_splits(card, folder / "data"),
        out,
        settings,
        recipe=recipe,
        save_optimizer=told.get("save_optimizer", False),
        **options,
    )


def kill_at(moment: str, count: int) -> None:
    """Have this process killed when something is called for the n-th time."""
    owner, name = {
        "step": (Step, "timed"),
        "evaluation": (loop, "judge"),
        "write": (_AtomicWriter, "write_data"),
        "index": (_AtomicWriter, "finish"),
        "swap": (Path, "rename"),
        "result": (loop, "write_weights"),
        "end": (Checkpoints, "remove"),
    }[moment]
    real = getattr(owner, name)
    calls = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if moment != "swap" or ".partial-save" in str(args[0]):
            calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, called)


def process(folder: Path, variant: str, out: Path, kill: list[Any] | None, **options: Any) -> str:
    """Run one process; say how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            if kill and kill[0] != "time":
                kill_at(*kill)
            train(folder, variant, out, **options)
            code = 0
        except RankoptError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        finally:
            sys.stderr.flush()
            os._exit(code)
    if kill and kill[0] == "time":
        time.sleep(kill[1])
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return "killed" if os.WIFSIGNALED(status) else str(os.WEXITSTATUS(status))


def describe(out: Path) -> dict[str, Any]:
    metrics = json.loads((out / "metrics.json").read_text())
    files = ["checkpoint.safetensors", "optimizer.pt"]
    found = {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest()
        for name in files
        if (out / name).exists()
    }
    quality = {name: metrics[name] for name in ("train", "validation", "test", "num_rows_seen")}
    return {
        "files": found,
        "curve": metrics["curve"],
        "quality": quality,
        "goodput": metrics["goodput"],
        "beside": sorted(path.name for path in out.parent.iterdir()),
        "journal": (out / "journal.jsonl").read_text().splitlines(),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "net.py").write_text(NET)
    generate(DATA, folder / "data")
    answer: dict[str, Any] = {}
    for variant, runs in json.loads((folder / "plan.json").read_text()).items():
        out = folder / variant / "undisturbed" / "out"
        assert process(folder, variant, out, None) == "0"
        answer[variant] = [describe(out)]
        for index, kills in enumerate(runs):
            out = folder / variant / str(index) / "out"
            ends = []
            for number, kill in enumerate([*kills, None]):
                if out.exists() and not out.with_name("out.partial").exists():
                    break  # a kill by the clock came when all was done
                options = {"checkpoint_every": EVERY, "resume": number > 0}
                ends.append(process(folder, variant, out, kill, **options))
            answer[variant].append({"ends": ends, **describe(out)})
    print(json.dumps(answer))


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop.collect_environment = with_bf16
    main()
