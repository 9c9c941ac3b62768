"""How much of a run's time went into its weights, and where the rest went.

Goodput is the time of the steps whose result is in the final weights, over the wall time from the
first start to the end. Steps that were done again after a kill, and those after the evaluation
whose weights were kept, are not in the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rankopt.train.fault_tolerance.journal import BEGINNINGS, Event


@dataclass(frozen=True)
class RunTimes:
    """Where a run's wall time went; the parts add up to it.

    Attributes:
        steps_ns: steps whose result is in the final weights.
        steps_after_best_ns: steps after the evaluation whose weights were kept.
        redone_steps_ns: steps lost to a kill and done again, with their wait for data.
        data_wait_ns: waiting for the batches of the steps that were not lost.
        evaluation_ns: measuring quality, in between and at the end.
        checkpoint_ns: standing still for a checkpoint; writing beside steps costs none.
        start_up_ns: from a process's beginning to its first step: model, rows, state.
        down_ns: from the last thing a process wrote down to the beginning of the next.
        other_ns: the rest: between steps, and writing the result.
    """

    steps_ns: int = 0
    steps_after_best_ns: int = 0
    redone_steps_ns: int = 0
    data_wait_ns: int = 0
    evaluation_ns: int = 0
    checkpoint_ns: int = 0
    start_up_ns: int = 0
    down_ns: int = 0
    other_ns: int = 0

    @property
    def wall_ns(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def goodput(self) -> float | None:
        """Return the share of useful steps; None for a run that took no time."""
        return self.steps_ns / self.wall_ns if self.wall_ns else None


@dataclass(frozen=True)
class _Process:
    """What one process of the run wrote down."""

    began_ns: int
    events: Sequence[Event]

    @property
    def length_ns(self) -> int:
        return max((_count(event, "at_ns") for event in self.events), default=0)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def first_step(self) -> int | None:
        return min((_count(event, "first") for event in self.of("steps")), default=None)


def run_times(events: Iterable[Event]) -> RunTimes:
    """Add up a journal's events.

    Args:
        events: of the whole run, in their order; an unfinished run is counted as far as it came.
    """
    processes = _processes(events)
    totals = dict.fromkeys((field.name for field in fields(RunTimes)), 0)
    best_step = _best_step(processes)
    for index, process in enumerate(processes):
        parts = _parts(process, _first_lost(processes[index + 1 :]), best_step)
        for name, value in parts.items():
            totals[name] += value
        if index:
            before = processes[index - 1]
            totals["down_ns"] += max(process.began_ns - before.began_ns - before.length_ns, 0)
    return RunTimes(**totals)


def goodput(events: Sequence[Event]) -> dict[str, Any]:
    """Describe a run's time for metrics.json.

    Returns:
        `goodput` (0 to 1), `wall_ns`, `times_ns` (part -> nanoseconds; they add up to `wall_ns`),
        `num_restarts`, and `num_redone_steps`.
    """
    times = run_times(events)
    processes = _processes(events)
    lost = sum(
        _num_redone(event, _first_lost(processes[index + 1 :]))
        for index, process in enumerate(processes)
        for event in process.of("steps")
    )
    parts = {name.removesuffix("_ns"): value for name, value in asdict(times).items()}
    return {
        "goodput": None if times.goodput is None else round(times.goodput, 5),
        "wall_ns": times.wall_ns,
        "times_ns": parts,
        "num_restarts": max(len(processes) - 1, 0),
        "num_redone_steps": lost,
    }


def goodput_line(told: Mapping[str, Any]) -> str:
    """Say in one line what `goodput` found; parts below a thousandth are left out."""
    from rankopt.units import format_duration

    wall_ns = told["wall_ns"]
    if not wall_ns:
        return "goodput: no time was measured"
    shares = {name: value / wall_ns for name, value in told["times_ns"].items() if name != "steps"}
    largest = sorted(shares.items(), key=lambda item: -item[1])
    rest = [f"{name.replace('_', ' ')} {share:.1%}" for name, share in largest if share >= 0.001]
    text = f"goodput {told['goodput']:.1%} of {format_duration(wall_ns)}"
    if told["num_restarts"]:
        restarts, redone = told["num_restarts"], told["num_redone_steps"]
        text += f", {restarts} restart{'s' * (restarts > 1)}, {redone:,} steps done again"
    return f"{text}: {', '.join(rest)}" if rest else text


def _processes(events: Iterable[Event]) -> list[_Process]:
    found: list[tuple[int, list[Event]]] = []
    for event in events:
        if event["event"] in BEGINNINGS:
            found.append((_count(event, "t_ns") - _count(event, "at_ns"), []))
        if found:
            found[-1][1].append(event)
    return [_Process(began_ns, own) for began_ns, own in found]


def _first_lost(later: Sequence[_Process]) -> int | None:
    """Return the first step that a later process did again; None when none did any."""
    firsts = [process.first_step for process in later]
    return min((first for first in firsts if first is not None), default=None)


def _best_step(processes: Sequence[_Process]) -> int | None:
    ends = [event for process in processes for event in process.of("end")]
    return ends[-1].get("best_step") if ends else None


def _num_redone(steps: Event, first_lost: int | None) -> int:
    first, last = _count(steps, "first"), _count(steps, "last")
    return 0 if first_lost is None else max(last + 1 - max(first, first_lost), 0)


def _parts(process: _Process, first_lost: int | None, best_step: int | None) -> dict[str, int]:
    """Split the time of one process; what no event claims is start-up or `other`."""
    parts = {"evaluation_ns": 0, "checkpoint_ns": 0}
    for name in ("evaluation", "checkpoint"):
        parts[f"{name}_ns"] = sum(_count(e, "duration_ns") for e in process.of(name))
    parts |= dict.fromkeys(
        ("steps_ns", "steps_after_best_ns", "redone_steps_ns", "data_wait_ns"), 0
    )
    for event in process.of("steps"):
        step_ns, wait_ns = _count(event, "step_ns"), _count(event, "wait_ns")
        count = max(_count(event, "last") - _count(event, "first") + 1, 1)
        redone = _num_redone(event, first_lost)
        lost_ns, lost_wait_ns = step_ns * redone // count, wait_ns * redone // count
        kept_ns = step_ns - lost_ns
        last_kept = _count(event, "last") - redone
        after = 0
        if best_step is not None:
            after = max(last_kept - max(best_step, _count(event, "first") - 1), 0)
        after_ns = step_ns * after // count
        parts["redone_steps_ns"] += lost_ns + lost_wait_ns
        parts["data_wait_ns"] += wait_ns - lost_wait_ns
        parts["steps_after_best_ns"] += after_ns
        parts["steps_ns"] += kept_ns - after_ns
    rest = max(process.length_ns - sum(parts.values()), 0)
    parts["start_up_ns"] = min(_start_up_ns(process), rest)
    parts["other_ns"] = rest - parts["start_up_ns"]
    return parts


def _start_up_ns(process: _Process) -> int:
    """Return when the first thing after loading began."""
    for event in process.events:
        if event["event"] in ("steps", "evaluation", "checkpoint", "end"):
            taken = sum(_count(event, name) for name in ("step_ns", "wait_ns", "duration_ns"))
            return max(_count(event, "at_ns") - taken, 0)
    return process.length_ns


def _count(event: Event, name: str) -> int:
    value = event.get(name, 0)
    return value if isinstance(value, int) and value > 0 else 0
