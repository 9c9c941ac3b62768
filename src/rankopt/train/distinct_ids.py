"""Tables that look each distinct id of a batch up once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DistinctEmbedding(nn.Embedding):
    """`nn.Embedding` that reads each distinct id once."""

    def forward(self, input: Tensor) -> Tensor:
        distinct, place = torch.unique(input, return_inverse=True)
        rows = F.embedding(
            distinct, self.weight, self.padding_idx, self.max_norm, self.norm_type, False,
            self.sparse,
        )  # fmt: skip
        return F.embedding(place, rows)


class DistinctEmbeddingBag(nn.EmbeddingBag):
    """`nn.EmbeddingBag` that reads each distinct id once."""

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        distinct, place = torch.unique(input, return_inverse=True)
        rows = F.embedding(distinct, self.weight, sparse=self.sparse)
        pooled: Tensor = F.embedding_bag(
            place, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )  # fmt: skip
        return pooled


def look_up_once(
    module: nn.Module, without: Iterable[nn.Parameter] = ()
) -> tuple[list[str], list[str]]:
    """Change a module's plain tables in place.

    Args:
        module: whatever holds nn.Embedding and nn.EmbeddingBag modules.
        without: tables to leave as they are.

    Returns:
        The names of those changed, and one sentence for each left as it was.
    """
    names: list[str] = []
    notes: list[str] = []
    others = {id(table) for table in without}
    for name, found in module.named_modules():
        if type(found) not in (nn.Embedding, nn.EmbeddingBag) or id(found.weight) in others:
            continue
        if found.scale_grad_by_freq:
            notes.append(f"{name} has scale_grad_by_freq, which counts repeated ids")
        elif isinstance(found, nn.EmbeddingBag) and (
            found.padding_idx is not None or found.max_norm is not None or found.mode == "max"
        ):
            notes.append(f"{name} has padding_idx or max_norm, or is pooled by its maximum")
        else:
            pools = isinstance(found, nn.EmbeddingBag)
            found.__class__ = DistinctEmbeddingBag if pools else DistinctEmbedding
            names.append(name)
    return names, notes
