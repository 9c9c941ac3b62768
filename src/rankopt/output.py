"""The one way results reach the disk: complete, or not at all.

A result is written beside its place, as `<out>.partial-<pid>` on the same filesystem, and renamed
when it is whole. A kill leaves a partial folder that the next run removes (or takes up, where a
verb can resume); an error leaves the earlier result untouched.

`--overwrite` replaces what rankopt wrote there, and nothing else: every result carries a list of
its own entries (`MARKER`), and whatever else lay in the folder is moved back in beside the new one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankopt.errors import EnvironmentProblem, OutputExistsError, Problem, UsageError
from rankopt.units import BYTES_PER_MIB, format_bytes

MARKER = ".rankopt-output.json"

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
# With less than this left, a failed write is put down to the disk: torch and the C++ compiler
# report a full disk as a RuntimeError without an errno.
_NEARLY_FULL_BYTES = BYTES_PER_MIB


@contextlib.contextmanager
def staged_output(
    out: Path,
    *,
    overwrite: bool,
    needed_bytes: int | None = None,
    resume: bool = False,
    keep_partial: bool = False,
) -> Iterator[Path]:
    """Give a folder to write a result into; it becomes `out` when the block ends without error.

    Args:
        out: where the result belongs.
        overwrite: replace an earlier result; entries that it did not write stay.
        needed_bytes: about how much will be written; refused at once when the disk has less.
        resume: start from the partial folder that an earlier, ended run left, if there is one.
        keep_partial: leave the partial folder after an error, for a later `resume`.

    Raises:
        OutputExistsError: `out` holds something and `overwrite` is False.
        UsageError: `out` is a file, or a folder that must not be replaced.
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    target = out.expanduser().resolve()
    with _disk_problems(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target)
        _check_target(target, overwrite)
        if needed_bytes is not None:
            check_free_space(target.parent, needed_bytes)
        partial = _partial(target, os.getpid())
        _start(target, partial, resume)
        try:
            yield partial
            _write_marker(partial)
            _swap(target, partial)
        except BaseException:
            if not keep_partial:
                shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def staged_file(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a path to write a file to; it becomes `out` when the block ends without error.

    Raises:
        OutputExistsError: `out` exists and `overwrite` is False.
        UsageError: `out` is a folder.
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    target = out.expanduser().resolve()
    if target.is_dir():
        raise UsageError(problems=[Problem(str(out), "must be a file; it is a folder")])
    if target.exists() and not overwrite:
        raise _exists(target, "the file exists already")
    with _disk_problems(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The suffix stays, since some writers choose a format by it.
        partial = target.with_name(f"{target.stem}.partial-{os.getpid()}{target.suffix}")
        try:
            yield partial
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def replace_folder(target: Path, partial: Path) -> None:
    """Put a complete folder in the target's place, for writers that stage a result themselves.

    Raises:
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    with _disk_problems(target):
        _recover(target)
        _write_marker(partial)
        _swap(target, partial)


def recover_folder(target: Path, *, alone: bool = False) -> None:
    """Finish or undo a replacement that a kill cut short, before the target is read.

    Args:
        target: the folder.
        alone: nobody else writes there, so that a living process of the killed one's number is
            another; in a container that starts again it mostly is this one.
    """
    if target.parent.is_dir():
        _recover(target, alone=alone)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part.

    Raises:
        ValueError: a number is NaN or infinite; what was not measured is None.
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with staged_file(path, overwrite=True) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuse work that the disk has no room for.

    Raises:
        EnvironmentProblem: `folder`'s filesystem has less than `needed_bytes` left.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise EnvironmentProblem(
            problems=[
                Problem(
                    str(folder),
                    f"must have {format_bytes(needed_bytes)} free",
                    format_bytes(free_bytes),
                    "Free some space, or give --out on another disk.",
                )
            ]
        )


def _check_target(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(problems=[Problem(str(target), "must be a folder; it is a file")])
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise _exists(target, "the folder already holds something")
    # A folder that is in use as a place cannot be renamed away from under its users.
    in_use = (Path.cwd(), *Path.cwd().parents, Path.home(), *Path.home().parents)
    if target in in_use or target.is_mount():
        what = "is the working folder, the home folder, one above them or a mount"
        hint = f"Give a folder of its own, such as --out {target / 'result'}."
        raise UsageError(problems=[Problem(str(target), what, hint=hint)])


def _exists(target: Path, what: str) -> OutputExistsError:
    hint = "Add --overwrite to replace the result in it, or give another --out."
    return OutputExistsError(problems=[Problem(str(target), what, hint=hint)])


def _partial(target: Path, pid: int) -> Path:
    return target.with_name(f"{target.name}.partial-{pid}")


def _replaced(target: Path, pid: int) -> Path:
    return target.with_name(f"{target.name}.replaced-{pid}")


def _start(target: Path, partial: Path, resume: bool) -> None:
    """Make the partial folder, from what an ended run left when resuming."""
    left = [path for path, _ in _left_behind(target, "partial")]
    if partial.exists():
        left.append(partial)
    left.sort(key=lambda path: path.stat().st_mtime_ns)
    taken = left.pop() if resume and left else None
    for path in left:
        shutil.rmtree(path)
    if taken is None:
        partial.mkdir()
    elif taken != partial:
        taken.rename(partial)


def _recover(target: Path, *, alone: bool = False) -> None:
    """Finish or undo a swap that a kill cut short."""
    for replaced, _ in _left_behind(target, "replaced", alone=alone):
        if target.exists():
            _carry_over(replaced, target)
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def _left_behind(target: Path, what: str, *, alone: bool = False) -> list[tuple[Path, int]]:
    """List folders beside the target whose process has ended; `alone` says that all have."""
    prefix = f"{target.name}.{what}-"
    found = []
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(prefix)
        is_one = path.name.startswith(prefix) and pid.isdecimal()
        if is_one and (alone or not _is_alive(int(pid))):
            found.append((path, int(pid)))
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _write_marker(folder: Path) -> None:
    entries = sorted(path.name for path in folder.iterdir() if path.name != MARKER)
    (folder / MARKER).write_text(json.dumps({"entries": entries}) + "\n", encoding="utf-8")


def _swap(target: Path, partial: Path) -> None:
    """Put the partial folder in the target's place; the old one goes last."""
    if not target.exists():
        partial.rename(target)
        return
    replaced = _replaced(target, os.getpid())
    target.rename(replaced)
    try:
        partial.rename(target)
    except BaseException:
        replaced.rename(target)
        raise
    _carry_over(replaced, target)
    shutil.rmtree(replaced)


def _carry_over(replaced: Path, target: Path) -> None:
    """Move what the earlier result did not write into the new folder, unless it has that name."""
    try:
        own = set(json.loads((replaced / MARKER).read_text(encoding="utf-8"))["entries"])
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    for path in replaced.iterdir():
        if path.name not in own and path.name != MARKER and not (target / path.name).exists():
            path.rename(target / path.name)


@contextlib.contextmanager
def _disk_problems(target: Path) -> Iterator[None]:
    """Turn what a full or read-only disk raises into a problem with a next step."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL or _is_nearly_full(target):
            raise _disk_full(target) from error
        if error.errno in _NO_ACCESS and _concerns(error, target):
            problem = Problem(
                str(error.filename), "cannot be written", error.strerror, "Give another --out."
            )
            raise EnvironmentProblem(problems=[problem]) from error
        raise
    except RuntimeError as error:
        if _is_nearly_full(target):
            raise _disk_full(target) from error
        raise


def _concerns(error: OSError, target: Path) -> bool:
    """Tell a refused write beside the target from any other refused file of the block."""
    return error.filename is not None and Path(error.filename).is_relative_to(target.parent)


def _is_nearly_full(target: Path) -> bool:
    try:
        return shutil.disk_usage(target.parent).free < _NEARLY_FULL_BYTES
    except OSError:
        return False


def _disk_full(target: Path) -> EnvironmentProblem:
    problem = Problem(
        str(target.parent),
        "the disk is full; nothing was changed there",
        hint="Free some space, or give --out on another disk.",
    )
    return EnvironmentProblem(problems=[problem])
