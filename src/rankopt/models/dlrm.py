"""DLRM: Deep Learning Recommendation Model (Naumov et al. 2019, arXiv:1906.00091).

Shapes in this module: B batch (candidates), T tables, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankopt.models.layers import MLP, DotInteraction, EmbeddingBags


class DLRM(nn.Module):
    """Bottom MLP, embedding tables, dot products of all pairs, top MLP.

    Shapes:
        dense: float32 [B, num_dense]
        sparse: int64 [B, T]
        output: logit, float32 [B]
    """

    def __init__(
        self,
        num_ids: Sequence[int],
        *,
        num_dense: int = 13,
        embedding_dim: int = 64,
        bottom_mlp: Sequence[int] = (512, 256),
        top_mlp: Sequence[int] = (512, 256),
        dropout: float = 0.0,
    ) -> None:
        """Build the model.

        Args:
            num_ids: rows of each table.
            num_dense: dense columns.
            embedding_dim: D, also the width that the bottom MLP ends with.
            bottom_mlp: hidden widths of the bottom MLP.
            top_mlp: hidden widths of the top MLP, which ends with one unit.
            dropout: share of hidden units of the top MLP dropped in training.
        """
        super().__init__()
        num_fields = len(num_ids) + 1
        self.bottom = MLP((num_dense, *bottom_mlp, embedding_dim), activate_last=True)
        self.tables = EmbeddingBags(num_ids, embedding_dim)
        self.interaction = DotInteraction(num_fields)
        width = embedding_dim + num_fields * (num_fields - 1) // 2
        self.top = MLP((width, *top_mlp, 1), dropout=dropout)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom_BD = self.bottom(dense)
        fields_BFD = torch.cat([bottom_BD.unsqueeze(1), self.tables(sparse)], dim=1)
        joined = torch.cat([bottom_BD, self.interaction(fields_BFD)], dim=1)
        logit: Tensor = self.top(joined)
        return logit.squeeze(1)
