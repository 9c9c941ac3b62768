"""`request_matmul` as a Python function, its reference in plain PyTorch, and its parity grid.

Shapes: B candidates, R requests, A heads; M rows of a candidate, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rankopt.kernels import reference
from rankopt.kernels.build import load_kernels
from rankopt.kernels.packing import pack_linear_fp32


def request_matmul(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Multiply each candidate's rows by its request's matrix, which is not copied for it.

    A candidate's result is the same bit for bit alone, anywhere in a batch, beside any others, with
    any number of threads and on every instruction set.

    Shapes: x float32 [B, A, M, K]; y float32 [R, A, K, N]; index int64 [B], values in [0, R);
    returns float32 [B, A, M, N].
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.request_matmul(x, y, index)
    return result


def reference_request_matmul(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Compute `rankopt::request_matmul` bit for bit, one request and head at a time."""
    out = x.new_zeros(*x.shape[:-1], y.shape[-1])
    for request, head in itertools.product(range(y.shape[0]), range(y.shape[1])):
        chosen = (index == request).nonzero().reshape(-1)
        if len(chosen) and y.shape[-1]:
            packed = pack_linear_fp32(y[request, head].T.contiguous())
            rows = x[chosen, head]
            out[chosen, head] = reference.linear_fp32(rows, packed, None, None, y.shape[-1])
    return out


@dataclass(frozen=True)
class RequestCase:
    """One call: how many candidates each request has, and the other sizes."""

    num_candidates: tuple[int, ...]
    num_heads: int
    num_rows: int
    num_inputs: int
    num_outputs: int
    values: Literal["normal", "extreme", "nonfinite"] = "normal"
    layout: Literal["contiguous", "transposed", "sliced"] = "contiguous"
    shuffled: bool = False

    def __str__(self) -> str:
        counts = "+".join(map(str, self.num_candidates)) or "none"
        sizes = f"{self.num_heads}x{self.num_rows}x{self.num_inputs}x{self.num_outputs}"
        order = "shuffled" if self.shuffled else "sorted"
        return f"{counts}-{sizes}-{self.values}-{self.layout}-{order}"


def _grid() -> Iterator[RequestCase]:
    counts = ((1,), (5,), (3, 0, 4), (1, 1, 1, 1), (130, 7))
    sizes = ((1, 1, 32, 29), (2, 1, 29, 32), (1, 10, 64, 17), (3, 2, 5, 4), (2, 3, 17, 1))
    for shape, some in itertools.product(sizes, counts):
        yield RequestCase(some, *shape)
    for shape in sizes:
        yield RequestCase((2, 3, 4), *shape, shuffled=True)
        yield RequestCase((4, 3), *shape, layout="transposed")
        yield RequestCase((4, 3), *shape, layout="sliced")
        yield RequestCase((4, 3), *shape, values="extreme")
        yield RequestCase((4, 3), *shape, values="nonfinite")
    yield RequestCase((), 2, 1, 8, 5)
    yield RequestCase((0, 0), 2, 1, 8, 5)
    yield RequestCase((3,), 1, 1, 1, 1)
    yield RequestCase((3,), 2, 0, 4, 5)


REQUEST_CASES: tuple[RequestCase, ...] = tuple(_grid())


def request_arguments(case: RequestCase) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the arguments of a case."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    num_requests = len(case.num_candidates)
    index = torch.repeat_interleave(
        torch.arange(num_requests), torch.tensor(case.num_candidates, dtype=torch.int64)
    )
    if case.shuffled:
        index = index[torch.randperm(len(index), generator=generator)]
    x = torch.randn(len(index), case.num_heads, case.num_rows, case.num_inputs, generator=generator)
    y = torch.randn(
        num_requests, case.num_heads, case.num_inputs, case.num_outputs, generator=generator
    )
    if case.values == "extreme":
        x, y = x.sign() * 1e18, y.sign() * 1e18
    elif case.values == "nonfinite":
        x[0, 0, 0, 0], y[-1, -1, -1, -1] = torch.nan, torch.inf
    if case.layout == "transposed":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
        y = y.transpose(2, 3).contiguous().transpose(2, 3)
    elif case.layout == "sliced":
        x = torch.cat([x, x], dim=3)[..., : case.num_inputs]
        y = torch.cat([y, y], dim=1)[:, : case.num_heads]
    return x, y, index
