"""What the interaction operators promise beyond the parity grid."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package, config

from rankopt.kernels import ops
from rankopt.kernels.interaction import dot_interaction, fm_interaction
from rankopt.kernels.registry import KERNELS
from rankopt.models.layers import DotInteraction, FactorizationMachine

# Fields and columns: one group of lanes and several, whole vectors and parts of one.
SHAPES = [(27, 64), (9, 32), (16, 16), (33, 7), (2, 1), (40, 5)]
Call = Callable[[Tensor, int], Tensor]
CALLS = [
    pytest.param(lambda x, dim: dot_interaction([x[:, :dim]], [x], dim=dim), id="dot"),
    pytest.param(lambda x, dim: dot_interaction([], [x], dim=dim, upper=True), id="upper"),
    pytest.param(lambda x, dim: fm_interaction([x], dim=dim), id="sum"),
    pytest.param(lambda x, dim: fm_interaction([x], dim=dim, total=False), id="columns"),
]
each_call = pytest.mark.parametrize("call", CALLS)


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["dot_interaction", "fm_interaction"])
def test_grid_holds_the_shapes_that_break_interactions(name: str) -> None:
    cases = KERNELS[name].cases
    assert {case.num_rows for case in cases} >= {0, 1, 3}
    assert {sum(case.pieces) for case in cases} >= {1, 2, 15, 16, 17, 27, 32, 33}
    assert {case.dim for case in cases} >= {1, 3, 16, 30, 64}
    assert {case.values for case in cases} >= {"tiny", "huge", "nonfinite", "alternating"}
    assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize(("num_fields", "dim"), SHAPES)
@each_call
def test_row_is_the_same_alone_anywhere_and_beside_anything(
    call: Call, num_fields: int, dim: int, isa: str
) -> None:
    ops.set_isa(isa)
    x = normal(41, num_fields * dim)
    together = call(x, dim)
    for row in (0, 1, 20, 40):
        assert torch.equal(call(x[row : row + 1], dim)[0], together[row])
    order = torch.randperm(41, generator=torch.Generator().manual_seed(1))
    assert torch.equal(call(x[order], dim), together[order])
    for neighbour in (torch.nan, torch.inf, 1e6):
        spoiled = x.clone()
        spoiled[::2] = neighbour
        assert torch.equal(call(spoiled, dim)[1::2], together[1::2])


@pytest.mark.parametrize(("num_fields", "dim"), SHAPES)
@each_call
def test_instruction_sets_and_threads_give_the_same_bits(
    call: Call, num_fields: int, dim: int
) -> None:
    x = normal(700, num_fields * dim)
    results = []
    for isa in ops.supported_isas():
        ops.set_isa(isa)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(call(x, dim))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@each_call
def test_pieces_do_not_change_a_bit(call: Call) -> None:
    del call
    x = normal(9, 27 * 16)
    cut = [x[:, :16], x[:, 16:48], x[:, 48:]]
    for upper, diagonal in ((False, False), (True, False), (False, True), (True, True)):
        whole = dot_interaction([x[:, :16]], [x], dim=16, upper=upper, diagonal=diagonal)
        assert torch.equal(
            dot_interaction([x[:, :7], x[:, 7:16]], cut, dim=16, upper=upper, diagonal=diagonal),
            whole,
        )
    assert torch.equal(fm_interaction(cut, dim=16), fm_interaction([x], dim=16))


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_every_triangle_is_the_same_row_by_row(isa: str) -> None:
    ops.set_isa(isa)
    for num_fields, dim in ((1, 16), (4, 66), (6, 5), (27, 64)):
        x = normal(29, num_fields * dim)
        for upper, diagonal in ((False, False), (True, False), (False, True), (True, True)):
            call = partial(dot_interaction, dim=dim, upper=upper, diagonal=diagonal)
            rows = [call([one[:, :1]], [one]) for one in x.split(1)]
            assert torch.equal(call([x[:, :1]], [x]), torch.cat(rows))


def test_calls_from_several_python_threads_agree() -> None:
    inputs = [normal(num_rows, 27 * 16, seed=num_rows) for num_rows in range(1, 30)]
    expected = [dot_interaction([], [x], dim=16) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: dot_interaction([], [x], dim=16), inputs * 5))
    for result, wanted in zip(results, expected * 5, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize(("num_fields", "dim"), SHAPES)
def test_they_are_the_layers_of_the_reference_models(num_fields: int, dim: int) -> None:
    fields = normal(5, num_fields, dim)
    pairs = DotInteraction(num_fields)(fields.double())
    result = dot_interaction([], [fields.flatten(1)], dim=dim).double()
    torch.testing.assert_close(result, pairs, rtol=1e-5, atol=1e-4)
    total = FactorizationMachine()(fields.double())
    result = fm_interaction([fields.flatten(1)], dim=dim).double()
    torch.testing.assert_close(result, total, rtol=1e-5, atol=1e-4)


def test_a_sum_over_pairs_loses_no_digits_where_the_identity_does() -> None:
    """One loud field: its square swamps the products that the machine is about."""
    fields = normal(200, 8, 16) * 1e-3
    fields[:, 0] += 1e3
    exact = FactorizationMachine()(fields.double())
    ours = (fm_interaction([fields.flatten(1)], dim=16).double() - exact).abs().max()
    theirs = (FactorizationMachine()(fields).double() - exact).abs().max()
    assert ours < 1e-4
    assert ours < theirs / 10


@each_call
def test_no_rows_are_no_rows(call: Call) -> None:
    assert call(torch.empty(0, 27 * 4), 4).shape == call(torch.zeros(2, 27 * 4), 4)[:0].shape


def test_one_field_has_no_pairs() -> None:
    x = normal(3, 8)
    assert torch.equal(dot_interaction([x], [x], dim=8), x)
    assert torch.equal(fm_interaction([x], dim=8), torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": [torch.zeros(2, 8, dtype=torch.float64)]}, "float32"),
        ({"fields": [torch.zeros(2, 2, 4)]}, r"\[B, columns\]"),
        ({"fields": [torch.zeros(2, 8), torch.zeros(3, 8)]}, "must have 2 rows; got one with 3"),
        ({"fields": [torch.zeros(2, 9)]}, "fields of 4 columns must fill a piece; got one of 9"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"before": [torch.zeros(3, 4)]}, "must have 2 rows"),
        ({"before": [torch.zeros(2, 4)], "fields": []}, "there are no fields"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"before": [], "fields": [torch.zeros(2, 8)], "dim": 4}
    with pytest.raises(RuntimeError, match=message):
        dot_interaction(**(arguments | change))
    if "before" not in change:
        del arguments["before"]
        with pytest.raises(RuntimeError, match=message):
            fm_interaction(**(arguments | change))


class Interactions(nn.Module):
    """Each operator, on whole tensors and on parts of one."""

    def forward(self, dense: Tensor, pooled: Tensor) -> tuple[Tensor, ...]:
        twice = dense * 2
        dot = torch.ops.rankopt.dot_interaction([twice], [twice, pooled], 8, False, False, 0)
        part = pooled[:, 8:32]
        upper = torch.ops.rankopt.dot_interaction([], [part], 8, True, True, 1)
        total = torch.ops.rankopt.fm_interaction([twice, part], 8, True, 0)
        columns = torch.ops.rankopt.fm_interaction([pooled], 8, False, 0)
        return dot, upper + 1, total, columns


def test_compiled_operators_equal_eager(tmp_path: Path) -> None:
    module = Interactions()
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        module, (torch.zeros(4, 8), torch.zeros(4, 80)), dynamic_shapes=({0: batch}, {0: batch})
    )
    # As artifacts are built. Without the C functions torch 2.13 hands an empty list over as None.
    with config.patch({"aot_inductor.custom_ops_to_c_shims": ops.aoti_c_shims()}):
        path = aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    compiled = aoti_load_package(path)
    for num_rows in (1, 2, 5, 130):
        given = normal(num_rows, 8), normal(num_rows, 80, seed=4)
        for result, expected in zip(compiled(*given), module(*given), strict=True):
            assert torch.equal(result, expected)
