"""A run's weights, optimizers and random draws as the nested state that a checkpoint holds.

Optimizers begin without state and gather it as they go, so what is loaded is made to the
checkpoint's measure first. State of tables cut over ranks is there from the beginning and is loaded
in place, each rank its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from rankopt.models.dcp import SafeReader, read_index

State = dict[str, Any]


def optimizers_state(states: Sequence[Mapping[str, Any]]) -> State:
    """Lay out optimizers' state dicts under names, since a checkpoint's keys are text."""
    return {
        str(index): {
            **{name: value for name, value in state.items() if name != "state"},
            "state": {str(key): value for key, value in state["state"].items()},
        }
        for index, state in enumerate(states)
    }


def optimizer_states(state: Mapping[str, Any]) -> list[State]:
    """Return what `optimizers_state` was given."""
    return [
        {
            **state[str(index)],
            "state": {
                int(key) if key.isdecimal() else key: value
                for key, value in state[str(index)]["state"].items()
            },
        }
        for index in range(len(state))
    ]


def made_to_measure(state: State, folder: Path) -> State:
    """Add to a state of `optimizers_state` the entries that a checkpoint has and it has not yet.

    Those are of PyTorch's own optimizers, which number their weights; others name them, have all
    their state from the beginning, and of sharded tables only what is this rank's.
    """
    stored = blank_state(folder, "optimizers")
    filled = {}
    for name, own in state.items():
        gathered = stored.get(name, {}).get("state", {})
        numbered = {key: value for key, value in gathered.items() if key.isdecimal()}
        filled[name] = {**own, "state": {**numbered, **own["state"]}}
    return filled


def load_optimizers(optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Give optimizers what was loaded into a state of `optimizers_state`."""
    for optimizer, own in zip(optimizers, optimizer_states(state), strict=True):
        optimizer.load_state_dict(own)


def draws_state(module: nn.Module) -> State:
    """Describe a rank's random draws, and buffers that are not among the weights."""
    state: State = {"torch": torch.get_rng_state()}
    if any(parameter.is_cuda for parameter in module.parameters()):
        state["cuda"] = torch.cuda.get_rng_state()
    kept = module.state_dict()
    hidden = {name: value for name, value in module.named_buffers() if name not in kept}
    return {**state, "buffers": hidden} if hidden else state


def load_draws(state: Mapping[str, Any]) -> None:
    """Go on with the draws that `draws_state` described; its buffers were loaded in place."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def begin_draws(step: int, rank: int) -> None:
    """Begin draws of a rank's own, for runs that go on with another number of ranks."""
    place = [torch.initial_seed() % 2**63, step, rank]
    torch.default_generator.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))


def blank_state(folder: Path, key: str) -> State:
    """Make room for everything that a checkpoint holds under a key."""
    index = read_index(folder, SafeReader(str(folder)))
    paths = index.planner_data or {}
    found: State = {}
    for name, entry in index.state_dict_metadata.items():
        first, *path = paths.get(name, (name,))
        if first != key or not path or not all(isinstance(part, str) for part in path):
            continue
        place = found
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = None
        if isinstance(entry, TensorStorageMetadata):
            place[path[-1]] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return found
