"""The kernels: each with its reference and the grid on which the two must agree.

Adding a kernel is one entry here; the tests run over the registry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankopt.kernels import attention_cases, lookup, ops, reference
from rankopt.kernels.attention_cases import AttentionCase
from rankopt.kernels.build import load_kernels
from rankopt.kernels.interaction import dot_reference, fm_reference
from rankopt.kernels.interaction_cases import (
    DOT_CASES,
    FM_CASES,
    InteractionCase,
    dot_allowance,
    dot_arguments,
    fm_allowance,
    fm_arguments,
)
from rankopt.kernels.lookup_cases import (
    LOOKUP_CASES,
    SEQUENCE_CASES,
    LookupCase,
    lookup_allowance,
    lookup_arguments,
    sequence_allowance,
    sequence_arguments,
)
from rankopt.kernels.mlp import mlp_reference
from rankopt.kernels.mlp_cases import MLP_CASES, MlpCase, mlp_arguments
from rankopt.kernels.packing import (
    ACTIVATION_CODES,
    FP16_MAX,
    pack_linear_fp16,
    pack_linear_fp32,
    pack_linear_int8,
)
from rankopt.kernels.parity import (
    LINEAR_CASES,
    LINEAR_FP16_CASES,
    LINEAR_FP32_CASES,
    LINEAR_INT8_CASES,
    RECURRENT_CASES,
    Agreement,
    LinearCase,
    RecurrentCase,
    compare,
    make_linear_inputs,
    make_recurrent_inputs,
)
from rankopt.kernels.requests import (
    REQUEST_CASES,
    RequestCase,
    reference_request_matmul,
    request_arguments,
)
from rankopt.kernels.train_lookup import table_lookup_reference, table_step_reference
from rankopt.kernels.train_lookup_cases import (
    TRAIN_LOOKUP_CASES,
    TRAIN_STEP_CASES,
    TrainLookupCase,
    train_lookup_allowance,
    train_lookup_arguments,
    train_step_allowance,
    train_step_arguments,
)

Arguments = tuple[Any, ...]
Case = (
    LinearCase
    | RecurrentCase
    | LookupCase
    | InteractionCase
    | AttentionCase
    | MlpCase
    | RequestCase
    | TrainLookupCase
)


@dataclass(frozen=True)
class Kernel:
    """One operator of the library; several results of one count as one flat tensor.

    Attributes:
        name: the operator's name under `torch.ops.rankopt`.
        reference: computes the same from the same arguments in plain PyTorch.
        cases: the parity grid.
        arguments: draws the arguments of a case.
        allowance: the absolute error allowed of each number, from a case's arguments and the
            reference's result; None where the bits must be the reference's.
        isas: whether `RANKOPT_ISA` chooses among implementations of it.
        triton: its version for a GPU, `file:function` under `rankopt.kernels.triton`; None without.
        triton_allowance: what that one is allowed; `allowance` when None.
    """

    name: str
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    cases: tuple[Case, ...]
    arguments: Callable[[Any], Arguments]
    allowance: Callable[[Arguments, Tensor], Tensor] | None
    isas: bool
    triton: str | None = None
    triton_allowance: Callable[[Arguments, Tensor], Tensor] | None = None

    def __call__(self, *arguments: object) -> Tensor:
        """Run the operator."""
        load_kernels()
        return _as_one(getattr(torch.ops.rankopt, self.name)(*arguments))

    def check(self, case: Case) -> dict[str, Agreement]:
        """Run a case and compare it with the reference, once per instruction set of this CPU.

        Returns:
            The agreement by instruction set; under `auto` alone for a kernel that has no choice.
        """
        arguments = self.arguments(case)
        expected = _as_one(self.reference(*arguments))
        if self.allowance is None:
            allowance = torch.zeros_like(expected)
        else:
            allowance = self.allowance(arguments, expected)
        before = ops.current_isa()
        agreements = {}
        try:
            for isa in ops.supported_isas() if self.isas else ["auto"]:
                ops.set_isa(isa)
                agreements[isa] = compare(self(*arguments), expected, allowance)
        finally:
            ops.set_isa(before)
        return agreements

    def on_gpu(self) -> Callable[..., Tensor]:
        """Import the version for a GPU; Triton must be installed."""
        if self.triton is None:
            raise KeyError(f"{self.name} has no version for a GPU")
        file, _, function = self.triton.partition(":")
        module = importlib.import_module(f"rankopt.kernels.triton.{file}")
        found: Callable[..., Tensor] = getattr(module, function)
        return found

    def check_on_gpu(self, case: Case, device: str, **options: object) -> Agreement:
        """Run a case with the version for a GPU, on a device, and compare it with the reference."""
        arguments = self.arguments(case)
        expected = _as_one(self.reference(*arguments))
        allowance = self.triton_allowance or self.allowance
        if allowance is None:
            raise KeyError(f"{self.name} does not say what its version for a GPU is allowed")
        moved = [_moved(argument, device) for argument in arguments]
        result = _as_one(self.on_gpu()(*moved, **options)).cpu()
        return compare(result, expected, allowance(arguments, expected))

    def holds(self, agreement: Agreement) -> bool:
        """Say whether an agreement is as close as this kernel promises."""
        return agreement.same_bits if self.allowance is None else agreement.excess <= 0


def _moved(argument: Any, device: str) -> Any:
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, list):
        return [_moved(each, device) for each in argument]
    return argument


class StepKernel(Kernel):
    """An operator that updates the tables and states given first; they are its result."""

    def __call__(self, *arguments: object) -> Tensor:
        """Run the operator on copies."""
        load_kernels()
        tables: Any
        states: Any
        tables, states, *rest = arguments
        changed = [[part.clone() for part in parts] for parts in (tables, states)]
        getattr(torch.ops.rankopt, self.name)(*changed, *rest)
        return _as_one((*changed[0], *changed[1]))


def _as_one(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return torch.cat([part.flatten() for part in result])


def _linear_int8_arguments(case: LinearCase) -> Arguments:
    given = make_linear_inputs(case)
    packed = pack_linear_int8(given.levels)
    return (
        given.x,
        packed,
        given.scale,
        given.bias,
        given.negative_slope,
        case.num_outputs,
        case.activation_bits,
        ACTIVATION_CODES[case.activation],
    )


def _linear_fp32_arguments(case: LinearCase) -> Arguments:
    given = make_linear_inputs(case)
    packed = pack_linear_fp32(given.weight)
    code = ACTIVATION_CODES[case.activation]
    return given.x, packed, given.bias, given.negative_slope, case.num_outputs, code


def _linear_fp16_arguments(case: LinearCase) -> Arguments:
    given = make_linear_inputs(case)
    # Subnormal weights beside small inputs, the largest that fp16 has beside ordinary ones.
    factor = {"tiny": 2.0**-18, "alternating": 2.0 * FP16_MAX}.get(case.values, 1.0)
    packed = pack_linear_fp16(given.weight * factor)
    code = ACTIVATION_CODES[case.activation]
    return given.x, packed, given.bias, given.negative_slope, case.num_outputs, code


def _linear_fbgemm_arguments(case: LinearCase) -> Arguments:
    given = make_linear_inputs(case)
    handle = torch.zeros(1, dtype=torch.int64)
    return given.x, given.levels, given.scale, given.bias, handle


def _linear_fbgemm_allowance(arguments: Arguments, expected: Tensor) -> Tensor:
    # fbgemm rounds x / peak * 63 through its own inverse of 1/63: a value half-way between two
    # levels may fall to either side. Two such values a row, and float32 rounding.
    x, levels, scale = arguments[:3]
    peak = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    largest = levels.abs().amax(dim=1) if levels.shape[1] else scale.new_zeros(scale.shape)
    one_level = peak.to(torch.float64) / 63.0 * largest.to(torch.float64) * scale
    allowance: Tensor = 2.0 * one_level + 1e-5 * expected.abs()
    return allowance


def _gru_arguments(case: RecurrentCase) -> Arguments:
    return *make_recurrent_inputs(case, num_gates=3, num_states=1), case.reverse


def _lstm_arguments(case: RecurrentCase) -> Arguments:
    return *make_recurrent_inputs(case, num_gates=4, num_states=2), case.reverse


def _recurrent_allowance(arguments: Arguments, expected: Tensor) -> Tensor:
    # Rounding of the sums before the gates, which a state carries on from step to step; beside wide
    # inputs the sums are that much larger.
    x, _, w_ih = arguments[:3]
    loudest = float(x.nan_to_num().abs().amax()) if x.numel() else 0.0
    sums = 1.0 + loudest * float(w_ih.abs().sum(1).amax())
    return 2e-7 * sums * (1.0 + expected.abs())


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="linear_int8",
            reference=reference.linear_int8,
            cases=LINEAR_INT8_CASES,
            arguments=_linear_int8_arguments,
            allowance=None,
            isas=True,
        ),
        Kernel(
            name="linear_fp32",
            reference=reference.linear_fp32,
            cases=LINEAR_FP32_CASES,
            arguments=_linear_fp32_arguments,
            allowance=None,
            isas=True,
        ),
        Kernel(
            name="linear_fp16",
            reference=reference.linear_fp16,
            cases=LINEAR_FP16_CASES,
            arguments=_linear_fp16_arguments,
            allowance=None,
            isas=True,
        ),
        Kernel(
            name="mlp_int8",
            reference=mlp_reference,
            cases=MLP_CASES,
            arguments=mlp_arguments,
            allowance=None,
            isas=True,
        ),
        Kernel(
            name="linear_fbgemm",
            reference=reference.linear_fbgemm,
            cases=tuple(
                case
                for case in LINEAR_CASES
                if case.negative_slope == case.activation == "none" and case.num_inputs > 0
            ),
            arguments=_linear_fbgemm_arguments,
            allowance=_linear_fbgemm_allowance,
            isas=False,
        ),
        Kernel(
            name="gru",
            reference=reference.gru,
            cases=RECURRENT_CASES,
            arguments=_gru_arguments,
            allowance=_recurrent_allowance,
            isas=True,
        ),
        Kernel(
            name="lstm",
            reference=reference.lstm,
            cases=RECURRENT_CASES,
            arguments=_lstm_arguments,
            allowance=_recurrent_allowance,
            isas=True,
        ),
        Kernel(
            name="lookup_rows",
            reference=lookup.lookup_rows_reference,
            cases=LOOKUP_CASES,
            arguments=lookup_arguments,
            allowance=None,
            isas=True,
            triton="lookup:lookup_rows",
            triton_allowance=lookup_allowance,
        ),
        Kernel(
            name="lookup_sequences",
            reference=lookup.lookup_sequences_reference,
            cases=SEQUENCE_CASES,
            arguments=sequence_arguments,
            allowance=None,
            isas=True,
            triton="lookup:lookup_sequences",
            triton_allowance=sequence_allowance,
        ),
        Kernel(
            name="dot_interaction",
            reference=dot_reference,
            cases=DOT_CASES,
            arguments=dot_arguments,
            allowance=dot_allowance,
            isas=True,
            triton="interaction:dot_interaction",
        ),
        Kernel(
            name="fm_interaction",
            reference=fm_reference,
            cases=FM_CASES,
            arguments=fm_arguments,
            allowance=fm_allowance,
            isas=True,
            triton="interaction:fm_interaction",
        ),
        Kernel(
            name="ragged_sum",
            reference=attention_cases.ragged_sum,
            cases=attention_cases.RAGGED_CASES,
            arguments=attention_cases.ragged_sum_arguments,
            allowance=attention_cases.ragged_sum_allowance,
            isas=True,
            triton="attention:ragged_sum",
        ),
        Kernel(
            name="hstu_attention",
            reference=attention_cases.hstu_attention,
            cases=attention_cases.HSTU_CASES,
            arguments=attention_cases.hstu_arguments,
            allowance=attention_cases.hstu_allowance,
            isas=True,
            triton="attention:hstu_attention",
        ),
        Kernel(
            name="hstu_candidate_attention",
            reference=attention_cases.hstu_candidate_attention,
            cases=attention_cases.CANDIDATE_CASES,
            arguments=attention_cases.candidate_arguments,
            allowance=attention_cases.candidate_allowance,
            isas=True,
            triton="attention:hstu_candidate_attention",
        ),
        Kernel(
            name="target_attention",
            reference=attention_cases.target_attention,
            cases=attention_cases.TARGET_CASES,
            arguments=attention_cases.target_arguments,
            allowance=attention_cases.target_allowance,
            isas=True,
            triton="target:target_attention",
        ),
        Kernel(
            name="masked_target_attention",
            reference=attention_cases.masked_target_attention,
            cases=attention_cases.MASKED_CASES,
            arguments=attention_cases.masked_arguments,
            allowance=attention_cases.masked_allowance,
            isas=True,
        ),
        Kernel(
            name="request_matmul",
            reference=reference_request_matmul,
            cases=REQUEST_CASES,
            arguments=request_arguments,
            allowance=None,
            isas=True,
        ),
        Kernel(
            name="table_lookup",
            reference=table_lookup_reference,
            cases=TRAIN_LOOKUP_CASES,
            arguments=train_lookup_arguments,
            allowance=train_lookup_allowance,
            isas=True,
        ),
        StepKernel(
            name="table_step",
            reference=table_step_reference,
            cases=TRAIN_STEP_CASES,
            arguments=train_step_arguments,
            allowance=train_step_allowance,
            isas=True,
        ),
    )
}
