"""Every class of deepctr-torch on MovieLens-100K, built and trained as its documentation says.

This file is what a user of deepctr-torch has anyway: `build` is the factory that the cards name,
`train` runs the library's own `fit` and saves its `state_dict`. Nothing here knows rankopt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

if "deepctr_torch" not in sys.modules:
    # deepctr_torch.utils asks a package index for its own latest release, in a thread that
    # importing the package starts. A model that is being timed must not.
    silent = ModuleType("deepctr_torch.utils")
    silent.check_version = lambda version: None  # type: ignore[attr-defined]
    sys.modules["deepctr_torch.utils"] = silent

from deepctr_torch import models
from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat

DIM = 32
MAX_HISTORY = 20
SIZES = {
    "user_id": 944,
    "age": 8,
    "gender": 3,
    "occupation": 22,
    "zip_prefix": 12,
    "item_id": 1683,
    "year": 16,
    "genre": 19,
}
SEQUENCE_MODELS = ("DIN", "DIEN")
MULTI_TASK_MODELS = ("SharedBottom", "ESMM", "MMOE", "PLE")
TASKS = ("label", "loved")
# These take no pooled list: they pair up the single-valued features.
WITHOUT_LISTS = ("ONN",)


def _sparse(*names: str) -> list[Any]:
    return [SparseFeat(name, SIZES[name], embedding_dim=DIM) for name in names]


def columns_of(model: str) -> list[Any]:
    """Return the feature columns of a model, in the order of its packed input."""
    if model in SEQUENCE_MODELS:
        lists = [
            VarLenSparseFeat(
                SparseFeat(f"hist_{name}", SIZES[name], DIM, embedding_name=name),
                maxlen=MAX_HISTORY,
                length_name="seq_length",
            )
            for name in ("item_id", "genre")
        ]
        return [*_sparse("user_id", "gender", "item_id", "genre"), *lists]
    genres = VarLenSparseFeat(SparseFeat("genres", 19, embedding_dim=DIM), maxlen=6)
    columns = _sparse(*SIZES)
    return columns if model in WITHOUT_LISTS else [*columns, genres]


def build(model: str) -> nn.Module:
    """Build one class by name with the library's own defaults."""
    columns = columns_of(model)
    factory = getattr(models, model)
    if model in SEQUENCE_MODELS:
        return factory(columns, ["item_id", "genre"])
    if model in MULTI_TASK_MODELS:
        return factory(columns, task_names=("like", "love"))
    if model in ("PNN", "MLR"):
        return factory(columns)
    return factory(columns, columns)


def inputs_of(model: str, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Make the mapping that `fit` takes: one array per feature, lists padded with 0."""
    inputs = {name: frame[name].to_numpy() for name in SIZES}
    if model in SEQUENCE_MODELS:
        inputs["hist_item_id"] = _padded(frame["history"], MAX_HISTORY)
        inputs["hist_genre"] = _padded(frame["history_genres"], MAX_HISTORY)
        # DIEN fails when every history of a batch is empty, so none is shorter than one.
        inputs["seq_length"] = frame["history"].map(len).clip(1, MAX_HISTORY).to_numpy()
    elif model not in WITHOUT_LISTS:
        inputs["genres"] = _padded(frame["genres"], 6)
    return inputs


def _padded(lists: pd.Series, width: int) -> np.ndarray:
    out = np.zeros((len(lists), width), dtype=np.int64)
    for row, values in enumerate(lists):
        kept = values[-width:]
        out[row, : len(kept)] = kept
    return out


def train(model: str, frame: pd.DataFrame, folder: Path) -> Path:
    """Train with the library's `fit` and save what it calls the model's weights."""
    net = build(model)
    labels = frame[list(TASKS)] if model in MULTI_TASK_MODELS else frame[["label"]]
    multi = model in MULTI_TASK_MODELS
    loss: Any = ["binary_crossentropy"] * 2 if multi else "binary_crossentropy"
    net.compile("adam", loss)
    inputs = inputs_of(model, frame)
    ordered = {name: inputs[name] for name in net.feature_index}
    net.fit(ordered, labels.to_numpy("float32"), batch_size=256, epochs=1, verbose=0)
    path = folder / "model.pt"
    torch.save(net.state_dict(), path)
    return path
