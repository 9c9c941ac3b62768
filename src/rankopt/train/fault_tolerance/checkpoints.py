"""Checkpoints within a run, such that a run that was killed ends with the weights it would have.

A checkpoint is taken right after a step, before the evaluation that may be due then, and holds
everything the next step depends on. It is written beside the steps that follow, and takes the last
one's place when it is whole. The best weights are written at the evaluation that found them, as a
checkpoint of their own, and kept while the last checkpoint knows of them.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from rankopt.errors import CheckpointError, Interrupted
from rankopt.sharding.checkpoint import PendingSave, ShardedCheckpoint
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.fault_tolerance.goodput import goodput
from rankopt.train.fault_tolerance.interruption import Interruption
from rankopt.train.fault_tolerance.journal import JOURNAL_NAME, Journal
from rankopt.train.fault_tolerance.progress import RunProgress
from rankopt.train.fault_tolerance.run_state import (
    State,
    begin_draws,
    blank_state,
    draws_state,
    load_draws,
    load_optimizers,
    made_to_measure,
    optimizer_states,
    optimizers_state,
)
from rankopt.train.fault_tolerance.working_folder import WorkingFolder
from rankopt.train.step import Step


class Rows(Protocol):
    """A stream of batches that knows where it stands."""

    def state(self) -> dict[str, Any]:
        """Describe it as small JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class Running(Protocol):
    """What of a run is written down."""

    module: nn.Module
    step: Step
    at: RunProgress
    best: Any
    best_optimizers: list[dict[str, Any]]
    keeps_optimizers: bool

    @property
    def windows(self) -> Rows: ...

    def keep_weights(self) -> Any:
        """Copy the weights, as `best` is."""
        ...

    def put_weights(self, kept: Any) -> None:
        """Give the module the weights that `keep_weights` copied."""
        ...


@dataclass(frozen=True)
class _Pending:
    """A save in the background, of the state after `step`; `best` weights or `last` state."""

    save: PendingSave
    kind: str
    step: int
    best_step: int


class Checkpoints:
    """Writes down where a run stands, and takes it up again.

    Args:
        folder: where; None keeps nothing but the journal.
        every: steps from one checkpoint to the next.
        journal: told what was done, and how long steps stood still for it.
        tell: called with a line where something went wrong.
        ranks: the processes that train together.
    """

    def __init__(
        self,
        folder: WorkingFolder | None,
        every: int,
        journal: Journal,
        tell: Callable[[str], None],
        ranks: Ranks,
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.every = every
        self.journal = journal
        self._interruption = Interruption()
        self._tell = tell
        # One for saves in the background, one for what steps ask meanwhile.
        self._group = None if folder is None else ranks.new_group()
        self._asking = None if folder is None else ranks.new_group()
        self._last = None if folder is None else self._sharded(folder.last)
        self._rows: dict[str, Any] = {}
        self._pending: _Pending | None = None
        self._saved_step = 0
        self._saved_best = 0
        self._is_finished = False

    def stoppable(self) -> contextlib.AbstractContextManager[object]:
        """Have signals stop the run at its next step, for a block, where there is a folder."""
        return contextlib.nullcontext() if self.folder is None else self._interruption

    def load(self, run: Running) -> bool:
        """Put a run where its last checkpoint was taken; False where there is none.

        Raises:
            CheckpointError: it is damaged, or does not fit.
        """
        if self.folder is None or self._last is None or not self.folder.has_checkpoint:
            return False
        state = _weights(run)
        state["optimizers"] = made_to_measure(state["optimizers"], self.folder.last)
        # Ranks draw as they did; where there are more or fewer now, each begins draws of its own.
        has_same_ranks = len(blank_state(self.folder.last, "ranks")) == self.ranks.world_size
        if has_same_ranks:
            state["ranks"] = {str(self.ranks.rank): draws_state(run.module)}
        state = self._last.load({**state, "progress": ""})
        progress = json.loads(state["progress"])
        run.at = RunProgress.from_json(progress["at"])
        run.step.num_rows_seen = progress["num_rows_seen"]
        run.windows.restore(progress["rows"])
        self._rows = progress["rows"]
        load_optimizers(run.step.optimizers, state["optimizers"])
        if has_same_ranks:
            load_draws(state["ranks"][str(self.ranks.rank)])
        else:
            begin_draws(run.at.num_steps, self.ranks.rank)
        self._saved_step = run.at.num_steps
        self._load_best(run)
        self.journal.add("resume", step=run.at.num_steps)
        self._tell(f"goes on after step {run.at.num_steps:,}")
        return True

    def after_step(self, run: Running) -> None:
        """Take a checkpoint where one is due, or where the run is to stop.

        Raises:
            Interrupted: a signal came; the checkpoint is written.
        """
        if self.folder is None:
            return
        self._rows = run.windows.state()
        is_stopped = self._is_stopped()
        if is_stopped or run.at.num_steps % self.every == 0:
            self._save(run)
        if is_stopped:
            self._stop(run)

    def look(self, run: Running) -> None:
        """Stop within an evaluation, which is then done again; several ranks go on to its end.

        Raises:
            Interrupted: a signal came; the checkpoint is written.
        """
        if self.folder is None or not self.ranks.is_alone or self._interruption.signal is None:
            return
        if not self._is_finished:
            self._save(run)
        self._stop(run)

    def keep_best(self, run: Running) -> None:
        """Write the best weights."""
        if self.folder is not None:
            with self.journal.timed("checkpoint", step=run.at.num_steps, of="best"):
                self._settle()
                self._save_best(run)

    def finish(self, run: Running) -> None:
        """Write the state after the last step and evaluation; what is left is to measure."""
        if self.folder is not None:
            self._rows = run.windows.state()
            self._save(run)
            self._is_finished = True

    def end(self, run: Running, staging: Path) -> dict[str, Any]:
        """Write the end into the journal and leave the journal with the result.

        Returns:
            What the whole run's time went into.
        """
        if self._pending is not None:
            with self.journal.timed("checkpoint", step=run.at.num_steps):
                self._settle()
        self.journal.add("end", num_steps=run.at.num_steps, best_step=run.at.best_step)
        if self.journal.path is not None:
            self.journal.copy(staging / JOURNAL_NAME)
        return self.ranks.broadcast(goodput(self.journal.events))

    def close(self) -> None:
        """Let go of the folder, which stays for a later process if there is a checkpoint in it."""
        self._tell = lambda line: None  # what ends the run has more to say
        self._settle()
        self.journal.flush()
        if self.folder is not None and self.ranks.is_first:
            self.folder.close()

    def remove(self) -> None:
        """Remove the folder of a run whose result is in its place."""
        if self.folder is not None and self.ranks.is_first:
            self.folder.remove()

    def _sharded(self, folder: Path) -> ShardedCheckpoint:
        return ShardedCheckpoint(folder, process_group=self._group)

    def _is_stopped(self) -> bool:
        """Tell, the same on all ranks, whether one of them is to stop."""
        return self.ranks.any(self._interruption.signal is not None, self._asking)

    def _stop(self, run: Running) -> None:
        self._settle()
        name = self._interruption.signal or "a signal to another rank"
        self.journal.add("interrupted", signal=name)
        where = self.folder.path if self.folder is not None else None
        if not self._saved_step:
            text = f"stopped by {name}; no checkpoint could be written to {where}."
        else:
            text = (
                f"stopped by {name} after step {run.at.num_steps:,}; the checkpoint of step "
                f"{self._saved_step:,} lies in {where}. Go on with the same command and --resume."
            )
        raise Interrupted(text)

    def _save(self, run: Running) -> None:
        """Take a checkpoint; one that cannot be written leaves the last, and the run goes on."""
        with self.journal.timed("checkpoint", step=run.at.num_steps) as event:
            self._settle()
            if self._saved_best != run.at.best_step:  # it could not be written when it was found
                self._save_best(run)
                self._settle()
            if self._saved_best != run.at.best_step:
                event["error"] = "the best weights could not be written"
                return
            state = _weights(run)
            state["ranks"] = {str(self.ranks.rank): draws_state(run.module)}
            state["progress"] = json.dumps(
                {
                    "at": run.at.to_json(),
                    "rows": self._rows,
                    "num_rows_seen": run.step.num_rows_seen,
                }
            )
            if self._last is not None:
                self._start(run, "last", run.at.num_steps, self._last, state)

    def _save_best(self, run: Running) -> None:
        if self.folder is None:
            return
        step = run.at.best_step
        # A save copies what it writes before it returns.
        now = None if run.at.num_steps == step else run.keep_weights()
        if now is not None:
            run.put_weights(run.best)
        state: State = {"model": run.module.state_dict()}
        if run.keeps_optimizers:
            state["optimizers"] = optimizers_state(run.best_optimizers)
        self._start(run, "best", step, self._sharded(self.folder.best(step)), state)
        if now is not None:
            run.put_weights(now)

    def _start(
        self, run: Running, kind: str, step: int, checkpoint: ShardedCheckpoint, state: Any
    ) -> None:
        try:
            save = checkpoint.save_async(state)
        except (CheckpointError, OSError) as error:
            self._failed(step, error)
        else:
            self._pending = _Pending(save, kind, step, run.at.best_step)

    def _settle(self) -> None:
        """Wait for the save in the background, and remove what it has made superfluous."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.save.wait()
        except CheckpointError as error:
            self._failed(pending.step, error)
            return
        if pending.kind == "best":
            self._saved_best = pending.step
        else:
            self._saved_step = pending.step
            if self.folder is not None and self.ranks.is_first:
                self.folder.keep_best(pending.best_step, self._saved_best)

    def _failed(self, step: int, error: Exception) -> None:
        self.journal.add("checkpoint", step=step, duration_ns=0, error=str(error))
        kept = f"that of step {self._saved_step:,} stays" if self._saved_step else "there is none"
        self._tell(f"the checkpoint of step {step:,} was not written, {kept}: {error}")

    def _load_best(self, run: Running) -> None:
        step = run.at.best_step
        if not step or self.folder is None:
            return
        folder = self.folder.best(step)
        now = run.keep_weights()
        state: State = {"model": run.module.state_dict()}
        if run.keeps_optimizers:
            own = optimizers_state([one.state_dict() for one in run.step.optimizers])
            state["optimizers"] = made_to_measure(copy.deepcopy(own), folder)
        state = self._sharded(folder).load(state)
        run.best = run.keep_weights()
        run.put_weights(now)
        if run.keeps_optimizers:
            run.best_optimizers = optimizer_states(state["optimizers"])
        self._saved_best = step


def _weights(run: Running) -> State:
    states = [optimizer.state_dict() for optimizer in run.step.optimizers]
    return {"model": run.module.state_dict(), "optimizers": optimizers_state(states)}
