"""What `rankopt::mlp_int8` promises beyond the parity grid."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rankopt.kernels import ops
from rankopt.kernels.mlp import MlpLayer, mlp_int8
from rankopt.kernels.packing import pack_linear_fp32, pack_linear_int8, quantize_linear_weight
from rankopt.kernels.registry import KERNELS

WIDTHS = (13, 48, 130, 80, 1)
INT8 = (False, True, True, False)


def rows(num_rows: int, num_inputs: int = WIDTHS[0], seed: int = 3) -> Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(seed))


def chain(widths: tuple[int, ...] = WIDTHS, int8: tuple[bool, ...] = INT8) -> list[MlpLayer]:
    layers = []
    for index, is_int8 in enumerate(int8):
        num_inputs, num_outputs = widths[index : index + 2]
        weight = rows(num_outputs, num_inputs, seed=index)
        levels, scale = quantize_linear_weight(weight)
        bias = rows(1, num_outputs, seed=20 + index)[0]
        slope = None if index + 1 == len(int8) else torch.zeros(1)
        if is_int8:
            layers.append(MlpLayer(pack_linear_int8(levels), scale, bias, slope, num_outputs))
        else:
            layers.append(MlpLayer(pack_linear_fp32(weight), None, bias, slope, num_outputs))
    return layers


def one_by_one(x: Tensor, layers: list[MlpLayer], bits: int) -> Tensor:
    for layer in layers:
        width, slope = layer.num_outputs, layer.negative_slope
        if layer.scale is None:
            x = ops.linear_fp32(x, layer.packed, layer.bias, slope, num_outputs=width)
        else:
            x = ops.linear_int8(
                x,
                layer.packed,
                layer.scale,
                layer.bias,
                slope,
                num_outputs=width,
                activation_bits=bits,
            )
    return x


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("num_rows", [1, 2, 9, 33, 700])
def test_a_chain_has_the_bits_of_its_layers_called_one_by_one(isa: str, num_rows: int) -> None:
    ops.set_isa(isa)
    layers, x = chain(), rows(num_rows)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for bits in (7, 8):
            result = mlp_int8(x, layers, activation_bits=bits)
            assert torch.equal(result, one_by_one(x, layers, bits))


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_row_is_the_same_alone_anywhere_and_beside_anything(isa: str) -> None:
    ops.set_isa(isa)
    layers, x = chain(), rows(97)
    together = mlp_int8(x, layers)
    for row in (0, 1, 40, 96):
        assert torch.equal(mlp_int8(x[row : row + 1], layers)[0], together[row])
    order = torch.randperm(97, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mlp_int8(x[order], layers), together[order])
    for neighbour in (torch.nan, torch.inf, 1e30):
        spoiled = x.clone()
        spoiled[::2] = neighbour
        assert torch.equal(mlp_int8(spoiled, layers)[1::2], together[1::2])


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("num_rows", [1, 3, 8, 17, 300])
def test_threads_do_not_change_a_bit(isa: str, num_rows: int) -> None:
    ops.set_isa(isa)
    layers = chain((900, 800, 700, 90, 600), (True, False, True, True))
    x = rows(num_rows, 900)
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(mlp_int8(x, layers))
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_calls_from_several_python_threads_agree() -> None:
    layers = chain()
    inputs = [rows(num_rows, seed=num_rows) for num_rows in range(1, 40)]
    expected = [mlp_int8(x, layers) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: mlp_int8(x, layers), inputs * 5))
    for result, wanted in zip(results, expected * 5, strict=True):
        assert torch.equal(result, wanted)


def test_an_output_of_the_layer_before_is_left_whole() -> None:
    layers, x = chain(), rows(50)
    before = x.clone()
    mlp_int8(x, layers)
    assert torch.equal(x, before)


def test_lists_of_different_lengths_and_layers_that_do_not_fit_are_refused() -> None:
    layers = chain()
    with pytest.raises(RuntimeError, match=r"mlp_int8: packed must be .* contiguous float32"):
        mlp_int8(rows(2, 14), layers)
    with pytest.raises(RuntimeError, match=r"mlp_int8: packed must be .* 130 inputs"):
        mlp_int8(rows(2), [*layers[:2], MlpLayer(*vars(chain()[1]).values())])
    with pytest.raises(RuntimeError, match="at least one layer"):
        mlp_int8(rows(2), [])
    one = layers[0]
    with pytest.raises(RuntimeError, match="one entry for each layer"):
        torch.ops.rankopt.mlp_int8(rows(2), [one.packed], [], [None], [None], [None], [48], 7)
    with pytest.raises(RuntimeError, match="activation_bits must be 7 or 8"):
        mlp_int8(rows(2), layers, activation_bits=6)


def test_grid_holds_chains_that_begin_and_end_in_either_kind() -> None:
    cases = KERNELS["mlp_int8"].cases
    assert {case.num_rows for case in cases} >= {0, 1, 2, 5, 17, 97}
    assert {(case.int8[0], case.int8[-1]) for case in cases} == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    }
    assert {case.activation_bits for case in cases} == {7, 8}
    assert len({str(case) for case in cases}) == len(cases)


def fixed_chain() -> list[MlpLayer]:
    return [
        MlpLayer(*list(vars(layer).values())[:5], peak=torch.tensor([4.0 * 3**index]))
        for index, layer in enumerate(chain((130, 90, 77, 40, 33), (True, True, True, True)))
    ]


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("num_rows", [1, 7, 40, 700])
def test_with_fixed_peaks_neither_rows_nor_threads_change_a_bit(isa: str, num_rows: int) -> None:
    layers, x = fixed_chain(), rows(num_rows, 130)
    ops.set_isa("scalar")
    expected = mlp_int8(x, layers)
    ops.set_isa(isa)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(mlp_int8(x, layers), expected)
    assert torch.equal(mlp_int8(x[-1:], layers)[0], expected[-1])


def test_a_fixed_peak_cuts_off_what_lies_beyond() -> None:
    weight = torch.eye(16)
    levels, scale = quantize_linear_weight(weight)
    layer = MlpLayer(pack_linear_int8(levels), scale, None, None, 16, torch.tensor([2.0]))
    x = torch.linspace(-6, 6, 16)[None]
    for layers in ([layer], [layer, layer]):
        result = mlp_int8(x, layers, activation_bits=8)
        assert torch.allclose(result, x.clamp(-2, 2), atol=2 / 127)
    x[0, 3] = torch.inf
    assert mlp_int8(x, [layer, layer]).isnan().all()


@pytest.mark.parametrize("peak", [0.0, -1.0, torch.inf, torch.nan])
def test_a_peak_that_is_no_size_is_refused(peak: float) -> None:
    layer = fixed_chain()[0]
    bad = MlpLayer(*list(vars(layer).values())[:5], peak=torch.tensor([peak]))
    with pytest.raises(RuntimeError, match="peak must be finite and at least"):
        mlp_int8(rows(2, 130), [bad])
