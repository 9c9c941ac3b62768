"""Look into a model in a fresh process: what `rankopt diagnose` and the peer bench call."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rankopt.bench.backend import driver_import_path, worker_environment
from rankopt.bench.plan import physical_cores_available, raised
from rankopt.bench.rows_file import FlatRows, write_rows
from rankopt.diagnose.schema import BatchRow
from rankopt.diagnose.worker import PROGRESS, Found, Request
from rankopt.errors import EXIT_USAGE, ArtifactError, EnvironmentProblem, UsageError
from rankopt.models.card import ModelCard, save_card

NUM_LOG_LINES = 12
BATCH_SIZES = (1, 64, 512)


def where_time_goes(
    artifact: str | Path | None,
    card: ModelCard | None,
    rows: FlatRows,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    *,
    num_threads: int | None = None,
    checkpoint: str | Path | None = None,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[BatchRow]:
    """Say where the time of each batch size goes.

    Args:
        artifact: an artifact folder; None to look into the card's eager module.
        card: needed without an artifact only.
        rows: encoded rows that calls are cut out of.
        batch_sizes: rows of a call.
        num_threads: thread budget; None: all physical cores.
        checkpoint: the eager module's weights in place of the card's.
        quick: take few samples.
        progress: told one line per step.

    Returns:
        One row per batch size; `model_dump(mode="json")` of each is plain JSON.

    Raises:
        ArtifactError: the artifact is damaged, or cannot be profiled.
        EnvironmentProblem: there is no compiler, or the process died.
        UsageError: neither an artifact nor a card is given, or a batch size is below 1.
    """
    found = look_into(
        artifact,
        card,
        rows,
        batch_sizes,
        num_threads=num_threads,
        checkpoint=checkpoint,
        quick=quick,
        progress=progress,
    )
    return list(found.batches)


def look_into(
    artifact: str | Path | None,
    card: ModelCard | None,
    rows: FlatRows,
    batch_sizes: Sequence[int],
    *,
    num_threads: int | None = None,
    checkpoint: str | Path | None = None,
    quick: bool = False,
    again: bool = False,
    allow_random: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """Do as `where_time_goes`, and return the machine's peaks beside it."""
    if artifact is None and card is None:
        raise UsageError("needs an artifact folder or a model card.")
    if not batch_sizes or any(size < 1 for size in batch_sizes):
        raise UsageError(f"batch sizes must be at least 1; got {list(batch_sizes)}.")
    threads = num_threads or physical_cores_available()
    with tempfile.TemporaryDirectory(prefix="rankopt-diagnose-") as name:
        folder = Path(name)
        request = Request(
            artifact=Path(artifact).resolve() if artifact is not None else None,
            card=save_card(card, folder / "card.yaml") if card and artifact is None else None,
            checkpoint=Path(checkpoint).resolve() if checkpoint is not None else None,
            rows=write_rows(rows, folder / "rows.safetensors"),
            batch_sizes=raised(batch_sizes, card.min_batch if card else 1),
            num_threads=threads,
            quick=quick,
            again=again,
            allow_random=allow_random,
        )
        return _ask(request, folder, progress)


def _ask(request: Request, folder: Path, progress: Callable[[str], None]) -> Found:
    asked, answer = folder / "request.json", folder / "found.json"
    asked.write_text(request.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "rankopt.diagnose.worker", str(asked), str(answer)]
    variables = {
        **os.environ,
        **worker_environment(request.num_threads, None),
        "PYTHONPATH": driver_import_path(),
    }
    said: list[str] = []
    with subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for line in process.stderr or ():
                if line.startswith(PROGRESS):
                    progress(line.removeprefix(PROGRESS).rstrip())
                else:
                    said.append(line.rstrip())
        except BaseException:
            process.kill()
            raise
    code = process.returncode
    if code == EXIT_USAGE:
        raise ArtifactError("\n".join(said))
    if code or not answer.is_file():
        tail = "\n".join(said[-NUM_LOG_LINES:])
        raise EnvironmentProblem(
            f"the process that looked into the model ended with {code}. Its last words:\n{tail}"
        )
    return Found.model_validate_json(answer.read_bytes())
