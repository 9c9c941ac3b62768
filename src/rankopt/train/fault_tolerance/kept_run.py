"""A run from its working folder to its end: begun, or gone on with after whatever ended it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankopt.train.distributed.ranks import Ranks
from rankopt.train.fault_tolerance.checkpoints import Checkpoints
from rankopt.train.fault_tolerance.journal import JOURNAL_NAME, Journal
from rankopt.train.fault_tolerance.working_folder import WorkingFolder

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has restarted its workers."""
RUN_ID = "TORCHELASTIC_RUN_ID"
"""What torchrun calls one launch, its restarts included; `none` where nobody named it."""


@dataclass(frozen=True)
class Keeping:
    """How a run is kept.

    Attributes:
        out: where the result will be.
        identity: describes the run; called by the first rank, where there is a working folder.
        every: steps between checkpoints; None for none, or for those of the run that goes on.
        resume: go on with a run that was killed; without one, begin.
        overwrite: throw away what an earlier run left.
        launch: names the launch of workers that this process is of; a run that it began goes on by
            itself. None for torchrun's, where it started this process.
        ranks: the processes that train together.
    """

    out: Path
    identity: Callable[[], dict[str, Any]]
    every: int | None = None
    resume: bool = False
    overwrite: bool = False
    launch: str | None = None
    ranks: Ranks = field(default_factory=Ranks.alone)

    @property
    def launched(self) -> str | None:
        named = os.environ.get(RUN_ID, "none")
        return self.launch or (None if named == "none" else named)

    @property
    def cause(self) -> str | None:
        """Why a run goes on here, if one does; None where it has to be a new one."""
        if self.resume:
            return "resume"
        if self.every is None:
            return None
        is_restart = os.environ.get(RESTARTS, "0") not in {"", "0"}
        return "launcher" if is_restart or WorkingFolder(self.out).is_of(self.launched) else None


@contextlib.contextmanager
def kept_run(keeping: Keeping, staging: Path, tell: Callable[[str], None]) -> Iterator[Checkpoints]:
    """Open a run's working folder, where it has one, and begin its journal.

    All ranks come here; the first one makes the folder and writes the journal. One that fails ends,
    and with it the collectives that the others wait in.

    Args:
        keeping: how the run is kept.
        staging: where the result is made; has the journal of a run without checkpoints.
        tell: called with a line where something went wrong.
    """
    ranks, cause, chosen = keeping.ranks, keeping.cause, 1
    folder = WorkingFolder(keeping.out) if keeping.every is not None or cause else None
    if folder is not None and ranks.is_first:
        chosen = folder.open(
            keeping.identity(),
            keeping.every,
            resume=cause is not None,
            overwrite=keeping.overwrite,
            launch=keeping.launched,
        )
    chosen = ranks.broadcast(chosen)
    path = staging / JOURNAL_NAME if folder is None else folder.journal
    journal = Journal(path if ranks.is_first else None)
    journal.begin(cause)
    run = Checkpoints(folder, chosen, journal, tell, ranks)
    try:
        yield run
    except BaseException:
        run.close()
        raise


def finished_result(keeping: Keeping) -> dict[str, Any] | None:
    """Return the metrics of the same run where only removing its working folder was left to do."""
    metrics = None
    folder = WorkingFolder(keeping.out)
    if keeping.ranks.is_first and keeping.cause is not None and folder.is_done:
        run = folder.run()
        if run is not None and run["identity"] == keeping.identity():
            metrics = json.loads((folder.out / "metrics.json").read_text(encoding="utf-8"))
            folder.remove()
    return keeping.ranks.broadcast(metrics)
