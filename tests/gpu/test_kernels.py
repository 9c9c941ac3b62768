"""The Triton kernels on the device, against fp64 over the parity grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rankopt.kernels.registry import KERNELS

pytestmark = pytest.mark.gpu
WITH_TRITON = sorted(name for name, kernel in KERNELS.items() if kernel.triton is not None)
PARTS = 8
"""Compiling a kernel takes a second, and workers share the parts."""
HALVES = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Type -> what a result may be off by, as a share of the largest: its rounding and the inputs'."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", WITH_TRITON)
def test_kernel_agrees_with_its_reference(name: str, part: int) -> None:
    kernel, failed = KERNELS[name], {}
    for case in kernel.cases[part::PARTS]:
        agreement = kernel.check_on_gpu(case, "cuda")
        if not agreement.excess <= 0:
            failed[str(case)] = str(agreement)
    assert failed == {}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(each, dtype) for each in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(each) for each in value]
    return value.cuda() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "name", ["dot_interaction", "fm_interaction", "hstu_attention", "hstu_candidate_attention"]
)
def test_half_precision_adds_up_in_fp32(name: str, dtype: torch.dtype) -> None:
    kernel = KERNELS[name]
    cases = [case for case in kernel.cases if case.values == "normal"][-8:]
    for case in cases:
        given = _cast(list(kernel.arguments(case)), dtype)
        expected = kernel.reference(*_cast(given, torch.float32)).double()
        result = kernel.on_gpu()(*_moved(given))
        assert result.dtype == dtype
        if expected.numel():
            error = (result.cpu().double() - expected).abs().max() / expected.abs().max()
            assert error <= HALVES[dtype], f"{case}: {error}"


@pytest.mark.parametrize("name", ["lookup_rows", "lookup_sequences", "dot_interaction"])
def test_operators_take_cuda_tensors(name: str) -> None:
    from rankopt.kernels.triton.library import register_cuda

    register_cuda()
    kernel = KERNELS[name]
    case = [case for case in kernel.cases if case.num_rows == 7 or case.num_rows == 3][-1]
    arguments = kernel.arguments(case)
    result = kernel(*[_moved(argument) for argument in arguments])
    assert result.is_cuda
    torch.testing.assert_close(result.cpu(), kernel.reference(*arguments), rtol=1e-5, atol=1e-5)


def test_id_that_is_not_there_gives_nan_and_reads_nothing() -> None:
    kernel = KERNELS["lookup_rows"]
    case = next(c for c in kernel.cases if c.form == "flat" and c.num_rows == 7)
    store, plan, inputs, num_rows, width = kernel.arguments(case)
    inputs[0] = inputs[0].clone()
    inputs[0][2] = 1 << 40
    result = kernel.on_gpu()(store.cuda(), plan.cuda(), _moved(inputs), num_rows, width).cpu()
    assert bool(result[2].isnan().any())
    assert not bool(result[torch.arange(num_rows) != 2].isnan().any())
