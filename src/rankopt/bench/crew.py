"""The live workers of one run: started, loaded, asked, and replaced when they die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rankopt.bench.arms import ArmSpec, loader_reference
from rankopt.bench.backend import Backend, Worker, WorkerDied
from rankopt.bench.plan import BenchPlan
from rankopt.bench.samples import SampleFile

T = TypeVar("T")


class Crew:
    """One worker per arm, all live at once.

    Args:
        arms: resolved arms with different labels.
        rows_file: what `write_rows` wrote.
        plan: thread counts, warm-up and the number of restarts allowed.
        backend: an open backend.
        samples: where environments, warm-ups and restarts are recorded.
        progress: told one line per step.
    """

    def __init__(
        self,
        arms: Sequence[ArmSpec],
        rows_file: Path,
        plan: BenchPlan,
        backend: Backend,
        samples: SampleFile,
        progress: Callable[[str], None],
    ) -> None:
        self.arms = {arm.label: arm for arm in arms}
        self.plan = plan
        self.samples = samples
        self.progress = progress
        self.environments: dict[str, dict[str, Any]] = {}
        self.num_restarts = 0
        self._rows_file = rows_file
        self._backend = backend
        self._workers: dict[str, Worker] = {}
        self._pids: dict[str, int] = {}
        self._batch_size: int | None = None
        for label in self.arms:  # all processes first: their imports overlap
            self._workers[label] = backend.start(label)
        for label in self.arms:
            self.progress(f"{label}: loading")
            self.retrying(partial(self._load, label))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.arms)

    def retrying(self, work: Callable[[], T]) -> T:
        """Do some work from the start again each time a worker dies in it.

        Raises:
            WorkerDied: workers died more often than the plan allows.
        """
        while True:
            try:
                return work()
            except WorkerDied as error:
                self._replace(error)

    def call(self, label: str, method: str, *args: Any) -> Any:
        """Run a method of an arm's worker; wrap in `retrying` to survive its death."""
        return self._workers[label].call(method, *args)

    def pid(self, label: str) -> int:
        """Return the process id of an arm's worker, on the worker's machine."""
        return self._pids[label]

    def other_pids(self, label: str) -> list[int]:
        """Return the process ids of all arms but one."""
        return [pid for other, pid in self._pids.items() if other != label]

    def warm_up(self, batch_size: int) -> dict[str, float]:
        """Warm every arm up at a batch size; return each one's median call in nanoseconds."""
        self._batch_size = batch_size
        return {
            label: self.retrying(partial(self._warm_up, label, batch_size)) for label in self.arms
        }

    def _warm_up(self, label: str, batch_size: int) -> float:
        plan = self.plan
        latency_ns = self.call(
            label, "warm_up", batch_size, plan.warm_up_calls, plan.warm_up_duration_ns
        )
        self.samples.add_warm_up(label, batch_size, latency_ns)
        # The first calls compile, allocate and page in; the later half is what a block will see.
        steady = sorted(latency_ns[len(latency_ns) // 2 :].tolist())
        return float(steady[len(steady) // 2])

    def _load(self, label: str) -> None:
        if label in self.environments:  # a death while it loaded was already made good
            return
        worker, arm = self._workers[label], self.arms[label]
        placed = {name: worker.place(path) for name, path in arm.paths().items()}
        environment = worker.call("load", arm.model_copy(update=placed), loader_reference(arm.kind))
        worker.call("put_rows", worker.place(self._rows_file))
        self._pids[label] = worker.call("pid")
        self.samples.add_environment(label, environment)
        self.environments[label] = environment

    def _replace(self, error: WorkerDied) -> None:
        label = error.label
        self.num_restarts += 1
        if self.num_restarts > self.plan.max_worker_restarts:
            raise WorkerDied(
                f"{error}\nThe run's {self.plan.max_worker_restarts} restarts are used up. "
                "Finished blocks are kept; continue with --resume once the cause is found "
                "(out of memory is the usual one: see the kernel log).",
                label=label,
            ) from error
        self.samples.add_event("restart", arm=label, reason=str(error).splitlines()[0])
        self.progress(f"{label}: worker died, starting another")
        self.environments.pop(label, None)
        self._workers[label] = self._backend.start(label)
        try:
            self._load(label)
            if self._batch_size is not None:
                self._warm_up(label, self._batch_size)
        except WorkerDied as again:
            self._replace(again)
