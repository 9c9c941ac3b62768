"""Parts of an artifact that run as Python: their modules, and the code these are made of.

parts/ID.pt          a module with its weights and the calls that the compiled graph makes
parts/code/...       source files of a model that is no installed package

A module is stored by reference to its class, as torch.save does. An installed package is named in
the manifest with its version; a factory in a file beside the card brings that file and the
neighbours it imported, under the names they had.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickletools
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rankopt.artifact.manifest import Manifest, PartEntry
from rankopt.capture.parts import EagerPart
from rankopt.errors import ArtifactError, ExportError, Problem
from rankopt.hashes import sha256_file

PARTS = "parts"
CODE = "parts/code"
FACTORY_PREFIX = "rankopt_card_"
"""Of the names under which `rankopt.models.build` imports a factory's file."""
_OURS = frozenset({"rankopt", "torch"})


@dataclass(frozen=True)
class StoredParts:
    """What was written.

    Attributes:
        entries: one per part.
        code: module name -> its file in the artifact.
        packages: installed package -> version.
        files: every file, to be hashed.
    """

    entries: tuple[PartEntry, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


def write_parts(parts: Mapping[str, EagerPart], folder: Path) -> StoredParts:
    """Store the parts of a graph.

    Args:
        parts: by the name of the constant that holds their handle.
        folder: the artifact's.

    Raises:
        ExportError: a module holds what cannot be stored.
    """
    if not parts:
        return StoredParts()
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    entries, named = [], set()
    for handle, part in parts.items():
        file = f"{PARTS}/{part.id}.pt"
        try:
            torch.save({"module": part.module, "calls": part.calls}, folder / file)
        except Exception as error:  # pickling runs the module's own code
            raise ExportError(
                f"part {part.path} ({part.class_name}) stays eager, but cannot be stored: {error}. "
                "Keep open files, locks and local functions out of the module's attributes."
            ) from error
        named |= _named_modules(folder / file)
        entries.append(
            PartEntry(
                id=part.id,
                module=part.path,
                class_name=part.class_name,
                file=file,
                handle=handle,
                signature=part.signature,
                why=part.why,
                size_bytes=_stored_bytes(folder / file),
            )
        )
    code, packages = _write_code(named, folder)
    files = (*(entry.file for entry in entries), *code.values())
    return StoredParts(tuple(entries), code, packages, files)


def load_parts(folder: Path, manifest: Manifest) -> dict[str, EagerPart]:
    """Load an artifact's parts, by the name of the constant that takes their handle.

    Nothing of theirs is run before its hash was compared with the manifest's.

    Raises:
        ArtifactError: a file is damaged, a package is missing, or other code has its name.
    """
    if not manifest.parts:
        return {}
    _check_files(folder, manifest)
    _check_packages(folder, manifest)
    with _importable(folder, manifest.part_code):
        return {entry.handle: _load_part(folder, entry) for entry in manifest.parts}


def _load_part(folder: Path, entry: PartEntry) -> EagerPart:
    file = folder / entry.file
    try:
        with warnings.catch_warnings():
            # torch warns of its own TreeSpec.
            warnings.simplefilter("ignore", FutureWarning)
            stored = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        part = EagerPart(
            id=entry.id,
            path=entry.module,
            module=stored["module"].eval(),
            calls=stored["calls"],
            why=entry.why,
        )
    except ModuleNotFoundError as error:
        raise ArtifactError(
            f"{file}: part {entry.module} is a {entry.class_name}, whose code needs the package "
            f"{error.name!r}, which is not installed here. Install it beside rankopt."
        ) from error
    except Exception as error:  # unpickling runs the module's own code
        raise ArtifactError(
            f"{file}: part {entry.module} ({entry.class_name}) cannot be loaded: "
            f"{type(error).__name__}: {error}. Install the packages it was built with."
        ) from error
    if part.signature != entry.signature:
        raise ArtifactError(f"{file}: is not the part that model.pt2 calls. Copy the folder again.")
    return part


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name in (*(entry.file for entry in manifest.parts), *manifest.part_code.values()):
        file = folder / name
        if not file.is_file():
            raise ArtifactError(f"{file}: is missing. Copy the whole folder.")
        if sha256_file(file) != manifest.files.get(name):
            raise ArtifactError(
                f"{file}: differs from its hash in the manifest, so its code was not run. "
                "Copy the folder again."
            )


def _check_packages(folder: Path, manifest: Manifest) -> None:
    problems = []
    for package, wanted in manifest.part_packages.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = None
        if found != wanted:
            problems.append(
                Problem(
                    f"{folder}: package {package}",
                    f"must be {wanted}, whose code runs the parts that stay eager",
                    found or "none",
                    f"Install it: pip install {package}=={wanted}",
                )
            )
    if problems:
        raise ArtifactError(problems=problems)


# Code that is no installed package.


def _stored_bytes(file: Path) -> int:
    """Count the bytes of a stored module's tensors, those it does not register included."""
    with zipfile.ZipFile(file) as archive:
        entries = [info for info in archive.infolist() if "/data/" in info.filename]
        return sum(info.file_size for info in entries)


def _named_modules(file: Path) -> set[str]:
    """Name the Python modules whose classes and functions a stored module refers to."""
    with zipfile.ZipFile(file) as archive:
        name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
        pickled = archive.read(name)
    return {
        str(argument).split(" ")[0]
        for opcode, argument, _ in pickletools.genops(pickled)
        if opcode.name == "GLOBAL"
    }


def _write_code(modules: Iterable[str], folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Copy the source of modules that no package installs, and of what they import.

    Returns:
        Module name -> file in the artifact; package -> version of all that is installed.
    """
    owners = packages_distributions()
    code: dict[str, str] = {}
    packages: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        top = name.split(".")[0]
        module = sys.modules.get(name)
        if name in code or module is None or top in _OURS or top in sys.stdlib_module_names:
            continue
        file = _source_of(module)
        if top in owners:
            packages[owners[top][0]] = version(owners[top][0])
        elif file is not None and not top.startswith("__"):
            code[name] = f"{CODE}/{_stored_name(name, file)}"
            (folder / code[name]).parent.mkdir(parents=True, exist_ok=True)
            (folder / code[name]).write_bytes(file.read_bytes())
            waiting += _imports(module, file)
    return code, dict(sorted(packages.items()))


def _source_of(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if isinstance(name, str) and name.endswith(".py") else None


def _stored_name(name: str, file: Path) -> str:
    if name.startswith(FACTORY_PREFIX):
        return file.name
    return "/".join(name.split(".")) + ("/__init__.py" if file.name == "__init__.py" else ".py")


def _imports(module: ModuleType, file: Path) -> set[str]:
    """Name the modules that a source file imports, packages around them included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if node.level:
                base = importlib.util.resolve_name(base, module.__package__ or None)
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    if "." in module.__name__:
        names.add(module.__name__)
    steps = [name.split(".") for name in names]
    return {".".join(each[:end]) for each in steps for end in range(1, len(each) + 1)}


@contextmanager
def _importable(folder: Path, code: Mapping[str, str]) -> Iterator[None]:
    """Import stored source files under the names they had, and nothing else of that name."""
    root = str(folder / CODE)
    wrote_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, root)
    try:
        importlib.invalidate_caches()
        # A neighbour before the factory's file, which imports it.
        for name in sorted(code, key=lambda each: each.startswith(FACTORY_PREFIX)):
            _import(name, folder / code[name])
        yield
    finally:
        sys.path.remove(root)
        sys.dont_write_bytecode = wrote_bytecode


def _import(name: str, file: Path) -> None:
    present = sys.modules.get(name)
    if present is not None:
        other = _source_of(present)
        if other is None or other.read_bytes() != file.read_bytes():
            raise ArtifactError(
                f"{file}: this process holds another module {name!r} ({other}), so the part's code "
                "cannot be imported. Load the artifact in a process of its own, or rename the file."
            )
        return
    try:
        if not name.startswith(FACTORY_PREFIX):
            importlib.import_module(name)
            return
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(name)
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    except ModuleNotFoundError as error:
        raise ArtifactError(
            f"{file}: needs the package {error.name!r}, which is not installed here. "
            "Install it beside rankopt."
        ) from error
    except Exception as error:  # a user's file may raise anything
        raise ArtifactError(
            f"{file}: importing it raised {type(error).__name__}: {error}"
        ) from error


def mismatches(
    folder: Path, entries: Sequence[PartEntry], parts: Mapping[str, EagerPart]
) -> list[Problem]:
    """Say which parts of a graph traced anew are not those that compiled code calls."""
    problems = [
        Problem(f"{folder}: part {entry.module}", "is called by the compiled graph", "none")
        for entry in entries
        if entry.handle not in parts
    ]
    problems += [
        Problem(
            f"{folder}: part {entry.module}",
            f"must be a {entry.class_name} that takes and gives what it did",
            f"{parts[entry.handle].class_name} with other arguments or shapes",
        )
        for entry in entries
        if entry.handle in parts and parts[entry.handle].signature != entry.signature
    ]
    known = {entry.handle for entry in entries}
    problems += [
        Problem(f"{folder}: part {part.path}", "stays eager now, but was compiled before")
        for handle, part in parts.items()
        if handle not in known
    ]
    return problems
