"""Measure all-to-all and all-reduce by message size among processes started by torchrun.

The result is what a topology takes in (`collectives:`): the planner then reads times off it instead
of a bandwidth that small messages never reach.
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml

from rankopt.environment import collect_environment
from rankopt.errors import EnvironmentProblem, Problem, UsageError
from rankopt.output import write_json_atomic
from rankopt.sharding.collectives import Collectives, CollectivesFile
from rankopt.sharding.launch import run_local_ranks
from rankopt.sharding.lookups import LookupsFile
from rankopt.sharding.topology import Topology
from rankopt.units import BYTES_PER_GB, BYTES_PER_GIB, BYTES_PER_KIB, BYTES_PER_MIB

Backend = Literal["gloo", "nccl"]
SIZES = (
    4 * BYTES_PER_KIB,
    64 * BYTES_PER_KIB,
    BYTES_PER_MIB,
    4 * BYTES_PER_MIB,
    16 * BYTES_PER_MIB,
    64 * BYTES_PER_MIB,
)
QUICK_SIZES = (4 * BYTES_PER_KIB, 256 * BYTES_PER_KIB, 4 * BYTES_PER_MIB)
NUM_SAMPLES = 15
QUICK_SAMPLES = 5
TIMEOUT_S = 600
TOPOLOGY_FILE = "topology.yaml"


class Measured(NamedTuple):
    """What the ranks of a machine measured together."""

    collectives: CollectivesFile
    lookups: LookupsFile


def default_backend() -> Backend:
    """Return nccl where there are two GPUs or more, else gloo."""
    return "nccl" if torch.cuda.device_count() > 1 else "gloo"


def measure_collectives(
    *,
    num_processes: int | None = None,
    backend: Backend | None = None,
    quick: bool = False,
    reproduce: str | None = None,
) -> Measured:
    """Run the collectives among processes of this machine, and lookups on all of them at once.

    Args:
        num_processes: how many; all GPUs with nccl, two with gloo when None.
        backend: nccl where there are two GPUs or more, else gloo, when None.
        quick: three sizes and few samples.
        reproduce: the command to write into the result.

    Raises:
        UsageError: fewer than two processes, or more than there are GPUs.
        EnvironmentProblem: the processes could not be started, or one of them failed.
    """
    chosen = backend or default_backend()
    num_gpus = torch.cuda.device_count()
    count = num_processes or (num_gpus if chosen == "nccl" else 2)
    _check(count, chosen, num_gpus)
    sizes, samples = (QUICK_SIZES, QUICK_SAMPLES) if quick else (SIZES, NUM_SAMPLES)
    with tempfile.TemporaryDirectory(prefix="rankopt-collectives-") as folder:
        out, rows = Path(folder) / "measured.json", Path(folder) / "rows.json"
        arguments = ["--backend", chosen, "--out", str(out), "--num-samples", str(samples)]
        arguments += ["--lookups", str(rows), *(["--quick"] if quick else [])]
        arguments += ["--sizes", ",".join(str(size) for size in sizes)]
        run_local_ranks(
            "rankopt.diagnose.collectives_worker", count, arguments, timeout_s=TIMEOUT_S
        )
        if not (out.is_file() and rows.is_file()):
            raise EnvironmentProblem("The measuring processes ended without a result.")
        measured, lookups = _read(out), json.loads(rows.read_text(encoding="utf-8"))
    common: dict[str, Any] = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cuda" if chosen == "nccl" else "cpu",
        "world_size": count,
        "environment": collect_environment().model_dump(mode="json"),
        "reproduce": reproduce or "rankopt diagnose --collectives --out DIR",
    }
    return Measured(
        CollectivesFile(backend=chosen, num_hosts=1, collectives=measured, **common),
        LookupsFile(**common, **lookups),
    )


def write_collectives(found: Measured, out: Path) -> dict[str, Path]:
    """Write what was measured, and `topology.yaml`: this machine as a topology that uses it."""
    paths = {
        "json": out / CollectivesFile.file_name,
        "lookups": out / LookupsFile.file_name,
        "yaml": out / TOPOLOGY_FILE,
    }
    write_json_atomic(paths["json"], found.collectives.model_dump(mode="json"))
    write_json_atomic(paths["lookups"], found.lookups.model_dump(mode="json"))
    topology = this_machine(found)
    text = yaml.safe_dump(topology, sort_keys=False, width=100)
    head = (
        "# This machine, as `rankopt diagnose --collectives` found it. Memory is its own,\n"
        "# bandwidths are those of copies of large arrays, intra_host is the all-to-all of the\n"
        "# largest message; inter_host repeats it, unmeasured: put your own in its place.\n"
    )
    paths["yaml"].write_text(head + text, encoding="utf-8")
    return paths


def this_machine(found: Measured) -> dict[str, Any]:
    """Describe this machine as a topology, with what it can tell of itself."""
    measured, lookups = found.collectives, found.lookups
    all_to_all = next(c for c in measured.collectives if c.collective == "all_to_all")
    rate = _gb_per_s(all_to_all.bytes_per_s)
    topology: dict[str, Any] = {
        "device": measured.device,
        "num_hosts": 1,
        "ranks_per_host": measured.world_size,
    }
    rates: dict[str, float] = {
        "host_memory": _gb_per_s(lookups.host_memory_bytes_per_s),
        "intra_host": rate,
        "inter_host": rate,
    }
    if measured.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        topology["hbm_gib"] = round(device.total_memory / BYTES_PER_GIB, 1)
        rates["hbm"] = _gb_per_s(lookups.hbm_bytes_per_s or 0.0)
        rates["host_to_device"] = _gb_per_s(lookups.host_to_device_bytes_per_s or 0.0)
    topology["host_memory_gib"] = round(_host_memory_bytes() / BYTES_PER_GIB, 1)
    topology["bandwidth_gb_per_s"] = rates
    topology["collectives"] = CollectivesFile.file_name
    topology["lookups"] = LookupsFile.file_name
    Topology.model_validate(topology)
    return topology


def _gb_per_s(bytes_per_s: float) -> float:
    return max(0.001, round(bytes_per_s / BYTES_PER_GB, 3))


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check(count: int, backend: Backend, num_gpus: int) -> None:
    problems = []
    if count < 2:
        hint = "Collectives need two; a machine of one GPU can measure gloo: --backend gloo."
        problems.append(Problem("--num-processes", "must be at least 2", count, hint))
    if backend == "nccl" and count > num_gpus:
        what = f"must be at most the number of GPUs, {num_gpus}, with nccl"
        problems.append(Problem("--num-processes", what, count))
    if problems:
        raise UsageError(problems=problems)


def _read(file: Path) -> tuple[Collectives, ...]:
    raw = json.loads(file.read_text(encoding="utf-8"))
    return tuple(Collectives.model_validate(item) for item in raw)
