"""The Triton kernels as operators: for CUDA tensors of `rankopt::`, and for compiled graphs.

Two doors to the same functions. `torch.ops.rankopt.X` of CUDA tensors runs them at once.
`torch.ops.rankopt_gpu.X` is what a graph for a GPU calls (`rankopt.passes.device`): AOTInductor
looks into it (`torch.library.triton_op`) and compiles the kernels into the package, so that an
artifact needs neither Python nor Triton to run them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._library.triton import set_wrap_triton_enabled
from torch.library import triton_op

from rankopt.kernels.build import load_kernels
from rankopt.kernels.triton import attention, interaction, lookup, target

NAMESPACE = "rankopt_gpu"


@triton_op(f"{NAMESPACE}::dot_interaction", mutates_args={})
def dot_interaction(
    before: list[Tensor],
    fields: list[Tensor],
    dim: int,
    upper: bool,
    diagonal: bool,
    rows_per_thread: int,
) -> Tensor:
    """See `rankopt.kernels.interaction.dot_interaction`."""
    return interaction.dot_interaction(before, fields, dim, upper, diagonal, rows_per_thread)


@triton_op(f"{NAMESPACE}::fm_interaction", mutates_args={})
def fm_interaction(fields: list[Tensor], dim: int, total: bool, rows_per_thread: int) -> Tensor:
    """See `rankopt.kernels.interaction.fm_interaction`."""
    return interaction.fm_interaction(fields, dim, total, rows_per_thread)


@triton_op(f"{NAMESPACE}::ragged_rows", mutates_args={})
def ragged_rows(lengths: Tensor, values: Tensor) -> Tensor:
    """See `rankopt.kernels.attention.ragged_rows`."""
    return attention.ragged_rows(lengths, values)


@triton_op(f"{NAMESPACE}::ragged_sum", mutates_args={})
def ragged_sum(weights: Tensor, rows: Tensor, lengths: Tensor, max_length: int) -> Tensor:
    """See `rankopt.kernels.attention.ragged_sum`."""
    return attention.ragged_sum(weights, rows, lengths, max_length)


@triton_op(f"{NAMESPACE}::hstu_attention", mutates_args={})
def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    bias: Tensor | None,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool,
    causal: bool,
    score_scale: float,
    weight_scale: float,
) -> Tensor:
    """See `rankopt.kernels.attention.hstu_attention`."""
    return attention.hstu_attention(
        *(q, k, v, lengths, bias, num_heads, num_context, max_length),
        *(align_right, causal, score_scale, weight_scale),
    )


@triton_op(f"{NAMESPACE}::hstu_candidate_attention", mutates_args={})
def hstu_candidate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    lengths: Tensor,
    request_index: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool,
    score_scale: float,
    weight_scale: float,
) -> Tensor:
    """See `rankopt.kernels.attention.hstu_candidate_attention`."""
    return attention.hstu_candidate_attention(
        *(q, k, v, own_k, own_v, lengths, request_index, bias, num_heads, num_context),
        *(max_length, align_right, score_scale, weight_scale),
    )


@triton_op(f"{NAMESPACE}::target_attention", mutates_args={})
def target_attention(
    query: Tensor,
    keys: Tensor,
    lengths: Tensor,
    request_index: Tensor | None,
    weights: Tensor,
    widths: list[int],
    activations: list[int],
    max_length: int,
) -> Tensor:
    """See `rankopt.kernels.attention.target_attention`."""
    return target.target_attention(
        query, keys, lengths, request_index, weights, widths, activations, max_length
    )


@triton_op(f"{NAMESPACE}::lookup_planned", mutates_args={})
def lookup_planned(
    store: Tensor,
    plan: Tensor,
    host_plan: list[int],
    inputs: list[Tensor],
    num_rows: int,
    width: int,
) -> Tensor:
    """See `rankopt.kernels.triton.lookup.lookup_planned`."""
    return lookup.lookup_planned(store, plan, host_plan, inputs, num_rows, width)


@triton_op(f"{NAMESPACE}::sequences_planned", mutates_args={})
def sequences_planned(
    store: Tensor, host_plan: list[int], inputs: list[Tensor], width: int
) -> Tensor:
    """See `rankopt.kernels.triton.lookup.sequences_planned`."""
    return lookup.sequences_planned(store, host_plan, inputs, width)


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
