"""Every kernel agrees with its reference on its whole grid, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from rankopt.kernels.parity import LinearCase, compare
from rankopt.kernels.registry import KERNELS

CASES = [
    pytest.param(kernel, case, id=f"{kernel.name}-{case}")
    for kernel in KERNELS.values()
    for case in kernel.cases
]


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_kernel_agrees_with_reference(kernel, case: LinearCase) -> None:
    failed = {
        isa: agreement
        for isa, agreement in kernel.check(case).items()
        if not kernel.holds(agreement)
    }
    assert not failed


def test_grid_holds_the_shapes_that_break_kernels() -> None:
    cases = KERNELS["linear_int8"].cases
    assert {case.num_rows for case in cases} >= {0, 1, 2, 5, 17, 513}
    assert {case.num_outputs for case in cases} >= {1, 15, 16, 17, 80}
    assert {case.num_inputs % 4 for case in cases} == {0, 1, 2, 3}
    assert {case.activation_bits for case in cases} == {7, 8}
    assert len({str(case) for case in cases}) == len(cases)


def test_fp32_grid_holds_narrow_and_wide_layers() -> None:
    cases = KERNELS["linear_fp32"].cases
    assert {case.num_rows for case in cases} >= {0, 1, 2, 5, 17, 513}
    assert {case.num_inputs for case in cases} >= {1, 13, 40, 80, 256, 1024}
    assert {case.num_outputs for case in cases} >= {1, 2, 4, 5, 15, 16, 17, 80, 512}
    assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("result", "expected", "holds"),
    [
        ([1.0, torch.nan], [1.0, torch.nan], True),
        ([1.0, torch.nan], [1.0, 2.0], False),
        ([torch.inf, 1.0], [-torch.inf, 1.0], False),
        ([1.0, 1.2], [1.0, 1.0], False),
        ([1.0, 1.05], [1.0, 1.0], True),
    ],
)
def test_compare_sees_numbers_nan_and_infinity(
    result: list[float], expected: list[float], holds: bool
) -> None:
    agreement = compare(torch.tensor(result), torch.tensor(expected), torch.tensor([0.1, 0.1]))
    assert (agreement.excess <= 0) is holds


def test_compare_tells_bits_apart() -> None:
    allowance = torch.zeros(1)
    assert compare(torch.tensor([0.5]), torch.tensor([0.5]), allowance).same_bits
    assert not compare(torch.tensor([0.0]), torch.tensor([-0.0]), allowance).same_bits
    assert not compare(torch.zeros(1, 1), torch.zeros(1), allowance).same_bits
