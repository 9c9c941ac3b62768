"""What packed rows and int8 layers stand for, written out by other means than the passes'."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from passes.zoo import with_weights
from rankopt.tables import BITS, TableDtype, pack_rows


def read_rows(packed: Tensor, dim: int, dtype: TableDtype) -> np.ndarray:
    """Read rows byte by byte as fbgemm's documentation lays them out: a second opinion."""
    raw = packed.numpy()
    if dtype == "fp32":
        return raw.copy().view("<f4").astype(np.float64)
    if dtype == "fp16":
        return raw.copy().view("<f2").astype(np.float64)
    bits = BITS[dtype]
    rows = np.zeros((len(raw), dim))
    for index, row in enumerate(raw):
        scale, bias = np.frombuffer(row[:4].tobytes(), dtype="<f2").astype(np.float64)
        for column in range(dim):
            byte = int(row[4 + column * bits // 8])
            level = byte >> (column * bits % 8) & (2**bits - 1)
            rows[index, column] = level * scale + bias
    return rows


def half_step(weight: np.ndarray, bits: int) -> np.ndarray:
    """Bound of one value's error, per row: half a step, and fp16 for the scale and the bias.

    fp16 rounds the bias by 2^-11 of itself and each of up to 2^bits - 1 steps by 2^-11 as well.
    """
    low, high = weight.min(axis=1, keepdims=True), weight.max(axis=1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    rounding = 2.0**-11 * (np.abs(low) + (high - low)) * 1.01
    return step / 2 + rounding + 2.0**-24


def dequantised(model: nn.Module, dtypes: Mapping[str, TableDtype]) -> nn.Module:
    """Put the rows that packed tables stand for into a copy of the model."""
    weights = {}
    for name, dtype in dtypes.items():
        weight = model.get_parameter(f"{name}.weight").detach()
        weights[name] = torch.from_numpy(
            read_rows(pack_rows(weight, dtype), weight.shape[1], dtype)
        ).float()
    return with_weights(model, weights)


class Levelled(nn.Module):
    """A linear layer on int8 weights and `bits`-bit activations, written out in float64."""

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        super().__init__()
        weight = layer.weight.detach().double()
        scale = (weight.abs().amax(1, keepdim=True) / 127).float().double()
        self.weight = (weight / scale).round() * scale
        self.bias = None if layer.bias is None else layer.bias.detach().double()
        self.levels = 2 ** (bits - 1) - 1

    def forward(self, x: Tensor) -> Tensor:
        peak = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30)
        levels = (x.double() * (self.levels / peak)).round()
        return functional.linear(levels * (peak / self.levels), self.weight, self.bias)


def levelled(model: nn.Module, bits: int, *kept: str) -> nn.Module:
    """Replace every linear by the arithmetic it stands for once quantised."""
    changed = copy.deepcopy(model)
    for name, layer in list(changed.named_modules()):
        if isinstance(layer, nn.Linear) and name not in kept:
            parent, _, leaf = name.rpartition(".")
            setattr(changed.get_submodule(parent), leaf, Levelled(layer, bits))
    return changed
