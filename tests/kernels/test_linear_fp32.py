"""What `rankopt::linear_fp32` promises beyond the parity grid."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rankopt.kernels import ops
from rankopt.kernels.packing import pack_linear_fp32

# Wide and narrow layers, whole tiles and parts of one.
LAYERS = [(13, 512), (130, 50), (256, 1), (40, 1), (1, 1), (33, 4), (70, 5)]


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor]:
    return normal(num_outputs, num_inputs, seed=7), normal(num_outputs, seed=8)


def run(weight: Tensor, bias: Tensor | None, x: Tensor, slope: Tensor | None = None) -> Tensor:
    packed = pack_linear_fp32(weight)
    return ops.linear_fp32(x, packed, bias, slope, num_outputs=weight.shape[0])


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize(("num_inputs", "num_outputs"), LAYERS)
def test_row_is_the_same_alone_anywhere_and_beside_anything(
    isa: str, num_inputs: int, num_outputs: int
) -> None:
    ops.set_isa(isa)
    weight, bias = layer(num_inputs, num_outputs)
    x = normal(97, num_inputs)
    together = run(weight, bias, x)
    for row in (0, 1, 40, 96):
        assert torch.equal(run(weight, bias, x[row : row + 1])[0], together[row])
    for num_rows in (2, 3, 7, 8, 9, 33):
        assert torch.equal(run(weight, bias, x[:num_rows]), together[:num_rows])
    order = torch.randperm(97, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(weight, bias, x[order]), together[order])
    for neighbour in (torch.nan, torch.inf, -torch.inf, 1e6):
        spoiled = x.clone()
        spoiled[::2] = neighbour
        result = run(weight, bias, spoiled)
        assert torch.equal(result[1::2], together[1::2])
        if neighbour != 1e6:
            assert not result[::2].isfinite().any()


@pytest.mark.parametrize(("num_inputs", "num_outputs"), LAYERS)
def test_instruction_sets_give_the_same_bits(num_inputs: int, num_outputs: int) -> None:
    weight, bias = layer(num_inputs, num_outputs)
    x = normal(21, num_inputs)
    results = []
    for isa in ops.supported_isas():
        ops.set_isa(isa)
        results.append(run(weight, bias, x, torch.full((1,), 0.1)))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [(700, 200, 30), (1, 1000, 800), (9, 500, 300), (4001, 90, 1), (2001, 64, 3)],
)
def test_threads_do_not_change_a_bit(
    isa: str, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    ops.set_isa(isa)
    weight, bias = layer(num_inputs, num_outputs)
    x = normal(num_rows, num_inputs)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(weight, bias, x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_calls_from_several_python_threads_agree() -> None:
    weight, bias = layer(256, 1)
    inputs = [normal(num_rows, 256, seed=num_rows) for num_rows in range(1, 40)]
    expected = [run(weight, bias, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: run(weight, bias, x), inputs * 5))
    for result, wanted in zip(results, expected * 5, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [*LAYERS, (1024, 16), (1024, 2)])
def test_error_stays_within_rounding_of_float64(num_inputs: int, num_outputs: int) -> None:
    weight, bias = layer(num_inputs, num_outputs)
    x = normal(64, num_inputs)
    exact = x.double() @ weight.double().T + bias.double()
    # One rounding for each product added and one for the bias, each half an ulp of what is summed.
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    bound = (num_inputs + 1) * torch.finfo(torch.float32).eps / 2 * magnitude * (1 + 1e-6)
    error = (run(weight, bias, x).double() - exact).abs()
    assert (error <= bound).all()
    # In practice it is as close as torch's own.
    theirs = (torch.nn.functional.linear(x, weight, bias).double() - exact).abs()
    assert error.mean() <= 4 * theirs.mean() + 1e-9


@pytest.mark.parametrize("num_outputs", [2, 50])
def test_zero_row_is_the_bias_and_no_rows_are_no_rows(num_outputs: int) -> None:
    weight, bias = layer(130, num_outputs)
    assert torch.equal(run(weight, bias, torch.zeros(2, 130)), bias.expand(2, -1))
    assert run(weight, bias, torch.empty(0, 130)).shape == (0, num_outputs)
    assert run(weight, bias, torch.empty(3, 0, 130)).shape == (3, 0, num_outputs)
    assert torch.equal(run(weight, bias, torch.zeros(130)), bias)


@pytest.mark.parametrize("num_outputs", [3, 50])
def test_negative_slope_is_relu_or_prelu(num_outputs: int) -> None:
    weight, bias = layer(130, num_outputs)
    x = normal(20, 130)
    plain = run(weight, bias, x)
    assert torch.equal(run(weight, bias, x, torch.zeros(1)), plain.relu())
    slopes = normal(num_outputs, seed=2).abs()
    wanted = torch.nn.functional.prelu(plain, slopes)
    assert torch.equal(run(weight, bias, x, slopes), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 13, dtype=torch.float64)}, "x must be float32"),
        ({"x": torch.zeros(2, 14)}, "packed must be 896 contiguous float32 values"),
        ({"x": torch.tensor(1.0)}, "x must be float32"),
        ({"packed": torch.zeros(832, dtype=torch.int8)}, "packed must be 832 .*got 832 of Char"),
        ({"bias": torch.ones(1)}, "bias must hold 50 values"),
        ({"negative_slope": torch.ones(2)}, "negative_slope must hold 50 values or one"),
        ({"num_outputs": 0}, "num_outputs must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    weight, bias = layer(13, 50)
    arguments = {
        "x": normal(2, 13),
        "packed": pack_linear_fp32(weight),
        "bias": bias,
        "num_outputs": 50,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.linear_fp32(**(arguments | change))
