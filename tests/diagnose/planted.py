"""A model whose time is known to go into one layer, its artifact, and rows for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml
from torch import Tensor

from passes.zoo import apply_passes, make_bundle
from rankopt.artifact.build import write_artifact
from rankopt.artifact.contract import contract_of, random_features
from rankopt.data.rows import Rows, bag_counts
from rankopt.models.build import build_module
from rankopt.models.card import ModelCard, load_card
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.quantize_dense import QuantizeDense

WIDTH = 1024
NUM_IDS = 500
DIM = 8
NUM_INPUTS = 2 * DIM + 4
"""Of the first layer."""
NET = f"""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding({NUM_IDS}, {DIM})
        self.item = nn.Embedding({NUM_IDS}, {DIM})
        self.first = nn.Linear({NUM_INPUTS}, {WIDTH})
        self.wide = nn.Linear({WIDTH}, {WIDTH})
        self.last = nn.Linear({WIDTH}, 1)

    def forward(self, dense, ids):
        rows = [self.user(ids[:, 0]), self.item(ids[:, 1]), dense]
        hidden = self.first(torch.cat(rows, dim=1)).relu()
        return self.last(self.wide(hidden).relu()).squeeze(1)


def make():
    torch.manual_seed(0)
    return Net()
"""
CARD = {
    "name": "planted",
    "factory": "net.py:make",
    "inputs": [
        {"name": "dense", "kind": "dense", "columns": ["a", "b", "c", "d"]},
        {"name": "ids", "kind": "ids", "columns": ["u", "i"], "num_ids": NUM_IDS},
    ],
    "outputs": [{"name": "click", "label": "label"}],
}


@cache
def _root() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="rankopt-planted-")


@cache
def card_file() -> Path:
    folder = Path(_root().name)
    (folder / "net.py").write_text(NET)
    (folder / "card.yaml").write_text(yaml.safe_dump(CARD))
    return folder / "card.yaml"


def card() -> ModelCard:
    return load_card(card_file())


@cache
def artifact() -> Path:
    """Compile the model once in a test run: tables in one lookup, layers in int8."""
    model = build_module(card(), allow_random=True)
    bundle = make_bundle(card(), model)
    steps = (FuseEmbeddings(), QuantizeDense(backend="native"), ExportAoti())
    folder = Path(_root().name) / "artifact"
    write_artifact(
        apply_passes(bundle, *steps).bundle, folder, control_size_bytes=bundle.size_bytes
    )
    return folder


def rows(count: int = 512) -> Rows:
    return Rows(features(count), {}, None, count, bags=bag_counts(card()))


def features(count: int) -> dict[str, Tensor]:
    return random_features(contract_of(card()), count, torch.Generator().manual_seed(1))
