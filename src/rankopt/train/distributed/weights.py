"""Weights of a module whose tables may be cut over ranks: kept, put back, made whole, written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankopt.models.checkpoint import save_checkpoint
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.state import CHECKPOINT_NAME, SHARDED_CHECKPOINT_NAME
from rankopt.units import BYTES_PER_GIB

WHOLE_BYTES = BYTES_PER_GIB
"""Sharded weights of at most so many bytes are written as one file."""

Kept = dict[str, list[Tensor]]


def keep(module: nn.Module) -> Kept:
    """Copy what this rank holds of a module's weights."""
    return {
        name: [part.detach().clone() for part in _own_parts(value)]
        for name, value in module.state_dict().items()
    }


def put_back(module: nn.Module, kept: Kept) -> None:
    """Give a module the weights that `keep` copied."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            for part, copy in zip(_own_parts(value), kept[name], strict=True):
                part.copy_(copy)


def cut_into(module: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Give a sharded module this rank's parts of whole weights."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if not _is_cut(value):
                value.copy_(whole[name])
                continue
            for shard in value.local_shards():
                place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                shard.tensor.copy_(whole[name][tuple(slice(a, a + n) for a, n in place)])


def whole_state(module: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return every weight whole, on every rank; all ranks call it."""
    state = dict(module.state_dict())
    for name, value in state.items():
        if not _is_cut(value):
            continue
        own: list[Tensor] = []
        for shard in value.local_shards():
            own += [torch.tensor(shard.metadata.shard_offsets), shard.tensor]
        whole = torch.empty(tuple(value.size()), dtype=value.dtype)
        for parts in ranks.gather(own):
            for offsets, rows in zip(parts[::2], parts[1::2], strict=True):
                place = zip(offsets.tolist(), rows.shape, strict=True)
                whole[tuple(slice(a, a + n) for a, n in place)] = rows
        state[name] = whole
    return state


def write_weights(module: nn.Module, ranks: Ranks, staging: Path) -> str:
    """Write a run's weights under the names and shapes of the card's module.

    One file, unless tables are cut over ranks and take more than WHOLE_BYTES: then a folder into
    which every rank writes its own parts.

    Returns:
        The name of what was written into the folder.
    """
    state: dict[str, Any] = module.state_dict()
    cut = [value for value in state.values() if _is_cut(value)]
    size = sum(value.size().numel() * value.dtype.itemsize for value in cut)
    if size > WHOLE_BYTES:
        from rankopt.sharding.checkpoint import ShardedCheckpoint, training_state

        ShardedCheckpoint(staging / SHARDED_CHECKPOINT_NAME).save(training_state(module))
        return SHARDED_CHECKPOINT_NAME
    if cut:
        state = whole_state(module, ranks)
    if ranks.is_first:
        save_checkpoint(state, staging / CHECKPOINT_NAME)
    return CHECKPOINT_NAME


def _is_cut(value: Any) -> bool:
    return hasattr(value, "local_shards")


def _own_parts(value: Any) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if _is_cut(value) else [value]
