"""DeepFM (Guo et al. 2017, arXiv:1703.04247).

Shapes in this module: B batch (candidates), T tables, C dense columns, F = C + T fields,
D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankopt.models.layers import MLP, EmbeddingBags, FactorizationMachine


class DeepFM(nn.Module):
    """First-order weights, a factorization machine and an MLP over the same field vectors.

    A dense column is a field whose vector is scaled by the column's value, as in the paper's
    treatment of continuous fields.

    Shapes:
        dense: float32 [B, C]
        sparse: int64 [B, T]
        output: logit, float32 [B]
    """

    def __init__(
        self,
        num_ids: Sequence[int],
        *,
        num_dense: int = 13,
        embedding_dim: int = 16,
        deep_mlp: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
    ) -> None:
        """Build the model.

        Args:
            num_ids: rows of each table; every table has a twin with D = 1.
            num_dense: dense columns.
            embedding_dim: D of the field vectors.
            deep_mlp: hidden widths of the MLP, which ends with one unit.
            dropout: share of hidden units dropped in training.
        """
        super().__init__()
        self.first_order = EmbeddingBags(num_ids, 1, init_scale=1e-4)
        self.first_order_dense = nn.Linear(num_dense, 1)
        self.tables = EmbeddingBags(num_ids, embedding_dim, init_scale=0.05)
        self.dense_vectors = nn.Parameter(torch.empty(num_dense, embedding_dim))
        nn.init.uniform_(self.dense_vectors, -0.05, 0.05)
        self.machine = FactorizationMachine()
        num_fields = num_dense + len(num_ids)
        self.deep = MLP((num_fields * embedding_dim, *deep_mlp, 1), dropout=dropout)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        dense_BCD = dense.unsqueeze(2) * self.dense_vectors
        fields_BFD = torch.cat([dense_BCD, self.tables(sparse)], dim=1)
        first_order_B = self.first_order(sparse).sum(dim=(1, 2))
        first_order_B = first_order_B + self.first_order_dense(dense).squeeze(1)
        deep_B = self.deep(fields_BFD.flatten(1)).squeeze(1)
        logit: Tensor = first_order_B + self.machine(fields_BFD) + deep_B
        return logit
