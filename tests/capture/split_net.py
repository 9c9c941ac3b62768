"""A model with three parts that torch.export refuses, and how it is split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankopt.artifact.contract import contract_of, random_features
from rankopt.bundle import ModelBundle
from rankopt.capture.diagnose import quiet_torch
from rankopt.capture.export import trace, trace_example
from rankopt.capture.split import SplitExport, export_split
from rankopt.models.card import ModelCard
from rankopt.models.serving import EagerModel, ServingModule

LAYERS = '''
import torch
from torch import nn


class Boost(nn.Module):
    """Branches on the rows, gives nested results, and is called twice."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Linear(dim, dim)

    def forward(self, x, *, limit=0.0):
        if x.max() > 1000:
            raise ValueError("a value is far too large")
        if x.mean().item() > limit:
            return {"out": self.scale(x), "extra": (x[:, :2], None)}
        return {"out": -self.scale(x), "extra": (2 * x[:, :2], None)}
'''

NET = """
import torch
from torch import nn

from split_test_layers import Boost


class Selected(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x, rows):
        kept = x[x[:, 0] > 0.3]
        if kept.shape[0] == 0:
            return kept, rows
        return self.inner(kept), rows


class Halve(nn.Module):
    def forward(self, x):
        while x.abs().max() > 0.5:
            x = x / 2
        return x


class Tower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.halve = Halve()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x):
        return self.lin(self.halve(x))


class Net(nn.Module):
    def __init__(self, num_ids=50, dim=8):
        super().__init__()
        self.table = nn.Embedding(num_ids, dim)
        self.boost = Boost(dim)
        self.selected = Selected(dim)
        self.tower = Tower(dim)
        self.top = nn.Linear(2 * dim + 2, 1)

    def forward(self, ids, dense):
        x = self.table(ids)
        first = self.boost(x)
        second = self.boost(dense, limit=0.1)
        rows, count = self.selected(dense, dense.shape[0])
        mixed = first["out"] + second["out"] + rows.sum(0, keepdim=True) / count
        both = torch.cat([mixed, self.tower(x), first["extra"][0]], 1)
        return self.top(both).squeeze(1)


def make(**config):
    torch.manual_seed(0)
    return Net(**config)
"""

CARD: dict[str, Any] = {
    "name": "split",
    "factory": "split_test_net.py:make",
    "inputs": [
        {"name": "ids", "kind": "ids", "num_ids": 50},
        {"name": "dense", "kind": "dense", "columns": list("abcdefgh")},
    ],
    "outputs": [{"name": "click", "label": "label"}],
}


@dataclass(frozen=True)
class Made:
    """The model, what became of it, and where."""

    card: ModelCard
    model: nn.Module
    bundle: ModelBundle
    folder: Path


def split(card: ModelCard, model: nn.Module) -> SplitExport | None:
    serving = ServingModule(card, model.eval())
    with pytest.raises(Exception) as caught, quiet_torch():  # noqa: PT011 (any type of torch's)
        trace(serving, card)
    return export_split(serving, card, lambda module: trace(module, card), caught.value)


def bundle_of(card: ModelCard, model: nn.Module) -> tuple[ModelBundle, tuple[str, ...]]:
    found = split(card, model)
    assert found is not None
    bundle = ModelBundle(card, found.program, trace_example(card), parts=found.parts)
    return bundle, found.notes


def rows(card: ModelCard, num_rows: int, shift: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    """Make rows up; a shift takes branches on the mean, and selections, the other way."""
    generator = torch.Generator().manual_seed(seed)
    features = random_features(contract_of(card), num_rows, generator)
    return features | {"dense": features["dense"] + shift}


def eager(made: Made, features: dict[str, Tensor]) -> Tensor:
    return EagerModel(made.card, made.model)(features)["click"]
