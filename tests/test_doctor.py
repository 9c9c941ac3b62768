from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rankopt import doctor
from rankopt.doctor import Findings, ImportProbe, diagnose, probe_compiler, probe_import
from rankopt.environment import Environment

UNDEFINED = (
    "OSError: fbgemm_gpu_py.so: undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKc"
)
CPU_FBGEMM_FIX = (
    "pip uninstall -y fbgemm-gpu && pip install --no-deps --force-reinstall fbgemm-gpu-cpu==1.8.0"
)
HEALTHY_LIBRARIES = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


def make_environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "os": "Linux-6.1",
        "architecture": "x86_64",
        "cpu_model": "Some CPU",
        "num_physical_cores": 2,
        "num_logical_cores": 2,
        "num_usable_cores": 2,
        "isa": ("avx2", "fma"),
        "memory_bytes": 16 << 30,
        "gpus": (),
        "python": "3.11.7",
        "libraries": HEALTHY_LIBRARIES,
        "compiler": "/usr/bin/g++",
        "compiler_version": "g++ 12.2.0",
        "git_commit": None,
    }
    return Environment(**(values | changes))


def make_findings(
    *,
    environment: dict[str, Any] | None = None,
    probes: dict[str, str] | None = None,
    **changes: Any,
) -> Findings:
    """Plant a healthy machine; `probes` maps an import to its error, or `torch` to its build."""
    probes = probes or {}
    imports = [ImportProbe(name="torch", ok=True, detail=probes.get("torch", "cpu"))]
    imports += [
        ImportProbe(name=name, ok=name not in probes, error=probes.get(name, ""))
        for name in ("fbgemm_gpu", "torchrec", "torchao", "ray", "pyarrow")
    ]
    values: dict[str, Any] = {
        "environment": make_environment(**(environment or {})),
        "imports": tuple(imports),
        "compiler_error": None,
        "has_python_headers": True,
        "free_bytes": {"/somewhere": 50 << 30},
        "free_memory_bytes": 12 << 30,
    }
    return Findings(**(values | changes))


def fix_of(findings: Findings, name: str, status: str = "problem") -> str | None:
    report = diagnose(findings)
    check = next(check for check in report.checks if check.name == name)
    assert check.status == status, check
    assert report.exit_code == (2 if status == "problem" else 0)
    return check.fix


def test_a_healthy_machine_exits_0() -> None:
    report = diagnose(make_findings())
    assert {check.status for check in report.checks} == {"ok"}
    assert report.exit_code == 0


@pytest.mark.parametrize("triple", doctor.KNOWN_TRIPLES)
def test_each_known_triple_is_accepted(triple: tuple[str, str, str]) -> None:
    libraries = dict(zip(("torch", "torchrec", "fbgemm-gpu-cpu"), triple, strict=True))
    fix_of(make_findings(environment={"libraries": libraries}), "versions", "ok")


@pytest.mark.parametrize(
    ("libraries", "fix"),
    [
        (
            HEALTHY_LIBRARIES | {"fbgemm-gpu-cpu": "1.6.0"},
            "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0",
        ),
        (
            HEALTHY_LIBRARIES | {"torch": "2.12.1"},
            "pip install --no-deps torchrec==1.7.0 fbgemm-gpu-cpu==1.7.0",
        ),
        (
            HEALTHY_LIBRARIES | {"torch": "1.13.1"},
            "pip install torch==2.13.0 && "
            "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0",
        ),
        (
            {"torch": "2.13.0+cpu"},
            "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0",
        ),
    ],
)
def test_a_broken_triple_names_the_releases_that_fit(libraries: dict[str, str], fix: str) -> None:
    assert fix_of(make_findings(environment={"libraries": libraries}), "versions") == fix


def test_the_cuda_wheel_on_a_cpu_torch_gets_the_exact_fix() -> None:
    libraries = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}
    findings = make_findings(
        environment={"libraries": libraries},
        probes={"fbgemm_gpu": UNDEFINED, "torchrec": UNDEFINED},
    )
    for name in ("fbgemm build", "import fbgemm_gpu", "import torchrec"):
        assert fix_of(findings, name) == CPU_FBGEMM_FIX


def test_both_builds_of_fbgemm_are_a_problem_even_where_they_import() -> None:
    libraries = HEALTHY_LIBRARIES | {"fbgemm-gpu": "1.8.0"}
    findings = make_findings(environment={"libraries": libraries}, probes={"torch": "12.8"})
    assert fix_of(findings, "fbgemm build") == CPU_FBGEMM_FIX
    with_gpu = {"libraries": libraries, "gpus": ("NVIDIA H100",)}
    findings = make_findings(environment=with_gpu, probes={"torch": "12.8"})
    fix = fix_of(findings, "fbgemm build")
    assert fix is not None
    assert "pip uninstall -y fbgemm-gpu-cpu" in fix


def test_a_cpu_fbgemm_on_a_gpu_machine_is_a_warning() -> None:
    findings = make_findings(environment={"gpus": ("NVIDIA H100",)}, probes={"torch": "12.8"})
    fix = fix_of(findings, "fbgemm build", "warning")
    assert fix is not None
    assert fix.endswith("fbgemm-gpu==1.8.0")


def test_an_undefined_symbol_with_the_right_packages_reinstalls_fbgemm() -> None:
    findings = make_findings(probes={"fbgemm_gpu": UNDEFINED})
    assert fix_of(findings, "import fbgemm_gpu") == CPU_FBGEMM_FIX


def test_a_missing_package_names_its_install() -> None:
    error = "ModuleNotFoundError: No module named 'ray'"
    findings = make_findings(probes={"ray": error})
    assert fix_of(findings, "import ray") == "pip install --no-deps --force-reinstall ray"


def test_torchao_is_optional() -> None:
    findings = make_findings(probes={"torchao": "ImportError: broken"})
    assert fix_of(findings, "import torchao", "warning")


def test_a_missing_compiler_names_the_package() -> None:
    findings = make_findings(
        environment={"compiler": None, "compiler_version": None},
        compiler_error=probe_compiler(None),
    )
    assert "apt-get install g++" in str(fix_of(findings, "C++ compiler"))


def test_missing_python_headers_are_a_warning() -> None:
    findings = make_findings(has_python_headers=False)
    assert fix_of(findings, "Python headers", "warning") == "apt-get install python3.11-dev"


def test_a_cpu_without_avx2_is_a_problem_on_x86_only() -> None:
    assert fix_of(make_findings(environment={"isa": ()}), "CPU")
    fix_of(make_findings(environment={"isa": ("neon",), "architecture": "aarch64"}), "CPU", "ok")


@pytest.mark.parametrize(
    ("free_bytes", "status"), [(1 << 20, "problem"), (3 << 30, "warning"), (50 << 30, "ok")]
)
def test_free_disk_is_judged(free_bytes: int, status: str) -> None:
    findings = make_findings(free_bytes={"/somewhere": free_bytes})
    assert bool(fix_of(findings, "disk /somewhere", status)) == (status != "ok")


def test_little_memory_is_a_warning() -> None:
    assert fix_of(make_findings(free_memory_bytes=1 << 30), "memory", "warning")


def test_an_old_python_is_a_problem() -> None:
    assert "3.11" in str(fix_of(make_findings(environment={"python": "3.10.4"}), "python"))


def test_an_import_that_crashes_its_process_is_reported() -> None:
    crashed = probe_import("torch", code="import os; os.abort()")
    assert not crashed.ok
    assert crashed.error
    undefined = probe_import("fbgemm_gpu", code=f"raise OSError({UNDEFINED!r})")
    assert "undefined symbol" in undefined.error


def test_an_import_that_hangs_is_reported() -> None:
    probe = probe_import("torch", timeout_s=0.5, code="import time; time.sleep(60)")
    assert (probe.ok, probe.error) == (False, "no answer in 0 s")


def test_the_compiler_probe_tells_a_broken_compiler(tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert "omp.h" in str(probe_compiler(str(broken)))
    assert probe_compiler(str(tmp_path / "none")) is not None


def test_this_machine_through_the_command_line(cli: Any) -> None:
    result = cli("doctor", "--json")
    report = json.loads(result.stdout)
    assert report["healthy"] is (result.exit_code == 0)
    names = {check["name"]: check for check in report["checks"]}
    assert names["python"]["found"] == ".".join(str(part) for part in sys.version_info[:3])
    assert names["import fbgemm_gpu"]["status"] == "ok"
    assert names["C++ compiler"]["status"] == "ok"
    assert all(check["fix"] for check in report["checks"] if check["status"] == "problem")


def test_a_pipe_gets_plain_lines_and_a_planted_problem_exits_2(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = make_findings(probes={"fbgemm_gpu": UNDEFINED})
    monkeypatch.setattr(doctor, "collect_findings", lambda: findings)
    result = cli("doctor")
    assert result.exit_code == 2
    assert f"problem  import fbgemm_gpu  {UNDEFINED}  fix: {CPU_FBGEMM_FIX}" in result.stdout
    assert "│" not in result.stdout
