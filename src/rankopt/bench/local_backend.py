"""Each arm in a fresh subprocess of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rankopt.bench.backend import (
    Launch,
    WorkerDied,
    driver_import_path,
    unwrap_answer,
    worker_environment,
)
from rankopt.bench.plan import physical_cores_available
from rankopt.errors import UsageError

NUM_LOG_LINES = 12


class LocalWorker:
    """A subprocess that holds one arm, spoken to over a socket pair."""

    def __init__(self, label: str, launch: Launch) -> None:
        self.label = label
        self._timeout_s = launch.call_timeout_s
        self._log = launch.log_folder / f"{label}.log"
        num_threads = launch.num_threads[label] or physical_cores_available()
        environment = {
            **os.environ,
            **worker_environment(num_threads, launch.omp_wait_policy),
            "PYTHONPATH": driver_import_path(),
        }
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(num_threads), str(launch.num_interop_threads)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rankopt.bench.local_backend", *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends the driver, which then ends its workers
            )
        theirs.close()
        self._connection = Connection(ours.detach())

    @property
    def process_id(self) -> int:
        return self._process.pid

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of `ArmWorker` in the subprocess.

        Raises:
            WorkerDied: the process ended or stayed silent too long.
        """
        try:
            self._connection.send((method, args))
            if not self._connection.poll(self._timeout_s):
                self.close()
                raise WorkerDied(
                    f"arm {self.label!r}: no answer to {method} in {self._timeout_s:.0f} s.",
                    label=self.label,
                )
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise WorkerDied(
                f"arm {self.label!r}: its process ended ({_ending(self._process.returncode)}) "
                f"during {method}.{self._log_tail()}",
                label=self.label,
            ) from error
        return unwrap_answer(self.label, answer)

    def place(self, path: Path) -> Path:
        """Return the path as it is: the subprocess sees the same disk."""
        return path

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        tail = "\n".join(lines[-NUM_LOG_LINES:])
        return f" Its last words, in {self._log}:\n{tail}" if tail else ""


class LocalBackend:
    """Fresh subprocesses; the simplest way to time arms, and without a cluster to start."""

    name = "local"

    def __init__(self) -> None:
        self._launch: Launch | None = None
        self._workers: list[LocalWorker] = []

    def open(self, launch: Launch) -> None:
        """Remember what workers are started with."""
        launch.log_folder.mkdir(parents=True, exist_ok=True)
        self._launch = launch

    def start(self, label: str) -> LocalWorker:
        """Start a fresh subprocess for an arm.

        Raises:
            UsageError: the backend is not open.
        """
        if self._launch is None:
            raise UsageError("the local backend is not open.")
        worker = LocalWorker(label, self._launch)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """End every subprocess started here."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._launch = None


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "without an exit code"
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"


def serve(descriptor: int, num_threads: int, num_interop_threads: int) -> None:
    """Answer the driver until it hangs up, which it also does by dying."""
    from rankopt.bench.worker import ArmWorker

    worker = ArmWorker(num_threads, num_interop_threads, os.environ.get("OMP_WAIT_POLICY"))
    connection = Connection(descriptor)
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            connection.send(worker.answer(method, args))
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    serve(*(int(argument) for argument in sys.argv[1:4]))
