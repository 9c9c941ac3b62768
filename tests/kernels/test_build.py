"""The library is built once, by one process, and says what is missing when it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rankopt.errors import EnvironmentProblem
from rankopt.kernels import build

TINY = 'extern "C" __attribute__((visibility("default"))) int answer() { return VALUE; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library small enough to build in a test, and an empty cache."""
    monkeypatch.setenv("RANKOPT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "value.h").write_text("#define VALUE 42\n")
    (folder / "tiny.cpp").write_text('#include "value.h"\n' + TINY)
    return folder


def compilers_run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record every compiler command from now on."""
    commands: list[list[str]] = []
    run = build._run

    def record(command: list[str]) -> None:
        commands.append(command)
        run(command)

    monkeypatch.setattr(build, "_run", record)
    return commands


def test_second_build_is_found_in_the_cache(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compilers_run(monkeypatch)
    library = build.build_kernels(sources)
    assert library.is_file()
    assert build.build_kernels(sources) == library
    assert len(commands) == 2  # one source, one link
    assert sorted(path.name for path in library.parent.iterdir()) == [library.name, "lock"]


def test_changed_header_builds_another_library(sources: Path) -> None:
    before = build.build_kernels(sources)
    (sources / "value.h").write_text("#define VALUE 43\n")
    after = build.build_kernels(sources)
    assert before != after
    assert before.is_file()
    assert after.is_file()


def test_concurrent_builds_compile_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compilers_run(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(build.build_kernels, [sources] * 4))
    assert len(libraries) == 1
    assert len(commands) == 2


def test_missing_compiler_names_the_fix(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        EnvironmentProblem, match=r"C\+\+ compiler is needed.*apt-get install g\+\+"
    ):
        build.build_kernels(sources)


def test_wrong_cxx_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentProblem, match=r"CXX: .*got 'no-such-compiler'"):
        build.build_kernels(sources)


def test_broken_source_shows_the_compilers_words_and_leaves_nothing(sources: Path) -> None:
    (sources / "tiny.cpp").write_text("int broken( {\n")
    with pytest.raises(EnvironmentProblem, match=r"could not be compiled(?s:.)*tiny\.cpp:1"):
        build.build_kernels(sources)
    left = [path for path in sources.parent.joinpath("cache").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["lock"]


def test_cache_that_cannot_be_written_names_the_setting(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("RANKOPT_CACHE", str(blocked))
    with pytest.raises(EnvironmentProblem, match="Set RANKOPT_CACHE"):
        build.build_kernels(sources)


def test_load_is_idempotent() -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.load_kernels(), range(8)))
    assert paths == {build.load_kernels()}


def test_environment_chooses_the_isa_and_a_wrong_one_is_an_error() -> None:
    script = "from rankopt.kernels import ops; print(ops.current_isa())"

    def isa(name: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"RANKOPT_ISA": name}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert isa("scalar").stdout.strip() == "scalar"
    wrong = isa("mmx")
    assert wrong.returncode != 0
    assert "RANKOPT_ISA: not an instruction set of this CPU; got 'mmx'" in wrong.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm from binutils")
def test_only_entry_points_are_exported() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(build.load_kernels())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in listing.splitlines()}
    entries = ("linear_fbgemm", "linear_fp32", "linear_int8")
    assert {f"aoti_torch_cpu_{entry}" for entry in entries} <= names
    assert not [name for name in names if "Avx" in name or "quantize" in name]
