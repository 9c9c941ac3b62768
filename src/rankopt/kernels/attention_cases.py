"""What the attention kernels compute, in float64, and the grid on which the two must agree.

Shapes: as in `rankopt.kernels.attention`.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rankopt.kernels.attention import ACTIVATIONS, ScoreLayer, TargetNetwork
from rankopt.kernels.packing import unpack_linear_fp32

Arguments = tuple[Any, ...]
Lengths = Literal[
    "mixed",  # anything from an empty list to a full one, both among them
    "full",  # every list as long as counts
    "empty",  # every list empty
    "long",  # longer than counts
]
Values = Literal[
    "normal",
    "loud",  # scores in the thousands, either sign
    "tiny",  # scores that vanish beside 1
    "nonfinite",  # NaN and infinity in one list
]


@dataclass(frozen=True)
class AttentionCase:
    """One call; what an operator has no use for is left out of it."""

    num_lists: int
    max_length: int
    num_heads: int
    head_width: int
    num_context: int = 0
    lengths: Lengths = "mixed"
    values: Values = "normal"
    candidates_per_list: int = 0
    causal: bool = True
    align_right: bool = True
    has_bias: bool = True
    hidden: tuple[int, ...] = (5, 3)
    activation: str = "slope"
    softmax: bool = False
    fill: float = 0.0

    def __str__(self) -> str:
        shape = f"{self.num_lists}x{self.num_context}+{self.max_length}"
        heads = f"{self.num_heads}x{self.head_width}"
        flags = [name for name in ("causal", "align_right", "has_bias") if getattr(self, name)]
        each = f"{self.candidates_per_list}each"
        units = "x".join(map(str, self.hidden))
        words = [shape, heads, self.lengths, self.values, each, *flags, units, self.activation]
        words += [f"softmax {self.fill:g}"] if self.softmax else []
        return "-".join(words)


def _shapes() -> Iterator[AttentionCase]:
    for num_lists, max_length in itertools.product((0, 1, 2, 7), (1, 5, 17, 50)):
        for num_heads, head_width in ((1, 1), (2, 3), (2, 32), (3, 17)):
            yield AttentionCase(num_lists, max_length, num_heads, head_width, num_context=2)
    kinds: tuple[Lengths, ...] = ("full", "empty", "long")
    for lengths, num_context in itertools.product(kinds, (0, 3)):
        yield AttentionCase(5, 9, 2, 8, num_context=num_context, lengths=lengths)
    values: tuple[Values, ...] = ("loud", "tiny", "nonfinite")
    for kind in values:
        yield AttentionCase(5, 9, 2, 8, num_context=1, values=kind)
    # Large enough that several threads share it, and longer than one block of queries or pairs.
    yield AttentionCase(33, 128, 2, 32, num_context=4)


def _hstu_grid() -> Iterator[AttentionCase]:
    # NaN of a later token may reach an earlier one of its own sequence, as 0 * NaN does in a
    # rectangle; which ones depends on how queries are blocked.
    yield from (case for case in _shapes() if case.values != "nonfinite")
    yield AttentionCase(5, 9, 2, 8, num_context=1, values="nonfinite", causal=False)
    for causal, right, bias in itertools.product((False, True), repeat=3):
        more: dict[str, Any] = {"causal": causal, "align_right": right, "has_bias": bias}
        yield AttentionCase(6, 30, 2, 16, num_context=3, **more)
        yield AttentionCase(3, 40, 1, 20, lengths="long", **more)


def _candidate_grid() -> Iterator[AttentionCase]:
    yield from _shapes()
    for each in (1, 2, 30, 200):
        yield AttentionCase(4, 20, 2, 16, num_context=2, candidates_per_list=each)
    for right, bias in itertools.product((False, True), repeat=2):
        more: dict[str, Any] = {"align_right": right, "has_bias": bias}
        yield AttentionCase(6, 30, 2, 16, num_context=3, candidates_per_list=3, **more)


def _target_grid() -> Iterator[AttentionCase]:
    for case in _shapes():
        yield AttentionCase(**{**case.__dict__, "num_context": 0})
    for hidden in ((1,), (4,), (36,), (80, 40), (17, 16, 5)):
        for activation in ACTIVATIONS:
            yield AttentionCase(6, 30, 1, 16, hidden=hidden, activation=activation)
    for each in (1, 20):
        yield AttentionCase(4, 20, 1, 8, candidates_per_list=each, hidden=(80, 40))


def _masked_grid() -> Iterator[AttentionCase]:
    yield from (case for case in _target_grid() if not case.candidates_per_list)
    for fill in (-(2.0**32) + 1, -1e9, 0.5, -math.inf):
        more: dict[str, Any] = {"softmax": True, "fill": fill}
        for values in ("normal", "loud", "nonfinite"):
            yield AttentionCase(7, 9, 2, 8, values=values, **more)
        # Of a full row without a place that is hidden the fill has no part.
        yield AttentionCase(5, 33, 1, 16, lengths="full", hidden=(80, 40), **more)
        yield AttentionCase(5, 33, 1, 16, lengths="empty", activation="dice", **more)
    for activation in ACTIVATIONS:
        more = {"hidden": (36, 17), "activation": activation}
        yield AttentionCase(6, 60, 1, 16, **more, softmax=True, fill=-1e9)


HSTU_CASES = tuple(dict.fromkeys(_hstu_grid()))
CANDIDATE_CASES = tuple(dict.fromkeys(_candidate_grid()))
TARGET_CASES = tuple(dict.fromkeys(_target_grid()))
MASKED_CASES = tuple(dict.fromkeys(_masked_grid()))
RAGGED_CASES = tuple(dict.fromkeys(_shapes()))


class _Draw:
    """The tensors of a case, the same each time."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        self._generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
        self.width = case.num_heads * case.head_width
        self.scale = {"loud": 60.0, "tiny": 1e-12}.get(case.values, 1.0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def lengths(self) -> Tensor:
        case = self.case
        most = case.max_length
        lengths = torch.randint(0, most + 1, (case.num_lists,), generator=self._generator)
        if case.lengths == "mixed":
            lengths[0::5] = most
            lengths[1::5] = 0
            return lengths
        if case.lengths == "long":
            return lengths + most
        return lengths.fill_(most if case.lengths == "full" else 0)

    def rows(self, num_rows: int, pieces: int) -> list[Tensor]:
        """Draw matrices as a projection leaves them: columns of one wider matrix."""
        wide = self.normal(num_rows, pieces * self.width) * self.scale
        if self.case.values == "nonfinite" and num_rows:
            wide[0] = torch.nan
            wide[-1, ::3] = torch.inf
        return list(wide.chunk(pieces, dim=1))

    def bias(self) -> Tensor | None:
        case = self.case
        num_positions = case.num_context + case.max_length + 1
        values = self.normal(case.num_heads, 2 * num_positions - 1)
        return values if case.has_bias else None

    def request_index(self) -> Tensor | None:
        each = self.case.candidates_per_list
        if not each:
            return None
        index = torch.arange(self.case.num_lists).repeat_interleave(each)
        # One candidate away from its neighbours.
        return torch.cat([index, index[:1]])


def ragged_sum_arguments(case: AttentionCase) -> Arguments:
    """Draw weights, rows and lengths."""
    draw = _Draw(case)
    lengths = draw.lengths()
    total = int(lengths.sum())
    return draw.normal(total), draw.rows(total, 2)[1], lengths, case.max_length


def hstu_arguments(case: AttentionCase) -> Arguments:
    """Draw the arguments of `hstu_attention`."""
    draw = _Draw(case)
    lengths = draw.lengths()
    num_rows = case.num_lists * case.num_context + int(lengths.sum())
    scales = (case.head_width**-0.5, 1 / (case.max_length + 1))
    sizes = (case.num_heads, case.num_context, case.max_length)
    flags = (case.align_right, case.causal)
    return *draw.rows(num_rows, 3), lengths, draw.bias(), *sizes, *flags, *scales


def candidate_arguments(case: AttentionCase) -> Arguments:
    """Draw the arguments of `hstu_candidate_attention`."""
    draw = _Draw(case)
    lengths = draw.lengths()
    keys = draw.rows(case.num_lists * case.num_context + int(lengths.sum()), 2)
    index = draw.request_index()
    q, own_k, own_v = draw.rows(case.num_lists if index is None else len(index), 3)
    scales = (case.head_width**-0.5, 1 / (case.max_length + 1))
    sizes = (case.num_heads, case.num_context, case.max_length)
    given = (q, *keys, own_k, own_v, lengths, index, draw.bias())
    return *given, *sizes, case.align_right, *scales


def _network(draw: _Draw) -> TargetNetwork:
    case = draw.case
    share = draw.width**-0.5
    first = [draw.normal(case.hidden[0], draw.width) * share for _ in range(3)]
    layers: list[ScoreLayer] = []
    inputs = draw.width
    for outputs in (*case.hidden, 1):
        weight, bias = draw.normal(outputs, inputs) * inputs**-0.5, draw.normal(outputs)
        activation = case.activation if len(layers) < len(case.hidden) else "none"
        vectors = [draw.normal(outputs) for _ in range(1 if "dice" not in activation else 3)]
        if activation == "row_dice":  # what is added to squares
            vectors[2] = vectors[2].abs() + 1e-3
        layers.append(ScoreLayer(weight, bias, activation, *vectors))
        inputs = outputs
    return TargetNetwork(first[0], first[1], first[2], tuple(layers))


def target_arguments(case: AttentionCase) -> Arguments:
    """Draw the arguments of `target_attention`."""
    draw = _Draw(case)
    lengths = draw.lengths()
    keys = draw.rows(int(lengths.sum()), 1)[0]
    index = draw.request_index()
    query = draw.rows(case.num_lists if index is None else len(index), 1)[0]
    network = _network(draw)
    sizes = (network.widths, network.activations, case.max_length)
    return query, keys, lengths, index, network.pack(), *sizes


def masked_arguments(case: AttentionCase) -> Arguments:
    """Draw the arguments of `masked_target_attention`."""
    draw = _Draw(case)
    kept = draw.lengths().clamp(max=case.max_length)
    mask = torch.arange(case.max_length) < kept[:, None]
    if case.num_lists > 2:  # places anywhere, not only at one end
        mask[2] &= torch.arange(case.max_length) % 3 != 1
    keys = draw.rows(case.num_lists * case.max_length, 2)[1]
    keys = keys.reshape(case.num_lists, case.max_length, draw.width)
    query = draw.rows(case.num_lists, 1)[0]
    network = _network(draw)
    given = (query, keys, mask, network.pack(), network.widths, network.activations)
    return *given, case.softmax, case.fill


def _counted(lengths: Tensor, max_length: int) -> list[tuple[int, int]]:
    """Return where each list's ids that count begin and end."""
    ends = lengths.cumsum(0).tolist()
    kept = lengths.clamp(max=max_length).tolist()
    return [(end - count, end) for end, count in zip(ends, kept, strict=True)]


def ragged_rows(lengths: Tensor, values: Tensor) -> Tensor:
    """Compute `rankopt::ragged_rows`."""
    return torch.arange(len(lengths)).repeat_interleave(lengths, output_size=len(values))


def ragged_sum(weights: Tensor, rows: Tensor, lengths: Tensor, max_length: int) -> Tensor:
    """Compute `rankopt::ragged_sum` in float64."""
    out = torch.zeros(len(lengths), rows.shape[1], dtype=torch.float64)
    for index, (begin, end) in enumerate(_counted(lengths, max_length)):
        out[index] = weights[begin:end].double() @ rows[begin:end].double()
    return out


def ragged_sum_allowance(arguments: Arguments, expected: Tensor) -> Tensor:
    """Allow the rounding of the longest sum."""
    weights, rows, lengths, max_length = arguments
    return 1e-6 * ragged_sum(weights.abs(), rows.abs(), lengths, max_length).nan_to_num()


def _sequences(
    lengths: Tensor, num_context: int, max_length: int, align_right: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each sequence's rows among the tokens, and their positions."""
    base = len(lengths) * num_context
    for index, (begin, end) in enumerate(_counted(lengths, max_length)):
        context = torch.arange(num_context)
        first = num_context + (max_length - (end - begin) if align_right else 0)
        rows = torch.cat([index * num_context + context, base + torch.arange(begin, end)])
        yield rows, torch.cat([context, first + torch.arange(end - begin)])


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    seen: Tensor,
    bias: Tensor | None,
    num_heads: int,
    scales: tuple[float, float],
    *,
    sizes: bool,
) -> Tensor:
    """Attend in float64; `sizes` adds up absolute values instead, an upper bound of all sums.

    Shapes: q [Q, A * K]; k, v [N, A * K]; distance, seen [Q, N]; returns [Q, A * K].
    """
    score_scale, weight_scale = scales
    pieces = (q, k, v, bias.T if bias is not None else q.new_zeros(0))
    q, k, v, table = ((each.abs() if sizes else each).double() for each in pieces)
    shape = (num_heads, q.shape[1] // num_heads)
    heads = [each.reshape(len(each), *shape).transpose(0, 1) for each in (q, k, v)]
    scores = heads[0] @ heads[1].transpose(1, 2) * score_scale
    if bias is not None:
        scores = scores + table[distance].permute(2, 0, 1)
    weights = (scores if sizes else F.silu(scores)) * weight_scale
    gathered: Tensor = weights.masked_fill(~seen, 0.0) @ heads[2]
    return gathered.transpose(0, 1).flatten(1)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    bias: Tensor | None,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool,
    causal: bool,
    score_scale: float,
    weight_scale: float,
    *,
    sizes: bool = False,
) -> Tensor:
    """Compute `rankopt::hstu_attention` in float64, one sequence at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    last = num_context + max_length
    scales = (score_scale, weight_scale)
    for rows, position in _sequences(lengths, num_context, max_length, align_right):
        distance = position[None, :] - position[:, None]
        seen = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
        three = (q[rows], k[rows], v[rows])
        out[rows] = _attend(*three, distance + last, seen, bias, num_heads, scales, sizes=sizes)
    return out


def hstu_candidate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    lengths: Tensor,
    request_index: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    num_context: int,
    max_length: int,
    align_right: bool,
    score_scale: float,
    weight_scale: float,
    *,
    sizes: bool = False,
) -> Tensor:
    """Compute `rankopt::hstu_candidate_attention` in float64, one candidate at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    sequences = list(_sequences(lengths, num_context, max_length, align_right))
    index = list(range(len(q))) if request_index is None else request_index.tolist()
    for row, request in enumerate(index):
        rows, position = sequences[request]
        keys = torch.cat([k[rows], own_k[row : row + 1]])
        values = torch.cat([v[rows], own_v[row : row + 1]])
        last = position.new_tensor([num_context + max_length])
        # Of a key at p, seen from the last position: p - (S - 1) + (S - 1).
        distance = torch.cat([position, last])[None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        three = (q[row : row + 1], keys, values)
        scales = (score_scale, weight_scale)
        out[row] = _attend(*three, distance, seen, bias, num_heads, scales, sizes=sizes)[0]
    return out


def hstu_allowance(arguments: Arguments, expected: Tensor) -> Tensor:
    """Allow the rounding of the sums, whose terms may cancel."""
    return 1e-6 * hstu_attention(*arguments, sizes=True).nan_to_num()


def candidate_allowance(arguments: Arguments, expected: Tensor) -> Tensor:
    """Allow the rounding of the sums, whose terms may cancel."""
    return 1e-6 * hstu_candidate_attention(*arguments, sizes=True).nan_to_num()


def target_attention(
    query: Tensor,
    keys: Tensor,
    lengths: Tensor,
    request_index: Tensor | None,
    weights: Tensor,
    widths: list[int],
    activations: list[int],
    max_length: int,
    *,
    sizes: bool = False,
) -> Tensor:
    """Compute `rankopt::target_attention` in float64, one candidate at a time."""
    network = _unpack(weights, widths, activations, query.shape[1], sizes)
    query, keys = ((each.abs() if sizes else each).double() for each in (query, keys))
    lists = _counted(lengths, max_length)
    index = list(range(len(query))) if request_index is None else request_index.tolist()
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row, request in enumerate(index):
        begin, end = lists[request]
        mine = keys[begin:end]
        out[row] = (_scores(network, query[row], mine, sizes) * mine).sum(0)
    return out


def _scores(network: TargetNetwork, query: Tensor, keys: Tensor, sizes: bool) -> Tensor:
    """Run the MLP. Shapes: query [D]; keys [N, D]; returns [N, 1]."""
    of_query = query @ network.of_query.T
    hidden = of_query + keys @ network.of_key.T + (query * keys) @ network.of_product.T
    for number, layer in enumerate(network.layers):
        hidden = hidden @ layer.weight.T if number else hidden
        hidden = hidden if layer.bias is None else hidden + layer.bias
        hidden = _bound(hidden, layer) if sizes else _activate(hidden, layer)
    return hidden


def masked_target_attention(
    query: Tensor,
    keys: Tensor,
    mask: Tensor,
    weights: Tensor,
    widths: list[int],
    activations: list[int],
    softmax: bool,
    fill: float,
) -> Tensor:
    """Compute `rankopt::masked_target_attention` in float64, one candidate at a time."""
    network = _unpack(weights, widths, activations, query.shape[1], False)
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row in range(len(query)):
        scores = torch.full(mask.shape[1:], fill, dtype=torch.float64)
        seen = mask[row]
        mine = keys[row].double()
        scores[seen] = _scores(network, query[row].double(), mine[seen], False)[:, 0]
        weight = scores.softmax(0) if softmax else scores
        counted = seen | (weight != 0) if softmax else seen
        out[row] = weight[counted] @ mine[counted]
    return out


def masked_allowance(arguments: Arguments, expected: Tensor) -> Tensor:
    """Allow the rounding of the sums; a score's error moves its share by as much."""
    query, keys, mask, weights, widths, activations, softmax, _ = arguments
    network = _unpack(weights, widths, activations, query.shape[1], True)
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row in range(len(query)):
        mine = keys[row].double().abs()
        scores = _scores(network, query[row].double().abs(), mine[mask[row]], True)
        if softmax:
            largest = scores.amax(0) if len(scores) else scores.new_zeros(1)
            out[row] = 2e-6 * (1 + 2 * largest) * mine.amax(0)
        else:
            out[row] = 2e-6 * (scores * mine[mask[row]]).sum(0)
    return out.nan_to_num()


def _bound(hidden: Tensor, layer: ScoreLayer) -> Tensor:
    """Bound what an activation makes of numbers no larger than these, and of their errors."""
    if "dice" not in layer.activation:
        return hidden
    slope = layer.slope.abs() if layer.slope is not None else hidden.new_ones(1)
    if layer.activation == "dice" and layer.scale is not None:
        # Of p's argument the error is the scale's times that of x, and so on of x * p.
        return hidden * (1 + slope) * (1 + hidden * layer.scale.abs() / 4)
    return hidden * (1 + slope) * (1 + hidden.shape[1])


def _activate(hidden: Tensor, layer: ScoreLayer) -> Tensor:
    if layer.slope is not None and layer.activation == "slope":
        return torch.where(hidden >= 0, hidden, hidden * layer.slope)
    if layer.activation == "sigmoid":
        return hidden.sigmoid()
    if layer.slope is not None and layer.scale is not None and layer.shift is not None:
        if layer.activation == "dice":
            p = (hidden * layer.scale + layer.shift).sigmoid()
            return hidden * (layer.slope + (1 - layer.slope) * p)
        if layer.activation == "row_dice":
            less = hidden - hidden.mean(1, keepdim=True)
            p = (less / (less**2 + layer.shift).sum(1, keepdim=True).sqrt()).sigmoid()
            return hidden * (layer.slope + (1 - layer.slope) * p)
    return F.silu(hidden) if layer.activation == "silu" else hidden


def _unpack(
    weights: Tensor, widths: list[int], activations: list[int], dim: int, sizes: bool
) -> TargetNetwork:
    """Read a packed network again, in float64."""
    rest = weights.abs() if sizes else weights

    def take(size: int) -> Tensor:
        nonlocal rest
        piece, rest = rest[:size], rest[size:]
        return piece

    tiles = -(-widths[0] // 16)
    first = [
        take(tiles * 16 * dim).view(tiles, dim, 16).transpose(1, 2).reshape(-1, dim)[: widths[0]]
        for _ in range(3)
    ]
    layers = []
    inputs = dim
    for number, outputs in enumerate(widths):
        weight = first[0]
        if number:
            padded = (-(-inputs // 16) * 16) * outputs
            size = padded if outputs <= 4 else -(-outputs // 16) * 16 * inputs
            weight = unpack_linear_fp32(take(size), outputs, inputs)
        name = ACTIVATIONS[activations[number]] if number < len(activations) else "none"
        bias, *more = (take(outputs).double() for _ in range(4 if "dice" in name else 2))
        layers.append(ScoreLayer(weight.double(), bias, name, *more))
        inputs = outputs
    of_query, of_key, of_product = (weight.double() for weight in first)
    return TargetNetwork(of_query, of_key, of_product, tuple(layers))


def target_allowance(arguments: Arguments, expected: Tensor) -> Tensor:
    """Allow the rounding of the sums, whose terms may cancel."""
    return 2e-6 * target_attention(*arguments, sizes=True).nan_to_num()
