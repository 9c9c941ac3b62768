"""Rows of quantised tables as numbers, to be compared with the rows they were made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rankopt.sharding.stored import StoredTensor

ReadRows = Callable[[int, int], Tensor]


def unpacked_rows(tensor: StoredTensor, other: StoredTensor) -> ReadRows:
    """Read rows as numbers, unpacking bytes where the other table says how wide they are.

    fbgemm keeps an int8 row as its bytes with an fp32 scale and bias after them, or an fp16 pair,
    and an int4 row as half as many bytes and an fp16 pair.

    Args:
        tensor: what is read.
        other: the table it is compared with.
    """
    if tensor.dtype != torch.uint8 or len(tensor.shape) != 2 or len(other.shape) != 2:
        return tensor.read_rows
    width, dim = tensor.num_columns, other.num_columns
    if width == dim + 8:
        return lambda a, b: torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(
            tensor.read_rows(a, b)
        )
    for bits in (4, 2):
        if width == dim * bits // 8 + 4:
            return lambda a, b, bits=bits: (  # type: ignore[misc]
                torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(
                    tensor.read_rows(a, b), bits
                )
            )
    return tensor.read_rows
