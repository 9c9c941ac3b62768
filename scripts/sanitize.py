"""Run the kernels' parity grid under AddressSanitizer and UndefinedBehaviorSanitizer.

The kernels are compiled with both into a program of their own (tests/kernels/sanitizer), which
calls each operator through torch's dispatcher on tensors of exactly the size they need. A kernel of
the registry is covered without another word here. Built objects are kept in the cache of built
kernels, so only what changed is compiled again.

    python scripts/sanitize.py [--max-numbers 100000]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from rankopt.kernels.build import SOURCE_DIR, cache_dir, require_compiler
from rankopt.kernels.registry import KERNELS

PROGRAM = Path(__file__).resolve().parent.parent / "tests/kernels/sanitizer/main.cpp"
FLAGS = (
    "-O1",
    "-g1",
    "-std=c++20",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    # torch's classes have their type information in libraries built without it.
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=all",
    "-Wno-unknown-pragmas",
)
LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu")


def main() -> int:
    """Build the program, write the calls, run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--max-numbers", type=int, default=100_000, help="leave out calls on more numbers than this"
    )
    settings = parser.parse_args()
    folder = cache_dir() / "sanitizer"
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    program = build(folder)
    print(f"built in {time.monotonic() - begin:.0f} s", flush=True)
    calls = folder / "calls.pt"
    torch.save(list_calls(settings.max_numbers), calls)
    # Leaks are looked for with ptrace, which a container may not allow; accesses are what counts.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    begin = time.monotonic()
    done = subprocess.run([str(program), str(calls)], env={**os.environ, **options}, check=False)
    calls.unlink()
    if done.returncode:
        print(f"the kernels failed under the sanitizers (exit {done.returncode})", file=sys.stderr)
        return 1
    print(f"no error in {time.monotonic() - begin:.0f} s")
    return 0


def list_calls(max_numbers: int) -> list[tuple[str, tuple[Any, ...]]]:
    """List every call of the parity grid on at most so many numbers."""
    calls = []
    for kernel in KERNELS.values():
        for case in kernel.cases:
            arguments = kernel.arguments(case)
            if count_numbers(arguments) <= max_numbers:
                calls.append((kernel.name, tuple(map(_readable, arguments))))
    return calls


def _readable(value: Any) -> Any:
    """Make empty tensors anew: one that is a view past the end of nothing cannot be read back."""
    if isinstance(value, Tensor) and not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    return [_readable(item) for item in value] if isinstance(value, list) else value


def count_numbers(arguments: Sequence[Any]) -> int:
    """Count the numbers in tensors and lists of tensors."""
    total = 0
    for value in arguments:
        if isinstance(value, Tensor):
            total += value.numel()
        elif isinstance(value, list | tuple):
            total += count_numbers(value)
    return total


def build(folder: Path) -> Path:
    """Compile what changed and link it."""
    compiler = require_compiler()
    headers = hashlib.sha256()
    for header in sorted(SOURCE_DIR.glob("*.h")):
        headers.update(header.read_bytes())
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [compiler, *FLAGS, abi, *includes]

    def compile_one(source: Path) -> str:
        digest = headers.copy()
        digest.update(f"{command} {torch.__version__} {source.name}".encode() + source.read_bytes())
        target = folder / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not target.exists():
            scratch = target.with_suffix(".tmp")
            subprocess.run([*command, "-c", str(source), "-o", str(scratch)], check=True)
            os.replace(scratch, target)
        return str(target)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*sorted(SOURCE_DIR.glob("*.cpp")), PROGRAM]))
    for stale in {str(file) for file in folder.glob("*.o")} - set(objects):
        Path(stale).unlink()
    paths = cpp_extension.library_paths()
    folders = [flag for path in paths for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    program = folder / "sanitizer"
    subprocess.run(
        [compiler, *FLAGS, *objects, *folders, *LIBRARIES, "-o", str(program)], check=True
    )
    return program


if __name__ == "__main__":
    sys.exit(main())
