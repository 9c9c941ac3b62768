"""The operators of one call, with a clock around each: what a profile needs to know of them.

`Notes` are taken once a batch size, with the tensors themselves; times are taken call by call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rankopt.kernels.build import load_kernels

Role = Literal["constant", "input", "output"]
ROLES: tuple[Role, ...] = ("constant", "input", "output")
Scores = Callable[[dict[str, Tensor]], dict[str, Tensor]]
CLOCK_ROUNDS = 20_000


@dataclass(frozen=True)
class Site:
    """A place in the model that has a clock.

    Attributes:
        name: the operator, such as `rankopt::linear_int8`, or a loop that the compiler made.
        origin: the operators of the graph that it stands for, where the compiler wrote them down.
        generated: whether the compiler made it, rather than called it.
        constants: names of the constants that it reads.
        optionals: of each list of tensors that may be missing, which are there; compiled code only.
    """

    name: str
    origin: tuple[str, ...] = ()
    generated: bool = False
    constants: tuple[str, ...] = ()
    optionals: tuple[tuple[bool, ...], ...] = ()


@dataclass
class Notes:
    """What one site was called with, in the order of its arguments, lists taken apart.

    Compiled code gives a list's length behind it, among the values.
    """

    constants: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    arguments: list[Tensor] = field(default_factory=list)
    """Constants and inputs together, in order."""


@dataclass(frozen=True)
class CallTimes:
    """Times of some calls. Shapes: C calls, S sites.

    Attributes:
        whole_ns: ns from the outside, clocks included.
        sites_ns: ns of each site.
        inside_ns: ns inside compiled code; None for an eager model.
    """

    whole_ns: npt.NDArray[np.float64]
    sites_ns: npt.NDArray[np.float64]
    inside_ns: npt.NDArray[np.float64] | None


class Profiled(Protocol):
    """A model whose operators have clocks."""

    def note(self, features: dict[str, Tensor]) -> tuple[list[Site], list[Notes]]:
        """Run once and keep what every operator was called with."""

    def time(self, windows: Sequence[dict[str, Tensor]]) -> Ticks:
        """Run once on each."""


@dataclass(frozen=True)
class Ticks:
    """What the clocks of some calls said.

    Attributes:
        whole_ns: ns of each call from outside.
        sites: ticks of each call's sites; as many as ran.
        inside: ticks of each call inside compiled code; None for an eager model.
    """

    whole_ns: list[int]
    sites: list[npt.NDArray[np.int64]]
    inside: list[int] | None


class EagerProfile:
    """An eager model; torch tells of every operator that Python calls."""

    def __init__(self, run: Scores) -> None:
        load_kernels()
        self._run = run

    def note(self, features: dict[str, Tensor]) -> tuple[list[Site], list[Notes]]:
        """Run once and keep what every operator was called with."""
        ops = torch.ops.rankopt
        ops.profile_eager_start(True)
        try:
            self._run(features)
        finally:
            ops.profile_eager_stop()
        names = list(ops.profile_eager_names())[:-1]  # the last one stopped the recording
        ops.profile_eager_take()
        return [Site(name) for name in names], take_notes(len(names))

    def time(self, windows: Sequence[dict[str, Tensor]]) -> Ticks:
        """Run once on each, recording."""
        ops = torch.ops.rankopt
        whole_ns, sites = [], []
        for features in windows:
            ops.profile_eager_start(False)
            begun = time.perf_counter_ns()
            try:
                self._run(features)
            finally:
                whole_ns.append(time.perf_counter_ns() - begun)
                ops.profile_eager_stop()
            # The last event is the operator that stopped the recording.
            sites.append(ops.profile_eager_take().numpy()[:-1])
        return Ticks(whole_ns, sites, None)


class CompiledProfile:
    """A compiled model with clocks written around its calls (`rankopt.diagnose.twin`).

    Args:
        run: the loaded twin.
        sites: where its clocks are; site 0 is the whole of the compiled code.
    """

    def __init__(self, run: Scores, sites: list[Site]) -> None:
        load_kernels()
        self.run, self._sites = run, sites

    def note(self, features: dict[str, Tensor]) -> tuple[list[Site], list[Notes]]:
        """Run once and keep what every operator was called with."""
        ops = torch.ops.rankopt
        ops.profile_open(len(self._sites), 1)
        ops.profile_note(True)
        try:
            self.run(features)
        finally:
            ops.profile_note(False)
        return self._sites[1:], take_notes(len(self._sites))[1:]

    def time(self, windows: Sequence[dict[str, Tensor]]) -> Ticks:
        """Run once on each; between calls nothing is done that the plain model's lack."""
        run, clock, whole_ns = self.run, time.perf_counter_ns, []
        torch.ops.rankopt.profile_open(len(self._sites), len(windows))
        for features in windows:
            begun = clock()
            run(features)
            whole_ns.append(clock() - begun)
        taken = torch.ops.rankopt.profile_take().numpy().reshape(-1, len(self._sites))
        return Ticks(whole_ns, list(taken[:, 1:]), [int(ticks) for ticks in taken[:, 0]])


def take_notes(num_sites: int) -> list[Notes]:
    """Collect what the last noted call kept, by site."""
    notes = [Notes() for _ in range(num_sites)]
    tensors, sites, roles, values, value_sites = torch.ops.rankopt.profile_notes()
    for tensor, site, role in zip(tensors, sites, roles, strict=True):
        if site >= num_sites:
            continue
        held = notes[site]
        name = ROLES[role]
        {"constant": held.constants, "input": held.inputs, "output": held.outputs}[name].append(
            tensor
        )
        if name != "output":
            held.arguments.append(tensor)
    for value, site in zip(values, value_sites, strict=True):
        if site < num_sites:
            notes[site].values.append(value)
    return notes


class Clock:
    """Turns ticks into ns; the rate is read off while the work goes on."""

    def __init__(self) -> None:
        load_kernels()
        self._ticks, self._ns = torch.ops.rankopt.profile_clock(), time.perf_counter_ns()

    def ns_per_tick(self) -> float:
        """Return the rate since this clock was made; make it some milliseconds before."""
        ticks, now_ns = torch.ops.rankopt.profile_clock(), time.perf_counter_ns()
        return float((now_ns - self._ns) / max(ticks - self._ticks, 1))

    def cost_ns(self) -> float:
        """Return what one clock around one operator costs, the least of some rounds."""
        costs = [torch.ops.rankopt.profile_empty(CLOCK_ROUNDS) for _ in range(5)]
        return float(min(costs)) * self.ns_per_tick()


def same_scores(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Tell whether two models gave the same bits, NaN being equal to NaN."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name].nan_to_num(nan=1e30), right[name].nan_to_num(nan=1e30))
        for name in left
    )
