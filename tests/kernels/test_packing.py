"""Weights survive quantising and packing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankopt.kernels.packing import (
    pack_linear_fp32,
    pack_linear_int8,
    packed_size_bytes,
    quantize_linear_weight,
    unpack_linear_fp32,
    unpack_linear_int8,
)


@settings(max_examples=60, deadline=None)
@given(num_outputs=st.integers(1, 40), num_inputs=st.integers(0, 40), seed=st.integers(0, 999))
def test_unpack_is_the_inverse_of_pack(num_outputs: int, num_inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator)
    levels = levels.to(torch.int8)
    packed = pack_linear_int8(levels)
    assert packed.dtype == torch.int8
    assert packed.numel() == packed_size_bytes(num_outputs, num_inputs)
    assert torch.equal(unpack_linear_int8(packed, num_outputs, num_inputs), levels)


def test_layout_is_the_documented_one() -> None:
    levels = torch.arange(1, 1 + 17 * 6).reshape(17, 6).to(torch.int8)
    packed = pack_linear_int8(levels)
    tiles = packed[: 2 * 2 * 64].view(2, 2, 16, 4)
    assert tiles[0, 1, 3, :2].tolist() == levels[3, 4:6].tolist()
    assert tiles[1, 0, 0].tolist() == levels[16, :4].tolist()
    assert tiles[0, 1, :, 2:].abs().sum() == 0
    assert tiles[1, :, 1:].abs().sum() == 0
    sums = packed[2 * 2 * 64 :].view(torch.int32)
    assert sums[:17].tolist() == levels.sum(dim=1, dtype=torch.int32).tolist()
    assert sums[17:].abs().sum() == 0


@settings(max_examples=60, deadline=None)
@given(num_outputs=st.integers(1, 40), num_inputs=st.integers(0, 40), seed=st.integers(0, 999))
def test_unpack_is_the_inverse_of_pack_in_fp32(
    num_outputs: int, num_inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    packed = pack_linear_fp32(weight)
    assert torch.equal(unpack_linear_fp32(packed, num_outputs, num_inputs), weight)


def test_fp32_layout_is_the_documented_one() -> None:
    weight = torch.arange(1.0, 1 + 17 * 6).reshape(17, 6)
    tiles = pack_linear_fp32(weight).view(2, 6, 16)
    assert torch.equal(tiles[0, 2], weight[:16, 2])
    assert torch.equal(tiles[1, :, 0], weight[16])
    assert tiles[1, :, 1:].abs().sum() == 0
    rows = pack_linear_fp32(weight.reshape(-1)[:80].reshape(4, 20)).view(4, 32)
    assert torch.equal(rows[1, :20], torch.arange(21.0, 41.0))
    assert rows[:, 20:].abs().sum() == 0


def test_quantised_weight_is_within_half_a_level() -> None:
    weight = torch.randn(20, 33, generator=torch.Generator().manual_seed(0))
    weight[4] *= 1e-4
    levels, scale = quantize_linear_weight(weight)
    error = (levels.double() * scale[:, None].double() - weight.double()).abs()
    assert (error <= 0.5 * scale[:, None].double() * (1 + 1e-6)).all()
    assert levels.abs().amax(dim=1).tolist() == [127] * 20


def test_output_of_zeros_quantises_to_zeros() -> None:
    weight = torch.zeros(3, 5)
    weight[1] = 1e-45
    levels, scale = quantize_linear_weight(weight)
    assert levels.abs().sum() == 0
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(3), "float matrix"),
        (torch.zeros(3, 3, dtype=torch.int8), "float matrix"),
        (torch.full((2, 2), torch.nan), "finite"),
    ],
)
def test_weights_that_cannot_be_quantised_are_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_linear_weight(weight)


def test_levels_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ValueError, match="-128"):
        pack_linear_int8(torch.full((2, 2), -128, dtype=torch.int8))
    with pytest.raises(ValueError, match="int8 matrix"):
        pack_linear_int8(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="packed must be 384 int8 values for 17 x 6"):
        unpack_linear_int8(torch.zeros(384 + 1, dtype=torch.int8), 17, 6)
    with pytest.raises(ValueError, match="float32 matrix"):
        pack_linear_fp32(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="packed must be 192 float32 values for 17 x 6"):
        unpack_linear_fp32(torch.zeros(191), 17, 6)
