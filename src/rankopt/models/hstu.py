"""HSTU: Hierarchical Sequential Transduction Unit (Zhai et al. 2024, arXiv:2402.17152).

Shapes in this module: B batch (candidates), H history length, C context columns,
S = C + H + 1 positions, D embedding dim, A heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankopt.models.layers import MLP, pad_ragged


class HSTUBlock(nn.Module):
    """One layer: pointwise projection, spatial aggregation, pointwise transformation (eq. 1-3).

    Attention is SiLU of the scores over the sequence length, not a softmax, so that the number of
    matching ids still shows in its result; U gates what was gathered.

    Shapes:
        sequence: float32 [B, S, D]
        allowed: bool [B, S, S], true where position i may look at position j
        output: float32 [B, S, D]
    """

    distance: Tensor

    def __init__(
        self, embedding_dim: int, num_heads: int, num_positions: int, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if embedding_dim % num_heads:
            raise ValueError(
                f"embedding_dim must be a multiple of num_heads ({num_heads}); got {embedding_dim}"
            )
        self.num_heads = num_heads
        self.num_positions = num_positions
        self.norm = nn.LayerNorm(embedding_dim)
        self.project = nn.Linear(embedding_dim, 4 * embedding_dim)
        self.gathered_norm = nn.LayerNorm(embedding_dim)
        self.transform = nn.Linear(embedding_dim, embedding_dim)
        self.dropout = nn.Dropout(dropout)
        self.position_bias = nn.Parameter(torch.zeros(num_heads, num_positions))
        position = torch.arange(num_positions)
        distance = (position[:, None] - position[None, :]).clamp(min=0)
        self.register_buffer("distance", distance, persistent=False)

    def forward(self, sequence_BSD: Tensor, allowed_BSS: Tensor) -> Tensor:
        size, positions, width = sequence_BSD.shape
        projected = F.silu(self.project(self.norm(sequence_BSD)))
        gate_BSD, values, queries, keys = projected.chunk(4, dim=-1)
        heads = (size, positions, self.num_heads, width // self.num_heads)
        queries_BASK = queries.view(heads).transpose(1, 2)
        keys_BASK = keys.view(heads).transpose(1, 2)
        values_BASK = values.view(heads).transpose(1, 2)
        score_BASS = queries_BASK @ keys_BASK.transpose(2, 3) + self.position_bias[:, self.distance]
        weight_BASS = F.silu(score_BASS) / self.num_positions
        weight_BASS = weight_BASS.masked_fill(~allowed_BSS.unsqueeze(1), 0.0)
        gathered_BSD = (weight_BASS @ values_BASK).transpose(1, 2).reshape(size, positions, width)
        update_BSD = self.transform(self.gathered_norm(gathered_BSD) * gate_BSD)
        updated: Tensor = sequence_BSD + self.dropout(update_BSD)
        return updated


class HSTU(nn.Module):
    """Rank one candidate by a causal sequence: context columns, history, then the candidate.

    The history is aligned to the right, so the candidate always stands one position after the
    newest id. Its final state gives the logit.

    Shapes:
        item: int64 [B]
        history_values: int64 [L]; history_lengths: int64 [B], each at least 0
        context: int64 [B, C], when `num_context_ids` is given
        output: logit, float32 [B]
    """

    causal: Tensor

    def __init__(
        self,
        num_items: int,
        *,
        num_context_ids: Sequence[int] = (),
        embedding_dim: int = 64,
        history_length: int = 50,
        num_blocks: int = 2,
        num_heads: int = 2,
        top_mlp: Sequence[int] = (64,),
        dropout: float = 0.0,
    ) -> None:
        """Build the model.

        Args:
            num_items: rows of the table that candidate and history share.
            num_context_ids: rows of the table of each context column.
            embedding_dim: D.
            history_length: H; of a longer history the last H ids count.
            num_blocks: layers.
            num_heads: A; must divide D.
            top_mlp: hidden widths between the candidate's state and the logit.
            dropout: share of each block's update dropped in training.
        """
        super().__init__()
        self.history_length = history_length
        self.item = nn.Embedding(num_items, embedding_dim)
        self.context = nn.ModuleList(nn.Embedding(rows, embedding_dim) for rows in num_context_ids)
        for table in (self.item, *self.context):
            nn.init.normal_(table.weight, std=0.05)
        num_positions = len(num_context_ids) + history_length + 1
        self.target = nn.Parameter(torch.zeros(embedding_dim))
        self.blocks = nn.ModuleList(
            HSTUBlock(embedding_dim, num_heads, num_positions, dropout=dropout)
            for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(embedding_dim)
        self.top = MLP((embedding_dim, *top_mlp, 1), activation="silu", dropout=dropout)
        causal = torch.ones(num_positions, num_positions).tril().bool()
        self.register_buffer("causal", causal, persistent=False)

    def forward(
        self,
        item: Tensor,
        history_values: Tensor,
        history_lengths: Tensor,
        context: Tensor | None = None,
    ) -> Tensor:
        state_BSD = self.encode(item, history_values, history_lengths, context)
        logit: Tensor = self.top(self.norm(state_BSD[:, -1]))
        return logit.squeeze(1)

    def encode(
        self,
        item: Tensor,
        history_values: Tensor,
        history_lengths: Tensor,
        context: Tensor | None = None,
    ) -> Tensor:
        """Return the state of every position, [B, S, D]; the candidate's is the last."""
        ids_BH, mask_BH = pad_ragged(
            history_values, history_lengths, self.history_length, align="right"
        )
        pieces = [self.item(ids_BH), (self.item(item) + self.target).unsqueeze(1)]
        if context is not None:
            columns = [table(context[:, index]) for index, table in enumerate(self.context)]
            pieces = [torch.stack(columns, dim=1), *pieces]
        num_before = len(self.context)
        present_BS = F.pad(F.pad(mask_BH, (num_before, 0), value=True), (0, 1), value=True)
        allowed_BSS = self.causal & present_BS.unsqueeze(1)
        state_BSD = torch.cat(pieces, dim=1)
        for block in self.blocks:
            state_BSD = block(state_BSD, allowed_BSS)
        return state_BSD
