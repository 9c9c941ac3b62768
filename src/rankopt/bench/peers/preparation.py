"""Prepare a peer's files once, in a process of their own, and keep them by what they were made of.

The process is fresh, so that an exporter's crash, its threads and its memory stay its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rankopt.bench.backend import driver_import_path, worker_environment
from rankopt.bench.peers.peer import Peer, PeerError, PeerJob, Setting, first_lines
from rankopt.bench.peers.registry import find_peer
from rankopt.data.cache import cached_folder
from rankopt.environment import installed_libraries
from rankopt.errors import RankoptError

NUM_LOG_LINES = 3


def prepare_files(peer: Peer, job: PeerJob, setting: Setting, timeout_s: float) -> Path | None:
    """Return the folder of a setting's prepared files, making it the first time.

    Raises:
        PeerError: the peer refuses the model, takes too long or dies.
    """
    if not peer.has_files:
        return None
    key = files_identity(peer, job, setting)

    def make(folder: Path) -> None:
        _run(peer, job, setting, folder, timeout_s)

    return cached_folder(f"peers-{peer.kind}", key, make)


def files_identity(peer: Peer, job: PeerJob, setting: Setting) -> dict[str, Any]:
    """Name everything that a setting's files depend on."""
    return {
        "peer": peer.kind,
        "setting": peer.file_settings(setting),
        "card": job.load_card().model_dump(mode="json"),
        "checkpoint": job.checkpoint_sha256,
        "libraries": installed_libraries(peer.distributions),
        "code": code_digest(type(peer)),
        **peer.files_key(job, setting),
    }


def code_digest(peer: type[Peer]) -> str:
    """Hash the file that a peer's class is written in."""
    file = importlib.import_module(peer.__module__).__file__
    return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()


def _run(peer: Peer, job: PeerJob, setting: Setting, folder: Path, timeout_s: float) -> None:
    request = {
        "peer": peer.kind,
        "config": peer.model_dump(mode="json"),
        "job": job.model_dump(mode="json"),
        "setting": setting,
        "folder": str(folder),
    }
    environment = {
        **os.environ,
        **worker_environment(job.num_threads, None),
        "PYTHONPATH": driver_import_path(),
    }
    with tempfile.TemporaryDirectory(prefix="rankopt-peer-") as scratch:
        file, log = Path(scratch) / "request.json", Path(scratch) / "log.txt"
        file.write_text(json.dumps(request), encoding="utf-8")
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(file)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"took longer than {timeout_s:.0f} s to prepare.") from error
        finally:
            _end(process)
        answer = file.with_suffix(".error")
        if code != 0:
            for item in folder.iterdir():
                shutil.rmtree(item) if item.is_dir() else item.unlink()
            said = answer.read_text(encoding="utf-8") if answer.exists() else _last_words(code, log)
            raise PeerError(said)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever compilers it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(code: int, log: Path) -> str:
    ending = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = " ".join(line.strip() for line in lines[-NUM_LOG_LINES:] if line.strip())
    return f"its process ended with {ending}. {tail}".strip()


def main(file: Path) -> int:
    """Prepare what a request asks for; an error is left beside it."""
    request = json.loads(file.read_text(encoding="utf-8"))
    job = PeerJob.model_validate(request["job"])
    import torch

    torch.set_num_threads(job.num_threads)
    peer = find_peer(request["peer"]).model_validate(request["config"])
    try:
        peer.prepare(job, request["setting"], Path(request["folder"]))
    except Exception as error:  # engines raise anything; what they say is the answer
        said = str(error) if isinstance(error, RankoptError) else first_lines(error)
        file.with_suffix(".error").write_text(said, encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an engine's threads may hang at exit
