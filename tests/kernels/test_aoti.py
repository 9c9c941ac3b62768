"""The operators go through torch.export and AOTInductor, with a dynamic batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package, config

from rankopt.kernels import ops
from rankopt.kernels.packing import (
    pack_linear_fp16,
    pack_linear_fp32,
    pack_linear_int8,
    quantize_linear_weight,
)


class Layers(nn.Module):
    """One layer of each operator, with and without bias and slope."""

    packed: Tensor
    levels: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        levels, scale = quantize_linear_weight(torch.randn(20, 10, generator=generator))
        self.register_buffer("packed", pack_linear_int8(levels))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.randn(20, generator=generator))
        self.register_buffer("slope", torch.zeros(1))
        levels, scale = quantize_linear_weight(torch.randn(7, 20, generator=generator))
        self.register_buffer("levels", levels)
        self.register_buffer("levels_scale", scale)
        self.register_buffer("next", pack_linear_int8(levels))
        self.register_buffer("peak", torch.full((1,), 6.0))
        self.register_buffer("next_scale", scale.clone())
        self.register_buffer("narrow", pack_linear_fp32(torch.randn(3, 7, generator=generator)))
        self.register_buffer("fp16", pack_linear_fp16(torch.randn(6, 3, generator=generator)))
        self.register_buffer("narrow_bias", torch.randn(3, generator=generator))
        self.register_buffer("handle", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one = torch.ops.rankopt.linear_int8(
            x, self.packed, self.scale, self.bias, self.slope, 20, 7, 3
        )
        two = torch.ops.rankopt.linear_int8(x, self.packed, self.scale, None, None, 20, 8)
        three = torch.ops.rankopt.linear_fbgemm(
            one, self.levels, self.levels_scale, None, self.handle
        )
        four = torch.ops.rankopt.linear_fp32(three, self.narrow, self.narrow_bias, None, 3, 2)
        half = torch.ops.rankopt.linear_fp16(four, self.fp16, None, self.slope, 6, 3)
        five = torch.ops.rankopt.mlp_int8(
            x,
            [self.packed, self.next, self.narrow],
            [self.scale, self.next_scale, None],
            [None, None, self.narrow_bias],
            [self.slope, None, None],
            [None, self.peak, None],
            [20, 7, 3],
            7,
            [0, 3, 2],
        )
        return one, two, three, four, half, five


@pytest.mark.parametrize("c_shims", [False, True])
def test_compiled_operators_equal_eager(tmp_path: Path, c_shims: bool) -> None:
    module = Layers()
    # Three dims: histories go through the same layer as [B, L, K].
    example = (torch.zeros(4, 3, 10),)
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(module, example, dynamic_shapes=shapes)
    shims = ops.aoti_c_shims() if c_shims else {}
    with config.patch({"aot_inductor.custom_ops_to_c_shims": shims}):
        path = aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    compiled = aoti_load_package(path)
    generator = torch.Generator().manual_seed(1)
    for num_rows in (1, 2, 5, 130):
        x = torch.randn(num_rows, 3, 10, generator=generator)
        for result, expected in zip(compiled(x), module(x), strict=True):
            assert torch.equal(result, expected)
