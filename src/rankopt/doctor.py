"""Say what this machine has and lacks, and how to mend each lack.

`collect_findings` looks; `diagnose` judges. The second takes only values, so that a broken install
can be judged in a test without breaking one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from rankopt.environment import Environment, collect_environment
from rankopt.units import BYTES_PER_GIB, format_bytes

Status = Literal["ok", "warning", "problem"]

KNOWN_TRIPLES = (
    ("2.13.0", "1.8.0", "1.8.0"),
    ("2.12.1", "1.7.0", "1.7.0"),
    ("2.11.0", "1.6.0", "1.6.0"),
)
"""Releases of torch, torchrec and fbgemm that load each other's symbols."""

_RESTORE_CPU_FBGEMM = (
    "pip uninstall -y fbgemm-gpu && "
    "pip install --no-deps --force-reinstall fbgemm-gpu-cpu=={fbgemm}"
)
_RESTORE_CUDA_FBGEMM = (
    "pip uninstall -y fbgemm-gpu-cpu && "
    "pip install --no-deps --force-reinstall fbgemm-gpu=={fbgemm}"
)
_MIN_DISK_BYTES = 1 * BYTES_PER_GIB
_COMFORTABLE_DISK_BYTES = 5 * BYTES_PER_GIB
_COMFORTABLE_MEMORY_BYTES = 8 * BYTES_PER_GIB

# Each prints one JSON object as its last line. fbgemm's probe asks for an operator, since a library
# with undefined symbols is skipped with a log line and leaves a package that imports but is empty.
_PROBES = {
    "torch": "import torch; detail = torch.version.cuda or 'cpu'",
    "fbgemm_gpu": (
        "import torch, fbgemm_gpu; "
        "torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function; detail = ''"
    ),
    "torchrec": "import torchrec; detail = ''",
    "torchao": "import torchao; detail = ''",
    "ray": "import ray; detail = ''",
    "pyarrow": "import pyarrow.parquet; detail = ''",
}
_OPTIONAL_IMPORTS = {"torchao"}

_PROGRAM = """#include <omp.h>
#include <optional>
int main() { std::optional<int> n = omp_get_max_threads(); return n.value_or(0) > 0 ? 0 : 1; }
"""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImportProbe(_Frozen):
    """What importing a package in a fresh process gave."""

    name: str
    ok: bool
    detail: str = ""
    """torch: the CUDA release it was built for, or `cpu`."""
    error: str = ""


class Findings(_Frozen):
    """Everything `diagnose` judges."""

    environment: Environment
    imports: tuple[ImportProbe, ...]
    compiler_error: str | None
    """What the compiler said to a small program with OpenMP; None when it built and ran."""
    has_python_headers: bool
    free_bytes: dict[str, int]
    """Free disk by folder: the working folder and the one for temporary files."""
    free_memory_bytes: int


class Check(_Frozen):
    """One line of the report."""

    name: str
    status: Status
    found: str
    fix: str | None = None


class DoctorReport(_Frozen):
    """All checks; healthy when none is a problem."""

    checks: tuple[Check, ...]
    environment: Environment

    @property
    def healthy(self) -> bool:
        return all(check.status != "problem" for check in self.checks)

    @property
    def exit_code(self) -> int:
        return 0 if self.healthy else 2


def collect_findings(*, timeout_s: float = 120) -> Findings:
    """Look at this machine: imports in fresh processes, a small compilation, disk and memory."""
    environment = collect_environment()
    # Two at a time: an import of torch keeps a core busy for seconds.
    with ThreadPoolExecutor(max_workers=2) as pool:
        imports = tuple(pool.map(lambda name: probe_import(name, timeout_s=timeout_s), _PROBES))
    folders = {str(Path.cwd()), tempfile.gettempdir()}
    return Findings(
        environment=environment,
        imports=imports,
        compiler_error=probe_compiler(environment.compiler),
        has_python_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        free_bytes={folder: shutil.disk_usage(folder).free for folder in sorted(folders)},
        free_memory_bytes=psutil.virtual_memory().available,
    )


def probe_import(name: str, *, timeout_s: float = 120, code: str | None = None) -> ImportProbe:
    """Import a package in a fresh process, where a crash of its libraries harms nobody."""
    script = f"{code or _PROBES[name]}\nimport json; print(json.dumps({{'detail': detail}}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return ImportProbe(name=name, ok=False, error=f"no answer in {timeout_s:.0f} s")
    if done.returncode == 0:
        detail = json.loads(done.stdout.splitlines()[-1])["detail"]
        return ImportProbe(name=name, ok=True, detail=detail)
    return ImportProbe(name=name, ok=False, error=_telling_line(done.stderr, done.returncode))


def probe_compiler(compiler: str | None, *, timeout_s: float = 60) -> str | None:
    """Build and run a small C++17 program with OpenMP; return what went wrong, or None."""
    if compiler is None:
        return "no C++ compiler on the path"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(_PROGRAM)
        command = [compiler, "-std=c++17", "-fopenmp", str(source), "-o", str(program)]
        try:
            built = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            if built.returncode != 0:
                return _telling_line(built.stderr, built.returncode)
            ran = subprocess.run([str(program)], timeout=timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return None if ran.returncode == 0 else f"the program it built exited {ran.returncode}"


def diagnose(findings: Findings) -> DoctorReport:
    """Judge what was found; each problem comes with the command that mends it."""
    checks = [
        _check_python(findings.environment),
        _check_triple(findings.environment.libraries),
        _check_fbgemm_build(findings),
        *(_check_import(probe, findings) for probe in findings.imports),
        *_check_compiler(findings),
        _check_cpu(findings.environment),
        _check_gpu(findings),
        _check_memory(findings),
        *(_check_disk(folder, free) for folder, free in findings.free_bytes.items()),
    ]
    return DoctorReport(checks=tuple(checks), environment=findings.environment)


def _check_python(environment: Environment) -> Check:
    version = tuple(int(part) for part in environment.python.split(".")[:2])
    if version < (3, 11):
        fix = (
            "Make the virtual environment anew with Python 3.11 or newer: rm -r .venv && make setup"
        )
        return Check(name="python", status="problem", found=environment.python, fix=fix)
    return Check(name="python", status="ok", found=environment.python)


def _check_triple(libraries: dict[str, str]) -> Check:
    fbgemm = libraries.get("fbgemm-gpu-cpu") or libraries.get("fbgemm-gpu")
    found = (libraries.get("torch"), libraries.get("torchrec"), fbgemm)
    text = "torch {}, torchrec {}, fbgemm {}".format(*(part or "missing" for part in found))
    series = tuple(_series(part) for part in found)
    if any(series == tuple(map(_series, triple)) for triple in KNOWN_TRIPLES):
        return Check(name="versions", status="ok", found=text)
    fitting = _fitting(libraries)
    flavour = "fbgemm-gpu" if "fbgemm-gpu" in libraries else "fbgemm-gpu-cpu"
    packages = [f"torchrec=={fitting[1]}", f"{flavour}=={fitting[2]}"]
    fix = f"pip install --no-deps {' '.join(packages)}"
    if _series(fitting[0]) != series[0]:
        fix = f"pip install torch=={fitting[0]} && {fix}"
    return Check(name="versions", status="problem", found=f"{text}: not built together", fix=fix)


def _check_fbgemm_build(findings: Findings) -> Check:
    libraries = findings.environment.libraries
    both = "fbgemm-gpu" in libraries and "fbgemm-gpu-cpu" in libraries
    build = _torch_build(findings)
    name = "fbgemm build"
    if build == "cpu" and "fbgemm-gpu" in libraries:
        found = "fbgemm-gpu, the CUDA build, beside a CPU build of torch"
        return Check(name=name, status="problem", found=found, fix=_fbgemm_fix(findings))
    if both:
        found = "fbgemm-gpu and fbgemm-gpu-cpu, which overwrite each other's files"
        return Check(name=name, status="problem", found=found, fix=_fbgemm_fix(findings))
    if build not in (None, "cpu") and findings.environment.gpus and "fbgemm-gpu" not in libraries:
        found = "fbgemm-gpu-cpu on a machine with a GPU: tables would stay on the CPU"
        return Check(name=name, status="warning", found=found, fix=_fbgemm_fix(findings))
    found = "fits the build of torch" if build else "torch does not import, so it is not known"
    return Check(name=name, status="ok" if build else "warning", found=found)


def _check_import(probe: ImportProbe, findings: Findings) -> Check:
    name = f"import {probe.name}"
    if probe.ok:
        return Check(name=name, status="ok", found=probe.detail or "works")
    status: Status = "warning" if probe.name in _OPTIONAL_IMPORTS else "problem"
    return Check(name=name, status=status, found=probe.error, fix=_import_fix(probe, findings))


def _import_fix(probe: ImportProbe, findings: Findings) -> str:
    libraries = findings.environment.libraries
    broken_symbols = "undefined symbol" in probe.error or "libcud" in probe.error
    if probe.name in {"fbgemm_gpu", "torchrec"} and ("fbgemm" in probe.error or broken_symbols):
        return _fbgemm_fix(findings)
    if probe.name == "fbgemm_gpu":
        return _fbgemm_fix(findings)
    if probe.name == "torch":
        return f"pip install --force-reinstall torch=={KNOWN_TRIPLES[0][0]}"
    if probe.name == "torchrec":
        return f"pip install --no-deps --force-reinstall torchrec=={_fitting(libraries)[1]}"
    pinned = f"=={libraries[probe.name]}" if probe.name in libraries else ""
    return f"pip install --no-deps --force-reinstall {probe.name}{pinned}"


def _fbgemm_fix(findings: Findings) -> str:
    wants_cuda = _torch_build(findings) not in (None, "cpu") and findings.environment.gpus
    command = _RESTORE_CUDA_FBGEMM if wants_cuda else _RESTORE_CPU_FBGEMM
    return command.format(fbgemm=_fitting(findings.environment.libraries)[2])


def _fitting(libraries: dict[str, str]) -> tuple[str, str, str]:
    series = _series(libraries.get("torch"))
    return next((t for t in KNOWN_TRIPLES if _series(t[0]) == series), KNOWN_TRIPLES[0])


def _check_compiler(findings: Findings) -> list[Check]:
    environment = findings.environment
    if findings.compiler_error:
        fix = "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora)"
        found = findings.compiler_error
        return [Check(name="C++ compiler", status="problem", found=found, fix=fix)]
    found = environment.compiler_version or str(environment.compiler)
    checks = [Check(name="C++ compiler", status="ok", found=found)]
    if not findings.has_python_headers:
        fix = f"apt-get install python{environment.python.rpartition('.')[0]}-dev"
        found = "Python.h is missing, so torch cannot tell which vector instructions it may use"
        checks.append(Check(name="Python headers", status="warning", found=found, fix=fix))
    return checks


def _check_cpu(environment: Environment) -> Check:
    isa = ", ".join(environment.isa) or "no vector instructions known to rankopt"
    found = f"{environment.cpu_model or environment.architecture}: {isa}"
    if environment.architecture in {"x86_64", "AMD64"} and "avx2" not in environment.isa:
        fix = "Use a CPU with AVX2 (2015 or newer), or pass it through to the virtual machine."
        return Check(name="CPU", status="problem", found=f"{found}; fbgemm needs AVX2", fix=fix)
    return Check(name="CPU", status="ok", found=found)


def _check_gpu(findings: Findings) -> Check:
    gpus = findings.environment.gpus
    if not gpus:
        return Check(name="GPU", status="ok", found="none; rankopt runs on the CPU")
    if _torch_build(findings) == "cpu":
        fix = "rm -r .venv && make setup"
        found = f"{', '.join(gpus)}, but this torch is a CPU build"
        return Check(name="GPU", status="warning", found=found, fix=fix)
    return Check(name="GPU", status="ok", found=", ".join(gpus))


def _check_memory(findings: Findings) -> Check:
    total = findings.environment.memory_bytes
    found = f"{format_bytes(findings.free_memory_bytes)} free of {format_bytes(total)}"
    if findings.free_memory_bytes < _COMFORTABLE_MEMORY_BYTES:
        fix = "Compiling a model takes some GiB: end other work before `rankopt optimize`."
        return Check(name="memory", status="warning", found=found, fix=fix)
    return Check(name="memory", status="ok", found=found)


def _check_disk(folder: str, free_bytes: int) -> Check:
    name, found = f"disk {folder}", f"{format_bytes(free_bytes)} free"
    if free_bytes < _COMFORTABLE_DISK_BYTES:
        status: Status = "problem" if free_bytes < _MIN_DISK_BYTES else "warning"
        fix = "Free some space; for temporary files, set TMPDIR to a folder on a larger disk."
        return Check(name=name, status=status, found=found, fix=fix)
    return Check(name=name, status="ok", found=found)


def _torch_build(findings: Findings) -> str | None:
    for probe in findings.imports:
        if probe.name == "torch" and probe.ok:
            return probe.detail
    return None


def _series(version: str | None) -> str | None:
    """Cut a release to what decides whether symbols fit: 2.13.0+cpu to 2.13."""
    return ".".join(version.split("+")[0].split(".")[:2]) if version else None


def _telling_line(text: str, returncode: int) -> str:
    """Pick the line of an error output that names the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for mark in ("undefined symbol", "cannot open shared object", "error:"):
        for line in lines:
            if mark in line:
                return line
    return lines[-1] if lines else f"exited {returncode}"
