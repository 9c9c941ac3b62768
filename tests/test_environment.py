from __future__ import annotations

import subprocess
import sys
import time

import pytest

from rankopt.environment import Environment, collect_environment, find_compiler, parse_cpuinfo

SAPPHIRE_RAPIDS = """processor	: 0
model name	: Intel(R) Xeon(R) Platinum 8488C
flags		: fpu avx2 fma avx512f avx512_vnni avx_vnni avx512_bf16 amx_int8 amx_bf16 amx_tile

processor	: 1
model name	: Intel(R) Xeon(R) Platinum 8488C
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp sve bf16 i8mm\n"


@pytest.fixture(scope="module")
def environment() -> Environment:
    return collect_environment()


def test_isa_names_are_read_from_cpuinfo() -> None:
    model, isa = parse_cpuinfo(SAPPHIRE_RAPIDS)
    assert model == "Intel(R) Xeon(R) Platinum 8488C"
    assert isa == (
        "amx_bf16",
        "amx_int8",
        "avx2",
        "avx512_bf16",
        "avx512_vnni",
        "avx512f",
        "avx_vnni",
        "fma",
    )
    assert parse_cpuinfo(GRAVITON) == (
        None,
        ("neon", "neon_bf16", "neon_dotprod", "neon_i8mm", "sve"),
    )
    assert parse_cpuinfo("") == (None, ())


def test_this_machine_is_described(environment: Environment) -> None:
    assert environment.memory_bytes > 1 << 28
    assert environment.python == ".".join(str(part) for part in sys.version_info[:3])
    assert environment.libraries["torch"].startswith("2.")
    assert Environment.model_validate_json(environment.model_dump_json()) == environment


def test_fingerprint_follows_the_machine_and_not_the_software(environment: Environment) -> None:
    newer = environment.model_copy(
        update={"libraries": {"torch": "9.9"}, "git_commit": "abc", "os": "Linux-9.9.9"}
    )
    if environment.os.startswith("Linux"):
        assert newer.fingerprint() == environment.fingerprint()
    reordered = environment.model_copy(update={"isa": tuple(reversed(environment.isa))})
    assert reordered.fingerprint() == environment.fingerprint()
    for change in (
        {"cpu_model": "another"},
        {"isa": (*environment.isa, "amx_tile")},
        {"num_usable_cores": 999},
        {"memory_bytes": environment.memory_bytes * 2},
        {"gpus": ("NVIDIA H100",)},
    ):
        assert environment.model_copy(update=change).fingerprint() != environment.fingerprint()


def test_collecting_is_quick() -> None:
    collect_environment()
    started = time.perf_counter()
    collect_environment()
    assert time.perf_counter() - started < 0.3


def test_collecting_does_not_import_torch() -> None:
    code = (
        "import sys; from rankopt.environment import collect_environment; collect_environment();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() is None
    assert collect_environment().compiler_version is None
