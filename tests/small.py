"""A small model of a user's own, its data, and what the verbs made of it.

The net is code in a file beside the card, as a user has it: an id column, a pooled list and dense
columns. Whatever takes seconds is made once a session and handed out as a folder; tests that change
one work on a copy.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rankopt.bench.plan import BenchPlan
from rankopt.data.synthetic import SyntheticOptions, generate
from rankopt.review.schema import PassRecord
from rankopt.units import NS_PER_MS

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_ids=200, dim=8, hidden=32):
        super().__init__()
        self.left = nn.Embedding(num_ids, dim)
        self.right = nn.Embedding(num_ids, dim)
        self.seen = nn.EmbeddingBag(num_ids, dim, mode="mean")
        self.top = nn.Sequential(nn.Linear(3 * dim + 4, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense, sparse, seen_values, seen_offsets):
        pooled = self.seen(seen_values, seen_offsets[:-1])
        rows = [self.left(sparse[:, 0]), self.right(sparse[:, 1]), pooled, dense]
        return self.top(torch.cat(rows, dim=1)).squeeze(1)


def make(**config):
    return Net(**config)
"""

CARD: dict[str, Any] = {
    "name": "small",
    "factory": "net.py:make",
    "config": {"num_ids": 200},
    "inputs": [
        {"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]},
        {"name": "sparse", "kind": "ids", "columns": ["C1", "C2"], "num_ids": 200},
        {
            "name": "seen",
            "kind": "ragged_ids",
            "column": "R1",
            "num_ids": 200,
            "max_length": 6,
            "layout": "values_offsets",
        },
    ],
    "outputs": [{"name": "click", "label": "label"}],
    "data": {
        "train": "data/train.parquet",
        "validation": "data/validation.parquet",
        "test": "data/test.parquet",
        "request_key": "request_id",
    },
    "train": {"epochs": 1, "batch_size": 256, "learning_rate": 0.01},
}

DATA = SyntheticOptions(
    num_train=20_000,
    num_validation=2_000,
    num_test=60_000,
    num_dense=4,
    num_tables=2,
    ids_per_table=200,
    num_ragged=1,
    ids_per_ragged=200,
    ragged_mean_length=2.0,
    ragged_max_length=6,
    candidates_per_request=4,
    num_interactions=1,
)

RECIPE = """
name: small-int8
objective: bytes
batch_sizes: [1, 16]
passes:
  - fuse_embeddings: {}
  - quantize_embeddings: {dtype: int8}
  - export_aoti: {}
gates:
  quality: {ne: 0.1%}
"""

PLAN = BenchPlan(
    batch_sizes=(1, 16),
    num_threads=1,
    min_blocks=8,
    max_blocks=8,
    calls_per_block=10,
    block_duration_ns=5 * NS_PER_MS,
    max_block_duration_ns=20 * NS_PER_MS,
    min_num_samples=1,
    warm_up_calls=10,
    warm_up_duration_ns=20 * NS_PER_MS,
    lead_in_duration_ns=1 * NS_PER_MS,
    idle_cpu_limit=0.5,  # a block of milliseconds sees every hiccup of an idle interpreter
)

_made: dict[str, Path] = {}


def _once(name: str, root: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder the first time it is asked for; root is the session's, so it is the key."""
    if name not in _made:
        folder = root / "small" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(folder)
        _made[name] = folder
    return _made[name]


def write_model(folder: Path, **changes: Any) -> Path:
    """Write net.py and card.yaml, without data; return the card."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NET)
    (folder / "card.yaml").write_text(yaml.safe_dump(CARD | changes))
    return folder / "card.yaml"


def write_plan(file: Path, plan: BenchPlan = PLAN) -> Path:
    file.write_text(yaml.safe_dump(plan.model_dump(mode="json", exclude_none=True)))
    return file


def model(root: Path) -> Path:
    """Return a folder with net.py, card.yaml and data/."""

    def make(folder: Path) -> None:
        write_model(folder)
        generate(DATA, folder / "data")
        (folder / "recipe.yaml").write_text(RECIPE)
        write_plan(folder / "plan.yaml")

    return _once("model", root, make)


def trained(root: Path, seed: int = 0) -> Path:
    """Return the folder that `rankopt train` wrote."""
    from rankopt.data.splits import open_splits
    from rankopt.models.card import load_card
    from rankopt.train.loop import train

    card = load_card(model(root) / "card.yaml")
    settings = card.train.model_copy(update={"seed": seed})

    def make(folder: Path) -> None:
        train(card, open_splits(card), folder, settings)

    return _once(f"trained-{seed}", root, make)


def artifact(root: Path) -> Path:
    """Return the artifact of the trained model, both passes kept whatever this machine measures."""
    from rankopt.api import optimize
    from rankopt.jobs.decisions import write_choices
    from rankopt.models.card import load_card
    from rankopt.recipe import load_recipe

    file, recipe = trained(root) / "card.yaml", load_recipe(model(root) / "recipe.yaml")
    card = load_card(file)
    kinds = [step.kind for step in recipe.passes if step.purpose != "artifact"]
    blank = PassRecord(kind="", changed=True, kept=True, reason="as planned", measured_speedup=1.25)

    def make(folder: Path) -> None:
        choices = folder.with_name("choices.json")
        records = [blank.model_copy(update={"kind": kind}) for kind in kinds]
        write_choices(choices, recipe, card, records)
        optimize(recipe, card, out=folder, choices=choices)

    return _once("artifact", root, make)


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target
