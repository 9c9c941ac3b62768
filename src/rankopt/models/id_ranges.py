"""Ids beyond a table's rows: what a card says is to become of them.

An artifact does the same in C++, in the pass that checks its inputs (`kernels/csrc/contract.cpp`).

Shapes: B rows, C columns, L ids of lists, F features of a KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rankopt.data.hashing import mix
from rankopt.models.card import (
    DenseInput,
    IdsInput,
    Input,
    KjtInput,
    ModelCard,
    PackedInput,
    RaggedIdsInput,
)
from rankopt.models.inputs import OutOfRange

LARGEST_FLOAT = float(1 << 62)
"""A whole number in float32 beyond it is no id, whatever the card says."""


def into_range(ids: Tensor, num_ids: int, policy: OutOfRange) -> Tensor:
    """Map ids outside of [0, num_ids) into it; others, and what is no id at all, stay.

    `clamp` takes the nearest id. `hash` takes splitmix64 of the id, shifted right by one bit,
    modulo `num_ids`: the same on every machine.

    Shapes: any; int64, int32 or float32.
    """
    if policy == "error":
        return ids
    outside = (ids < 0) | (ids >= num_ids)
    if ids.is_floating_point():
        outside &= (ids == ids.trunc()) & (ids.abs() < LARGEST_FLOAT)
    if not bool(outside.any()):
        return ids
    mapped = ids.clone()
    whole = ids[outside].to(torch.int64)
    mapped[outside] = _mapped(whole, num_ids, policy).to(ids.dtype)
    return mapped


def _mapped(ids: Tensor, num_ids: int, policy: OutOfRange) -> Tensor:
    if policy == "clamp":
        return ids.clamp(0, num_ids - 1)
    hashes = mix(ids.numpy().view(np.uint64)) >> np.uint64(1)
    return torch.from_numpy((hashes % np.uint64(num_ids)).view(np.int64))


def features_in_range(card: ModelCard, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map the ids of a call as the card says; features that need nothing are passed on as they are.

    Shapes: see `rankopt.models.card`.
    """
    mapped = dict(features)
    for item in card.inputs:
        _map_input(item, mapped)
    return mapped


def maps_ids(card: ModelCard) -> bool:
    """Tell whether a card maps any ids."""
    return any(policy != "error" for item in card.inputs for policy in _policies(item))


def _policies(item: Input) -> list[OutOfRange]:
    if isinstance(item, DenseInput):
        return []
    if isinstance(item, KjtInput):
        return [feature.out_of_range for feature in item.features]
    if isinstance(item, PackedInput):
        return [column.out_of_range for column in item.columns]
    return [item.out_of_range]


def _map_input(item: Input, features: dict[str, Tensor]) -> None:
    if all(policy == "error" for policy in _policies(item)):
        return
    if isinstance(item, IdsInput):
        ids = features[item.name]
        if ids.dim() == 1:
            features[item.name] = into_range(ids, item.ranges[0], item.out_of_range)
            return
        columns = [
            into_range(ids[:, index], num_ids, item.out_of_range)
            for index, num_ids in enumerate(item.ranges)
        ]
        features[item.name] = torch.stack(columns, dim=1)
    elif isinstance(item, RaggedIdsInput):
        name = f"{item.name}.values"
        features[name] = into_range(features[name], item.num_ids, item.out_of_range)
    elif isinstance(item, KjtInput):
        name = f"{item.name}.values"
        lengths = features[f"{item.name}.lengths"].view(len(item.features), -1).sum(1)
        groups = torch.split(features[name], lengths.tolist())
        features[name] = torch.cat(
            [
                into_range(ids, feature.num_ids, feature.out_of_range)
                for ids, feature in zip(groups, item.features, strict=True)
            ]
        )
    elif isinstance(item, PackedInput):
        matrix = features[item.name].clone()
        for column, start in zip(item.columns, item.starts(), strict=True):
            if column.num_ids is not None:
                span = matrix[:, start : start + column.width]
                span.copy_(into_range(span, column.num_ids, column.out_of_range))
        features[item.name] = matrix
