"""How many rows of an interaction pay for waking another thread, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rankopt.kernels.autotune import fastest
from rankopt.kernels.interaction import dot_interaction, fm_interaction
from rankopt.kernels.ops import current_isa

_BATCHES = (16, 32, 64, 128, 256, 512)


def fewest_rows_per_thread(form: Literal["dot", "sum"], num_fields: int, dim: int) -> int:
    """Measure from which batch on all threads are faster than one.

    Args:
        form: which of the two operators.
        num_fields: F.
        dim: D.

    Returns:
        Rows for each thread; 0, the operator's own estimate, where there is one thread.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return 0
    for batch in _BATCHES:
        fields = torch.ones(batch, num_fields * dim)
        call = _call(form, fields, dim)
        key = f"{form}_interaction {batch}x{num_fields}x{dim} {num_threads}t {current_isa()}"
        shared = batch // num_threads
        choice = fastest(key, {"alone": partial(call, _NEVER), "shared": partial(call, shared)})
        if choice.chosen == "shared":
            return max(1, shared)
    return _BATCHES[-1]


_NEVER = 1 << 40


def _call(form: Literal["dot", "sum"], fields: Tensor, dim: int) -> Callable[[int], Tensor]:
    if form == "dot":
        return lambda rows: dot_interaction([], [fields], dim=dim, rows_per_thread=rows)
    return lambda rows: fm_interaction([fields], dim=dim, rows_per_thread=rows)
