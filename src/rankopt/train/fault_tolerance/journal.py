"""What a run did and when, one JSON object a line, across all its starts.

Every line holds `t_ns` (the system's clock), `at_ns` (nanoseconds since this process began, by a
clock that nobody sets) and `event`:

- `start`: the first process of the run began; `restart`: a later one did, with its `cause`.
- `resume`: the state was loaded, and the run goes on after step `step`.
- `steps`: steps `first` to `last` took `step_ns` and waited `wait_ns` for their batches. Written
  about once a second and before everything else, so that a kill hides a second at most.
- `evaluation`, `checkpoint`: took `duration_ns`, in which no step could run. A checkpoint that
  could not be written has an `error`.
- `interrupted`: a signal stopped the process.
- `end`: the run is done; the weights are those after step `best_step` of `num_steps`.

Lines are appended and never rewritten. A torn last line is cut off when the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankopt.units import NS_PER_S

JOURNAL_NAME = "journal.jsonl"
BEGINNINGS = ("start", "restart")
"""Events with which a process begins."""
FLUSH_NS = NS_PER_S

Event = dict[str, Any]


class Journal:
    """The journal of a run.

    A disk that takes no more lines does not end the run: lines wait in memory for a later write.

    Args:
        path: the file, made when the first event is added; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.events = [] if path is None else read_journal(path)
        self._began_ns = time.perf_counter_ns()
        self._steps: Event | None = None
        self._unwritten: list[str] = []
        if path is not None and path.exists():
            _cut_torn_line(path)

    def begin(self, cause: str | None = None) -> None:
        """Note that this process began: the run's first, or a later one and why."""
        if any(event["event"] in BEGINNINGS for event in self.events):
            self.add("restart", cause=cause or "resume")
        else:
            self.add("start")

    def add(self, event: str, **details: Any) -> None:
        """Append an event, after the steps before it."""
        self._write_steps()
        self._append({**self._now(event), **details})

    def add_step(self, number: int, step_ns: int, wait_ns: int) -> None:
        """Count a step; it is written together with those next to it."""
        at_ns = time.perf_counter_ns() - self._began_ns
        steps = self._steps
        if steps is None:
            steps = {"first": number, "step_ns": 0, "wait_ns": 0, "since_ns": at_ns}
            self._steps = steps
        steps["last"] = number
        steps["step_ns"] += step_ns
        steps["wait_ns"] += wait_ns
        if at_ns - steps["since_ns"] >= FLUSH_NS:
            self._write_steps()

    def flush(self) -> None:
        """Write the steps that have waited for others."""
        self._write_steps()

    def copy(self, path: Path) -> None:
        """Write all events to another file, unless that is where they lie.

        Raises:
            OSError: it cannot be written.
        """
        if path != self.path:
            lines = [json.dumps(event, separators=(",", ":")) + "\n" for event in self.events]
            path.write_text("".join(lines), encoding="utf-8")

    @contextlib.contextmanager
    def timed(self, event: str, **details: Any) -> Iterator[Event]:
        """Append an event with the duration of the block, and whatever the block puts into it."""
        self._write_steps()
        began_ns = time.perf_counter_ns()
        found: Event = {}
        yield found
        self.add(event, duration_ns=time.perf_counter_ns() - began_ns, **details, **found)

    def _now(self, event: str) -> Event:
        at_ns = time.perf_counter_ns() - self._began_ns
        return {"t_ns": time.time_ns(), "event": event, "at_ns": at_ns}

    def _write_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            names = ("first", "last", "step_ns", "wait_ns")
            self._append({**self._now("steps"), **{name: steps[name] for name in names}})

    def _append(self, event: Event) -> None:
        self.events.append(event)
        if self.path is None:
            return
        self._unwritten.append(json.dumps(event, separators=(",", ":")) + "\n")
        # Not synced to the disk: what a process wrote outlives it, and no weight depends on it.
        try:
            with self.path.open("ab", buffering=0) as file:
                size_bytes = file.tell()
                text = "".join(self._unwritten).encode()
                if file.write(text) != len(text):
                    file.truncate(size_bytes)
                    return
        except OSError:
            return
        self._unwritten = []


def read_journal(path: Path) -> list[Event]:
    """Read the events of a journal; what is no event, as a torn last line, is left out."""
    if not path.exists():
        return []
    events = []
    # What stands after the last line's end is torn, though it may read as an event.
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return events


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    kept = data.rfind(b"\n") + 1
    if kept < len(data):
        with path.open("r+b") as file:
            file.truncate(kept)
