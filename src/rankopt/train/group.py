"""What checkpoints ask of the process group, where there is one; one process answers itself."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import distributed

Value = TypeVar("Value")


def is_distributed() -> bool:
    """Tell whether a process group is set up."""
    return bool(distributed.is_available() and distributed.is_initialized())


def rank() -> int:
    """Return which process this is."""
    return distributed.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return how many there are."""
    return distributed.get_world_size() if is_distributed() else 1


def new_group() -> Any:
    """Make a group for collectives that do not mix with the step's; all ranks come here."""
    return distributed.new_group(backend="gloo") if is_distributed() else None


def on_any_rank(flag: bool, group: Any) -> bool:
    """Tell whether it holds on any rank of a group of `new_group`."""
    if not is_distributed():
        return flag
    number = torch.tensor([float(flag)])
    distributed.all_reduce(number, group=group)
    return bool(number)


def broadcast(value: Value) -> Value:
    """Return the first rank's value, a small plain object, on every rank."""
    if not is_distributed():
        return value
    held: list[Any] = [value]
    distributed.broadcast_object_list(held, src=0)
    result: Value = held[0]
    return result
