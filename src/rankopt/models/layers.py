"""Building blocks that several reference models share.

Shapes in this module: B batch (candidates), T tables, F fields, D embedding dim, H padded history
length, L ids of all rows together, N width of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class Dice(nn.Module):
    """Gate each unit by where it lies in its own distribution (Zhou et al. 2018, section 5.3).

    f(s) = p(s) s + (1 - p(s)) alpha s with p(s) = sigmoid((s - E[s]) / sqrt(Var[s] + eps)); the
    moments are those of the batch in training and running averages afterwards.

    Shapes:
        input and output: float32 [B, width]
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x_BN: Tensor) -> Tensor:
        gate_BN = torch.sigmoid(self.norm(x_BN))
        return x_BN * (self.alpha + gate_BN * (1 - self.alpha))


_ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda width: nn.ReLU(),
    # One slope for the layer: a slope per unit would read dim 1 of a 3-d input as the unit.
    "prelu": lambda width: nn.PReLU(),
    "dice": Dice,
    "sigmoid": lambda width: nn.Sigmoid(),
    "silu": lambda width: nn.SiLU(),
}


def make_activation(name: str, width: int) -> nn.Module:
    """Make the activation of a layer of `width` units.

    Raises:
        ValueError: the name is not known.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}; got {name!r}")
    return _ACTIVATIONS[name](width)


class MLP(nn.Sequential):
    """Linear layers with an activation after each but, unless asked for, the last.

    Shapes:
        input: float32 [B, sizes[0]]
        output: float32 [B, sizes[-1]]
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        activate_last: bool = False,
    ) -> None:
        if len(sizes) < 2:
            raise ValueError(f"an MLP needs an input and an output size; got {list(sizes)}")
        layers: list[nn.Module] = []
        last = len(sizes) - 2
        for index, (width_in, width_out) in enumerate(pairwise(sizes)):
            layers.append(nn.Linear(width_in, width_out))
            if index < last or activate_last:
                layers.append(make_activation(activation, width_out))
                if dropout > 0:
                    layers.append(nn.Dropout(dropout))
        super().__init__(*layers)


class EmbeddingBags(nn.Module):
    """One `nn.EmbeddingBag` per id column.

    Shapes:
        input: int64 [B, T]
        output: float32 [B, T, D]
    """

    def __init__(self, num_ids: Sequence[int], embedding_dim: int, *, init_scale: float = 0.0):
        """Draw the tables.

        Args:
            num_ids: rows of each table.
            embedding_dim: D.
            init_scale: bound of the uniform initial values; 0 takes 1 / sqrt(rows) per table, as
                DLRM does.
        """
        super().__init__()
        self.bags = nn.ModuleList()
        for rows in num_ids:
            bag = nn.EmbeddingBag(rows, embedding_dim, mode="sum")
            bound = init_scale or 1 / math.sqrt(rows)
            nn.init.uniform_(bag.weight, -bound, bound)
            self.bags.append(bag)

    def forward(self, ids_BT: Tensor) -> Tensor:
        pooled = [bag(ids_BT[:, t : t + 1]) for t, bag in enumerate(self.bags)]
        return torch.stack(pooled, dim=1)


class DotInteraction(nn.Module):
    """Dot products of all pairs of F vectors, each pair once (Naumov et al. 2019).

    Shapes:
        input: float32 [B, F, D]
        output: float32 [B, F * (F - 1) / 2]
    """

    pairs: Tensor

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(num_fields, num_fields, offset=-1)
        # Positions in the flattened F x F matrix: one index_select, where two index tensors
        # would become a slower general gather.
        self.register_buffer("pairs", row * num_fields + column, persistent=False)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        products_BFF = torch.bmm(fields_BFD, fields_BFD.transpose(1, 2))
        return products_BFF.flatten(1).index_select(1, self.pairs)


class FactorizationMachine(nn.Module):
    """Sum of the dot products of all pairs, by Rendle's identity (2010) in O(F D).

    Shapes:
        input: float32 [B, F, D]
        output: float32 [B]
    """

    def forward(self, fields_BFD: Tensor) -> Tensor:
        square_of_sum_BD = fields_BFD.sum(dim=1).square()
        sum_of_squares_BD = fields_BFD.square().sum(dim=1)
        return 0.5 * (square_of_sum_BD - sum_of_squares_BD).sum(dim=1)


class LowRankCross(nn.Module):
    """Cross layers x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l (Wang et al. 2021, DCN V2).

    Shapes:
        input and output: float32 [B, N]
    """

    def __init__(self, width: int, rank: int, num_layers: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))

    def forward(self, x_BN: Tensor) -> Tensor:
        crossed_BN = x_BN
        for down, up in zip(self.down, self.up, strict=True):
            crossed_BN = x_BN * up(down(crossed_BN)) + crossed_BN
        return crossed_BN


def pad_ragged(
    values_L: Tensor, lengths_B: Tensor, max_length: int, *, align: str = "left"
) -> tuple[Tensor, Tensor]:
    """Lay ragged ids out as a rectangle; of a longer list the last `max_length` ids stay.

    A row of zeros is put before the ids and every padded cell reads it, so the gather is in range
    even when no row holds an id (L = 0), and no size of the data enters the graph as a constant.

    Args:
        values_L: ids of all rows, one row after the other.
        lengths_B: how many belong to each row.
        max_length: H.
        align: `left` pads at the end; `right` pads at the start, so the newest id is always last.

    Returns:
        ids [B, H] (0 where padded) and a bool mask [B, H], true where an id stands.
    """
    ends_B1 = lengths_B.cumsum(0).unsqueeze(1)
    kept_B1 = lengths_B.clamp(max=max_length).unsqueeze(1)
    slots_H = torch.arange(max_length, device=values_L.device)
    if align == "right":
        slots_BH = slots_H - (max_length - kept_B1)
        mask_BH = slots_BH >= 0
    else:
        slots_BH = slots_H.expand(lengths_B.shape[0], max_length)
        mask_BH = slots_BH < kept_B1
    index_BH = (ends_B1 - kept_B1 + slots_BH + 1) * mask_BH
    return torch.cat([values_L.new_zeros(1), values_L])[index_BH], mask_BH
