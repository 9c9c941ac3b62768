"""How many operations the library's own kernels take, and what a chain of layers was called with.

A multiply and an add are two operations. What a kernel was called with decides alone: lists that
are short cost little. None stands for arguments that are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from rankopt.diagnose.profile import Notes, Site
from rankopt.kernels.lookup import FIELDS, lookup_traffic
from rankopt.kernels.mlp import MlpLayer

Arithmetic = Literal["int8", "fp32", "bf16"]
Operations = dict[Arithmetic, int]


def mlp_layers(site: Site, notes: Notes) -> list[MlpLayer] | None:
    """Put the layers of one `mlp_int8` together again, of compiled code."""
    present = site.optionals
    if len(present) != 4 or len({len(each) for each in present}) != 1:
        return None
    count = len(present[0])
    # Behind each list its length: the numbers of outputs, how many bits there are, activations.
    *values, num_activations = notes.values
    if num_activations not in (0, count):
        return None
    before = len(values) - num_activations - 2
    num_outputs, activations = values[before - count : before], values[before + 2 :]
    tensors = iter(notes.arguments[1:])
    if len(num_outputs) != count or len(notes.arguments) != 1 + count + sum(map(sum, present)):
        return None
    packed = [next(tensors) for _ in range(count)]
    scale, bias, slope, peak = (
        [next(tensors) if there else None for there in each] for each in present
    )
    columns = (packed, scale, bias, slope, num_outputs, peak, activations or [0] * count)
    return [MlpLayer(*layer) for layer in zip(*columns, strict=True)]


def mlp_bits(notes: Notes) -> int:
    """Return the activation bits that one `mlp_int8` of compiled code was called with."""
    return notes.values[-2 - notes.values[-1]]


def _mlp(site: Site, notes: Notes) -> Operations | None:
    layers = mlp_layers(site, notes)
    if not layers:
        return None
    x = notes.arguments[0]
    work: Operations = {}
    widths = [x.shape[-1], *(layer.num_outputs for layer in layers)]
    for layer, (num_inputs, num_outputs) in zip(layers, pairwise(widths), strict=True):
        kind: Arithmetic = "fp32" if layer.scale is None else "int8"
        num_rows = x.numel() // max(x.shape[-1], 1)
        work[kind] = work.get(kind, 0) + 2 * num_rows * num_inputs * num_outputs
    return work


def _dot(site: Site, notes: Notes) -> Operations | None:
    if len(notes.values) != 6:
        return None
    num_before, _, dim, _, diagonal, _ = notes.values
    fields = notes.arguments[num_before:]
    num_fields = sum(piece.shape[1] for piece in fields) // max(dim, 1)
    num_pairs = num_fields * (num_fields + (1 if diagonal else -1)) // 2
    return {"fp32": 2 * fields[0].shape[0] * num_pairs * dim}


def _fm(site: Site, notes: Notes) -> Operations | None:
    """Count, of each field behind the first, its product with the sum so far, and both sums."""
    if len(notes.values) != 4:
        return None
    _, dim, total, _ = notes.values
    num_rows = notes.arguments[0].shape[0]
    num_fields = sum(piece.shape[1] for piece in notes.arguments) // max(dim, 1)
    return {"fp32": num_rows * dim * (3 * max(num_fields - 1, 0) + (1 if total else 0))}


def _hstu(site: Site, notes: Notes) -> Operations | None:
    """Count scores and weighted values of every pair of tokens that see each other."""
    if len(notes.arguments) < 4 or len(notes.values) < 5 or notes.arguments[3].is_meta:
        return None
    q, _, _, lengths = notes.arguments[:4]
    _, num_context, max_length, _, causal = notes.values[:5]
    tokens = lengths.clamp(max=max_length) + num_context
    pairs = tokens * (tokens + 1) // 2 if causal else tokens * tokens
    return {"fp32": 4 * int(pairs.sum()) * q.shape[1]}


def _hstu_candidates(site: Site, notes: Notes) -> Operations | None:
    if len(notes.arguments) < 6 or len(notes.values) < 4 or notes.arguments[5].is_meta:
        return None
    q, lengths = notes.arguments[0], notes.arguments[5]
    _, num_context, max_length = notes.values[:3]
    tokens = lengths.clamp(max=max_length) + num_context + 1  # a candidate sees itself too
    return {"fp32": 4 * int(_of_candidates(tokens, notes.arguments[6:], q).sum()) * q.shape[1]}


def _target(site: Site, notes: Notes) -> Operations | None:
    # widths, how many, activations, how many, longest list
    if len(notes.arguments) < 4 or not notes.values or notes.arguments[2].is_meta:
        return None
    query, _, lengths = notes.arguments[:3]
    counts = lengths.clamp(max=notes.values[-1])
    num_pairs = int(_of_candidates(counts, notes.arguments[3:-1], query).sum())
    return _of_pairs(query, num_pairs, notes.values)


def _masked_target(site: Site, notes: Notes) -> Operations | None:
    # widths, how many, activations, how many, whether softmax
    if len(notes.arguments) < 4 or notes.arguments[2].is_meta:
        return None
    return _of_pairs(notes.arguments[0], int(notes.arguments[2].sum()), notes.values)


def _of_pairs(query: Tensor, num_pairs: int, values: list[int]) -> Operations | None:
    """Count, a candidate: its share, and its matrix for the keys; a pair: the layers and the sum.

    The first layer multiplies a key by one matrix, made of two for each candidate.
    """
    count = len(values) // 2 - 1
    if count < 2 or len(values) != 2 * count + 2:
        return None
    widths = values[:count]
    num_rows, dim = query.shape
    a_pair = 2 * (sum(a * b for a, b in pairwise([dim, *widths])) + dim)
    return {"fp32": num_pairs * a_pair + num_rows * 4 * dim * widths[0]}


def _of_candidates(counts: Tensor, more: list[Tensor], query: Tensor) -> Tensor:
    """Pick each candidate's own out of the lists' counts, by the request's number if there is."""
    index = next((t for t in more if t.dtype == torch.int64 and t.dim() == 1), None)
    return counts[: query.shape[0]] if index is None else counts[index]


def _ragged_sum(site: Site, notes: Notes) -> Operations | None:
    if len(notes.arguments) < 3 or not notes.values or notes.arguments[2].is_meta:
        return None
    rows, lengths = notes.arguments[1], notes.arguments[2]
    return {"fp32": 2 * int(lengths.clamp(max=notes.values[-1]).sum()) * rows.shape[1]}


KERNELS: dict[str, Callable[[Site, Notes], Operations | None]] = {
    "mlp_int8": _mlp,
    "dot_interaction": _dot,
    "fm_interaction": _fm,
    "hstu_attention": _hstu,
    "hstu_candidate_attention": _hstu_candidates,
    "target_attention": _target,
    "masked_target_attention": _masked_target,
    "ragged_sum": _ragged_sum,
}
"""Operator -> its operations, by kind of arithmetic. Another kernel is one line here."""


def planned_bytes(name: str, notes: Notes) -> int | None:
    """Count the bytes that a lookup described by a plan moves; None for other operators."""
    given, results = notes.arguments, notes.outputs
    if name not in ("lookup_rows", "lookup_sequences") or len(given) < 3 or not results:
        return None
    plan, inputs = given[1], given[2:]
    if name == "lookup_rows":
        return lookup_traffic(plan, inputs, results[0].shape[0]).total_bytes
    # Every id of an input is read; the result is one row an id.
    plan = plan.clone()
    plan[:, FIELDS["length"]] = 0
    read = lookup_traffic(plan, inputs, 0).total_bytes
    return read + results[0].numel() * results[0].element_size()
