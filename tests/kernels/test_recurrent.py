"""What `rankopt::gru` promises beyond the parity grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package, config
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rankopt.kernels import ops
from rankopt.kernels.parity import RecurrentCase, make_recurrent_inputs
from rankopt.kernels.registry import KERNELS

SHAPES = [(20, 16, 16), (7, 3, 1), (5, 40, 70)]
Operator = Callable[..., tuple[Tensor, ...]]
OPERATORS = [pytest.param(ops.gru, 3, id="gru"), pytest.param(ops.lstm, 4, id="lstm")]
each_operator = pytest.mark.parametrize(("operator", "num_gates"), OPERATORS)


def inputs(
    num_gates: int, num_rows: int, num_steps: int, num_inputs: int, num_hidden: int
) -> list[Tensor]:
    case = RecurrentCase(num_rows, num_steps, num_inputs, num_hidden)
    made = make_recurrent_inputs(case, num_gates, 0)
    return [tensor for tensor in made if tensor is not None]


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_grid_holds_the_shapes_that_break_recurrences(name: str) -> None:
    cases = KERNELS[name].cases
    assert {case.num_rows for case in cases} >= {0, 1, 2, 7, 513}
    assert len({str(case) for case in cases}) == len(cases)
    lengths = inputs(3, 7, 5, 3, 2)[1]
    assert {0, 5} <= set(lengths.tolist())


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("shape", SHAPES)
@each_operator
def test_row_is_the_same_alone_anywhere_and_beside_anything(
    operator: Operator, num_gates: int, isa: str, shape: tuple[int, int, int]
) -> None:
    ops.set_isa(isa)
    x, lengths, *weights = inputs(num_gates, 97, *shape)
    together = operator(x, lengths, *weights)
    for row in range(0, 97, 8):
        alone = operator(x[row : row + 1], lengths[row : row + 1], *weights)
        assert all(
            torch.equal(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True)
        )
    order = torch.randperm(97, generator=torch.Generator().manual_seed(1))
    moved = operator(x[order], lengths[order], *weights)
    assert all(torch.equal(one, all_[order]) for one, all_ in zip(moved, together, strict=True))
    spoiled, longer = x.clone(), lengths.clone()
    spoiled[::2], longer[::2] = torch.nan, shape[0]
    beside = operator(spoiled, longer, *weights)
    for one, all_ in zip(beside, together, strict=True):
        assert torch.equal(one[1::2], all_[1::2])
        assert one[::2].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
@each_operator
def test_instruction_sets_and_threads_give_the_same_bits(
    operator: Operator, num_gates: int, shape: tuple[int, int, int]
) -> None:
    given = inputs(num_gates, 513, *shape)
    results = []
    for isa in ops.supported_isas():
        ops.set_isa(isa)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(torch.cat([part.flatten() for part in operator(*given)]))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("operator", "kind"), [(ops.gru, nn.GRU), (ops.lstm, nn.LSTM)])
def test_packed_lists_of_torch_give_the_same(operator: Operator, kind: type[nn.RNNBase]) -> None:
    generator = torch.Generator().manual_seed(5)
    layer = kind(6, 10, batch_first=True)
    x = torch.randn(9, 8, 6, generator=generator)
    lengths = torch.randint(1, 9, (9,), generator=generator)
    with torch.no_grad():
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        result, end = layer(packed)
        expected, _ = pad_packed_sequence(result, batch_first=True, total_length=8)
        outputs, *states = operator(x, lengths, *layer.parameters())
    torch.testing.assert_close(outputs, expected)
    for state, last in zip(states, end if isinstance(end, tuple) else [end], strict=True):
        torch.testing.assert_close(state, last[0])


def test_strided_input_is_read_as_it_is() -> None:
    x, lengths, *weights = inputs(3, 6, 5, 4, 3)
    x = x.nan_to_num()
    time_major = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(ops.gru(time_major, lengths, *weights)[0], ops.gru(x, lengths, *weights)[0])


@each_operator
def test_negative_length_is_an_empty_row_and_too_long_is_refused(
    operator: Operator, num_gates: int
) -> None:
    x, lengths, *weights = inputs(num_gates, 4, 5, 4, 3)
    assert not any(part.any() for part in operator(x, torch.full_like(lengths, -2), *weights))
    lengths[2] = 6
    with pytest.raises(RuntimeError, match=r"lengths\[2\] must be at most 5; got 6"):
        operator(x, lengths, *weights)
    with pytest.raises(RuntimeError, match="w_ih must be float32"):
        operator(x, lengths.clamp(max=5), weights[0][:, 1:], *weights[1:])


class Recurrences(nn.Module):
    """Results are read in part, and go from one recurrence into the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 6)
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        gru, lstm = list(self.gru.parameters()), list(self.lstm.parameters())
        outputs, last = torch.ops.rankopt.gru(x, lengths, *gru, None, False)
        _, back = torch.ops.rankopt.gru(outputs, lengths, *gru[:2], None, None, last, True)
        steps, _, held = torch.ops.rankopt.lstm(outputs, lengths, *lstm, back, None, False)
        return outputs, back, steps, held


@pytest.mark.parametrize("c_shims", [False, True])
def test_compiled_operators_equal_eager(tmp_path: Path, c_shims: bool) -> None:
    module = Recurrences().eval()
    batch = torch.export.Dim("batch", min=1)
    shapes = ({0: batch}, {0: batch})
    example = (torch.zeros(4, 3, 6), torch.ones(4, dtype=torch.int64))
    with torch.no_grad():
        program = torch.export.export(module, example, dynamic_shapes=shapes)
        shims = ops.aoti_c_shims() if c_shims else {}
        with config.patch({"aot_inductor.custom_ops_to_c_shims": shims}):
            path = aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        compiled = aoti_load_package(path)
        for num_rows in (1, 2, 5, 130):
            x, lengths, *_ = inputs(3, num_rows, 3, 6, 6)
            for result, expected in zip(compiled(x, lengths), module(x, lengths), strict=True):
                assert torch.equal(result, expected)
