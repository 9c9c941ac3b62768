"""A twin of a compiled artifact, with a clock around every operator.

An AOTInductor package carries the C++ it was compiled from, and how. The twin is that code with
two reads of the time-stamp counter around each call of an operator and of each loop that the
compiler made, compiled with the same flags: no graph, card or module is needed. It reads the
artifact's own weights, and must give its scores bit for bit before it is believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension

from rankopt.artifact.manifest import PROGRAM, Manifest, read_manifest
from rankopt.diagnose.profile import Site
from rankopt.errors import ArtifactError, EnvironmentProblem
from rankopt.kernels.build import cache_dir, require_compiler
from rankopt.runtime import LoadedArtifact, check_machine, load_operators

NUM_ERROR_LINES = 8
RUN = "void AOTInductorModel::run_impl("
RUN_END = "} // AOTInductorModel::run_impl"

# Written before the compiled model's own code. The five names are the kernel library's
# (csrc/profile.cpp), found when the twin is loaded.
PRELUDE = """
#include <cstdint>
#include <type_traits>
#if defined(__x86_64__)
#include <x86intrin.h>
#else
#include <chrono>
#endif
extern "C" {
extern bool rankopt_profile_noting;
extern int64_t* rankopt_profile_ticks;
extern int64_t* rankopt_profile_last;
void rankopt_profile_note(int64_t site, int64_t role, AtenTensorHandle handle);
void rankopt_profile_note_value(int64_t site, int64_t value);
}
namespace rankopt_profile {
inline int64_t ticks() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__rdtsc());
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}
struct Site {
  const int64_t site, started;
  explicit Site(int64_t number) : site(number), started(ticks()) {}
  ~Site() {
    if (rankopt_profile_ticks) rankopt_profile_ticks[site] += ticks() - started;
  }
};
// The whole of one call: site 0. When it ends, the next call writes into the next row.
struct Call {
  const int64_t num_sites, started;
  explicit Call(int64_t count) : num_sites(count), started(ticks()) {}
  ~Call() {
    if (!rankopt_profile_ticks) return;
    rankopt_profile_ticks[0] += ticks() - started;
    if (rankopt_profile_ticks < rankopt_profile_last) rankopt_profile_ticks += num_sites;
  }
};
inline void note(int64_t site, int64_t role, AtenTensorHandle handle) {
  rankopt_profile_note(site, role, handle);
}
inline void note(int64_t site, int64_t role, const torch::aot_inductor::RAIIAtenTensorHandle& h) {
  rankopt_profile_note(site, role, h.get());
}
inline void note(int64_t site, int64_t role, const torch::aot_inductor::ConstantHandle& h) {
  rankopt_profile_note(site, role, h.get());
}
template <class T>
void note(int64_t site, int64_t, const T& value) {
  if constexpr (std::is_integral_v<T>)
    rankopt_profile_note_value(site, static_cast<int64_t>(value));
}
}  // namespace rankopt_profile
"""

_COUNT = "rankopt_num_sites"
"""Stands in the code until all sites are counted."""
_CALL = re.compile(r"\s*AOTI_TORCH_ERROR_CODE_CHECK\((aoti_torch_\w+)\((.*)\)\);\s*(?://.*)?$")
_LOOP = re.compile(r"\s*(cpp_\w+)\((.*)\);\s*$")
_ORIGIN = re.compile(r"// Topologically Sorted Source Nodes: \[.*\], Original ATen: \[(.*)\]")
_CONSTANT = re.compile(r"auto& (\w+) = constants_->at\((\d+)\)")
_LIST = re.compile(r"std::(?:array|vector)<([^<>,]+)(?:, \d+)?>\{")
_OPTIONAL = "const AtenTensorHandle*"
"""What a list holds of tensors that may be missing."""
_NUMBER = re.compile(r"-?\d")
_POINTER = re.compile(r"\((const )?[\w:]+ ?\*\)\((\w+)\.data_ptr\(\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
# Buffers and views: what they cost is overhead, not an operator.
_PLUMBING = re.compile(
    r"aoti_torch_(empty|new_|delete|create|get_|_alloc|_reinterpret|grad_mode|assign|check|item)"
)


@dataclass(frozen=True)
class Source:
    """A package's generated code: the calls, the loops, and what the calls to other libraries are.

    Attributes:
        wrapper: C++ that calls operators and loops in order.
        loops: C++ of the loops.
        nodes: names of the operators called through torch, by their number.
        library: the compiled library's name in the package.
    """

    wrapper: str
    loops: str
    nodes: tuple[str, ...]
    library: str


def read_source(package: Path) -> Source:
    """Read the generated code out of a package.

    Raises:
        ArtifactError: it holds none.
    """
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()

        def only(suffix: str) -> str:
            found = [name for name in names if name.endswith(suffix)]
            if len(found) != 1:
                raise ArtifactError(
                    f"{package}: holds {len(found)} files *{suffix}, where the code that it was "
                    "compiled from is expected. Build the artifact again with this version."
                )
            return found[0]

        library = only(".wrapper.so")
        extern = [name for name in names if name.endswith(".wrapper.json")]
        nodes = json.loads(archive.read(extern[0]))["nodes"] if extern else []
        return Source(
            wrapper=archive.read(only(".wrapper.cpp")).decode(),
            loops=archive.read(only(".kernel.cpp")).decode(),
            nodes=tuple(str(node["node"]["target"]) for node in nodes),
            library=library,
        )


def instrument(source: Source) -> tuple[str, list[Site]]:
    """Write clocks into the calling code.

    Returns:
        The code, and its sites in order; site 0 is the whole of `run_impl`.

    Raises:
        ArtifactError: the code is not of the form that this version knows.
    """
    start, end = source.wrapper.find(RUN), source.wrapper.find(RUN_END)
    place = source.wrapper.find("namespace torch::aot_inductor")
    if min(start, end, place) < 0:
        raise ArtifactError(
            "the artifact's generated code is not of the form that this version of rankopt reads. "
            "Build the artifact again with this version."
        )
    body, sites = _Instrumented(source).run(source.wrapper[start:end])
    before, between = source.wrapper[:place], source.wrapper[place:start]
    return before + PRELUDE + between + body + source.wrapper[end:], sites


class _Instrumented:
    """Goes through the lines of `run_impl`."""

    def __init__(self, source: Source) -> None:
        self._nodes = source.nodes
        self._sites = [Site("run_impl")]
        self._constants: set[str] = set()
        self._origin: tuple[str, ...] = ()

    def run(self, body: str) -> tuple[str, list[Site]]:
        lines: list[str] = []
        self._constants = {name for name, _ in _CONSTANT.findall(body)}
        for line in body.split("\n"):
            lines.extend(self._line(line))
        return "\n".join(lines).replace(_COUNT, str(len(self._sites))), self._sites

    def _line(self, line: str) -> list[str]:
        if "__check_inputs_outputs(" in line:
            return [f"    rankopt_profile::Call rankopt_call({_COUNT});", line]
        origin = _ORIGIN.search(line)
        if origin:
            self._origin = tuple(origin.group(1).split(", "))
            return [line]
        call = _CALL.match(line)
        if call and not _PLUMBING.match(call.group(1)):
            name = self._name(call.group(1), call.group(2))
            return self._timed(line, name, _arguments(call.group(2)))
        loop = _LOOP.match(line)
        if loop:
            pointers = _POINTER.findall(loop.group(2))
            inputs = [name for constant, name in pointers if constant]
            outputs = [name for constant, name in pointers if not constant]
            given = _Arguments(inputs, outputs)
            return self._timed(line, loop.group(1), given, generated=True)
        return [line]

    def _timed(
        self, line: str, name: str, given: _Arguments, *, generated: bool = False
    ) -> list[str]:
        number = len(self._sites)
        names = [_NAME.findall(text) for text in given.inputs]
        constants = [next((n for n in found if n in self._constants), None) for found in names]
        read = tuple(dict.fromkeys(name for name in constants if name))
        origin = () if generated else self._origin
        self._sites.append(Site(name, origin, generated, read, given.optionals))
        self._origin = ()
        before = [
            f"rankopt_profile::note({number}, {0 if constant else 1}, {text});"
            for text, constant in zip(given.inputs, constants, strict=True)
        ]
        after = [f"rankopt_profile::note({number}, 2, {text});" for text in given.outputs]
        return [
            f"    if (rankopt_profile_noting) {{ {' '.join(before)} }}",
            f"    {{ rankopt_profile::Site rankopt_site({number});",
            line,
            "    }",
            f"    if (rankopt_profile_noting) {{ {' '.join(after)} }}",
        ]

    def _name(self, function: str, arguments: str) -> str:
        if "proxy_executor_call_function" in function:
            number = re.match(r"\s*proxy_executor, (\d+)", arguments)
            if number and int(number.group(1)) < len(self._nodes):
                return self._nodes[int(number.group(1))]
        return function.removeprefix("aoti_torch_").removeprefix("cpu_")


@dataclass(frozen=True)
class _Arguments:
    """What a call reads and writes, in order, lists taken apart; what says neither is dropped.

    Attributes:
        optionals: of each list of tensors that may be missing, which are there.
    """

    inputs: list[str]
    outputs: list[str]
    optionals: tuple[tuple[bool, ...], ...] = ()


def _arguments(text: str) -> _Arguments:
    optionals = tuple(
        tuple(held != "nullptr" for held in _split(_braced(text, match.end())))
        for match in _LIST.finditer(text)
        if match.group(1) == _OPTIONAL
    )
    # Without their types, which have commas of their own, lists split like any other argument.
    pieces = _split(_LIST.sub("{", text))
    if pieces and pieces[0] == "proxy_executor":
        held = [_held(piece) for piece in pieces if piece.startswith("{")]
        inputs = [name for each in held for name in each]
        # A call through torch writes into the last tensor of its last list.
        written = bool(held and held[-1] and not _NUMBER.match(held[-1][-1]))
        return _Arguments(inputs[:-1], inputs[-1:]) if written else _Arguments(inputs, [])
    inputs, outputs = [], []
    for piece in pieces:
        if re.match(r"&\w+_handle$", piece):
            outputs.append(piece[1:])
        else:
            inputs += _held(piece)
    return _Arguments(inputs, outputs, optionals)


def _held(piece: str) -> list[str]:
    """Return what an argument holds: a list's members, an optional's value, nothing of nullptr."""
    pointed = re.match(r"&temporary_reference\((.*)\)$", piece)
    if pointed:
        return _held(pointed.group(1))
    if piece.startswith("{"):
        return [name for member in _split(_braced(piece, 1)) for name in _held(member)]
    silent = piece in ("", "nullptr") or piece.startswith("&")
    return [] if silent or re.search(r"release\(|std::move", piece) else [piece]


def _braced(text: str, start: int) -> str:
    """Return what stands between a brace, which ends at `start`, and the one that closes it."""
    depth, position = 1, start
    while depth and position < len(text):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
    return text[start : position - 1]


def _split(text: str) -> list[str]:
    """Split at the commas that stand in no bracket and in no string."""
    pieces, depth, quoted, piece = [], 0, False, ""
    for letter in text:
        quoted ^= letter == '"'
        if not quoted:
            depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0 and not quoted:
            pieces.append(piece.strip())
            piece = ""
        else:
            piece += letter
    return [*pieces, piece.strip()] if piece.strip() else pieces


def build_twin(artifact: Path, workdir: Path) -> tuple[LoadedArtifact, list[Site]]:
    """Load an artifact's twin.

    Args:
        artifact: the folder; it is left as it is.
        workdir: an empty folder for the twin's, which links to the artifact's weights.

    Raises:
        ArtifactError: the package carries no code, or code that this version cannot read.
        EnvironmentProblem: there is no compiler, or it failed.
    """
    manifest = read_manifest(artifact)
    check_machine(artifact, manifest)
    load_operators(artifact, manifest)
    source = read_source(artifact / PROGRAM)
    code, sites = instrument(source)
    library = _compile(code, source)
    workdir.mkdir(parents=True, exist_ok=True)
    for path in artifact.iterdir():
        if path.name != PROGRAM:
            (workdir / path.name).symlink_to(path.resolve())
    _package(artifact / PROGRAM, workdir / PROGRAM, source.library, library)
    return _load(workdir, manifest), sites


def _load(folder: Path, manifest: Manifest) -> LoadedArtifact:
    return LoadedArtifact(folder, manifest)


def _package(original: Path, target: Path, name: str, library: Path) -> None:
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            data = library.read_bytes() if entry.filename == name else old.read(entry)
            new.writestr(entry.filename, data)


def _compile(code: str, source: Source) -> Path:
    """Compile the twin, or find it in the cache."""
    compiler = require_compiler()
    key = hashlib.sha256()
    for text in (compiler, torch.__version__, code, source.loops):
        key.update(text.encode() + b"\0")
    folder = cache_dir() / "twins" / key.hexdigest()[:24]
    library = folder / "twin.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        scratch = Path(name)
        texts = {"calls": code, "loops": source.loops, "constants": _CONSTANTS}
        with ThreadPoolExecutor(max_workers=2) as pool:
            objects = list(pool.map(lambda item: _object(compiler, scratch, *item), texts.items()))
        built = scratch / "twin.so"
        folders = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries = ["-ltorch", "-ltorch_cpu", "-lgomp"]
        _run(
            [
                compiler,
                "-shared",
                "-fPIC",
                "-fopenmp",
                *objects,
                *folders,
                *libraries,
                "-o",
                str(built),
            ]
        )
        os.replace(built, library)
    return library


# The weights lie outside the library; the names are expected all the same.
_CONSTANTS = """
extern "C" {
alignas(64) extern unsigned char _binary_constants_bin_start[64];
alignas(64) unsigned char _binary_constants_bin_start[64] = {};
extern unsigned char _binary_constants_bin_end[1];
unsigned char _binary_constants_bin_end[1] = {};
}
"""


def _object(compiler: str, scratch: Path, name: str, text: str) -> str:
    file, target = scratch / f"{name}.cpp", scratch / f"{name}.o"
    file.write_text(text, encoding="utf-8")
    flags = compile_flags(text) or ["-std=c++20", "-fPIC"]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    includes.append(f"-I{sysconfig.get_path('include')}")
    _run([compiler, *flags, *includes, "-c", str(file), "-o", str(target)])
    return str(target)


def compile_flags(text: str) -> list[str]:
    """Read the flags that a generated file was compiled with, paths left out; they end the file."""
    commands = re.findall(r"// Compile cmd\n// (.*)", text)
    if not commands:
        return []
    words = shlex.split(commands[-1])[1:]
    flags: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("-o", "-include"):  # what to write, and a header compiled beforehand
            skip = True
        elif word != "-c" and not word.startswith("-I") and not word.endswith(".cpp"):
            flags.append(word)
    return flags


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or (
            done.stderr.splitlines()
        )
        raise EnvironmentProblem(
            f"The artifact's code could not be compiled with clocks in it; {command[0]} said:\n"
            + "\n".join(f"  {line}" for line in lines[:NUM_ERROR_LINES])
        )
