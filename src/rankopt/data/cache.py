"""Where data made at run time is kept, and how it gets there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankopt.errors import EnvironmentProblem, OutputExistsError, Problem

CACHE_VARIABLE = "RANKOPT_CACHE"


def cache_folder() -> Path:
    """Return the folder of data made at run time: `$RANKOPT_CACHE`, else `~/.cache/rankopt`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "rankopt"


def cached_folder(kind: str, key: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """Return the cached folder of `key`, filling it with `make` the first time.

    Two processes may make the same folder at once: the first to finish wins, and what the other
    made is dropped.

    Args:
        kind: what it holds, the first level of the cache.
        key: everything that what is made depends on; JSON.
        make: fills the empty folder it is given.

    Raises:
        EnvironmentProblem: the cache cannot be written, or the disk is full.
    """
    text = json.dumps(dict(key), sort_keys=True)
    folder = cache_folder() / kind / hashlib.sha256(text.encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    with contextlib.suppress(OutputExistsError), new_folder(folder) as unfinished:
        make(unfinished)
        (unfinished / "key.json").write_text(text + "\n", encoding="utf-8")
    return folder


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to fill beside `folder`, and rename it to that once it is full.

    An error or a kill on the way leaves `folder` as it was.

    Raises:
        OutputExistsError: `folder` is there already, with something in it.
        EnvironmentProblem: it cannot be written, or the disk is full.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        # mkdtemp allows only its owner in; the result follows the umask like any other folder.
        inside = unfinished / "content"
        inside.mkdir()
        yield inside
        _rename(inside, folder)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}:
            raise _unwritable(folder, error) from error
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)  # replaces an empty folder, never a full one
    except OSError as error:
        if target.exists():
            what = "already exists and holds something"
            hint = "Choose another folder, or remove this one."
            problems = [Problem(str(target), what, hint=hint)]
            raise OutputExistsError(problems=problems) from error
        raise


def _unwritable(folder: Path, error: OSError) -> EnvironmentProblem:
    hint = f"Free some space, or point {CACHE_VARIABLE} at a folder that can be written."
    what = f"cannot be written: {error.strerror or error}"
    return EnvironmentProblem(problems=[Problem(str(folder), what, hint=hint)])
