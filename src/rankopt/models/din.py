"""DIN: Deep Interest Network (Zhou et al. 2018, arXiv:1706.06978).

Shapes in this module: B batch (candidates), H history length, L ids of all rows together,
U user columns, C item columns, D embedding dim, E = D (times two with genres in the history).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankopt.models.layers import MLP, pad_ragged


class LocalActivation(nn.Module):
    """Weigh each id of the history by an MLP of it and the candidate; sum (the paper's eq. 3).

    The weights are not normalised, since their sum carries how strong the interest is; `softmax`
    asks for the normalised variant.

    Shapes:
        query: float32 [B, D]
        keys: float32 [B, H, D]
        mask: bool [B, H]
        output: float32 [B, D]
    """

    def __init__(
        self,
        embedding_dim: int,
        hidden: Sequence[int] = (80, 40),
        *,
        activation: str = "prelu",
        softmax: bool = False,
    ) -> None:
        super().__init__()
        self.score = MLP((4 * embedding_dim, *hidden, 1), activation=activation)
        self.softmax = softmax

    def forward(self, query_BD: Tensor, keys_BHD: Tensor, mask_BH: Tensor) -> Tensor:
        query_BHD = query_BD.unsqueeze(1).expand_as(keys_BHD)
        pair = torch.cat([query_BHD, keys_BHD, query_BHD - keys_BHD, query_BHD * keys_BHD], dim=-1)
        # Two dimensions, so that Dice's moments are per unit and the products are plain GEMMs.
        score_BH = self.score(pair.flatten(0, 1)).view_as(mask_BH)
        if self.softmax:
            # A finite floor: a row without history would otherwise be softmax of -inf only, NaN.
            score_BH = score_BH.masked_fill(~mask_BH, -1e9).softmax(dim=1)
        weight_BH = score_BH.masked_fill(~mask_BH, 0.0)
        return torch.bmm(weight_BH.unsqueeze(1), keys_BHD).squeeze(1)


class DIN(nn.Module):
    """Embeddings of user, item and context, the history seen from the candidate, a top MLP.

    Candidate and history share the item table.

    Shapes:
        user: int64 [B, U]
        item: int64 [B]
        history_values: int64 [L]; history_lengths: int64 [B], each at least 0
        item_features: int64 [B, C], when `num_item_feature_ids` is given
        genres_values: int64 [L]; genres_lengths: int64 [B], when `num_genres` is given
        output: logit, float32 [B]
    """

    def __init__(
        self,
        num_items: int,
        num_user_ids: Sequence[int],
        *,
        num_item_feature_ids: Sequence[int] = (),
        num_genres: int = 0,
        embedding_dim: int = 64,
        history_length: int = 50,
        attention_mlp: Sequence[int] = (80, 40),
        top_mlp: Sequence[int] = (200, 80),
        activation: str = "prelu",
        attention_activation: str | None = None,
        softmax: bool = False,
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
    ) -> None:
        """Build the model.

        Args:
            num_items: rows of the table that candidate and history share.
            num_user_ids: rows of the table of each user column.
            num_item_feature_ids: rows of the table of each further column of the candidate.
            num_genres: rows of the table of the candidate's pooled ids; 0 for none.
            embedding_dim: D.
            history_length: H; of a longer history the last H ids count.
            attention_mlp: hidden widths of the activation unit.
            top_mlp: hidden widths of the top MLP, which ends with one unit.
            activation: `prelu`, `dice`, `relu`, `sigmoid` or `silu`.
            attention_activation: the activation unit's own; `activation` when None.
            softmax: normalise the weights of a history to sum to one.
            dropout: share of hidden units of the top MLP dropped in training.
            embedding_dropout: share of the joined embeddings dropped in training.
        """
        super().__init__()
        self.history_length = history_length
        self.item = nn.Embedding(num_items, embedding_dim)
        self.user = nn.ModuleList(nn.Embedding(rows, embedding_dim) for rows in num_user_ids)
        self.item_features = nn.ModuleList(
            nn.Embedding(rows, embedding_dim) for rows in num_item_feature_ids
        )
        self.genres = (
            nn.EmbeddingBag(num_genres, embedding_dim, mode="mean") if num_genres else None
        )
        self.attention = LocalActivation(
            embedding_dim,
            attention_mlp,
            activation=attention_activation or activation,
            softmax=softmax,
        )
        num_vectors = 2 + len(num_user_ids) + len(num_item_feature_ids) + bool(num_genres)
        self.embedding_dropout = nn.Dropout(embedding_dropout)
        self.top = MLP(
            (num_vectors * embedding_dim, *top_mlp, 1), activation=activation, dropout=dropout
        )
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                nn.init.normal_(module.weight, std=0.05)

    def forward(
        self,
        user: Tensor,
        item: Tensor,
        history_values: Tensor,
        history_lengths: Tensor,
        item_features: Tensor | None = None,
        genres_values: Tensor | None = None,
        genres_lengths: Tensor | None = None,
    ) -> Tensor:
        ids_BH, mask_BH = pad_ragged(history_values, history_lengths, self.history_length)
        item_BD = self.item(item)
        interest_BD = self.attention(item_BD, self.item(ids_BH), mask_BH)
        vectors = [table(user[:, column]) for column, table in enumerate(self.user)]
        vectors += [item_BD, interest_BD]
        if item_features is not None:
            vectors += [
                table(item_features[:, column]) for column, table in enumerate(self.item_features)
            ]
        if self.genres is not None and genres_values is not None and genres_lengths is not None:
            starts_B = genres_lengths.cumsum(0) - genres_lengths
            vectors.append(self.genres(genres_values, starts_B))
        joined = self.embedding_dropout(torch.cat(vectors, dim=1))
        logit: Tensor = self.top(joined)
        return logit.squeeze(1)
