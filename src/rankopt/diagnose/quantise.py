"""How long int8 layers spend turning their inputs into int8, estimated.

A layer quantises each row and multiplies in one call, so no clock stands between the two. The
same rows with 16 outputs take the same quantising and 16 / N of the product; with 4 inputs and 16
outputs they take what a call costs whatever it does. Three equations, two of them unknown. A chain
of layers spends what its layers do, each by itself on rows of its width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rankopt.diagnose.costs import plain_name
from rankopt.diagnose.kernel_work import mlp_bits, mlp_layers
from rankopt.diagnose.profile import Notes, Site
from rankopt.kernels.mlp import MlpLayer, mlp_int8
from rankopt.kernels.packing import pack_linear_int8

TILE_OUTPUTS = 16
MIN_OUTPUTS = 64
"""Of narrower layers one tile is most of the product, and nothing can be told apart."""
NUM_ROUNDS = 25
FEW_INPUTS = 4
MAX_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class _Quantised:
    """One int8 layer: how many rows of how many inputs it is called with."""

    layer: MlpLayer
    num_rows: int
    num_inputs: int


def quantise_ns(site: Site, notes: Notes) -> float | None:
    """Estimate the time; None for other operators, and where every layer is narrow or too large.

    Args:
        site: the operator.
        notes: what it was called with.
    """
    found = [
        each
        for each in _layers(site, notes)
        if each.layer.num_outputs >= MIN_OUTPUTS
        and 0 < each.num_rows * each.num_inputs <= MAX_ELEMENTS
    ]
    if not found:
        return None
    bits = mlp_bits(notes) if plain_name(site) == "mlp_int8" else notes.values[1]
    return sum(_layer_ns(each, bits) for each in found)


def _layers(site: Site, notes: Notes) -> list[_Quantised]:
    name = plain_name(site)
    if not notes.inputs or not notes.inputs[0].dim():
        return []
    x = notes.inputs[0]
    num_rows = x.numel() // max(x.shape[-1], 1)
    if name == "linear_int8" and len(notes.values) == 3 and len(notes.constants) >= 2:
        layer = MlpLayer(notes.constants[0], notes.constants[1], None, None, notes.values[0])
        return [_Quantised(layer, num_rows, x.shape[-1])]
    layers = mlp_layers(site, notes) if name == "mlp_int8" else None
    found, num_inputs = [], x.shape[-1]
    for layer in layers or []:
        kept = not any(t is not None and t.is_meta for t in (layer.packed, layer.scale, layer.peak))
        if layer.scale is not None and kept:
            found.append(_Quantised(layer, num_rows, num_inputs))
        num_inputs = layer.num_outputs
    return found


def _layer_ns(quantised: _Quantised, bits: int) -> float:
    given, num_inputs = quantised.layer, quantised.num_inputs
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(quantised.num_rows, num_inputs, generator=generator)
    narrow = rows[..., :FEW_INPUTS].contiguous()
    whole = MlpLayer(given.packed, given.scale, None, None, given.num_outputs, given.peak)
    one_tile, corner = _tile(num_inputs, given.peak), _tile(narrow.shape[-1], given.peak)
    pairs = ((rows, whole), (rows, one_tile), (narrow, corner))
    samples = [
        [_time_ns(partial(_run, x, layer, bits)) for x, layer in pairs] for _ in range(NUM_ROUNDS)
    ]
    # The least of each: what is left of a difference of medians may be the machine's noise.
    total, least, call = (min(column) for column in zip(*samples, strict=True))
    part = TILE_OUTPUTS / given.num_outputs
    quantising = ((least - call) - (total - call) * part) / (1 - part)
    return float(min(max(quantising, 0.0), total))


def _tile(num_inputs: int, peak: Tensor | None) -> MlpLayer:
    packed = pack_linear_int8(torch.ones(TILE_OUTPUTS, num_inputs, dtype=torch.int8))
    return MlpLayer(packed, torch.ones(TILE_OUTPUTS), None, None, TILE_OUTPUTS, peak)


def _run(x: Tensor, layer: MlpLayer, bits: int) -> None:
    mlp_int8(x, [layer], activation_bits=bits)


def _time_ns(run: Callable[[], None]) -> int:
    begun = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - begun
