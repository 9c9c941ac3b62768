"""Start the ranks of a measurement on this machine with torchrun, and wait for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

from rankopt.errors import EnvironmentProblem

_RANK = re.compile(r"^\[rank\d+\]:\s*")
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt)\b")


def run_local_ranks(
    module: str,
    num_ranks: int,
    arguments: Sequence[str],
    *,
    timeout_s: float,
    told: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a module of ours in as many processes as there are ranks.

    Args:
        module: run as `python -m module`.
        num_ranks: how many.
        arguments: of each.
        timeout_s: after which they are ended.
        told: each line that they print.

    Raises:
        EnvironmentProblem: a process failed, or they did not end in time.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "-m", module, *arguments]
    # One thread a rank, or the ranks of a machine compete for its cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        # torchrun ends its processes when it is asked to end.
        late = threading.Timer(timeout_s, running.terminate)
        late.start()
        try:
            for line in running.stdout or ():
                told(line.strip())
            running.wait()
        finally:
            in_time = late.is_alive()
            late.cancel()
            if running.stdout is not None:
                running.stdout.close()
            if running.poll() is None:
                running.terminate()
                running.wait()
        if not in_time:
            what = f"The measuring processes did not end within {timeout_s:g} s"
            raise EnvironmentProblem(f"{what}; is a firewall between them?")
        if running.returncode:
            errors.seek(0)
            why = _reason(errors.read()) or f"exit code {running.returncode}"
            raise EnvironmentProblem(f"A measuring process failed: {why}")


def _reason(text: str) -> str | None:
    """Find what a rank died of; torchrun's own error says only that one did."""
    lines = [_RANK.sub("", line.strip()) for line in text.splitlines()]
    said = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    return said[0] if said else None
