"""Tests of the diagnosis leave the instruction set and the thread count as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rankopt.kernels import ops


@pytest.fixture(autouse=True)
def restore_isa_and_threads() -> Iterator[None]:
    isa, threads = ops.current_isa(), torch.get_num_threads()
    yield
    ops.set_isa(isa)
    torch.set_num_threads(threads)
