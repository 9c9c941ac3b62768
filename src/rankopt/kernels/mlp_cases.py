"""The parity grid of `rankopt::mlp_int8`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rankopt.kernels.mlp import MlpLayer, columns
from rankopt.kernels.packing import (
    ACTIVATION_CODES,
    pack_linear_fp16,
    pack_linear_fp32,
    pack_linear_int8,
)
from rankopt.kernels.parity import Activation, Layout, LinearCase, Slope, Values, make_linear_inputs


@dataclass(frozen=True)
class MlpCase:
    """One call: the widths of the layers, inputs first, and which layers are int8."""

    num_rows: int
    widths: tuple[int, ...]
    int8: tuple[bool, ...]
    values: Values = "normal"
    layout: Layout = "contiguous"
    activation_bits: int = 7
    has_bias: bool = True
    negative_slope: Slope = "one"
    fixed: tuple[float, ...] = ()
    """Fixed peaks of the layers, 0 for none; none at all when empty."""
    activation: Activation = "none"
    """Of every layer but the last."""
    half: bool = False
    """Whether the layers that are not int8 store fp16."""

    def __str__(self) -> str:
        shape = "x".join(str(size) for size in (self.num_rows, *self.widths))
        kinds = "".join("i" if kind else "h" if self.half else "f" for kind in self.int8)
        bias = "bias" if self.has_bias else "nobias"
        parts = (shape, kinds, self.values, self.layout, f"{self.activation_bits}bit", bias)
        fixed = "_".join(f"{peak:g}" for peak in self.fixed) or "dynamic"
        activation = () if self.activation == "none" else (self.activation,)
        return "-".join((*parts, f"slope_{self.negative_slope}", fixed, *activation))


def _grid() -> Iterator[MlpCase]:
    chains: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...] = (
        ((20, 33), (True,)),
        ((20, 33), (False,)),
        ((130, 80, 40, 1), (True, True, False)),
        ((13, 70, 17, 5), (False, True, True)),
        ((64, 48, 3, 20, 2), (True, False, False, True)),
        ((7, 5, 4, 33, 65, 16), (False, False, False, False, True)),
    )
    for num_rows, (widths, int8), bits in itertools.product((0, 1, 2, 5, 17, 97), chains, (7, 8)):
        yield MlpCase(num_rows, widths, int8, activation_bits=bits)
    for num_rows, (widths, int8) in itertools.product((0, 1, 5, 17, 97), chains[1:]):
        yield MlpCase(num_rows, widths, int8, half=True)
    values: tuple[Values, ...]
    values = ("extreme", "alternating", "zero", "tiny", "huge", "nonfinite", "loud")
    for kind in values:
        for num_rows, bits, (widths, int8) in itertools.product((1, 9), (7, 8), chains[2:5:2]):
            yield MlpCase(num_rows, widths, int8, values=kind, activation_bits=bits)
    layouts: tuple[Layout, ...] = ("row_stride", "transposed", "three_dims")
    slopes: tuple[Slope, ...] = ("none", "per_output")
    for num_rows, (widths, int8) in itertools.product((1, 9), chains[2:5]):
        for layout in layouts:
            yield MlpCase(num_rows, widths, int8, layout=layout)
        for slope in slopes:
            yield MlpCase(num_rows, widths, int8, negative_slope=slope)
            yield MlpCase(num_rows, widths, int8, negative_slope=slope, has_bias=False)
        activations: tuple[Activation, ...] = ("sigmoid", "silu")
        for activation, bits in itertools.product(activations, (7, 8)):
            yield MlpCase(
                num_rows,
                widths,
                int8,
                activation_bits=bits,
                negative_slope="none",
                activation=activation,
            )
    # Fixed peaks: on every layer, the first, later ones; too small, so that much saturates.
    both = (True, True)
    for num_rows, bits in itertools.product((0, 1, 2, 5, 17, 97), (7, 8)):
        for fixed in ((3.0, 20.0, 0.0), (3.0, 0.0, 0.0), (0.0, 20.0, 0.0), (0.1, 0.2, 0.0)):
            widths, int8 = (130, 77, 40, 1), (*both, False)
            yield MlpCase(num_rows, widths, int8, activation_bits=bits, fixed=fixed)
        yield MlpCase(
            num_rows,
            (13, 70, 17, 33, 5),
            (False, *both, True),
            activation_bits=bits,
            negative_slope="none",
            fixed=(0.0, 5.0, 9.0, 20.0),
        )
    for kind in values:
        for num_rows, first in itertools.product((1, 9), (0.0, 2.0)):
            yield MlpCase(num_rows, (7, 33, 17), both, values=kind, fixed=(first, 5.0))
            yield MlpCase(
                num_rows,
                (7, 33, 17, 40),
                (*both, True),
                values=kind,
                negative_slope="none",
                fixed=(first, 5.0, 3.0),
                activation="silu",
            )
    yield MlpCase(1500, (40, 64, 33), both, fixed=(3.0, 20.0))
    yield MlpCase(3, (1100, 700, 600, 40), (*both, True), fixed=(3.0, 90.0, 1e3))
    # Several blocks of rows, several threads: by rows, and by outputs with a wait between layers.
    yield MlpCase(1500, (40, 64, 33, 1), (True, True, False))
    yield MlpCase(3, (1100, 700, 600, 40, 1), (True, True, True, False))
    yield MlpCase(12, (1100, 700, 90, 600), (True, False, True), activation_bits=8)
    yield MlpCase(3, (1100, 700, 600, 40, 1), (False, True, False, False), half=True)
    yield MlpCase(3, (0, 17, 5), (True, True))


MLP_CASES: tuple[MlpCase, ...] = tuple(_grid())


def mlp_arguments(case: MlpCase) -> tuple[Any, ...]:
    """Draw the operator's arguments of a case: the same ones every time."""
    layers = []
    x = torch.empty(0)
    for index, (num_inputs, num_outputs) in enumerate(itertools.pairwise(case.widths)):
        # Rows at their extremes are the first layer's; the weights are so in every layer.
        given = make_linear_inputs(
            LinearCase(
                case.num_rows if index == 0 else 1,
                num_inputs,
                num_outputs,
                values=case.values,
                layout=case.layout if index == 0 else "contiguous",
                has_bias=case.has_bias,
                negative_slope=case.negative_slope,
            )
        )
        if index == 0:
            x = given.x
        if case.int8[index]:
            packed, scale = pack_linear_int8(given.levels), given.scale
        else:
            pack = pack_linear_fp16 if case.half else pack_linear_fp32
            packed, scale = pack(given.weight), None
        fixed = case.fixed[index] if case.fixed else 0.0
        peak = torch.tensor([fixed]) if fixed else None
        layers.append(MlpLayer(packed, scale, given.bias, given.negative_slope, num_outputs, peak))
    if case.activation == "none":
        return x, *columns(layers), case.activation_bits
    codes = [ACTIVATION_CODES[case.activation]] * (len(layers) - 1)
    return x, *columns(layers), case.activation_bits, [*codes, 0]
