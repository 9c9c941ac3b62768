"""What `rankopt::linear_fp16` promises beyond the parity grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankopt.kernels import ops
from rankopt.kernels.mlp import MlpLayer, mlp_int8
from rankopt.kernels.packing import (
    fits_fp16,
    pack_linear_fp16,
    pack_linear_fp32,
    pack_linear_int8,
    quantize_linear_weight,
)

# Wide and narrow layers, whole tiles and parts of one.
LAYERS = [(13, 512), (130, 50), (256, 1), (1, 1), (33, 4), (70, 5)]


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear_fp16(x, pack_linear_fp16(weight), bias, num_outputs=weight.shape[0])


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize(("num_inputs", "num_outputs"), LAYERS)
def test_bits_are_those_of_fp32_on_the_rounded_weights(
    isa: str, num_inputs: int, num_outputs: int
) -> None:
    ops.set_isa(isa)
    weight, bias = normal(num_outputs, num_inputs), normal(num_outputs, seed=8)
    x = normal(97, num_inputs, seed=4)
    rounded = pack_linear_fp32(weight.half().float())
    expected = ops.linear_fp32(x, rounded, bias, num_outputs=num_outputs)
    assert torch.equal(run(weight, x, bias), expected)


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_every_finite_half_is_read_exactly(isa: str) -> None:
    ops.set_isa(isa)
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = halves[halves.isfinite()].float()
    one = torch.ones(1, 1)
    # 0 + 1 * w: of negative zero the sum is zero.
    wide = run(weight.reshape(-1, 1), one)[0]
    assert torch.equal(wide, weight + 0.0)
    # One input to a lane, the others zero.
    rows = torch.eye(16).repeat(4, 1)[:64]
    narrow = run(weight[: 16 * (len(weight) // 16)].reshape(-1, 16)[:4], rows[:16])
    assert torch.equal(narrow, weight[:64].reshape(4, 16).T + 0.0)


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize(("num_inputs", "num_outputs"), LAYERS)
def test_row_is_the_same_alone_anywhere_and_beside_anything(
    isa: str, num_inputs: int, num_outputs: int
) -> None:
    ops.set_isa(isa)
    weight = normal(num_outputs, num_inputs)
    x = normal(97, num_inputs, seed=4)
    together = run(weight, x)
    for num_rows in (1, 2, 3, 7, 8, 9, 33):
        assert torch.equal(run(weight, x[:num_rows]), together[:num_rows])
    spoiled = x.clone()
    spoiled[::2] = torch.nan
    result = run(weight, spoiled)
    assert torch.equal(result[1::2], together[1::2])
    assert result[::2].isnan().all()


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("num_rows", [1, 3, 17, 700, 1500])
def test_no_schedule_changes_a_bit(isa: str, num_rows: int) -> None:
    """One thread, rows shared, outputs shared with a wait between layers, blocks; fused or not."""
    ops.set_isa(isa)
    widths, kinds = (300, 260, 200, 3), ("fp16", "int8", "fp16")
    layers = []
    for index, kind in enumerate(kinds):
        weight = normal(widths[index + 1], widths[index], seed=index) / 16
        levels, scale = quantize_linear_weight(weight)
        int8 = kind == "int8"
        packed = pack_linear_int8(levels) if int8 else pack_linear_fp16(weight)
        given = scale if int8 else None
        layers.append(MlpLayer(packed, given, None, torch.zeros(1), widths[index + 1]))
    x = normal(num_rows, 300)
    torch.set_num_threads(1)
    alone = mlp_int8(x, layers)
    one_by_one = x
    for layer in layers:
        one_by_one = mlp_int8(one_by_one, [layer])
    assert torch.equal(one_by_one, alone)
    assert torch.equal(mlp_int8(x[-1:], layers)[0], alone[-1])
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(mlp_int8(x, layers), alone)


def test_weights_that_fp16_cannot_hold_are_refused() -> None:
    weight = torch.full((2, 3), 65504.0)
    assert fits_fp16(weight)
    weight[1, 2] = -65505.0
    assert not fits_fp16(weight)
    with pytest.raises(ValueError, match="at most 65504"):
        pack_linear_fp16(weight)
    assert not fits_fp16(torch.tensor([[torch.nan]]))


def test_another_type_of_weight_is_named() -> None:
    x, weight = normal(2, 13), normal(50, 13)
    with pytest.raises(RuntimeError, match="linear_fp16: packed must be float16; got Float"):
        ops.linear_fp16(x, pack_linear_fp32(weight), num_outputs=50)
    with pytest.raises(RuntimeError, match="linear_fp32: packed must be float32"):
        ops.linear_fp32(x, pack_linear_fp16(weight), num_outputs=50)
    with pytest.raises(RuntimeError, match="packed must be 832 contiguous float16"):
        ops.linear_fp16(x, pack_linear_fp16(weight)[:-1], num_outputs=50)
