"""What a backend is: a way to run each arm in a fresh process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rankopt.errors import RankoptError


class ArmError(RankoptError):
    """An arm raised while it was loaded, warmed up or scored."""


class WorkerDied(RankoptError):  # noqa: N818 - it says what happened; nobody raised it there
    """A worker process ended, or stopped answering, in the middle of the work.

    Attributes:
        label: the arm it ran.
    """

    def __init__(self, message: str = "", *, label: str = "") -> None:
        super().__init__(message)
        self.label = label


@dataclass(frozen=True)
class Launch:
    """What a worker process is started with.

    Attributes:
        num_threads: threads per arm label; None: all physical cores of the worker's machine.
        num_interop_threads: torch's inter-op threads.
        omp_wait_policy: OpenMP's wait policy; None leaves the default.
        log_folder: where a local worker's own output goes.
        call_timeout_s: silence after which a worker counts as dead.
    """

    num_threads: dict[str, int | None]
    num_interop_threads: int
    omp_wait_policy: str | None
    log_folder: Path
    call_timeout_s: float

    def most_threads(self, default: int) -> int:
        """Return the largest thread budget of all arms."""
        return max(count or default for count in self.num_threads.values())


class Worker(Protocol):
    """A live process that holds one arm."""

    label: str

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of `ArmWorker` there and return its value.

        Raises:
            WorkerDied: the process ended or stayed silent too long.
            ArmError: the arm raised.
            RankoptError: the arm found something that is the reader's to mend.
        """

    def place(self, path: Path) -> Path:
        """Return where the worker finds a file or folder of the driver's, sending it if needed."""

    def close(self) -> None:
        """End the process."""


class Backend(Protocol):
    """Starts workers; used as a context manager around one run."""

    name: str

    def open(self, launch: Launch) -> None:
        """Get hold of the resources that all arms share."""

    def start(self, label: str) -> Worker:
        """Start a fresh worker process for an arm."""

    def close(self) -> None:
        """Let go of the resources; workers are ended with them."""


class OpenBackend:
    """Closes a backend whatever happens between."""

    def __init__(self, backend: Backend, launch: Launch) -> None:
        self._backend = backend
        self._launch = launch

    def __enter__(self) -> Backend:
        try:
            self._backend.open(self._launch)
        except BaseException:
            self._backend.close()
            raise
        return self._backend

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._backend.close()


# glibc's malloc hands large blocks back to the kernel after a call and has them mapped and cleared
# again in the next one. At batch 512 that made the eager code of torch-rechub's FiBiNet take 1.7
# times as long (10 blocks, twice) and its HSTU swing by a third from block to block: a control
# slower than it need be. A server keeps its memory (jemalloc, tcmalloc, or these settings), so
# every arm does. No threshold above 32 MiB is accepted, so mapping is switched off as a whole: the
# 48 MB that a layer of HSTU writes at batch 512 were 11,787 page faults a call, and 20 times its
# arithmetic.
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_MAX_": "0"}


def worker_environment(num_threads: int, omp_wait_policy: str | None) -> dict[str, str]:
    """Return the variables that thread pools and malloc read when they are first loaded.

    Malloc's are the caller's own where the caller has set them.
    """
    variables = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
        str(num_threads),
    )
    variables |= {name: os.environ.get(name, value) for name, value in KEPT_MEMORY.items()}
    if omp_wait_policy:
        variables["OMP_WAIT_POLICY"] = omp_wait_policy
    return variables


def driver_import_path() -> str:
    """Return PYTHONPATH for a worker on this machine: what the driver can import, it can too."""
    own = (sys.prefix, sys.base_prefix)
    entries: Sequence[str] = [
        entry
        for entry in sys.path
        if entry and Path(entry).exists() and not _lies_in_site(entry, own)
    ]
    return os.pathsep.join(os.path.abspath(entry) for entry in entries)


def _lies_in_site(entry: str, prefixes: tuple[str, ...]) -> bool:
    # The interpreter adds its own library and site-packages by itself.
    return any(entry.startswith(os.path.join(prefix, "lib")) for prefix in prefixes)


def unwrap_answer(label: str, answer: tuple[str, Any]) -> Any:
    """Return a worker's value, or raise what it reports.

    Raises:
        ArmError: the arm raised something that no reader can mend.
        RankoptError: what the arm raised, when it is one.
    """
    status, value = answer
    if status == "value":
        return value
    if isinstance(value, RankoptError):
        raise value
    raise ArmError(f"arm {label!r}: {value}")
