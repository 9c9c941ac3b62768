"""How long an int8 linear layer spends turning its input into int8, estimated.

The layer quantises each row and multiplies in one call, so no clock stands between the two. The
same rows with 16 outputs take the same quantising and 16 / N of the product; with 4 inputs and 16
outputs they take what a call costs whatever it does. Three equations, two of them unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rankopt.diagnose.profile import Notes
from rankopt.kernels import ops
from rankopt.kernels.packing import pack_linear_int8

TILE_OUTPUTS = 16
MIN_OUTPUTS = 64
"""Of narrower layers one tile is most of the product, and nothing can be told apart."""
NUM_ROUNDS = 25
FEW_INPUTS = 4
MAX_ELEMENTS = 1 << 24


def quantise_ns(name: str, notes: Notes) -> float | None:
    """Estimate the time; None for other operators and for layers too narrow or too large.

    Args:
        name: the operator's, without its library.
        notes: what it was called with: input, packed weights, scales, and how many outputs and
            bits behind them.
    """
    if name != "linear_int8" or not notes.inputs or len(notes.values) != 2:
        return None
    x, (num_outputs, bits) = notes.inputs[0], notes.values
    if num_outputs < MIN_OUTPUTS or not 0 < x.numel() <= MAX_ELEMENTS:
        return None
    packed, scale = notes.constants[0], notes.constants[1]
    rows = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    narrow = rows[..., :FEW_INPUTS].contiguous()
    tile = pack_linear_int8(torch.ones(TILE_OUTPUTS, x.shape[-1], dtype=torch.int8))
    corner = pack_linear_int8(torch.ones(TILE_OUTPUTS, narrow.shape[-1], dtype=torch.int8))
    ones = torch.ones(TILE_OUTPUTS)

    def whole() -> None:
        ops.linear_int8(rows, packed, scale, num_outputs=num_outputs, activation_bits=bits)

    def one_tile() -> None:
        ops.linear_int8(rows, tile, ones, num_outputs=TILE_OUTPUTS, activation_bits=bits)

    def nothing() -> None:
        ops.linear_int8(narrow, corner, ones, num_outputs=TILE_OUTPUTS, activation_bits=bits)

    samples = [[_time_ns(run) for run in (whole, one_tile, nothing)] for _ in range(NUM_ROUNDS)]
    # The least of each: what is left of a difference of medians may be the machine's noise.
    total, least, call = (min(column) for column in zip(*samples, strict=True))
    part = TILE_OUTPUTS / num_outputs
    quantising = ((least - call) - (total - call) * part) / (1 - part)
    return float(min(max(quantising, 0.0), total))


def _time_ns(run: Callable[[], None]) -> int:
    begun = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - begun
