"""What machine and which software a number was measured on.

Collected without importing torch, since every verb records it and `doctor` must work where torch
does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from rankopt.content import checkout_root
from rankopt.units import BYTES_PER_GIB

LIBRARIES = (
    "rankopt",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "torchao",
    "triton",
    "ray",
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
)

# The kernel's names for the instruction sets that decide which kernels run, and ours.
_ISA_NAMES = {
    "avx2": "avx2",
    "fma": "fma",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "asimddp": "neon_dotprod",
    "bf16": "neon_bf16",
    "i8mm": "neon_i8mm",
    "sve": "sve",
}


class Environment(BaseModel):
    """A machine and its software, as recorded beside every measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    os: str
    architecture: str
    cpu_model: str | None
    num_physical_cores: int | None
    num_logical_cores: int | None
    num_usable_cores: int | None
    """Cores this process may run on: fewer than the machine's in a container or under taskset."""
    isa: tuple[str, ...]
    memory_bytes: int
    gpus: tuple[str, ...]
    python: str
    libraries: dict[str, str]
    compiler: str | None
    compiler_version: str | None
    git_commit: str | None
    """Of the checkout rankopt runs from; ends in `-dirty` when it was changed since."""

    def fingerprint(self) -> str:
        """Name the machine: equal on two runs whose times may be compared.

        Software is left out, so that a change of version shows as a change of time.
        """
        machine = {
            "os": self.os.split("-")[0],
            "architecture": self.architecture,
            "cpu_model": self.cpu_model,
            "cores": [self.num_physical_cores, self.num_logical_cores, self.num_usable_cores],
            "isa": sorted(self.isa),
            # The kernel's own share of memory changes with its version.
            "memory_gib": round(self.memory_bytes / BYTES_PER_GIB),
            "gpus": sorted(self.gpus),
        }
        return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]


def collect_environment() -> Environment:
    """Describe this machine; takes some tens of milliseconds."""
    cpu_model, isa = _cpu()
    compiler = find_compiler()
    return Environment(
        os=f"{platform.system()}-{platform.release()}",
        architecture=platform.machine(),
        cpu_model=cpu_model,
        num_physical_cores=psutil.cpu_count(logical=False),
        num_logical_cores=psutil.cpu_count(logical=True),
        num_usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        isa=isa,
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpus(),
        python=platform.python_version(),
        libraries=installed_libraries(),
        compiler=compiler,
        compiler_version=_first_line([compiler, "--version"]) if compiler else None,
        git_commit=_git_commit(),
    )


def installed_libraries(names: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """Return the installed release of each named distribution; one that is absent is left out."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def find_compiler() -> str | None:
    """Return the path of `$CXX`, else of g++, else of c++ or clang++; None where there is none."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    return None


def parse_cpuinfo(text: str) -> tuple[str | None, tuple[str, ...]]:
    """Read the model name and the instruction sets from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = (fields.get("flags") or fields.get("features") or "").split()
    isa = tuple(sorted(_ISA_NAMES[flag] for flag in set(flags) if flag in _ISA_NAMES))
    return fields.get("model name"), isa


def _cpu() -> tuple[str | None, tuple[str, ...]]:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        model, isa = parse_cpuinfo(cpuinfo.read_text(errors="replace"))
        return model or platform.processor() or None, isa
    return platform.processor() or None, ()


def _gpus() -> tuple[str, ...]:
    """Name the NVIDIA GPUs; the driver's files answer at once, nvidia-smi in up to a second."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    if names:
        return tuple(names)
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    text = _output([tool, "--query-gpu=name", "--format=csv,noheader"], timeout_s=10)
    return tuple(line.strip() for line in (text or "").splitlines() if line.strip())


def _git_commit() -> str | None:
    root = checkout_root()
    if root is None or not (root / ".git").exists():
        return None
    return _first_line(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"])


def _first_line(command: list[str]) -> str | None:
    text = _output(command)
    return text.splitlines()[0] if text else None


def _output(command: list[str], timeout_s: float = 5) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
