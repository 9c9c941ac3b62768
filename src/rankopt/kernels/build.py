"""Compile the C++ kernels once per machine, keep them in a cache, load them into the process.

The key of the cache is everything the library depends on: sources, flags, compiler, torch. One
process builds; another that needs the same library at the same time waits for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

from rankopt.environment import find_compiler
from rankopt.errors import EnvironmentProblem, Problem

SOURCE_DIR = Path(__file__).parent / "csrc"
LIBRARY_NAME = "librankopt_kernels.so"
# No -march: each instruction set is compiled into its own functions and chosen at run time.
# -ffp-contract=off: a fused multiply-add on one CPU and none on another would give other bits.
COMPILE_FLAGS = (
    "-O3",
    # torch is built so too: without it its headers check what only a debug build of it sets.
    "-DNDEBUG",
    "-std=c++20",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
)
LINK_FLAGS = ("-shared", "-fopenmp", "-lc10", "-ltorch", "-ltorch_cpu")
_NUM_ERROR_LINES = 12

_load_lock = threading.Lock()
_loaded: Path | None = None


def cache_dir() -> Path:
    """Return where built libraries are kept: `$RANKOPT_CACHE`, else `~/.cache/rankopt`."""
    root = os.environ.get("RANKOPT_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "rankopt"


def load_kernels() -> Path:
    """Load the kernels into this process, building them first where the cache has none.

    Its symbols become visible to libraries loaded later, so load it before a compiled artifact that
    calls them. Calling it again costs nothing.

    Returns:
        The library loaded.

    Raises:
        EnvironmentProblem: there is no C++ compiler, it failed, or the cache cannot be written.
    """
    global _loaded
    with _load_lock:
        if _loaded is None:
            library = build_kernels()
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            _loaded = library
        return _loaded


def build_kernels(source_dir: Path = SOURCE_DIR) -> Path:
    """Return the built library of `source_dir`, compiling it where the cache has none.

    Raises:
        EnvironmentProblem: there is no C++ compiler, it failed, or the cache cannot be written.
    """
    compiler = require_compiler()
    sources = sorted(source_dir.glob("*.cpp"))
    folder = cache_dir() / "kernels" / _key(compiler, sorted(source_dir.iterdir()))
    library = folder / LIBRARY_NAME
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _file_lock(folder / "lock"):
            if not library.exists():
                _build(compiler, sources, library)
    except OSError as error:
        raise EnvironmentProblem(
            problems=[
                Problem(
                    str(folder),
                    f"the kernels cannot be built here: {error.strerror or error}",
                    hint="Set RANKOPT_CACHE to a folder that can be written and has 50 MB free.",
                )
            ]
        ) from None
    return library


def require_compiler() -> str:
    """Return the C++ compiler that `find_compiler` finds.

    Raises:
        EnvironmentProblem: there is none.
    """
    path = find_compiler()
    if path is not None:
        return path
    chosen = os.environ.get("CXX")
    where = "CXX" if chosen else "PATH"
    raise EnvironmentProblem(
        problems=[
            Problem(
                where,
                "a C++ compiler is needed to build the kernels",
                chosen,
                hint="Install one (Debian and Ubuntu: `apt-get install g++`; Fedora: `dnf install "
                "gcc-c++`), or set CXX to the one you have.",
            )
        ]
    )


def _key(compiler: str, files: Sequence[Path]) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    digest = hashlib.sha256()
    for text in (compiler, version, torch.__version__, *COMPILE_FLAGS, *LINK_FLAGS):
        digest.update(text.encode() + b"\0")
    for file in files:
        if file.suffix in {".cpp", ".h"}:
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _build(compiler: str, sources: Sequence[Path], library: Path) -> None:
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as name:
        scratch = Path(name)

        def compile_one(source: Path) -> Path:
            target = scratch / f"{source.stem}.o"
            _run([compiler, *COMPILE_FLAGS, abi, *includes, "-c", str(source), "-o", str(target)])
            return target

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = [str(path) for path in pool.map(compile_one, sources)]
        built = scratch / LIBRARY_NAME
        folders = [flag for p in cpp_extension.library_paths() for flag in (f"-L{p}",)]
        _run([compiler, *objects, *folders, *LINK_FLAGS, "-o", str(built)])
        os.replace(built, library)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-_NUM_ERROR_LINES:]
        raise EnvironmentProblem(
            f"The kernels could not be compiled; {command[0]} ended with {done.returncode}:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nrankopt needs a compiler with C++20: g++ 11 or clang++ 14 at least "
            "(`rankopt doctor` shows yours); set CXX to choose another."
        )


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
