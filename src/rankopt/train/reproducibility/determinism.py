"""What a training run fixes so that another one gives the same bits.

On the CPU two runs can differ by the draws of three generators, by the number of threads (sums are
split among them), and by additions in whatever order threads arrive: the backward of `table[ids]`
adds gradients up atomically from 32,768 values on, and two threads that read 200,000 rows of 16
gave eight results in eight tries. torch's deterministic mode does that one serially, and Inductor
takes the same way then. The backward of lookups and of `index_select`, `gather`, `index_add` and
`scatter_add` gave one result without it.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rankopt.train.settings import TrainSettings

_FILL: Any = torch.utils.deterministic  # its switch is set through a class that types do not know
_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "TORCHINDUCTOR_")
_NAMES = ("ATEN_CPU_CAPABILITY", "RANKOPT_ISA", "PYTHONHASHSEED", "LD_PRELOAD", "CXX")


@contextlib.contextmanager
def repeatable(settings: TrainSettings) -> Iterator[None]:
    """Seed, set threads and keep to one order of sums; leave the process as it was.

    torch's generator is seeded, and those of numpy and Python too, since a factory may draw its
    weights from them.
    """
    threads = torch.get_num_threads()
    drawn = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]), one_order_of_sums():
        torch.manual_seed(settings.seed)
        np.random.seed(settings.seed % (1 << 32))
        random.seed(settings.seed)
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            np.random.set_state(drawn[0])
            random.setstate(drawn[1])


@contextlib.contextmanager
def one_order_of_sums() -> Iterator[None]:
    """Have torch add up in an order that does not depend on which thread comes first."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _FILL.fill_uninitialized_memory
    # Operators that have no such order, all of them on GPUs, warn; nothing is refused.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor would show reads of memory that nobody wrote, and costs a pass.
    _FILL.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        _FILL.fill_uninitialized_memory = filled


def arithmetic() -> dict[str, Any]:
    """Describe what decides the order and width of sums here, beside threads and libraries."""
    return {
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": bool(torch._C._get_mkldnn_enabled()),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def environment_variables() -> dict[str, str]:
    """Return those set here that thread pools, math libraries, compilers and hashes go by."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }
