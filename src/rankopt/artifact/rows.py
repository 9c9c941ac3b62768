"""Pick rows out of flat features, by the artifact's contract alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rankopt.artifact.contract import InputContract


def one_row(
    contract: Sequence[InputContract], features: Mapping[str, Tensor], row: int
) -> dict[str, Tensor]:
    """Return the features of one row as a batch of one."""
    picked: dict[str, Tensor] = {}
    spans: dict[str, Tensor] = {}
    for entry in contract:
        value = features[entry.name]
        if entry.role in ("dense", "ids", "packed"):
            picked[entry.name] = value[row : row + 1].contiguous()
        elif entry.role == "lengths":
            batch = value.shape[0] // entry.groups
            ends = value.cumsum(0)
            at = torch.arange(entry.groups) * batch + row
            picked[entry.name] = value[at].contiguous()
            spans[entry.name] = torch.cat(
                [torch.arange(int(ends[i] - value[i]), int(ends[i])) for i in at.tolist()]
            )
    for entry in contract:
        if entry.role == "values" and entry.partner:
            spans[entry.name] = spans[entry.partner]
            picked[entry.name] = features[entry.name][spans[entry.partner]]
    for entry in contract:
        if entry.role == "weights" and entry.partner:
            picked[entry.name] = features[entry.name][spans[entry.partner]]
    return picked
