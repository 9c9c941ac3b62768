"""DLRM over torchrec's EmbeddingBagCollection, fed with a KeyedJaggedTensor.

Shapes in this module: B batch (candidates), T tables, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from rankopt.models.layers import MLP, DotInteraction


class DLRMTorchrec(nn.Module):
    """The model of `rankopt.models.dlrm.DLRM`, its tables held by torchrec.

    Table `t_KEY` pools the ids of feature KEY by their sum; bags may hold any number of ids.

    Shapes:
        dense: float32 [B, num_dense]
        sparse: KeyedJaggedTensor with the features `keys`, in that order
        output: logit, float32 [B]
    """

    def __init__(
        self,
        keys: Sequence[str],
        num_ids: Sequence[int],
        *,
        num_dense: int = 13,
        embedding_dim: int = 64,
        bottom_mlp: Sequence[int] = (512, 256),
        top_mlp: Sequence[int] = (512, 256),
        dropout: float = 0.0,
    ) -> None:
        """Build the model on the CPU.

        Args:
            keys: names of the features.
            num_ids: rows of each feature's table.
            num_dense: dense columns.
            embedding_dim: D, also the width that the bottom MLP ends with.
            bottom_mlp: hidden widths of the bottom MLP.
            top_mlp: hidden widths of the top MLP, which ends with one unit.
            dropout: share of hidden units of the top MLP dropped in training.
        """
        super().__init__()
        if len(keys) != len(num_ids):
            raise ValueError(
                f"num_ids must hold one number per key ({len(keys)}); got {len(num_ids)}"
            )
        self.embedding_dim = embedding_dim
        num_fields = len(keys) + 1
        self.bottom = MLP((num_dense, *bottom_mlp, embedding_dim), activate_last=True)
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{key}",
                    embedding_dim=embedding_dim,
                    num_embeddings=rows,
                    feature_names=[key],
                )
                for key, rows in zip(keys, num_ids, strict=True)
            ],
            device=torch.device("cpu"),
        )
        self.interaction = DotInteraction(num_fields)
        width = embedding_dim + num_fields * (num_fields - 1) // 2
        self.top = MLP((width, *top_mlp, 1), dropout=dropout)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        bottom_BD = self.bottom(dense)
        pooled = self.tables(sparse).values()
        pooled_BTD = pooled.reshape(pooled.shape[0], -1, self.embedding_dim)
        fields_BFD = torch.cat([bottom_BD.unsqueeze(1), pooled_BTD], dim=1)
        joined = torch.cat([bottom_BD, self.interaction(fields_BFD)], dim=1)
        logit: Tensor = self.top(joined)
        return logit.squeeze(1)
