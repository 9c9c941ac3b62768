"""What `rankopt::linear_int8` promises beyond the parity grid."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rankopt.kernels import ops
from rankopt.kernels.packing import ACTIVATION_CODES, pack_linear_int8, quantize_linear_weight

NUM_INPUTS, NUM_OUTPUTS = 130, 50


@pytest.fixture
def layer() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator)
    levels, scale = quantize_linear_weight(weight)
    bias = torch.randn(NUM_OUTPUTS, generator=generator)
    return weight, pack_linear_int8(levels), scale, bias


def rows(num_rows: int, num_inputs: int = NUM_INPUTS, seed: int = 3) -> Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(seed))


def run(layer: tuple[Tensor, ...], x: Tensor, bits: int, slope: Tensor | None = None) -> Tensor:
    _, packed, scale, bias = layer
    return ops.linear_int8(
        x, packed, scale, bias, slope, num_outputs=NUM_OUTPUTS, activation_bits=bits
    )


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("bits", [7, 8])
def test_row_is_the_same_alone_anywhere_and_beside_anything(layer, isa: str, bits: int) -> None:
    ops.set_isa(isa)
    x = rows(97)
    together = run(layer, x, bits)
    for row in (0, 1, 40, 96):
        assert torch.equal(run(layer, x[row : row + 1], bits)[0], together[row])
    order = torch.randperm(97, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(layer, x[order], bits), together[order])
    for neighbour in (torch.nan, torch.inf, -torch.inf, 1e6):
        spoiled = x.clone()
        spoiled[::2] = neighbour
        spoiled[4, 1:] = 0.0
        result = run(layer, spoiled, bits)
        assert torch.equal(result[1::2], together[1::2])
        if neighbour != 1e6:
            assert result[::2].isnan().all()


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"), [(700, 200, 90), (1, 3000, 800), (9, 2000, 300)]
)
def test_threads_do_not_change_a_bit(
    isa: str, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    ops.set_isa(isa)
    levels, scale = quantize_linear_weight(rows(num_outputs, num_inputs, seed=4))
    packed, x = pack_linear_int8(levels), rows(num_rows, num_inputs)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(ops.linear_int8(x, packed, scale, num_outputs=num_outputs))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_calls_from_several_python_threads_agree(layer) -> None:
    inputs = [rows(num_rows, seed=num_rows) for num_rows in range(1, 40)]
    expected = [run(layer, x, 7) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: run(layer, x, 7), inputs * 5))
    for result, wanted in zip(results, expected * 5, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize(("bits", "levels"), [(7, 63), (8, 127)])
def test_error_stays_within_half_a_level_of_each_input(layer, bits: int, levels: int) -> None:
    weight, _, scale, bias = layer
    x = rows(64)
    stored = scale[:, None].double() * quantize_linear_weight(weight)[0].double()
    exact = x.double() @ stored.T + bias.double()
    half_level = x.abs().amax(dim=1, keepdim=True).double() / levels / 2
    bound = half_level * stored.abs().sum(dim=1) * (1 + 1e-5)
    error = (run(layer, x, bits).double() - exact).abs()
    assert (error <= bound).all()
    # The bound is not so wide that anything would pass.
    assert error.max() > 0
    assert error.mean() < 0.1 * exact.abs().mean()


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("bits", [7, 8])
def test_largest_inputs_do_not_saturate(isa: str, bits: int) -> None:
    ops.set_isa(isa)
    x = torch.full((3, 64), 2.0)
    x[1] = -2.0
    x[2, 1::2] = -2.0
    levels = torch.full((4, 64), 127, dtype=torch.int8)
    levels[1] = -127
    levels[2, 1::2] = -127
    result = ops.linear_int8(
        x, pack_linear_int8(levels), torch.ones(4), num_outputs=4, activation_bits=bits
    )
    torch.testing.assert_close(result.double(), x.double() @ levels.double().T, rtol=1e-6, atol=0)


def test_zero_row_is_the_bias_and_no_rows_are_no_rows(layer) -> None:
    bias = layer[3]
    assert torch.equal(run(layer, torch.zeros(2, NUM_INPUTS), 7), bias.expand(2, -1))
    assert run(layer, torch.empty(0, NUM_INPUTS), 7).shape == (0, NUM_OUTPUTS)
    assert run(layer, torch.empty(3, 0, NUM_INPUTS), 7).shape == (3, 0, NUM_OUTPUTS)
    assert torch.equal(run(layer, torch.zeros(NUM_INPUTS), 7), bias)


def test_negative_slope_is_relu_or_prelu(layer) -> None:
    x = rows(20)
    plain = run(layer, x, 8)
    assert torch.equal(run(layer, x, 8, torch.zeros(1)), plain.relu())
    slopes = torch.rand(NUM_OUTPUTS, generator=torch.Generator().manual_seed(2))
    wanted = torch.nn.functional.prelu(plain, slopes)
    assert torch.equal(run(layer, x, 8, slopes), wanted)


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_activations_follow_float64_over_the_whole_range(isa: str, name: str) -> None:
    ops.set_isa(isa)
    exact = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}[name]
    # One input, one weight of 1: the layer's result is its bias.
    bias = torch.cat([torch.linspace(-120, 120, 4801), torch.tensor([-0.0, 1e30, -1e30])])
    width = len(bias)
    levels = torch.zeros(width, 1, dtype=torch.int8)
    packed, x = pack_linear_int8(levels), torch.ones(2, 1)
    result = ops.linear_int8(
        x,
        packed,
        torch.ones(width),
        bias,
        num_outputs=width,
        activation=ACTIVATION_CODES[name],
    )
    wanted = exact(bias.double()).expand(2, -1)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, NUM_INPUTS, dtype=torch.float64)}, "x must be float32"),
        ({"x": torch.zeros(2, NUM_INPUTS + 4)}, "packed must be"),
        ({"x": torch.tensor(1.0)}, "x must be float32"),
        ({"packed": torch.zeros(3, dtype=torch.int8)}, "packed must be"),
        ({"scale": torch.ones(NUM_OUTPUTS + 1)}, "scale must hold 50 values"),
        ({"bias": torch.ones(1)}, "bias must hold 50 values"),
        ({"negative_slope": torch.ones(2)}, "negative_slope must hold 50 values or one"),
        ({"activation_bits": 6}, "activation_bits must be 7 or 8; got 6"),
        ({"activation": 1}, "activation must be 0 .none., 2 .sigmoid. or 3 .silu.; got 1"),
        ({"num_outputs": 0}, "num_outputs must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(layer, change: dict[str, object], message: str) -> None:
    _, packed, scale, bias = layer
    arguments = {
        "x": rows(2),
        "packed": packed,
        "scale": scale,
        "bias": bias,
        "num_outputs": NUM_OUTPUTS,
        "activation_bits": 7,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.linear_int8(**(arguments | change))


def test_too_many_inputs_are_refused() -> None:
    packed = torch.zeros(16 * (65540 + 4), dtype=torch.int8)
    with pytest.raises(RuntimeError, match="at most 65536 inputs"):
        ops.linear_int8(torch.zeros(1, 65540), packed, torch.ones(1), num_outputs=1)


def test_unknown_isa_is_refused_and_changes_nothing() -> None:
    before = ops.current_isa()
    with pytest.raises(RuntimeError, match=r"got 'sse9'\. Allowed here: auto, scalar"):
        ops.set_isa("sse9")
    assert ops.current_isa() == before
    ops.set_isa("scalar")
    assert ops.current_isa() == "scalar"
    ops.set_isa("auto")
    assert ops.current_isa() == ops.supported_isas()[-1]
