"""The parity grid: the inputs on which a kernel must agree with its reference, as data.

Shapes: B rows, N outputs, K inputs.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rankopt.kernels.packing import quantize_linear_weight

Values = Literal[
    "normal",  # what a layer sees
    "extreme",  # every input and every weight at its largest: no sum may saturate
    "alternating",  # the same with alternating signs
    "zero",  # rows of zeros
    "tiny",  # so small that the reciprocal of a scale overflows
    "huge",  # so large that a careless scale overflows
    "nonfinite",  # rows of NaN, inf and -inf between ordinary ones
    "loud",  # rows of 1e6 between ordinary ones
]
Layout = Literal["contiguous", "row_stride", "transposed", "three_dims"]
Slope = Literal["none", "one", "per_output"]
Activation = Literal["none", "sigmoid", "silu"]


@dataclass(frozen=True)
class LinearCase:
    """One call of a linear kernel; `activation_bits` is for the quantised ones."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    values: Values = "normal"
    layout: Layout = "contiguous"
    activation_bits: int = 7
    has_bias: bool = True
    negative_slope: Slope = "none"
    activation: Activation = "none"

    def __str__(self) -> str:
        shape = f"{self.num_rows}x{self.num_inputs}x{self.num_outputs}"
        bias = "bias" if self.has_bias else "nobias"
        parts = (shape, self.values, self.layout, f"{self.activation_bits}bit", bias)
        activation = () if self.activation == "none" else (self.activation,)
        return "-".join((*parts, f"slope_{self.negative_slope}", *activation))


@dataclass(frozen=True)
class LinearInputs:
    """The tensors of a case.

    Attributes:
        x: float32 [..., K].
        weight: float32 [N, K].
        levels: the weight quantised, int8 [N, K].
        scale: float32 [N], what a level stands for.
        bias: float32 [N], or None.
        negative_slope: float32 [1] or [N], or None.
    """

    x: Tensor
    weight: Tensor
    levels: Tensor
    scale: Tensor
    bias: Tensor | None
    negative_slope: Tensor | None


def _grid() -> Iterator[LinearCase]:
    rows, inputs, outputs = (0, 1, 2, 5, 17, 513), (1, 3, 64, 65, 130), (1, 15, 16, 17, 80)
    for shape in itertools.product(rows, inputs, outputs):
        yield LinearCase(*shape)
    for shape in itertools.product((1, 5, 17), (7, 260), (17, 80)):
        values: tuple[Values, ...]
        values = ("extreme", "alternating", "zero", "tiny", "huge", "nonfinite", "loud")
        for kind in values:
            yield LinearCase(*shape, values=kind)
        layouts: tuple[Layout, ...] = ("row_stride", "transposed", "three_dims")
        for layout in layouts:
            yield LinearCase(*shape, layout=layout)
        slopes: tuple[Slope, ...] = ("one", "per_output")
        activations: tuple[Activation, ...] = ("sigmoid", "silu")
        kinds: tuple[Values, ...] = ("normal", "nonfinite", "huge")
        for slope in slopes:
            yield LinearCase(*shape, negative_slope=slope)
            yield LinearCase(*shape, negative_slope=slope, has_bias=False, values="nonfinite")
        for activation, drawn in itertools.product(activations, kinds):
            yield LinearCase(*shape, values=drawn, activation=activation)
        yield LinearCase(*shape, negative_slope="per_output", activation="silu", has_bias=False)
    # Narrow ones, whose last tile is half padding: whole groups of rows, and some left.
    for num_rows, num_outputs in itertools.product((8, 12, 16, 21, 37), (3, 8, 24, 37, 40)):
        yield LinearCase(num_rows, 80, num_outputs, negative_slope="per_output")
        yield LinearCase(num_rows, 29, num_outputs, values="nonfinite", has_bias=False)
    # Large enough that several threads share it: by rows, and by outputs.
    yield LinearCase(600, 192, 144, negative_slope="one")
    yield LinearCase(1, 2048, 700)
    # Longer than one block of inputs, and the longest sums the kernels take.
    yield LinearCase(3, 8200, 33, values="extreme")
    yield LinearCase(1, 65536, 2, values="extreme")
    yield LinearCase(3, 0, 17)


LINEAR_CASES: tuple[LinearCase, ...] = tuple(_grid())
LINEAR_INT8_CASES: tuple[LinearCase, ...] = tuple(
    LinearCase(**{**case.__dict__, "activation_bits": bits}) for case in _grid() for bits in (7, 8)
)


def _fp32_grid() -> Iterator[LinearCase]:
    inputs, outputs = (1, 13, 40, 80, 256, 1024), (1, 2, 4, 5, 15, 16, 17, 80, 512)
    for shape in itertools.product((0, 1, 2, 5, 17), inputs, outputs):
        yield LinearCase(*shape)
    layers = ((13, 512), (256, 1), (40, 80), (1, 17), (80, 2), (1024, 16), (40, 1), (256, 70))
    for num_inputs, num_outputs in layers:
        yield LinearCase(513, num_inputs, num_outputs)
    for shape in itertools.product((1, 5, 17), (7, 48), (1, 3, 17, 80)):
        values: tuple[Values, ...]
        values = ("alternating", "zero", "tiny", "huge", "nonfinite", "loud")
        for kind in values:
            yield LinearCase(*shape, values=kind)
        layouts: tuple[Layout, ...] = ("row_stride", "transposed", "three_dims")
        for layout in layouts:
            yield LinearCase(*shape, layout=layout)
        slopes: tuple[Slope, ...] = ("one", "per_output")
        activations: tuple[Activation, ...] = ("sigmoid", "silu")
        kinds: tuple[Values, ...] = ("normal", "nonfinite", "huge")
        for slope in slopes:
            yield LinearCase(*shape, negative_slope=slope)
            yield LinearCase(*shape, negative_slope=slope, has_bias=False, values="nonfinite")
        for activation, drawn in itertools.product(activations, kinds):
            yield LinearCase(*shape, values=drawn, activation=activation)
        yield LinearCase(*shape, negative_slope="per_output", activation="silu", has_bias=False)
    # Large enough that several threads share it: by rows, and by outputs.
    yield LinearCase(600, 192, 144, negative_slope="one")
    yield LinearCase(1, 2048, 700)
    yield LinearCase(4000, 90, 1, negative_slope="one")
    yield LinearCase(3, 0, 17)
    yield LinearCase(3, 0, 2)


LINEAR_FP32_CASES: tuple[LinearCase, ...] = tuple(_fp32_grid())
LINEAR_FP16_CASES: tuple[LinearCase, ...] = tuple(
    case for case in LINEAR_FP32_CASES if case.num_rows != 2 and case.num_inputs not in (40, 256)
)


def make_linear_inputs(case: LinearCase) -> LinearInputs:
    """Draw a case's tensors: the same ones every time."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = normal(case.num_outputs, case.num_inputs)
    if case.values in {"extreme", "alternating"}:
        weight = torch.full_like(weight, 0.5)
        weight[1::2] = -0.5
    levels, scale = quantize_linear_weight(weight)
    x = _lay_out(_rows(case, normal(case.num_rows, case.num_inputs)), case.layout)
    slope = {
        "none": None,
        "one": torch.zeros(1),
        "per_output": torch.rand(case.num_outputs, generator=generator),
    }[case.negative_slope]
    bias = normal(case.num_outputs) if case.has_bias else None
    return LinearInputs(x, weight, levels, scale, bias, slope)


def _rows(case: LinearCase, x: Tensor) -> Tensor:
    if case.values == "extreme":
        return torch.full_like(x, 3.0)
    if case.values == "alternating":
        x = torch.full_like(x, 3.0)
        x[:, 1::2] = -3.0
        return x
    if case.values == "zero":
        return torch.zeros_like(x)
    if case.values == "tiny":
        x = x * 1e-38
        x[::3] = 1e-45
        return x
    if case.values == "huge":
        return x.clamp(-1, 1) * 3.0e38
    if case.values == "nonfinite":
        x[0::4, 0] = torch.nan
        x[1::4, -1] = torch.inf
        x[2::4] = -torch.inf
    if case.values == "loud":
        x[::2] = 1e6
    return x


def _lay_out(x: Tensor, layout: Layout) -> Tensor:
    if layout == "row_stride":
        wide = torch.full((x.shape[0], x.shape[1] + 3), 1e9)
        wide[:, 1 : 1 + x.shape[1]] = x
        return wide[:, 1 : 1 + x.shape[1]]
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "three_dims":
        return torch.stack([x, x.flip(0)])
    return x


Lengths = Literal[
    "mixed",  # anything from an empty row to a full one, both among them
    "full",  # every row as long as the padding
    "empty",  # every row empty
]


@dataclass(frozen=True)
class RecurrentCase:
    """One call of the recurrence over padded lists."""

    num_rows: int
    num_steps: int
    num_inputs: int
    num_hidden: int
    lengths: Lengths = "mixed"
    scale: float = 1.0
    has_bias: bool = True
    has_first: bool = False
    reverse: bool = False

    def __str__(self) -> str:
        shape = f"{self.num_rows}x{self.num_steps}x{self.num_inputs}x{self.num_hidden}"
        bias = "bias" if self.has_bias else "nobias"
        first = "first" if self.has_first else "nofirst"
        direction = "backward" if self.reverse else "forward"
        return "-".join((shape, self.lengths, f"{self.scale:g}", bias, first, direction))


def _recurrent_grid() -> Iterator[RecurrentCase]:
    units = ((1, 1), (3, 2), (16, 16), (8, 17), (64, 48))
    for num_rows, num_steps, sizes in itertools.product((0, 1, 2, 7), (1, 5, 20), units):
        yield RecurrentCase(num_rows, num_steps, *sizes)
    for num_rows in (1, 7, 33):
        for has_bias, has_first, reverse in itertools.product((False, True), repeat=3):
            yield RecurrentCase(
                num_rows, 6, 5, 9, has_bias=has_bias, has_first=has_first, reverse=reverse
            )
        lengths: tuple[Lengths, ...] = ("full", "empty")
        for kind in lengths:
            yield RecurrentCase(num_rows, 6, 5, 9, lengths=kind, has_first=True)
        # Gates wide open or shut, and so small that they stay at one half.
        for scale in (100.0, 1e-4):
            yield RecurrentCase(num_rows, 6, 5, 9, scale=scale)
    # Large enough that several threads share it.
    yield RecurrentCase(513, 20, 16, 16)
    yield RecurrentCase(513, 3, 40, 70, reverse=True)


RECURRENT_CASES: tuple[RecurrentCase, ...] = tuple(_recurrent_grid())


def make_recurrent_inputs(
    case: RecurrentCase, num_gates: int, num_states: int
) -> tuple[Tensor | None, ...]:
    """Draw x, lengths, the weights, the biases and the first states of a case.

    They are the same each time. A GRU has 3 gates and 1 state, an LSTM 4 and 2.

    What lies past a row's length is NaN: nothing may read it.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(case.num_rows, case.num_steps, case.num_inputs) * case.scale
    lengths = torch.randint(0, case.num_steps + 1, (case.num_rows,), generator=generator)
    if case.lengths == "mixed":
        lengths[0::5] = case.num_steps
        lengths[1::5] = 0
    else:
        lengths.fill_(case.num_steps if case.lengths == "full" else 0)
    past = torch.arange(case.num_steps) >= lengths[:, None]
    x = x.masked_fill(past[:, :, None], torch.nan)
    gates = num_gates * case.num_hidden
    share = case.num_hidden**-0.5
    weights = (normal(gates, case.num_inputs) * share, normal(gates, case.num_hidden) * share)
    biases = (normal(gates), normal(gates)) if case.has_bias else (None, None)
    states = [
        normal(case.num_rows, case.num_hidden) if case.has_first else None
        for _ in range(num_states)
    ]
    return x, lengths, *weights, *biases, *states


@dataclass(frozen=True)
class Agreement:
    """How far a kernel's result lies from its reference.

    Attributes:
        same_bits: every number has the reference's bits, and NaN stands where it stands there.
        largest_error: the largest absolute difference where both are finite; 0 without numbers.
        excess: the largest of difference minus allowance; above 0 the kernel fails.
    """

    same_bits: bool
    largest_error: float
    excess: float


def compare(result: Tensor, expected: Tensor, allowance: Tensor) -> Agreement:
    """Compare a result with its reference.

    Shapes: all three alike; `allowance` is the absolute error allowed of each number.
    """
    if result.shape != expected.shape:
        return Agreement(False, torch.inf, torch.inf)
    same_bits = torch.equal(_bits(result), _bits(expected))
    same_kind = (result.isnan() == expected.isnan()) & (result.isinf() == expected.isinf())
    infinite = expected.isinf()
    agree = bool(same_kind.all()) and torch.equal(result[infinite], expected[infinite])
    finite = torch.isfinite(expected) & torch.isfinite(result)
    error = (result[finite].to(torch.float64) - expected[finite].to(torch.float64)).abs()
    if not error.numel():
        return Agreement(same_bits, 0.0, 0.0 if agree else torch.inf)
    excess = float((error - allowance[finite]).max()) if agree else torch.inf
    return Agreement(same_bits, float(error.max()), excess)


def _bits(values: Tensor) -> Tensor:
    # Any NaN is as good as another; -0.0 and 0.0 are not the same.
    plain = torch.where(values.isnan(), torch.full_like(values, torch.nan), values)
    return plain.contiguous().view(torch.int32)
