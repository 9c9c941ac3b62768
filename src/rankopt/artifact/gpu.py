"""Run a compiled program on a GPU: inputs copied over, small batches replayed as CUDA graphs.

At small batches launching the kernels takes longer than running them. A CUDA graph launches all of
them at once; it reads and writes fixed addresses, so each has static inputs that a call's are
copied into.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankopt.artifact.manifest import Target
from rankopt.errors import Problem

MAX_GRAPHS = 64
"""Graphs that are kept: with ragged inputs nearly every call has sizes of its own."""
CALLS_BEFORE = 3
"""A graph is captured when sizes come for the third time; capturing costs some ten calls."""
MAX_COUNTED = 4096


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: list[Tensor]
    outputs: list[Tensor]


class GpuProgram:
    """A program that takes and returns CPU tensors, as `boxed_run` of a CPU program does.

    Not for several threads at once: `LoadedArtifact` has them take turns.

    Args:
        loader: the package, its constants given.
        target: settings of the artifact.
        rows_at: which input has a row for each candidate.
        groups: rows of it for each candidate.
    """

    def __init__(self, loader: Any, target: Target, rows_at: int, groups: int) -> None:
        self._run: Callable[[list[Tensor]], list[Tensor]] = loader.boxed_run
        self._tf32 = target.tf32
        self._graph_batch = target.graph_batch
        self._rows_at, self._groups = rows_at, groups
        self._graphs: OrderedDict[tuple[Any, ...], _Captured] = OrderedDict()
        self._seen: Counter[tuple[Any, ...]] = Counter()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def boxed_run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Score; waits for the GPU, since the scores are wanted on the CPU."""
        with torch.inference_mode(), tf32(self._tf32):
            key = tuple(tuple(given.shape) for given in inputs)
            captured = self._graphs.get(key)
            if captured is None and self._worth_capturing(key, inputs):
                captured = self._capture(key, inputs)
            if captured is None:
                outputs = self._run([given.cuda() for given in inputs])
            else:
                self._graphs.move_to_end(key)
                for static, given in zip(captured.inputs, inputs, strict=True):
                    static.copy_(given, non_blocking=True)
                captured.graph.replay()
                outputs = captured.outputs
            return [output.cpu() for output in outputs]

    def _worth_capturing(self, key: tuple[Any, ...], inputs: Sequence[Tensor]) -> bool:
        if inputs[self._rows_at].shape[0] > self._graph_batch * self._groups:
            return False
        if len(self._seen) > MAX_COUNTED:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] >= CALLS_BEFORE

    def _capture(self, key: tuple[Any, ...], inputs: Sequence[Tensor]) -> _Captured:
        static = [given.cuda() for given in inputs]
        # What a first run allocates or sets up must not fall into the recording.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run(list(static))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = list(self._run(list(static)))
        self._graphs[key] = captured = _Captured(graph, static, outputs)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return captured


@contextmanager
def tf32(allowed: bool | None) -> Iterator[None]:
    """Set PyTorch's own matrix products for the time of a call, and put them back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    if allowed is None or before == allowed:
        yield
        return
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def capability() -> str:
    """Return the compute capability of the GPU in use, such as 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def gpu_problems(path: Path, target: Target) -> list[Problem]:
    """Say what this machine lacks for an artifact for a GPU."""
    where = f"{path}: target"
    if not torch.cuda.is_available():
        what = f"needs an NVIDIA GPU; torch {torch.__version__} sees none here"
        hint = "Serve it on such a machine, or build it again with target: aoti-cpu."
        return [Problem(where, what, target.device, hint)]
    if target.capability != capability():
        return [
            Problem(
                where,
                f"was compiled for compute capability {target.capability}",
                capability(),
                "Build it on a GPU of the kind that serves.",
            )
        ]
    return []
