"""Lookups of training: rows of many tables pooled in one call, and the step that updates them.

A call reads T tables: ids int64 [B, T] hold one id for each, ids [L] with offsets [T * B + 1] hold
lists, table after table. The result is float32 [B, W], the tables' columns side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rankopt.kernels.build import load_kernels

StepOptimizer = Literal["adagrad", "rowwise_adagrad", "sgd"]
OPTIMIZER_CODES: dict[str, int] = {"adagrad": 0, "rowwise_adagrad": 1, "sgd": 2}

NO_OFFSETS = torch.empty(0, dtype=torch.int64)
NO_WEIGHTS = torch.empty(0)


def table_lookup(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor = NO_OFFSETS,
    weights: Tensor = NO_WEIGHTS,
    *,
    is_mean: bool = False,
    padding: int = -1,
) -> Tensor:
    """Pool rows of tables.

    Args:
        tables: float32 [rows, D] each.
        ids: int64 [B, T] or [L]; one out of range raises an IndexError.
        offsets: int64 [T * B + 1] beside ids [L].
        weights: float32 [L], what each id's row is multiplied by; empty for none.
        is_mean: divide a bag's sum by the number of its ids.
        padding: an id that counts for nothing.
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.table_lookup(
        list(tables), ids, offsets, weights, is_mean, padding
    )
    return result


def table_lookup_reference(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor,
    is_mean: bool,
    padding: int,
) -> Tensor:
    """Compute `table_lookup` in float64."""
    columns = []
    for table, (bag_ids, bag_of, scale, num_bags) in zip(
        tables, _flat_bags(len(tables), ids, offsets, weights, is_mean, padding), strict=True
    ):
        rows = table.double()[bag_ids] * scale[:, None]
        pooled = torch.zeros(num_bags, table.shape[1], dtype=torch.float64)
        columns.append(pooled.index_add(0, bag_of, rows))
    return torch.cat(columns, dim=1)


def table_step_reference(
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    is_mean: bool,
    padding: int,
    optimizer: int,
    learning_rate: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute the tables and states after a step, in float64.

    Adagrad: s += g^2; w -= rate * g / (sqrt(s) + eps), g being the sum over all contributions to a
    row. Row-wise: s += mean(g^2), one s per row. Rows that no id names stay.
    """
    gradients = [torch.zeros_like(table, dtype=torch.float64) for table in tables]
    for k in range(len(ids)):
        flat = _flat_bags(len(tables), ids[k], offsets[k], weights[k], is_mean, padding)
        start = 0
        for gradient, (bag_ids, bag_of, scale, _) in zip(gradients, flat, strict=True):
            part = grads[k][:, start : start + gradient.shape[1]].double()
            gradient.index_add_(0, bag_ids, part[bag_of] * scale[:, None])
            start += gradient.shape[1]
    results, new_states = [], []
    for index, (table, gradient) in enumerate(zip(tables, gradients, strict=True)):
        if optimizer == OPTIMIZER_CODES["sgd"]:
            results.append(table.double() - learning_rate * gradient)
            continue
        square = gradient.square()
        if optimizer == OPTIMIZER_CODES["rowwise_adagrad"]:
            state = states[index].double() + square.mean(dim=1)
            root = state.sqrt()[:, None]
        else:
            state = states[index].double() + square
            root = state.sqrt()
        change = torch.where(gradient == 0, 0.0, gradient / (root + eps))
        results.append(table.double() - learning_rate * change)
        new_states.append(state)
    return (*results, *new_states)


def _flat_bags(
    num_tables: int, ids: Tensor, offsets: Tensor, weights: Tensor, is_mean: bool, padding: int
) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Return for each table its ids, the bag of each, what each is multiplied by, and B."""
    if ids.dim() == 2:
        num_bags = ids.shape[0]
        flat = ids.t().reshape(-1)
        lengths = torch.ones(num_bags * num_tables, dtype=torch.int64)
        first = 0
    else:
        num_bags = (len(offsets) - 1) // num_tables
        flat, lengths = ids, offsets.diff()
        first = int(offsets[0])
    result = []
    for t in range(num_tables):
        mine = lengths[t * num_bags : (t + 1) * num_bags]
        begin = first + int(lengths[: t * num_bags].sum())
        end = begin + int(mine.sum())
        chosen = flat[begin:end]
        bag_of = torch.repeat_interleave(torch.arange(num_bags), mine)
        scale = weights[begin:end].double() if weights.numel() else torch.ones(len(chosen)).double()
        keep = chosen != padding
        chosen, bag_of, scale = chosen[keep], bag_of[keep], scale[keep]
        if is_mean:
            counts = torch.bincount(bag_of, minlength=num_bags).clamp(min=1)
            scale = scale / counts[bag_of]
        result.append((chosen, bag_of, scale, num_bags))
    return result
