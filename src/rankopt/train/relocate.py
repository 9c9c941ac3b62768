"""Write a card into another folder so that every path in it still leads to the same file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from rankopt.models.card import ModelCard
from rankopt.train.settings import TrainSettings


def write_card(
    card: ModelCard, settings: TrainSettings, file: Path, folder: Path, checkpoint: str
) -> None:
    """Write the card of a trained model.

    Args:
        card: the card that was trained.
        settings: what it was trained with; becomes its `train`.
        file: where to write.
        folder: the folder the card will finally lie in; relative paths are made for it.
        checkpoint: the checkpoint's name in that folder.
    """
    raw: dict[str, Any] = card.model_dump(mode="json", exclude_defaults=True)
    target, _, function = card.factory.rpartition(":")
    if target.endswith(".py"):
        raw["factory"] = f"{_moved(card, target, folder)}:{function}"
    data = raw.get("data", {})
    for split in ("train", "validation", "test"):
        if data.get(split):
            data[split] = _moved(card, data[split], folder)
    raw["checkpoint"] = checkpoint
    trained = settings.model_dump(mode="json", exclude_defaults=True)
    if trained:
        raw["train"] = trained
    file.write_text(yaml.safe_dump(raw, sort_keys=False, width=100), encoding="utf-8")


def _moved(card: ModelCard, path: str, folder: Path) -> str:
    """Rewrite a path of the card; an address such as s3://... or an absolute path stays."""
    if "://" in path or Path(path).is_absolute():
        return path
    return os.path.relpath((card.folder / path).resolve(), folder.resolve())
