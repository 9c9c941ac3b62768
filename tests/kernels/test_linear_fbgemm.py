"""What `rankopt::linear_fbgemm` promises beyond the parity grid: rows apart, handles owned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rankopt.kernels import ops
from rankopt.kernels.packing import quantize_linear_weight


@pytest.fixture
def layer() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    levels, scale = quantize_linear_weight(torch.randn(40, 96, generator=generator))
    return levels, scale, torch.randn(40, generator=generator)


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(5))


def on_the_fly() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


def test_packed_weights_give_the_bits_of_packing_on_the_fly(layer) -> None:
    levels, scale, bias = layer
    x = rows(33)
    handle = ops.fbgemm_pack(levels, scale)
    try:
        packed = ops.linear_fbgemm(x, levels, scale, bias, torch.tensor([handle]))
        assert torch.equal(packed, ops.linear_fbgemm(x, levels, scale, bias, on_the_fly()))
    finally:
        ops.fbgemm_release(handle)


def test_row_is_the_same_alone_and_beside_anything(layer) -> None:
    x = rows(31)
    together = ops.linear_fbgemm(x, *layer, on_the_fly())
    assert torch.equal(ops.linear_fbgemm(x[7:8], *layer, on_the_fly())[0], together[7])
    for neighbour in (torch.nan, torch.inf, 1e6, 0.0):
        spoiled = x.clone()
        spoiled[::2] = neighbour
        result = ops.linear_fbgemm(spoiled, *layer, on_the_fly())
        assert torch.equal(result[1::2], together[1::2])
        if neighbour == 0.0:
            assert torch.equal(result[0], layer[2])
        elif neighbour != 1e6:
            assert result[::2].isnan().all()


def test_released_and_unknown_handles_are_errors(layer) -> None:
    levels, scale, bias = layer
    handle = ops.fbgemm_pack(levels, scale)
    ops.fbgemm_release(handle)
    with pytest.raises(RuntimeError, match=f"no packed weights with handle {handle}"):
        ops.linear_fbgemm(rows(2), levels, scale, bias, torch.tensor([handle]))
    with pytest.raises(RuntimeError, match="was released before"):
        ops.fbgemm_release(handle)


def test_handles_are_never_given_out_twice(layer) -> None:
    levels, scale, _ = layer

    def pack_and_release(_: int) -> int:
        handle = ops.fbgemm_pack(levels, scale)
        ops.fbgemm_release(handle)
        return handle

    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(pack_and_release, range(60)))
    assert len(set(handles)) == 60


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 95), "K the weight's columns"),
        (1, torch.zeros(40, 96), "weight must be int8"),
        (2, torch.ones(39), "scale must be float32"),
        (3, torch.ones(39), "bias must be float32"),
        (4, torch.zeros(1), "handle must be int64"),
    ],
)
def test_wrong_arguments_are_named(layer, position: int, value: Tensor, message: str) -> None:
    arguments = [rows(2), *layer, on_the_fly()]
    arguments[position] = value
    with pytest.raises(RuntimeError, match=message):
        ops.linear_fbgemm(*arguments)
