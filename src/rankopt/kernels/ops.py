"""The kernels as Python functions, and what a compiler must be told to call them directly.

`rankopt.kernels.build.load_kernels` registers the operators with torch, shapes included, so they go
through `torch.export` and AOTInductor with dynamic sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankopt.errors import EnvironmentProblem
from rankopt.kernels.build import load_kernels


def linear_int8(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    negative_slope: Tensor | None = None,
    *,
    num_outputs: int,
    activation_bits: int = 7,
    activation: int = 0,
) -> Tensor:
    """Multiply by packed int8 weights, with one activation scale per row.

    A row's result is the same bit for bit alone, anywhere in a batch, beside any neighbours, with
    any number of threads and on every instruction set. A row that holds NaN or infinity gives NaN.

    Shapes: x float32 [..., K]; packed as `packing.pack_linear_int8` makes it; scale and bias
    float32 [N]; negative_slope float32 [1] or [N], what negative results are multiplied by (0 is
    ReLU); activation one of `packing.ACTIVATION_CODES`, behind it; returns float32 [..., N].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.linear_int8(
        x, packed, scale, bias, negative_slope, num_outputs, activation_bits, activation
    )
    return result


def linear_fp32(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    negative_slope: Tensor | None = None,
    *,
    num_outputs: int,
    activation: int = 0,
) -> Tensor:
    """Multiply by packed float32 weights, adding up in an order that the layer alone decides.

    A row's result is the same bit for bit alone, anywhere in a batch, beside any neighbours, with
    any number of threads and on every instruction set; `torch.nn.functional.linear` adds up in
    another order for another batch size.

    Shapes: x float32 [..., K]; packed as `packing.pack_linear_fp32` makes it; bias float32 [N];
    negative_slope float32 [1] or [N], what negative results are multiplied by (0 is ReLU);
    activation one of `packing.ACTIVATION_CODES`, behind it; returns float32 [..., N].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.linear_fp32(
        x, packed, bias, negative_slope, num_outputs, activation
    )
    return result


def linear_fp16(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    negative_slope: Tensor | None = None,
    *,
    num_outputs: int,
    activation: int = 0,
) -> Tensor:
    """Multiply by packed float16 weights, adding up in float32, with the promises of `linear_fp32`.

    The result is that of `linear_fp32` on the same weights rounded to float16, bit for bit.

    Shapes: as `linear_fp32`; packed as `packing.pack_linear_fp16` makes it.
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.linear_fp16(
        x, packed, bias, negative_slope, num_outputs, activation
    )
    return result


def linear_fbgemm(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, handle: Tensor
) -> Tensor:
    """Multiply by int8 weights through fbgemm, with one 7-bit activation scale per row.

    Shapes: x float32 [..., K]; weight int8 [N, K]; scale and bias float32 [N]; handle int64 [1],
    what `fbgemm_pack` returned, or 0 to pack on the fly (slow); returns float32 [..., N].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.linear_fbgemm(x, weight, scale, bias, handle)
    return result


def fbgemm_pack(weight: Tensor, scale: Tensor) -> int:
    """Pack weights for `linear_fbgemm`; the caller owns the handle and must release it."""
    load_kernels()
    return int(torch.ops.rankopt.fbgemm_pack(weight, scale))


def fbgemm_release(handle: int) -> None:
    """Free what `fbgemm_pack` packed; its handle is never given out again."""
    load_kernels()
    torch.ops.rankopt.fbgemm_release(handle)


def gru(
    x: Tensor,
    lengths: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    first: Tensor | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run one layer of `torch.nn.GRU` over padded lists, each up to its own length.

    A row's result is the same bit for bit alone, anywhere in a batch, beside any neighbours, with
    any number of threads and on every instruction set.

    Shapes: B rows, T steps, I inputs, H hidden units; x float32 [B, T, I]; lengths int64 [B], at
    most T, below 1 an empty row; weights and biases as `nn.GRU` names them; first float32 [B, H],
    zeros when None; returns [B, T, H], zero past the length, and the last state [B, H].
    """
    load_kernels()
    outputs, last = torch.ops.rankopt.gru(x, lengths, w_ih, w_hh, b_ih, b_hh, first, reverse)
    return outputs, last


def lstm(
    x: Tensor,
    lengths: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    first: Tensor | None = None,
    memory: Tensor | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of `torch.nn.LSTM` over padded lists, with the promises of `gru`.

    Shapes: as `gru`; memory float32 [B, H], the first cell state, zeros when None; returns
    [B, T, H], the last state [B, H] and the last cell state [B, H].
    """
    load_kernels()
    outputs, last, held = torch.ops.rankopt.lstm(
        x, lengths, w_ih, w_hh, b_ih, b_hh, first, memory, reverse
    )
    return outputs, last, held


def supported_isas() -> list[str]:
    """List the instruction sets this CPU can run, the best one last."""
    load_kernels()
    return list(torch.ops.rankopt.supported_isas())


def current_isa() -> str:
    """Return the instruction set in use: the best one, or what RANKOPT_ISA or `set_isa` named.

    Raises:
        EnvironmentProblem: RANKOPT_ISA names none that this CPU has.
    """
    load_kernels()
    try:
        return str(torch.ops.rankopt.isa())
    except RuntimeError as error:
        raise EnvironmentProblem(str(error).splitlines()[0]) from error


def set_isa(name: str) -> None:
    """Use another instruction set from now on in this process; `auto` is the best one."""
    load_kernels()
    torch.ops.rankopt.set_isa(name)


def schema_here(name: str) -> str | None:
    """Return the signature of a loaded operator, such as `rankopt::linear_int8`; None without one.

    The operator must have one overload, as all of rankopt's have.
    """
    space, _, operator = name.partition("::")
    found = getattr(getattr(torch.ops, space), operator, None)
    return None if found is None else str(found.default._schema)


WITH_C_FUNCTION = (
    *("linear_int8", "linear_fp32", "linear_fp16", "linear_fbgemm", "mlp_int8"),
    *("lookup_rows", "lookup_sequences", "dot_interaction", "fm_interaction"),
    *("ragged_rows", "ragged_sum", "hstu_attention", "hstu_candidate_attention"),
    *("target_attention", "masked_target_attention", "request_matmul", "gru", "lstm"),
)
"""Operators that compiled artifacts call by their C function, `aoti_torch_cpu_NAME`."""
_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "List[Tensor]": "const AtenTensorHandle*, int64_t",
    "List[Optional[Tensor]]": "const AtenTensorHandle**, int64_t",
    "List[int]": "const int64_t*, int64_t",
    "int": "int64_t",
    "bool": "int32_t",
    "float": "double",
}
"""How AOTInductor passes each type of a schema; results follow the arguments, by pointer."""


def aoti_c_shims() -> dict[Any, list[str]]:
    """Return the value of `torch._inductor.config.aot_inductor.custom_ops_to_c_shims`.

    With it a compiled artifact calls the kernels' C functions instead of going through torch's
    dispatcher with boxed arguments. Load the kernels before such an artifact.
    """
    load_kernels()
    operators = [getattr(torch.ops.rankopt, name).default for name in WITH_C_FUNCTION]
    return {operator: [_c_function(operator._schema)] for operator in operators}


def _c_function(schema: Any) -> str:
    name = schema.name.partition("::")[2]
    types = [_C_TYPES[str(argument.type)] for argument in schema.arguments]
    types += ["AtenTensorHandle*"] * len(schema.returns)
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(types)})"
