"""What collectives cost by message size: the file that `rankopt diagnose --collectives` writes."""

from __future__ import annotations

import bisect
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rankopt.sharding.measured_file import MeasuredFile
from rankopt.units import NS_PER_S

Collective = Literal["all_to_all", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = ("all_to_all", "all_reduce")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MessageTime(_Strict):
    """One message size.

    `size_bytes` is the whole buffer of one rank: what it sends to all, its own part included.
    """

    size_bytes: int = Field(gt=0)
    p50_ns: Positive
    lowest_ns: Positive
    highest_ns: Positive
    num_samples: int = Field(gt=0)

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.p50_ns * NS_PER_S


class Collectives(_Strict):
    """One collective over the sizes, slowest rank of each call."""

    collective: Collective
    within_host: bool
    messages: tuple[MessageTime, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _sizes_rise(self) -> Collectives:
        sizes = [message.size_bytes for message in self.messages]
        if sizes != sorted(set(sizes)):
            raise ValueError("messages must rise in size_bytes")
        return self

    @property
    def bytes_per_s(self) -> float:
        """The rate of the largest message."""
        return self.messages[-1].bytes_per_s

    def time_ns(self, size_bytes: float) -> float:
        """Read the time of any size off the measured ones, linear between two.

        Below the smallest the latency stays; above the largest its rate does.
        """
        if size_bytes <= 0:
            return 0.0
        sizes = [message.size_bytes for message in self.messages]
        place = bisect.bisect_left(sizes, size_bytes)
        if place == 0:
            return self.messages[0].p50_ns
        if place == len(sizes):
            return size_bytes / self.bytes_per_s * NS_PER_S
        below, above = self.messages[place - 1], self.messages[place]
        share = (size_bytes - below.size_bytes) / (above.size_bytes - below.size_bytes)
        return below.p50_ns + share * (above.p50_ns - below.p50_ns)


class CollectivesFile(MeasuredFile):
    """`collectives.json`."""

    file_name = "collectives.json"

    backend: Literal["gloo", "nccl"]
    world_size: int = Field(ge=2)
    num_hosts: int = Field(ge=1)
    collectives: tuple[Collectives, ...] = Field(min_length=1)
    environment: dict[str, Any] = Field(default_factory=dict)
    reproduce: str = ""
