"""Hashes of files, and records that tell later whether a file is still the one it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rankopt.data.cache import cache_folder
from rankopt.errors import Problem
from rankopt.units import BYTES_PER_MIB, NS_PER_S

_REMEMBERED_BYTES = 64 * BYTES_PER_MIB
"""Hashes of files from this size on are kept, by size and time of the last change."""
_SETTLED_NS = 2 * NS_PER_S
"""A file changed later than this before it was hashed may change again within one tick."""


class FileRecord(BaseModel):
    """A file or folder that something was made of, as it was then."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Absolute."""
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Hash a file or folder."""
        return cls(path=str(path.resolve()), sha256=sha256_path(path))

    def problem(self, where: str, hint: str) -> Problem | None:
        """Say how the file differs from what it was; None where it does not."""
        file = Path(self.path)
        if not file.exists():
            return Problem(where, f"{file} is gone", hint=hint)
        found = sha256_path(file)
        if found == self.sha256:
            return None
        what = f"{file} has changed: its sha256 must be {self.sha256}"
        return Problem(where, what, found, hint)


def sha256_file(path: Path) -> str:
    """Hash a file without reading it into memory."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_path(path: Path) -> str:
    """Hash a file; or a folder by the names and contents of the files in it."""
    if path.is_file():
        return sha256_files([path])
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{file.relative_to(path).as_posix()} {sha256_files([file])}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sha256_files(files: Sequence[Path]) -> str:
    """Hash the contents of files in their order; that of a single file is its own hash.

    Large files that have not changed since they were last hashed are not read again.
    """
    found = [_remembered(file) for file in files]
    return found[0] if len(found) == 1 else hashlib.sha256("\n".join(found).encode()).hexdigest()


def _remembered(file: Path) -> str:
    state = file.stat()
    if state.st_size < _REMEMBERED_BYTES:
        return sha256_file(file)
    key = {"path": str(file.resolve()), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    kept = cache_folder() / "hashes" / name
    with contextlib.suppress(OSError):
        if len(known := kept.read_text(encoding="ascii")) == hashlib.sha256().digest_size * 2:
            return known
    found = sha256_file(file)
    after = file.stat()
    same = (after.st_size, after.st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    if same and time.time_ns() - state.st_mtime_ns > _SETTLED_NS:
        with contextlib.suppress(OSError):  # what cannot be kept is read again
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(found, encoding="ascii")
    return found
