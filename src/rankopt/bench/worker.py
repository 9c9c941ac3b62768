"""The inside of a worker process: one arm, loaded, warmed up, timed, scored.

A backend decides how the process is started and spoken to; the work is the same. torch is
imported only once the thread counts are set, since OpenMP and MKL read them when they load.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankopt._version import __version__
from rankopt.bench.arms import ArmSpec, load_arm
from rankopt.bench.backend import KEPT_MEMORY, ArmError, worker_environment
from rankopt.bench.plan import physical_cores_available
from rankopt.errors import RankoptError

if TYPE_CHECKING:
    from torch import Tensor

    from rankopt.bench.arms import ArmCallable
    from rankopt.bench.rows_file import RowsFile

# Rows that timing cycles through: enough that ids vary as in traffic, few enough to hold in memory
# cut and ready. Batch 1 gets 1,024 windows, batch 512 gets 64.
MAX_WINDOW_ROWS = 32_768
MAX_WINDOWS = 1_024
MIN_WINDOWS = 8


@dataclass(frozen=True)
class BlockSamples:
    """One turn of one arm.

    Attributes:
        latency_ns: wall time of each call, int64.
        wall_ns: wall time of the whole turn, lead-in left out.
        cpu_ns: CPU time of this process, all threads, in that time.
        started_ns: monotonic clock of the worker's machine at the start.
        idle_cpu_ns: process id -> CPU time of the other arms' processes in that time, their main
            threads left out; None where the machine has no clock for it.
    """

    latency_ns: npt.NDArray[np.int64]
    wall_ns: int
    cpu_ns: int
    started_ns: int
    idle_cpu_ns: dict[int, int] | None

    @property
    def idle_cpu_share(self) -> float | None:
        """Largest CPU time of any idle arm, as a share of the turn's wall time."""
        if self.idle_cpu_ns is None:
            return None
        return max(self.idle_cpu_ns.values(), default=0) / max(self.wall_ns, 1)


class ArmWorker:
    """One arm in a process of its own.

    Args:
        num_threads: threads of torch, OpenMP and MKL; None: all physical cores available here.
        num_interop_threads: torch's inter-op threads.
        omp_wait_policy: OpenMP's wait policy; None leaves the default.
    """

    def __init__(
        self,
        num_threads: int | None,
        num_interop_threads: int = 1,
        omp_wait_policy: str | None = None,
    ) -> None:
        self._num_threads = num_threads or physical_cores_available()
        self._num_interop_threads = num_interop_threads
        self._torch_came_first = "torch" in sys.modules
        os.environ.update(worker_environment(self._num_threads, omp_wait_policy))
        # Here rather than in `load`: the import takes seconds, and all workers do it at once.
        import torch

        torch.set_num_threads(self._num_threads)
        self._label = ""
        self._run: ArmCallable | None = None
        self._rows: RowsFile | None = None
        self._windows: dict[int, list[dict[str, Tensor]]] = {}
        self._received: Path | None = None

    def answer(self, method: str, args: Sequence[Any]) -> tuple[str, Any]:
        """Run a method by name; errors come back as values, whatever carries the message."""
        try:
            return "value", getattr(self, method)(*args)
        except RankoptError as error:
            return "error", error
        except Exception:
            return "error", f"{method} failed:\n{traceback.format_exc()}"

    def load(self, spec: ArmSpec, loader: str) -> dict[str, Any]:
        """Load the arm and report the environment in effect."""
        import torch

        if torch.get_num_interop_threads() != self._num_interop_threads:
            torch.set_num_interop_threads(self._num_interop_threads)
        self._label = spec.label
        self._run = load_arm(spec.model_copy(update={"num_threads": self._num_threads}), loader)
        return self.environment()

    def put_rows(self, path: Path) -> int:
        """Open the rows that all arms share; return how many there are."""
        from rankopt.bench.rows_file import RowsFile

        self._rows = RowsFile(path)
        self._windows.clear()
        return self._rows.num_rows

    def receive(self, name: str, data: bytes) -> Path:
        """Append bytes to a file of this worker's own folder; return its path."""
        if self._received is None:
            self._received = Path(tempfile.mkdtemp(prefix="rankopt-arm-"))
        path = self._received / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.write(data)
        return path

    def warm_up(self, batch_size: int, num_calls: int, duration_ns: int) -> npt.NDArray[np.int64]:
        """Cut this batch size's windows and run until both bounds are met; return wall times."""
        windows = self._cut_windows(batch_size)
        samples: list[int] = []
        begun = time.perf_counter_ns()
        while len(samples) < num_calls or time.perf_counter_ns() - begun < duration_ns:
            samples.append(int(self._timed(windows, len(samples), 1)[0]))
        # Collected and frozen here once: a collection costs tens of milliseconds with torch loaded,
        # so it must neither fall into a block nor be paid at each one.
        gc.collect()
        gc.freeze()
        return np.asarray(samples, dtype=np.int64)

    def time_block(
        self,
        batch_size: int,
        block: int,
        num_calls: int,
        lead_in_ns: int,
        idle_pids: Sequence[int],
    ) -> BlockSamples:
        """Take one turn: an untimed lead-in, then `num_calls` timed calls.

        The windows follow from the block's number, so every arm scores the same rows in it, and so
        does the core that the turn begins on.
        """
        _move_to_core(block // 2)
        windows = self._cut_windows(batch_size)
        first = block * num_calls
        self._lead_in(windows, first, lead_in_ns)
        gc.disable()
        try:
            idle_before = _cpu_ns_of(idle_pids)
            cpu_before, begun = time.process_time_ns(), time.perf_counter_ns()
            started_ns = time.monotonic_ns()
            latency_ns = self._timed(windows, first, num_calls)
            wall_ns = time.perf_counter_ns() - begun
            cpu_ns = time.process_time_ns() - cpu_before
            idle_after = _cpu_ns_of(idle_pids)
        finally:
            gc.enable()
        idle = None
        if idle_before is not None and idle_after is not None:
            idle = {pid: idle_after[pid] - idle_before[pid] for pid in idle_pids}
        return BlockSamples(latency_ns, wall_ns, cpu_ns, started_ns, idle)

    def predict(self, start: int, stop: int, batch_size: int) -> dict[str, npt.NDArray[np.float32]]:
        """Score rows `start` to `stop` in calls of `batch_size`; raw outputs, one array each.

        The last call reaches back over rows already scored where it can, so that no call is
        smaller than the others: some models cannot run one row.
        """
        run, rows = self._loaded()
        parts: dict[str, list[npt.NDArray[np.float32]]] = {}
        for begin in range(start, stop, batch_size):
            end = min(begin + batch_size, stop)
            first = max(0, end - batch_size)
            window = self._prepared(rows.window(first, end - first))
            for name, tensor in run(window).items():
                scores = tensor.detach().float().cpu().numpy().reshape(-1)
                if scores.size != end - first:
                    raise ArmError(
                        f"arm {self._label!r}: output {name!r} must hold one score per row: got "
                        f"{scores.size} scores (shape {list(tensor.shape)}) for {end - first} rows."
                    )
                parts.setdefault(name, []).append(scores[begin - first :].copy())
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def environment(self) -> dict[str, Any]:
        """Report what the arm runs under; equal for two workers exactly when timing compares."""
        import torch

        return {
            "host": platform.node(),
            "cpu": _cpu_model(),
            "kernel": platform.release(),
            "num_physical_cores": physical_cores_available(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rankopt": __version__,
            "num_threads": torch.get_num_threads(),
            "num_interop_threads": torch.get_num_interop_threads(),
            "omp_max_threads": _openmp_threads(torch.__config__.parallel_info()),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "malloc": {name: os.environ.get(name) for name in KEPT_MEMORY},
            "threads_set_before_torch": not self._torch_came_first,
        }

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def cpu_time_ns(self) -> int:
        """Return the CPU time of this process so far, all threads."""
        return time.process_time_ns()

    def max_resident_bytes(self) -> int:
        """Return the largest memory the process has held so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def forget_received(self) -> None:
        """Delete the files that were sent to this worker."""
        if self._received is not None:
            shutil.rmtree(self._received, ignore_errors=True)
            self._received = None

    def _loaded(self) -> tuple[ArmCallable, RowsFile]:
        if self._run is None or self._rows is None:
            raise ArmError("the worker has no arm or no rows yet: call load and put_rows.")
        return self._run, self._rows

    def _cut_windows(self, batch_size: int) -> list[dict[str, Tensor]]:
        if batch_size not in self._windows:
            _, rows = self._loaded()
            wanted = max(MIN_WINDOWS, min(MAX_WINDOWS, MAX_WINDOW_ROWS // batch_size))
            count = max(1, min(wanted, rows.num_rows // batch_size))
            starts = [index * rows.num_rows // count for index in range(count)]
            # One batch size at a time: windows of the others would only hold memory.
            windows = [self._prepared(rows.window(start, batch_size)) for start in starts]
            self._windows = {batch_size: windows}
        return self._windows[batch_size]

    def _prepared(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bring features into the form that the arm is called with, where it has one of its own."""
        prepare = getattr(self._run, "prepare", None)
        return features if prepare is None else prepare(features)

    def _lead_in(self, windows: Sequence[dict[str, Tensor]], first: int, duration_ns: int) -> None:
        begun, index = time.perf_counter_ns(), first
        while True:
            self._timed(windows, index, 1)
            index += 1
            if time.perf_counter_ns() - begun >= duration_ns:
                return

    def _timed(
        self, windows: Sequence[dict[str, Tensor]], first: int, num_calls: int
    ) -> npt.NDArray[np.int64]:
        """Time calls over the windows from `first` on, one int64 wall time each."""
        run, _ = self._loaded()
        clock, wait = time.perf_counter_ns, _device_barrier()
        samples = np.empty(num_calls, dtype=np.int64)
        count = len(windows)
        for index in range(num_calls):
            features = windows[(first + index) % count]
            begun = clock()
            run(features)
            if wait is not None:
                wait()
            samples[index] = clock() - begun
        return samples


def _move_to_core(number: int) -> None:
    """Move the calling thread to a core, and leave it free to be moved from there.

    The scheduler leaves a process on the core where it was started, and cores of a shared machine
    differ: for whole runs the second of two processes with the same artifact took up to 12 % longer
    at batch 16, and 1.5 % on average at batch 1. So the arms of a block begin on the same core, and
    those of the next pair of blocks on another.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(every)[number % len(every)]})
    os.sched_setaffinity(0, every)


def _device_barrier() -> Any:
    """Return the call that waits for queued GPU work; None while no GPU context exists."""
    import torch

    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.synchronize if in_use else None


def _cpu_ns_of(pids: Sequence[int]) -> dict[int, int] | None:
    """Read the CPU time of other processes' threads, their main threads left out.

    Linux gives every process a clock, `(~pid << 3) | 2` (clock_getcpuclockid(3)). Reading it wakes
    nobody; asking the idle process itself would be the work it is accused of. The main thread is
    left out because it cannot run the arm while it waits for its turn, whereas in a Ray actor it
    wakes a hundred times a second to look for signals: 0.5 to 0.8 % of a core, whatever arm it
    holds, against 0.2 to 0.3 % for all other threads of an idle actor.
    """
    try:
        return {
            pid: time.clock_gettime_ns((~pid << 3) | 2) - _main_thread_cpu_ns(pid) for pid in pids
        }
    except OSError:
        return None


def _main_thread_cpu_ns(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    except FileNotFoundError:  # a kernel without CONFIG_SCHED_INFO: the whole process counts
        return 0


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _openmp_threads(parallel_info: str) -> int | None:
    for line in parallel_info.splitlines():
        if "omp_get_max_threads()" in line:
            return int(line.rpartition(":")[2])
    return None
