"""What bounds an operator: its operations, its bytes, or neither.

An operator takes at least the time of its operations at the machine's arithmetic peak, and at least
the time of its bytes at the rate at which memory gives them. The larger of the two is the limit
nearest to it. Where it takes more than a few times that limit, neither bounds it: calls, waiting
for other threads, or the code itself do, and all of that is called overhead.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankopt.diagnose.costs import Cost
from rankopt.diagnose.kernel_work import Arithmetic
from rankopt.diagnose.schema import Bound, MachinePeaks
from rankopt.units import NS_PER_S

NEAR = 0.3
"""Share of its time that the nearest limit must explain before it is said to bound an operator."""


@dataclass(frozen=True)
class Limits:
    """The least time, in ns, that an operator's work takes on this machine.

    Attributes:
        operations_ns: None where operations are not counted.
        bytes_ns: at the reading rate of the whole model's working set; of a lookup, the time in
            which this machine reads the same rows.
        peak: which arithmetic peak; of several kinds of arithmetic, that of most operations.
    """

    operations_ns: float | None
    bytes_ns: float
    peak: Arithmetic | None

    @property
    def nearest_ns(self) -> float:
        return max(self.operations_ns or 0.0, self.bytes_ns)

    def bound(self, time_ns: float) -> Bound:
        """Say what time is nearest to."""
        if time_ns <= 0 or self.nearest_ns < NEAR * time_ns:
            return "overhead"
        return "operations" if (self.operations_ns or 0.0) >= self.bytes_ns else "bytes"


def limits_of(
    cost: Cost, machine: MachinePeaks, working_set_bytes: int, gather_ns: float | None
) -> Limits:
    """Turn what an operator has to do into the least time for it.

    Args:
        cost: what it has to do.
        machine: what the machine can do.
        working_set_bytes: what passes through the caches between two calls of it.
        gather_ns: of a lookup, how long its rows alone take; None for anything else.
    """
    operations_ns = None
    if cost.num_operations is not None:
        operations_ns = NS_PER_S * sum(
            count / peak_of(machine, kind) for kind, count in cost.by_arithmetic.items()
        )
    bytes_ns = gather_ns
    if bytes_ns is None:
        bytes_ns = cost.num_bytes / machine.read_per_s(working_set_bytes) * NS_PER_S
    return Limits(operations_ns, bytes_ns, cost.arithmetic)


def peak_of(machine: MachinePeaks, arithmetic: Arithmetic) -> float:
    """Return operations a second; without bf16 units such products run as fp32."""
    if arithmetic == "int8":
        return machine.int8.per_s
    if arithmetic == "bf16" and machine.bf16 is not None:
        return machine.bf16.per_s
    return machine.fp32.per_s
