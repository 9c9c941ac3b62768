"""Raw samples on disk: appended block by block, so that a killed run loses one block at most.

One JSON object a line: first the run's fingerprint, then each arm's environment, warm-ups, and one
line per finished turn. Nothing is rewritten; a torn last line is cut off when a run resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankopt.errors import EnvironmentProblem, OutputExistsError, UsageError


@dataclass(frozen=True)
class BlockRecord:
    """One arm's turn in one finished block.

    Attributes:
        batch_size: rows of a call.
        block: number of the block at this batch size; every arm has one record in it.
        arm: the arm's label.
        turn: position in the block's order, from 0.
        latency_ns: wall time of each call, int64.
        wall_ns: wall time of the turn.
        cpu_ns: CPU time of the arm's process in the turn.
        started_ns: monotonic clock at the start.
        idle_cpu_share: largest CPU time of an idle arm over `wall_ns`; None where not measurable.
        attempt: 0 for the first try; disturbed tries before it stand in the file as `discarded`.
        disturbed: True when the last try allowed was disturbed too.
    """

    batch_size: int
    block: int
    arm: str
    turn: int
    latency_ns: npt.NDArray[np.int64]
    wall_ns: int
    cpu_ns: int
    started_ns: int
    idle_cpu_share: float | None
    attempt: int = 0
    disturbed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {**self.__dict__, "latency_ns": self.latency_ns.tolist()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BlockRecord:
        """Read what `to_json` wrote."""
        return cls(**{**value, "latency_ns": np.asarray(value["latency_ns"], dtype=np.int64)})


class SampleFile:
    """The samples of one run.

    Args:
        path: the file; its folder must exist.
        fingerprint: what must be equal for samples to belong together: plan, arms, rows.
        resume: continue a file of the same fingerprint.

    Raises:
        OutputExistsError: the file holds samples and `resume` is False.
        UsageError: the file belongs to a run that differs; each difference is named.
        EnvironmentProblem: the file cannot be written.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], *, resume: bool = False) -> None:
        self.path = path
        self._environments: dict[str, dict[str, Any]] = {}
        self._blocks: dict[tuple[int, int], dict[str, BlockRecord]] = {}
        self._num_calls: dict[int, int] = {}
        self.events: list[dict[str, Any]] = []
        self.is_resumed = False
        self.num_resumed = 0
        # Through JSON, so that tuples and paths compare as they will be read back.
        wanted = json.loads(json.dumps(fingerprint, default=str))
        lines = _complete_lines(path)
        if lines and not resume:
            raise OutputExistsError(
                f"{path}: already holds samples. Continue with --resume, or start anew with "
                "--overwrite."
            )
        if lines:
            _refuse_difference(path, lines[0].get("fingerprint", {}), wanted, "run")
            for line in lines[1:]:
                self._take(line)
            self.is_resumed = True
            self.num_resumed = sum(len(turns) for turns in self._blocks.values())
        else:
            self._write([{"type": "run", "fingerprint": wanted}])

    def block(self, batch_size: int, block: int, arms: Iterable[str]) -> list[BlockRecord] | None:
        """Return a block that is finished for all of these arms, in their order."""
        turns = self._blocks.get((batch_size, block), {})
        labels = list(arms)
        return [turns[label] for label in labels] if turns.keys() >= set(labels) else None

    def num_calls(self, batch_size: int) -> int | None:
        """Return the calls per block that this run settled on for a batch size."""
        return self._num_calls.get(batch_size)

    def set_num_calls(self, batch_size: int, num_calls: int) -> None:
        """Settle the calls per block of a batch size."""
        self._num_calls[batch_size] = num_calls
        self._write([{"type": "calls", "batch_size": batch_size, "num_calls": num_calls}])

    def add_block(self, records: Iterable[BlockRecord]) -> None:
        """Append a finished block: the turns of all arms, in one write."""
        kept = list(records)
        self._write([{"type": "turn", **record.to_json()} for record in kept])
        for record in kept:
            self._blocks.setdefault((record.batch_size, record.block), {})[record.arm] = record

    def add_discarded(self, record: BlockRecord) -> None:
        """Append a turn that an idle arm disturbed and that is run again."""
        self._write([{"type": "discarded", **record.to_json()}])

    def add_warm_up(self, arm: str, batch_size: int, latency_ns: npt.NDArray[np.int64]) -> None:
        """Append an arm's warm-up."""
        line = {"type": "warm_up", "arm": arm, "batch_size": batch_size}
        self._write([{**line, "latency_ns": latency_ns.tolist()}])

    def add_event(self, event: str, **details: Any) -> None:
        """Append something worth a note in the report, such as a worker's restart."""
        line = {"type": "event", "event": event, **details}
        self.events.append(line)
        self._write([line])

    def add_environment(self, arm: str, environment: Mapping[str, Any]) -> None:
        """Append an arm's environment, or check that it is still the same.

        Raises:
            UsageError: the run began on another host or with other versions or threads.
        """
        now = json.loads(json.dumps(environment))
        known = self._environments.get(arm)
        if known is not None:
            _refuse_difference(self.path, known, now, f"environment of arm {arm!r}")
            return
        self._environments[arm] = now
        self._write([{"type": "environment", "arm": arm, "environment": now}])

    def _take(self, line: dict[str, Any]) -> None:
        kind = line.pop("type")
        if kind == "turn":
            record = BlockRecord.from_json(line)
            self._blocks.setdefault((record.batch_size, record.block), {})[record.arm] = record
        elif kind == "environment":
            self._environments[line["arm"]] = line["environment"]
        elif kind == "calls":
            self._num_calls[line["batch_size"]] = line["num_calls"]
        elif kind == "event":
            self.events.append({"type": kind, **line})

    def _write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise EnvironmentProblem(
                f"{self.path}: samples cannot be written: {error.strerror}. Blocks finished before "
                "are kept; make room and continue with --resume."
            ) from error


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file and cut off a torn last one.

    Raises:
        UsageError: a line in the middle is not JSON, so something else wrote into the file.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    kept = data[: data.rfind(b"\n") + 1]
    lines = []
    for number, text in enumerate(kept.splitlines(), start=1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            raise UsageError(
                f"{path}: line {number} is damaged ({error}), so the run cannot be resumed. "
                "Start anew with --overwrite."
            ) from error
    if len(kept) < len(data):
        with path.open("r+b") as stream:
            stream.truncate(len(kept))
    return lines


def _refuse_difference(
    path: Path, known: Mapping[str, Any], now: Mapping[str, Any], what: str
) -> None:
    names = [name for name in sorted({*known, *now}) if known.get(name) != now.get(name)]
    if not names:
        return
    details = "; ".join(
        f"{name}: {known.get(name)!r} then, {now.get(name)!r} now" for name in names
    )
    raise UsageError(
        f"{path}: cannot be resumed: the {what} differs ({details}). Samples of different runs are "
        "never joined; start anew with --overwrite, or resume where it began."
    )
