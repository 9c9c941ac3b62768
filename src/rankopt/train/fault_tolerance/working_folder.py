"""The folder beside a run's result that survives a kill.

`OUT.partial` holds `resume.json` (what the run is), `journal.jsonl`, `last` (the last checkpoint)
and `best-STEP` (the best weights that `last` knows of). It goes when OUT is in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rankopt.errors import EnvironmentProblem, OutputExistsError, Problem, UsageError
from rankopt.output import recover_folder, write_json_atomic
from rankopt.train.fault_tolerance.identity import differences
from rankopt.train.fault_tolerance.journal import JOURNAL_NAME, read_journal

RUN_NAME = "resume.json"
_LOCK_NAME = "lock"


class WorkingFolder:
    """Where a run's checkpoints and journal lie while it goes on.

    Args:
        out: where the result will be.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.expanduser().resolve()
        self.path = self.out.with_name(f"{self.out.name}.partial")
        self.last = self.path / "last"
        self.journal = self.path / JOURNAL_NAME
        self._lock: Any = None

    def best(self, step: int) -> Path:
        """Return where the weights of the evaluation after a step lie."""
        return self.path / f"best-{step}"

    def best_steps(self) -> list[int]:
        """List the evaluations whose weights are there."""
        names = [path.name.removeprefix("best-") for path in self.path.glob("best-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def has_checkpoint(self) -> bool:
        return (self.last / ".metadata").is_file()

    @property
    def is_done(self) -> bool:
        """Whether a kill came when the result was in its place and the folder not yet removed."""
        here, there = (read_journal(file) for file in (self.journal, self.out / JOURNAL_NAME))
        return bool(here) and here[-1]["event"] == "end" and here[-1:] == there[-1:]

    def run(self) -> dict[str, Any] | None:
        """Read what the run in it is; None where there is none, or none that had begun."""
        try:
            found = json.loads((self.path / RUN_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def is_of(self, launch: str | None) -> bool:
        """Tell whether the run in it was begun by the same launch of workers."""
        run = self.run()
        return launch is not None and run is not None and run.get("launch") == launch

    def open(
        self,
        identity: Mapping[str, Any],
        every: int | None,
        *,
        resume: bool,
        overwrite: bool,
        launch: str | None = None,
    ) -> int:
        """Make the folder for a new run, or take it for one that goes on.

        Args:
            identity: what the run is; one that goes on must be the same.
            every: steps between checkpoints; None for those of the run that goes on.
            resume: go on where there is something to go on from.
            overwrite: throw away what an earlier run left.
            launch: names the launch of workers that this process is of.

        Returns:
            Steps between checkpoints.

        Raises:
            OutputExistsError: it holds a checkpoint, and neither `resume` nor `overwrite` is set.
            UsageError: the run differs, or there is none and `every` is None.
            EnvironmentProblem: another process is at it, or it cannot be written.
        """
        if every is None and self.run() is None:
            what = "is not there, so there is no run to go on with"
            hint = "To begin one, add --checkpoint-every STEPS."
            raise UsageError(problems=[Problem(str(self.path), what, hint=hint)])
        with _told(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
        try:
            return self._begin(identity, every, resume=resume, overwrite=overwrite, launch=launch)
        except BaseException:
            self.release()
            raise

    def _begin(
        self,
        identity: Mapping[str, Any],
        every: int | None,
        *,
        resume: bool,
        overwrite: bool,
        launch: str | None,
    ) -> int:
        """Make what lies in the folder that of this run."""
        with _told(self.path):
            recover_folder(self.last, alone=True)
            # What a kill cut short; such weights are found and written again.
            for left in (*self.path.glob("*.partial-save"), *self.path.glob("best-*.replaced-*")):
                shutil.rmtree(left)
        run = self.run()
        is_done = self.is_done
        if run is not None and resume and not is_done:
            problems = differences(str(self.path), run["identity"], identity)
            if problems:
                raise UsageError(problems=problems)
        elif self.has_checkpoint and not is_done and not overwrite:
            what = "holds the checkpoints of a run that has not ended"
            hint = "Go on with it by --resume, or begin anew with --overwrite."
            raise OutputExistsError(problems=[Problem(str(self.path), what, hint=hint)])
        else:
            self._clear()
        chosen = every if every is not None else int(run["checkpoint_every"]) if run else 1
        begun = {"checkpoint_every": chosen, "launch": launch, "identity": dict(identity)}
        write_json_atomic(self.path / RUN_NAME, begun)
        return chosen

    def keep_best(self, *steps: int) -> None:
        """Remove the weights of all evaluations but these."""
        for step in set(self.best_steps()) - set(steps):
            shutil.rmtree(self.best(step), ignore_errors=True)

    def close(self) -> None:
        """Let another process have the folder; one without a checkpoint is removed."""
        if self.has_checkpoint:
            self.release()
        else:
            self.remove()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.close()

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.name == _LOCK_NAME:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _take(self) -> None:
        """Lock the folder; the system lets go of a lock when its process ends, however it does."""
        self._lock = (self.path / _LOCK_NAME).open("a+")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._lock.close()
            hint = "Wait for it, or end it first."
            problem = Problem(str(self.path), "is in use by another process", hint=hint)
            raise EnvironmentProblem(problems=[problem]) from error
        except OSError:
            return  # a filesystem without locks


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = Problem(str(path), "cannot be written", error.strerror, "Give another --out.")
        raise EnvironmentProblem(problems=[problem]) from error
