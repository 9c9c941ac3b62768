"""Get MovieLens-100K's own files, checked against pinned hashes.

The files come out of the wheel of a package on PyPI that ships them as its example. GroupLens's
terms forbid passing the data on, so it is fetched by each user and never stored with rankopt.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rankopt.errors import DataError, EnvironmentProblem, Problem

MOVIELENS_VARIABLE = "RANKOPT_MOVIELENS"
PACKAGE = "recbole==1.2.1"
MEMBER_FOLDER = "recbole/dataset_example/ml-100k"
MEMBERS = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")

_DOWNLOAD_TIMEOUT_S = 300
_ADVICE = (
    f"On a machine with a network run `pip download --no-deps --only-binary :all: {PACKAGE}`, "
    f"copy the wheel here and set {MOVIELENS_VARIABLE} to its path (or to the folder of "
    f"{', '.join(MEMBERS)} taken out of it)."
)


@dataclass(frozen=True)
class Hashes:
    """SHA-256 of the wheel and of each member used."""

    wheel: str
    members: dict[str, str]


PINNED = Hashes(
    wheel="9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
    members={
        "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
        "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
        "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    },
)


def read_members(path: str | Path | None = None, pinned: Hashes = PINNED) -> dict[str, str]:
    """Return the text of each member.

    Args:
        path: the wheel, or a folder that holds the members; None goes by `$RANKOPT_MOVIELENS`,
            and without that downloads the wheel with pip.
        pinned: the hashes they must have.

    Raises:
        DataError: a file is missing or is not the one pinned.
        EnvironmentProblem: the wheel could not be downloaded.
    """
    chosen = path or os.environ.get(MOVIELENS_VARIABLE)
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="rankopt-movielens-") as folder:
            return _read(_download(Path(folder)), pinned)
    return _read(Path(chosen).expanduser(), pinned)


def _read(place: Path, pinned: Hashes) -> dict[str, str]:
    raw = _from_folder(place) if place.is_dir() else _from_wheel(place, pinned)
    problems = [
        problem
        for member, content in raw.items()
        if (problem := _mismatch(f"{place}: {member}", content, pinned.members[member]))
    ]
    if problems:
        raise DataError(problems=problems)
    return {member: content.decode("utf-8") for member, content in raw.items()}


def _from_folder(folder: Path) -> dict[str, bytes]:
    missing = [member for member in MEMBERS if not (folder / member).is_file()]
    if missing:
        raise DataError(
            problems=[Problem(str(folder), f"lacks {', '.join(missing)}", hint=_ADVICE)]
        )
    return {member: (folder / member).read_bytes() for member in MEMBERS}


def _from_wheel(wheel: Path, pinned: Hashes) -> dict[str, bytes]:
    if not wheel.is_file():
        raise DataError(problems=[Problem(str(wheel), "no such file or folder", hint=_ADVICE)])
    if problem := _mismatch(str(wheel), wheel.read_bytes(), pinned.wheel):
        raise DataError(problems=[problem])
    try:
        with zipfile.ZipFile(wheel) as archive:
            return {member: archive.read(f"{MEMBER_FOLDER}/{member}") for member in MEMBERS}
    except (zipfile.BadZipFile, KeyError) as error:
        what = f"is no wheel that holds {MEMBER_FOLDER}: {error}"
        raise DataError(problems=[Problem(str(wheel), what, hint=_ADVICE)]) from error


def _mismatch(where: str, content: bytes, expected: str) -> Problem | None:
    found = hashlib.sha256(content).hexdigest()
    if found == expected:
        return None
    hint = "Not the file this was tested with, or a damaged copy: fetch it again."
    return Problem(where, f"must have the SHA-256 {expected}", found, hint)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, PACKAGE],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_fetched(f"pip did not finish: {error}") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise _not_fetched(lines[-1] if lines else f"pip ended with {done.returncode}")
    return wheels[0]


def _not_fetched(reason: str) -> EnvironmentProblem:
    what = f"could not be downloaded ({reason})"
    return EnvironmentProblem(problems=[Problem(f"MovieLens-100K ({PACKAGE})", what, hint=_ADVICE)])
