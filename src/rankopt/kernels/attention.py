"""Attention over ragged lists: no work for a place that no id stands in.

Shapes in this module: R lists (requests), B candidates, L ids of all lists together, D width of a
vector, C context tokens before each list, A heads, K width of a head, S = C + max_length + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankopt.kernels.build import load_kernels
from rankopt.kernels.packing import TILE_OUTPUTS, pack_linear_fp32

ACTIVATIONS = ("none", "slope", "sigmoid", "silu", "dice", "row_dice")
"""What may follow a hidden layer of `target_attention`, in the kernel's numbering."""


def ragged_rows(lengths: Tensor, values: Tensor) -> Tensor:
    """Name the list that each value belongs to.

    Shapes: lengths int64 [R], adding up to L; values [L, ...]; returns int64 [L].
    """
    load_kernels()
    rows: Tensor = torch.ops.rankopt.ragged_rows(lengths, values)
    return rows


def ragged_sum(weights: Tensor, rows: Tensor, lengths: Tensor, *, max_length: int) -> Tensor:
    """Add up each list's weighted rows, of a longer list the last `max_length`.

    Shapes: weights float32 [L]; rows float32 [L, D]; lengths int64 [R]; returns float32 [R, D].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.ragged_sum(weights, rows, lengths, max_length)
    return result


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool = True,
    causal: bool = True,
    score_scale: float = 1.0,
    weight_scale: float = 1.0,
) -> Tensor:
    """Gather values by SiLU of the scores (HSTU, arXiv:2402.17152, eq. 2) within each sequence.

    A sequence is C context tokens and a list's last `max_length` ids; the ids stand next to each
    other, right before position S - 1 when `align_right`, else right after the context. A row's
    result is the same bit for bit alone, in any batch, with any number of threads and on every
    instruction set.

    Shapes: q, k, v float32 [R * C + L, A * K], all context tokens first; lengths int64 [R]; bias
    float32 [A, 2 S - 1], by position of the key less that of the query plus S - 1; returns like q,
    zeros for ids that do not count.
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.hstu_attention(
        *(q, k, v, lengths, bias, num_heads, num_context, max_length),
        *(align_right, causal, score_scale, weight_scale),
    )
    return result


def hstu_candidate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    lengths: Tensor,
    request_index: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool = True,
    score_scale: float = 1.0,
    weight_scale: float = 1.0,
) -> Tensor:
    """Let one token per candidate, at position S - 1, see itself and a whole sequence.

    With `request_index` the keys and values of a request are computed once for all its candidates
    (M-FALCON); candidates of one request are fastest side by side.

    Shapes: q, own_k, own_v float32 [B, A * K]; k, v float32 [R * C + L, A * K] and lengths int64
    [R] as in `hstu_attention`; request_index int64 [B], candidate b sees list b without; bias
    float32 [A, 2 S - 1]; returns float32 [B, A * K].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.hstu_candidate_attention(
        *(q, k, v, own_k, own_v, lengths, request_index, bias, num_heads, num_context),
        *(max_length, align_right, score_scale, weight_scale),
    )
    return result


@dataclass(frozen=True, eq=False)
class ScoreLayer:
    """One layer of the MLP of a target attention.

    Attributes:
        weight: float32 [N, K]; bias: float32 [N], or None.
        activation: one of `ACTIVATIONS`.
        slope: float32 [1] or [N], what negative results are multiplied by, for `slope`; what dice
            multiplies by where p is 0.
        scale, shift: float32 [1] or [N], for dice, x * (slope + (1 - slope) * p): p is the sigmoid
            of x * scale + shift for `dice`, that of (x - mean) / sqrt(sum of (x - mean)^2 + shift)
            over the layer's outputs for `row_dice`.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "none"
    slope: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None

    def vectors(self, width: int) -> list[Tensor]:
        """Return what stands behind the matrix: bias and slopes, for dice scales and shifts."""
        ones = torch.ones(1)
        bias = torch.zeros(width) if self.bias is None else self.bias
        found = [bias, ones if self.slope is None else self.slope]
        if "dice" in self.activation:
            found += [ones if each is None else each for each in (self.scale, self.shift)]
        return [each.reshape(-1).expand(width) for each in found]


@dataclass(frozen=True, eq=False)
class TargetNetwork:
    """The MLP of a target attention: what a candidate, a key and their product are multiplied by.

    Attributes:
        of_query, of_key, of_product: float32 [N, D], the first layer; its own `weight` is unused.
        layers: the first layer and those after it; the last has one output.
    """

    of_query: Tensor
    of_key: Tensor
    of_product: Tensor
    layers: tuple[ScoreLayer, ...]

    @property
    def widths(self) -> list[int]:
        """Outputs of each layer."""
        return [len(self.of_query), *(len(layer.weight) for layer in self.layers[1:])]

    @property
    def activations(self) -> list[int]:
        """Activations of all layers but the last, numbered."""
        return [ACTIVATIONS.index(layer.activation) for layer in self.layers[:-1]]

    def pack(self) -> Tensor:
        """Lay the network out as the kernel reads it, one float32 vector."""
        pieces = [_wide(weight) for weight in (self.of_query, self.of_key, self.of_product)]
        for index, (layer, width) in enumerate(zip(self.layers, self.widths, strict=True)):
            if index:
                pieces.append(pack_linear_fp32(layer.weight))
            pieces += layer.vectors(width)
        return torch.cat([piece.to(torch.float32) for piece in pieces])


def _wide(weight: Tensor) -> Tensor:
    """Pack a matrix in tiles of sixteen outputs, however few there are."""
    num_outputs, num_inputs = weight.shape
    padded = torch.zeros(-(-num_outputs // TILE_OUTPUTS) * TILE_OUTPUTS, num_inputs)
    padded[:num_outputs] = weight
    return padded.view(-1, TILE_OUTPUTS, num_inputs).transpose(1, 2).reshape(-1)


def target_attention(
    query: Tensor,
    keys: Tensor,
    lengths: Tensor,
    request_index: Tensor | None,
    weights: Tensor,
    *,
    widths: Sequence[int],
    activations: Sequence[int],
    max_length: int,
) -> Tensor:
    """Sum each candidate's keys, weighed by an MLP of the two (DIN, arXiv:1706.06978, eq. 3).

    A row's result is the same bit for bit alone, in any batch, with any number of threads and on
    every instruction set.

    Shapes: query float32 [B, D]; keys float32 [L, D]; lengths int64 [R]; request_index int64 [B],
    candidate b reads list b without; weights, widths and activations as `TargetNetwork` gives them;
    returns float32 [B, D].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.target_attention(
        query, keys, lengths, request_index, weights, list(widths), list(activations), max_length
    )
    return result


def masked_target_attention(
    query: Tensor,
    keys: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    widths: Sequence[int],
    activations: Sequence[int],
    softmax: bool = False,
    fill: float = 0.0,
) -> Tensor:
    """Do what `target_attention` does over a rectangle of keys, scoring the masked places alone.

    Every other place's score is `fill`, which must be 0 without `softmax`. With it a weight is the
    score's share of all places of its row, so a row without a true place shares equally, and is NaN
    where the fill is -inf.

    Shapes: query float32 [B, D]; keys float32 [B, H, D]; mask bool [B, H]; weights, widths and
    activations as `TargetNetwork` gives them; returns float32 [B, D].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.masked_target_attention(
        query, keys, mask, weights, list(widths), list(activations), softmax, fill
    )
    return result
