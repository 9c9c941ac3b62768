"""The Triton kernels as operators: for CUDA tensors of `rankopt::`, and for compiled graphs.

Two doors to the same functions. `torch.ops.rankopt.X` of CUDA tensors runs them at once.
`torch.ops.rankopt_gpu.X` is what a graph for a GPU calls (`rankopt.passes.device`): AOTInductor
looks into it (`torch.library.triton_op`) and compiles the kernels into the package, so that an
artifact needs neither Python nor Triton to run them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._library.triton import set_wrap_triton_enabled
from torch.library import triton_op

from rankopt.kernels.build import load_kernels
from rankopt.kernels.triton import attention, interaction, lookup, target

NAMESPACE = "rankopt_gpu"


COMPILED: tuple[Callable[..., Tensor], ...] = (
    interaction.dot_interaction,
    interaction.fm_interaction,
    attention.ragged_rows,
    attention.ragged_sum,
    attention.hstu_attention,
    attention.hstu_candidate_attention,
    target.target_attention,
    lookup.lookup_planned,
    lookup.sequences_planned,
)
"""What graphs for a GPU call, each under its own name."""


def _register(function: Callable[..., Tensor]) -> None:
    """Make an operator of a function and of what it takes, but for how it cuts its work."""
    signature = inspect.signature(function, eval_str=True)
    taken = [
        parameter.replace(default=parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Tensor:
        return function(*arguments, **named)

    run.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
    triton_op(f"{NAMESPACE}::{function.__name__}", run, mutates_args={})


for _function in COMPILED:
    _register(_function)


EAGER: dict[str, Callable[..., Tensor]] = {
    "dot_interaction": interaction.dot_interaction,
    "fm_interaction": interaction.fm_interaction,
    "ragged_rows": attention.ragged_rows,
    "ragged_sum": attention.ragged_sum,
    "hstu_attention": attention.hstu_attention,
    "hstu_candidate_attention": attention.hstu_candidate_attention,
    "target_attention": target.target_attention,
    "lookup_rows": lookup.lookup_rows,
    "lookup_sequences": lookup.lookup_sequences,
}
"""Operators of `rankopt::` that take CUDA tensors."""


@cache
def register_cuda() -> torch.library.Library:
    """Give the operators of `rankopt::` their CUDA implementations, once for the process."""
    load_kernels()
    library = torch.library.Library("rankopt", "IMPL")
    for name, function in EAGER.items():
        library.impl(name, _at_once(function), "CUDA")
    return library


def _at_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        with set_wrap_triton_enabled(False):
            return function(*arguments)

    return run
