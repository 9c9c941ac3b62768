"""Optimizers for a ranking model: one for dense weights, one for tables where asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Adagrad, AdamW, Optimizer, SparseAdam

from rankopt.train.settings import TrainSettings


def make_optimizers(
    module: nn.Module,
    settings: TrainSettings,
    *,
    without: Iterable[nn.Parameter] = (),
    dense_options: Mapping[str, Any] | None = None,
) -> list[Optimizer]:
    """Make the optimizers of a run; turns on sparse gradients of tables that get their own.

    With AdamW over everything, a step writes every row of every table: 26 tables of 10,000 x 64
    are 16.6 million values read and written several times per batch. `sparse_adam` and `adagrad`
    touch only the rows of the batch.

    Args:
        module: whose parameters are trained.
        settings: rates, decay, and what the tables' optimizer is.
        without: parameters that have an optimizer already.
        dense_options: further arguments of AdamW.
    """
    others = {id(parameter) for parameter in without}
    tables = [] if settings.table_optimizer == "adam" else _sparse_tables(module, others)
    own = {id(table) for table in tables} | others
    dense = [p for p in module.parameters() if p.requires_grad and id(p) not in own]
    optimizers: list[Optimizer] = []
    if dense:
        rate, decay = settings.learning_rate, settings.weight_decay
        optimizers.append(AdamW(dense, lr=rate, weight_decay=decay, **(dense_options or {})))
    rate = settings.table_learning_rate or settings.learning_rate
    if tables and settings.table_optimizer == "sparse_adam":
        optimizers.append(SparseAdam(tables, lr=rate))
    elif tables:
        optimizers.append(Adagrad(tables, lr=rate))
    return optimizers


def _sparse_tables(module: nn.Module, others: set[int]) -> list[nn.Parameter]:
    """Find the tables whose only use is lookup, and have them produce sparse gradients."""
    holders: dict[int, tuple[nn.Parameter, list[nn.Module]]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            if id(parameter) not in others:
                holders.setdefault(id(parameter), (parameter, []))[1].append(owner)
    tables: dict[int, nn.Parameter] = {}
    for parameter, owners in holders.values():
        # A table tied to a dense layer gets dense gradients from there; the two do not add up.
        if not all(_allows_sparse(owner) for owner in owners):
            continue
        for owner in owners:
            if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and parameter.requires_grad:
                owner.sparse = True
                tables[id(parameter)] = parameter
    return list(tables.values())


def _allows_sparse(owner: nn.Module) -> bool:
    if isinstance(owner, nn.EmbeddingBag):
        return owner.mode != "max"
    return isinstance(owner, nn.Embedding)
