"""The state a run can go on from: weights, and beside them what the optimizers had gathered."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rankopt.errors import CheckpointError, Problem
from rankopt.models.checkpoint import read_checkpoint
from rankopt.models.match import match_state_dict

CHECKPOINT_NAME = "checkpoint.safetensors"
SHARDED_CHECKPOINT_NAME = "checkpoint"
OPTIMIZER_NAME = "optimizer.pt"


def save_optimizers(
    states: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer], folder: Path
) -> None:
    """Write the states of a run's optimizers, with what each is."""
    content = {"kinds": [_kind(optimizer) for optimizer in optimizers], "states": list(states)}
    torch.save(content, folder / OPTIMIZER_NAME)


def load_state(folder: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load a run's weights into a module, and its optimizers' state where it was saved.

    Raises:
        CheckpointError: a file cannot be read, does not fit, or is of other optimizers.
    """
    file = folder / CHECKPOINT_NAME
    if not file.exists() and (folder / SHARDED_CHECKPOINT_NAME).is_dir():
        file = folder / SHARDED_CHECKPOINT_NAME
    matched = match_state_dict(module, read_checkpoint(file).state, str(file))
    module.load_state_dict(matched.state, strict=False)
    saved = folder / OPTIMIZER_NAME
    if not saved.exists():
        return
    try:
        content = torch.load(saved, weights_only=True)
        kinds, states = content["kinds"], content["states"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(problems=[Problem(str(saved), f"cannot be read: {error}")]) from error
    wanted = [_kind(optimizer) for optimizer in optimizers]
    if kinds != wanted:
        problem = Problem(
            str(saved),
            f"must be the state of {', '.join(wanted)}",
            ", ".join(map(str, kinds)),
            "Start with the same recipe, or delete the file to begin with fresh optimizers.",
        )
        raise CheckpointError(problems=[problem])
    for optimizer, state in zip(optimizers, states, strict=True):
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(problems=[Problem(str(saved), str(error))]) from error


def _kind(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    inner = getattr(optimizer, "optimizer", None)
    return f"{name}({inner})" if inner else name
