"""A chain of linear layers in one call: `rankopt::mlp_int8`, its reference and its C entry point.

Shapes: B rows, K inputs of the first layer, N outputs of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankopt.kernels import reference
from rankopt.kernels.build import load_kernels


@dataclass(frozen=True)
class MlpLayer:
    """One layer of a chain.

    Attributes:
        packed: the weight as `packing.pack_linear_int8` makes it, or `pack_linear_fp32`.
        scale: float32 [N], what a level of an int8 weight stands for; None for an fp32 layer.
        bias: float32 [N], or None.
        negative_slope: float32 [1] or [N], what negative results are multiplied by; 0 is ReLU.
        num_outputs: N.
    """

    packed: Tensor
    scale: Tensor | None
    bias: Tensor | None
    negative_slope: Tensor | None
    num_outputs: int


def mlp_int8(x: Tensor, layers: Sequence[MlpLayer], *, activation_bits: int = 7) -> Tensor:
    """Run linear layers one after the other while their rows are in the cache.

    The result has the bits of `ops.linear_int8` and `ops.linear_fp32` called layer by layer.

    Shapes: x float32 [..., K]; returns float32 [..., N].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.mlp_int8(x, *columns(layers), activation_bits)
    return result


def columns(
    layers: Sequence[MlpLayer],
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None], list[Tensor | None], list[int]]:
    """Return the operator's lists: weights, scales, biases, slopes and numbers of outputs."""
    return (
        [layer.packed for layer in layers],
        [layer.scale for layer in layers],
        [layer.bias for layer in layers],
        [layer.negative_slope for layer in layers],
        [layer.num_outputs for layer in layers],
    )


def mlp_reference(
    x: Tensor,
    packed: list[Tensor],
    scale: list[Tensor | None],
    bias: list[Tensor | None],
    negative_slope: list[Tensor | None],
    num_outputs: list[int],
    activation_bits: int,
) -> Tensor:
    """Compute `rankopt::mlp_int8` bit for bit: its layers, one by one."""
    for index, width in enumerate(num_outputs):
        vectors = bias[index], negative_slope[index]
        factor = scale[index]
        if factor is None:
            x = reference.linear_fp32(x, packed[index], *vectors, width)
        else:
            x = reference.linear_int8(x, packed[index], factor, *vectors, width, activation_bits)
    return x


def aoti_c_shims() -> dict[Any, list[str]]:
    """Return this operator's entry of `ops.aoti_c_shims`."""
    return {
        torch.ops.rankopt.mlp_int8.default: [
            "AOTITorchError aoti_torch_cpu_mlp_int8(AtenTensorHandle, const AtenTensorHandle*, "
            "int64_t, const AtenTensorHandle**, int64_t, const AtenTensorHandle**, int64_t, "
            "const AtenTensorHandle**, int64_t, const int64_t*, int64_t, int64_t, "
            "AtenTensorHandle*)"
        ]
    }
