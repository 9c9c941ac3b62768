"""diagnose.json: where a model's time goes and what bounds it, as frozen values.

Units stand in the names; None means that it was not measured or cannot be counted.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Part = Literal[
    "lookup",
    "interaction",
    "attention",
    "dense",
    "quantise",
    "eager part",
    "other compiled code",
    "framework overhead",
]
"""`quantise` is turning activations into int8 and back where that can be told apart; `eager part`
is a submodule that stays Python; `framework overhead` is everything between operators: checks,
allocation, views, Python."""

PARTS: tuple[Part, ...] = (
    "lookup",
    "interaction",
    "attention",
    "dense",
    "quantise",
    "eager part",
    "other compiled code",
    "framework overhead",
)
Bound = Literal["operations", "bytes", "overhead"]
Distribution = Literal["uniform", "zipf"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Timing(_Frozen):
    """A median of calls with its 95 % interval, which takes calls as independent."""

    p50_ns: float
    ci_low_ns: float | None
    ci_high_ns: float | None
    num_samples: int


class Peak(_Frozen):
    """The best of several measurements: a peak is what the machine can do when left alone.

    Attributes:
        per_s: operations or bytes a second, all threads; a multiply and an add are two operations.
        median_per_s: the middle measurement.
        lowest_per_s: the worst one.
    """

    per_s: float
    median_per_s: float
    lowest_per_s: float
    num_samples: int


class ReadPeak(_Frozen):
    """Bytes a second, read in order again and again out of a buffer of this size."""

    working_set_bytes: int
    peak: Peak


class GatherPeak(_Frozen):
    """Bytes a second of whole rows read at random places."""

    row_bytes: int
    working_set_bytes: int
    distribution: Distribution
    peak: Peak


class MachinePeaks(_Frozen):
    """What this machine can do, with this many threads and this instruction set."""

    fingerprint: str
    cpu_model: str | None
    isa: str
    num_threads: int
    made_at: str
    int8: Peak
    fp32: Peak
    bf16: Peak | None
    """None where the CPU has no bf16 products."""
    reads: tuple[ReadPeak, ...]
    gathers: tuple[GatherPeak, ...]

    def read_per_s(self, working_set_bytes: int) -> float:
        """Return the reading rate of the smallest buffer measured that holds so much."""
        fitting = [r for r in self.reads if r.working_set_bytes >= working_set_bytes]
        chosen = fitting[0] if fitting else self.reads[-1]
        return chosen.peak.per_s


class OperatorRow(_Frozen):
    """One operator, in the order in which it runs.

    Attributes:
        name: what runs: an operator, or a loop that the compiler made of several.
        part: what its time counts as.
        layer: the constants it reads, which tell one layer from another.
        shapes: of its inputs without constants, then of its results.
        num_operations: None where they are not counted.
        num_bytes: bytes of constants, inputs and results, each once; of tables, the rows read.
        bound: what its time is nearest to; see `docs/diagnose.md`.
        of_bound: that limit's time over the time taken.
        quantise_p50_ns: what of it is quantising activations, estimated; counted as `quantise`.
    """

    name: str
    part: Part
    layer: str
    shapes: str
    time: Timing
    num_operations: int | None
    num_bytes: int | None
    operations_per_s: float | None
    bytes_per_s: float | None
    peak: str | None
    of_operations_peak: float | None
    of_bytes_peak: float | None
    bound: Bound
    of_bound: float | None
    gather_bytes_per_s: float | None = None
    """Of a lookup: the rate at which this machine reads these very rows and does nothing else."""
    quantise_p50_ns: float | None = None


class PartRow(_Frozen):
    """The operators of one part together.

    Attributes:
        time: median of their sum in each call. Of `dense`, what counts as `quantise` is left out.
        share: of the whole call's median.
        operations_per_s: over the operators' full times: a dense layer is held to its peak with
            the quantising that it needs.
        of_operations_peak: time of the operations at the peak of their arithmetic over time taken.
        of_bytes_peak: the same of bytes, at the reading rate; of lookups, at the gathering rate.
    """

    part: Part
    time: Timing
    share: float
    num_operators: int
    operations_per_s: float | None
    bytes_per_s: float | None
    of_operations_peak: float | None
    of_bytes_peak: float | None
    bound: Bound


class BatchRow(_Frozen):
    """One batch size.

    Attributes:
        whole: the call as it is served, without clocks.
        parts: largest first; with `unexplained_share` they make the whole.
        unexplained_share: what the parts' medians lack of the whole (below 0: exceed it by).
        overhead_inside_p50_ns: the overhead inside compiled code: buffers and views. None for an
            eager model.
        clocks_p50_ns: what the clocks themselves cost a call; the parts are without it.
        parameter_bytes: constants that one call reads, tables left out.
    """

    model: str
    subject: Literal["artifact", "eager"]
    batch_size: int
    whole: Timing
    parts: tuple[PartRow, ...]
    operators: tuple[OperatorRow, ...]
    unexplained_share: float
    overhead_inside_p50_ns: float | None
    clocks_p50_ns: float
    parameter_bytes: int
    notes: tuple[str, ...] = ()


class Diagnosis(_Frozen):
    """The whole of diagnose.json."""

    made_at: str
    model: str
    subject: Literal["artifact", "eager"]
    source: str
    num_threads: int
    machine: MachinePeaks
    batches: tuple[BatchRow, ...]
    data: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reproduce: str
