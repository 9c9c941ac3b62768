"""Measure all-to-all and all-reduce by message size among processes started by torchrun.

The result is what a topology takes in (`collectives:`): the planner then reads times off it instead
of a bandwidth that small messages never reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from rankopt.environment import collect_environment
from rankopt.errors import EnvironmentProblem, Problem, UsageError
from rankopt.output import write_json_atomic
from rankopt.sharding.collectives import Collectives, CollectivesFile
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
FILE = "collectives.json"
TOPOLOGY_FILE = "topology.yaml"


def default_backend() -> Backend:
    """Return nccl where there are two GPUs or more, else gloo."""
    return "nccl" if torch.cuda.device_count() > 1 else "gloo"


def measure_collectives(
    *,
    num_processes: int | None = None,
    backend: Backend | None = None,
    quick: bool = False,
    reproduce: str | None = None,
) -> CollectivesFile:
    """Run the collectives among processes of this machine.

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
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(count), "-m", "rankopt.diagnose.collectives_worker"]
        command += ["--backend", chosen, "--out", str(out), "--num-samples", str(samples)]
        command += ["--sizes", ",".join(str(size) for size in sizes)]
        _run(command)
        if not out.is_file():
            raise EnvironmentProblem("The measuring processes ended without a result.")
        measured = _read(out)
    return CollectivesFile(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device="cuda" if chosen == "nccl" else "cpu",
        backend=chosen,
        world_size=count,
        num_hosts=1,
        collectives=measured,
        environment=collect_environment().model_dump(mode="json"),
        reproduce=reproduce or "rankopt diagnose --collectives --out DIR",
    )


def write_collectives(found: CollectivesFile, out: Path) -> dict[str, Path]:
    """Write `collectives.json`, and `topology.yaml`: this machine as a topology that uses it."""
    paths = {"json": out / FILE, "yaml": out / TOPOLOGY_FILE}
    write_json_atomic(paths["json"], found.model_dump(mode="json"))
    topology = this_machine(found)
    text = yaml.safe_dump(topology, sort_keys=False, width=100)
    head = (
        "# This machine, as `rankopt diagnose --collectives` found it. Memory is its own;\n"
        "# intra_host is the all-to-all of the largest message. Bandwidths that were not\n"
        "# measured are torchrec's defaults: put your own in their place.\n"
    )
    paths["yaml"].write_text(head + text, encoding="utf-8")
    return paths


def this_machine(found: CollectivesFile) -> dict[str, Any]:
    """Describe this machine as a topology, with what it can tell of itself."""
    all_to_all = next(c for c in found.collectives if c.collective == "all_to_all")
    rate = round(all_to_all.bytes_per_s / BYTES_PER_GB, 3)
    topology: dict[str, Any] = {
        "device": found.device,
        "num_hosts": 1,
        "ranks_per_host": found.world_size,
    }
    rates: dict[str, float] = {"host_memory": 54.8, "intra_host": rate, "inter_host": rate}
    if found.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        topology["hbm_gib"] = round(device.total_memory / BYTES_PER_GIB, 1)
        rates |= {"hbm": 963.0, "host_to_device": 34.4}
    topology["host_memory_gib"] = round(_host_memory_bytes() / BYTES_PER_GIB, 1)
    topology["bandwidth_gb_per_s"] = rates
    topology["collectives"] = FILE
    Topology.model_validate(topology)
    return topology


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


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(
            f"The measuring processes did not end within {TIMEOUT_S} s; is a firewall between them?"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        why = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise EnvironmentProblem(f"A measuring process failed: {why}")


def _read(file: Path) -> tuple[Collectives, ...]:
    raw = json.loads(file.read_text(encoding="utf-8"))
    return tuple(Collectives.model_validate(item) for item in raw)
