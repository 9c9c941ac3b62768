"""DLRM-DCNv2: DLRM with low-rank cross layers in place of dot products.

Cross layers: Wang et al. 2021, arXiv:2008.13535; the whole as in MLPerf's `dlrm_v2`.
Shapes in this module: B batch (candidates), T tables, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankopt.models.layers import MLP, EmbeddingBags, LowRankCross


class DCNv2(nn.Module):
    """Bottom MLP and embeddings joined, crossed, then a top MLP (the stacked form).

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
        cross_rank: int = 256,
        num_cross_layers: int = 3,
        top_mlp: Sequence[int] = (1024, 1024, 512, 256),
        dropout: float = 0.0,
    ) -> None:
        """Build the model.

        Args:
            num_ids: rows of each table.
            num_dense: dense columns.
            embedding_dim: D, also the width that the bottom MLP ends with.
            bottom_mlp: hidden widths of the bottom MLP.
            cross_rank: rank of each cross layer's matrix.
            num_cross_layers: how many cross layers.
            top_mlp: hidden widths of the top MLP, which ends with one unit.
            dropout: share of hidden units of the top MLP dropped in training.
        """
        super().__init__()
        width = (len(num_ids) + 1) * embedding_dim
        self.bottom = MLP((num_dense, *bottom_mlp, embedding_dim), activate_last=True)
        self.tables = EmbeddingBags(num_ids, embedding_dim)
        self.cross = LowRankCross(width, cross_rank, num_cross_layers)
        self.top = MLP((width, *top_mlp, 1), dropout=dropout)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        joined = torch.cat([self.bottom(dense), self.tables(sparse).flatten(1)], dim=1)
        logit: Tensor = self.top(self.cross(joined))
        return logit.squeeze(1)
