"""Topologies: how many hosts and ranks there are, what memory they have and how fast it moves.

torchrec's planner takes 32 GB of device memory and 128 GB of host memory a rank unless it is told,
so a file states both, and every bandwidth that a prediction rests on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rankopt.content import find, read_yaml
from rankopt.errors import Problem, UsageError
from rankopt.problems import problems_of_validation, take_reserved
from rankopt.sharding.collectives import Collectives, CollectivesFile
from rankopt.sharding.lookups import LookupsFile
from rankopt.sharding.measured_file import read_measured
from rankopt.units import BYTES_PER_GB, BYTES_PER_GIB

FOLDER = "benchmarks/topologies"
MAX_GB_PER_S = 100_000
"""Ten times the fastest memory there is: beyond it the unit was mistaken."""
MAX_GIB = 1_000_000
"""A host of a pebibyte; beyond it these were bytes or MiB."""

Device = Literal["cpu", "cuda"]
Rate = Annotated[float, Field(gt=0, le=MAX_GB_PER_S, allow_inf_nan=False)]
"""GB/s: 10^9 bytes a second, one direction, of one rank."""
Memory = Annotated[float, Field(gt=0, le=MAX_GIB, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bandwidths(_Strict):
    """What one rank reaches, in GB/s."""

    host_memory: Rate
    intra_host: Rate
    """To the other ranks of its host."""
    inter_host: Rate
    """To ranks of other hosts."""
    hbm: Rate | None = None
    host_to_device: Rate | None = None


class Reserved(_Strict):
    """The shares of memory that no plan may use."""

    hbm: Share = 0.15
    """torchrec's own margin: dense activations, the allocator's gaps, the libraries."""
    host_memory: Share = 0.1


class Topology(_Strict):
    """Hosts and ranks that a model is sharded over.

    Example:
        ```yaml
        device: cuda
        num_hosts: 1
        ranks_per_host: 8
        hbm_gib: 79.6
        host_memory_gib: 2048
        bandwidth_gb_per_s:
          {hbm: 3350, host_memory: 75, host_to_device: 55, intra_host: 450, inter_host: 50}
        ```
    """

    device: Device
    num_hosts: int = Field(ge=1, le=4096)
    ranks_per_host: int = Field(ge=1, le=64)
    hbm_gib: Memory | None = None
    """Of one device, as it reports it; CPUs have none."""
    host_memory_gib: Memory
    """Of one host; its ranks share it in equal parts."""
    bandwidth_gb_per_s: Bandwidths
    reserved: Reserved = Reserved()
    dense_tflop_per_s: Rate | None = None
    """Sustained by one rank on the dense layers; without it their time is left out."""
    collectives: tuple[str, ...] | str | None = None
    """Files of `rankopt diagnose --collectives`, relative to this one: measured times by message
    size take the place of `intra_host` and `inter_host`."""
    lookups: str | None = None
    """Another file that it writes: what reading and updating a row costs, in place of bytes over
    the bandwidth of memory."""
    name: str = Field(default="topology", exclude=True)
    measured: tuple[Collectives, ...] = Field(default=(), exclude=True)
    """What the files of `collectives` hold; `load_topology` reads them."""
    measured_lookups: LookupsFile | None = Field(default=None, exclude=True)
    """What the file of `lookups` holds, likewise."""

    @model_validator(mode="after")
    def _device_memory_is_stated(self) -> Topology:
        stated = {
            "hbm_gib": self.hbm_gib,
            "bandwidth_gb_per_s.hbm": self.bandwidth_gb_per_s.hbm,
            "bandwidth_gb_per_s.host_to_device": self.bandwidth_gb_per_s.host_to_device,
        }
        if self.device == "cuda":
            missing = [name for name, value in stated.items() if value is None]
            if missing:
                raise ValueError(f"device cuda needs {', '.join(missing)}")
        elif any(value is not None for value in stated.values()):
            given = [name for name, value in stated.items() if value is not None]
            raise ValueError(f"device cpu has no {', '.join(given)}")
        return self

    @model_validator(mode="after")
    def _bandwidths_make_sense(self) -> Topology:
        rates = self.bandwidth_gb_per_s
        wrong = []
        if rates.hbm is not None and rates.host_to_device is not None:
            if rates.host_to_device > rates.hbm:
                wrong.append(f"host_to_device ({rates.host_to_device:g}) is above hbm")
            if rates.intra_host > rates.hbm:
                wrong.append(f"intra_host ({rates.intra_host:g}) is above hbm ({rates.hbm:g})")
        if self.device == "cuda" and rates.inter_host > rates.intra_host:
            wrong.append(
                f"inter_host ({rates.inter_host:g}) is above intra_host ({rates.intra_host:g})"
            )
        if wrong:
            raise ValueError(f"bandwidth_gb_per_s: {'; '.join(wrong)}. Are the units GB/s a rank?")
        return self

    @model_validator(mode="after")
    def _some_memory_is_left(self) -> Topology:
        if self.host_bytes < 1 or (self.device == "cuda" and self.hbm_bytes < 1):
            raise ValueError("hbm_gib, host_memory_gib and reserved leave no byte to a rank")
        return self

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def hbm_bytes(self) -> int:
        """Device memory of a rank that a plan may use; 0 on CPUs."""
        return math.floor((self.hbm_gib or 0.0) * BYTES_PER_GIB * (1 - self.reserved.hbm))

    @property
    def host_bytes(self) -> int:
        """Host memory of a rank that a plan may use."""
        usable = self.host_memory_gib * BYTES_PER_GIB * (1 - self.reserved.host_memory)
        return math.floor(usable / self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def bandwidth(self, collective: str, *, within_host: bool) -> float:
        """Bytes a second of a large message of one rank, measured where a file says so."""
        curve = self.curve(collective, within_host=within_host)
        if curve is not None:
            return curve.bytes_per_s
        rates = self.bandwidth_gb_per_s
        if within_host:
            return rates.intra_host * BYTES_PER_GB
        if collective == "all_reduce":
            # Every rank has an adapter of its own, and a ring over the hosts uses all of them.
            return min(rates.intra_host, rates.inter_host * self.ranks_per_host) * BYTES_PER_GB
        return rates.inter_host * BYTES_PER_GB

    def curve(self, collective: str, *, within_host: bool) -> Collectives | None:
        """Return the measurement of one collective within a host or across hosts."""
        for measured in self.measured:
            if measured.collective == collective and measured.within_host == within_host:
                return measured
        return None


def load_topology(name_or_path: str | Path) -> Topology:
    """Read a topology.

    Raises:
        UsageError: no such file, or it breaks the schema; every problem is listed.
    """
    file = find(FOLDER, name_or_path)
    raw = read_yaml(file, UsageError)
    if not isinstance(raw, dict):
        raise UsageError(problems=[Problem(str(file), "must be a mapping", type(raw).__name__)])
    problems = take_reserved(str(file), raw, Topology)
    try:
        topology = Topology.model_validate(raw)
    except ValidationError as error:
        raise UsageError(
            problems=[*problems, *problems_of_validation(str(file), error, Topology)]
        ) from error
    if problems:
        raise UsageError(problems=problems)
    given = topology.collectives or ()
    files = (given,) if isinstance(given, str) else given
    measured = tuple(
        item
        for name in files
        for item in read_measured(file.parent / name, CollectivesFile, topology.device).collectives
    )
    update: dict[str, Any] = {"name": file.stem, "measured": measured}
    if topology.lookups is not None:
        update["measured_lookups"] = read_measured(
            file.parent / topology.lookups, LookupsFile, topology.device
        )
    return topology.model_copy(update=update)
