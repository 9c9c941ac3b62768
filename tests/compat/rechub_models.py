"""The ranking and multi-task classes of torch-rechub, and its HSTU, on MovieLens-100K.

This file is what a user of torch-rechub has anyway: `build` is the factory that the cards name,
`train` runs the library's own trainers, which save the weights. Nothing here knows rankopt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch_rechub.basic.features import SequenceFeature, SparseFeature
from torch_rechub.models import multi_task, ranking
from torch_rechub.models.generative.hstu import HSTUModel
from torch_rechub.trainers import CTRTrainer, MTLTrainer, SeqTrainer
from torch_rechub.utils.data import DataGenerator, SequenceDataGenerator

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
SEQUENCE_MODELS = ("DIN", "DIEN", "BST")
MULTI_TASK_MODELS = ("SharedBottom", "ESMM", "MMOE", "PLE", "AITM")
TASKS = ("label", "loved")
# These pair up the single-valued features and take no pooled list.
WITHOUT_LISTS = ("DeepFFM", "FatDeepFFM", "FiBiNet", "ESMM", "AFM")
DISLIKE, LIKE = 1683, 1684
"""HSTU predicts the next token, and after a candidate that is what the user did with it."""

TRAINING: dict[str, dict[str, Any]] = {
    # Two that one epoch at the library's default rate leaves far from calibrated.
    "FatDeepFFM": {"n_epoch": 2},
    "DIEN": {"optimizer_params": {"lr": 3e-4, "weight_decay": 1e-5}},
}


def mlp() -> dict[str, Any]:
    """Make the settings of an MLP anew: EDCN writes its own sizes into what it is given."""
    return {"dims": [256, 128], "dropout": 0.2}


def tower() -> dict[str, Any]:
    """Make the settings of a task's tower."""
    return {"dims": [64]}


class HSTURanker(HSTUModel):
    """HSTU as a ranker: the history and then the candidate; the score is like against dislike."""

    def forward(self, history: Tensor, item_id: Tensor) -> Tensor:
        """Score [B] candidates given their users' padded histories [B, MAX_HISTORY]."""
        tokens = torch.cat([history, item_id[:, None]], dim=1)
        last = super().forward(tokens)[:, -1]
        return last[:, LIKE] - last[:, DISLIKE]


def _sparse(*names: str) -> list[Any]:
    return [SparseFeature(name, SIZES[name], DIM) for name in names]


def _sequence(name: str, of: str, pooling: str = "concat") -> Any:
    return SequenceFeature(name, SIZES[of], DIM, pooling=pooling, shared_with=of, padding_idx=0)


def build(model: str) -> nn.Module:
    """Build one class by name, small and with the library's own defaults."""
    if model == "HSTUModel":
        return HSTURanker(
            LIKE + 1, d_model=64, n_heads=2, n_layers=2, dqk=32, dv=32,
            max_seq_len=MAX_HISTORY + 1, use_time_embedding=False,
        )  # fmt: skip
    if model in SEQUENCE_MODELS:
        return _sequence_model(model)
    genres = SequenceFeature("genres", 19, DIM, pooling="mean", padding_idx=0)
    features = _sparse(*SIZES) + ([] if model in WITHOUT_LISTS else [genres])
    if model in MULTI_TASK_MODELS:
        return _multi_task_model(model, features)
    factory = getattr(ranking, model)
    arguments: dict[str, dict[str, Any]] = {
        "WideDeep": {"wide_features": features, "deep_features": features, "mlp_params": mlp()},
        "DeepFM": {"deep_features": features, "fm_features": features, "mlp_params": mlp()},
        "DCN": {"features": features, "n_cross_layers": 3, "mlp_params": mlp()},
        "DCNv2": {"features": features, "n_cross_layers": 3, "mlp_params": mlp()},
        "EDCN": {"features": features, "n_cross_layers": 3, "mlp_params": mlp()},
        "AFM": {"fm_features": features, "embed_dim": DIM},
        "FiBiNet": {"features": features, "mlp_params": mlp()},
        "AutoInt": {"sparse_features": features, "dense_features": [], "mlp_params": mlp()},
    }
    if model in ("DeepFFM", "FatDeepFFM"):
        # Field-aware tables hold one row per id and field of the pair.
        cross = [SparseFeature(f.name, f.vocab_size * len(features), 10) for f in features]
        linear = [SparseFeature(f.name, f.vocab_size, 1) for f in features]
        extra = {"reduction_ratio": 2} if model == "FatDeepFFM" else {}
        return factory(linear, cross, embed_dim=10, mlp_params=mlp(), **extra)
    return factory(**arguments[model])


def _sequence_model(model: str) -> nn.Module:
    users = _sparse("user_id", "gender")
    targets = [SparseFeature("item_id", SIZES["item_id"], DIM, padding_idx=0)]
    history = [_sequence("history", "item_id")]
    if model == "DIN":
        return ranking.DIN(users, history, targets, mlp(), {"dims": [64, 32]})
    if model == "BST":
        return ranking.BST(users, history, targets, mlp(), nhead=4, max_seq_len=MAX_HISTORY + 1)
    negatives = [_sequence("neg_history", "item_id")]
    return ranking.DIEN(users, history, negatives, targets, {"dims": [128, 64]})


def _multi_task_model(model: str, features: list[Any]) -> nn.Module:
    types = ["classification", "classification"]
    if model == "ESMM":
        return multi_task.ESMM(features[:5], features[5:], cvr_params=mlp(), ctr_params=mlp())
    if model == "SharedBottom":
        return multi_task.SharedBottom(
            features, types, mlp() | {"output_layer": False}, [tower(), tower()]
        )
    if model == "MMOE":
        return multi_task.MMOE(features, types, 4, mlp(), [tower(), tower()])
    if model == "PLE":
        return multi_task.PLE(features, types, 1, 2, 1, mlp(), [tower(), tower()])
    return multi_task.AITM(features, 2, mlp(), [tower(), tower()])


def inputs_of(model: str, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Make the mapping that the trainers' data generator takes."""
    inputs = {name: frame[name].to_numpy() for name in SIZES}
    if model in SEQUENCE_MODELS:
        inputs["history"] = _padded(frame["history"], MAX_HISTORY)
        if model == "DIEN":
            draw = np.random.default_rng(0).integers(1, SIZES["item_id"], inputs["history"].shape)
            inputs["neg_history"] = np.where(inputs["history"] == 0, 0, draw)
        return inputs
    return inputs | {"genres": _padded(frame["genres"], 6)}


def _padded(lists: pd.Series, width: int, side: str = "end") -> np.ndarray:
    out = np.zeros((len(lists), width), dtype=np.int64)
    for row, values in enumerate(lists):
        kept = values[-width:]
        start = 0 if side == "end" else width - len(kept)
        out[row, start : start + len(kept)] = kept
    return out


def train(model: str, frame: pd.DataFrame, folder: Path) -> Path:
    """Train with the library's trainer, which writes the weights into the folder itself."""
    torch.manual_seed(0)
    net = build(model)
    settings: dict[str, Any] = {"n_epoch": 1, "model_path": str(folder)}
    settings |= TRAINING.get(model, {})
    if model == "HSTUModel":
        return _train_hstu(net, frame, folder, settings)
    inputs = inputs_of(model, frame)
    if model not in MULTI_TASK_MODELS:
        loader = _loader(inputs, frame["label"].to_numpy("float32"))
        CTRTrainer(net, loss_mode=model != "DIEN", **settings).fit(loader)
        return folder / "model.pth"
    labels = frame[list(TASKS)].to_numpy("float32")
    if model == "ESMM":  # its tasks are cvr, ctr and ctcvr
        labels = labels[:, [1, 0, 1]]
    loader = _loader(inputs, labels)
    types = ["classification"] * labels.shape[1]
    MTLTrainer(net, task_types=types, **settings).fit(loader, _loader(_head(inputs), labels[:2048]))
    return folder / "model_base_0.pth"


def _head(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values[:2048] for name, values in inputs.items()}


def _loader(inputs: dict[str, np.ndarray], labels: np.ndarray) -> Any:
    generator = DataGenerator(inputs, labels)
    train_loader, _, _ = generator.generate_dataloader(
        x_val=_head(inputs), y_val=labels[:2048], x_test=_head(inputs), y_test=labels[:2048],
        batch_size=256,
    )  # fmt: skip
    return train_loader


def _train_hstu(
    net: nn.Module, frame: pd.DataFrame, folder: Path, settings: dict[str, Any]
) -> Path:
    history = _padded(frame["history"], MAX_HISTORY, side="start")
    tokens = np.concatenate([history, frame[["item_id"]].to_numpy()], axis=1)
    target = np.where(frame["label"] == 1, LIKE, DISLIKE)
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
    generator = SequenceDataGenerator(tokens, places, target, np.zeros_like(tokens))
    loader, _, _ = generator.generate_dataloader(batch_size=256, split_ratio=(0.98, 0.01, 0.01))
    ranker, net.forward = net.forward, HSTUModel.forward.__get__(net)
    SeqTrainer(net, **settings).fit(loader)
    net.forward = ranker
    return folder / "model.pth"
