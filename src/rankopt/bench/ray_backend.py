"""Each arm in a fresh Ray actor; all actors on one node, in one placement group.

One bundle holds the CPUs of the largest thread budget, and every actor asks for none of its own:
arms take turns, so they share the cores. (Actors that each ask for all cores wait for each other
for ever; actors that ask for none outside a group get OMP_NUM_THREADS=1 from Ray, so the thread
variables are given explicitly.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rankopt.bench.arms import factory_file
from rankopt.bench.backend import (
    Launch,
    WorkerDied,
    driver_import_path,
    unwrap_answer,
    worker_environment,
)
from rankopt.bench.plan import physical_cores_available
from rankopt.bench.worker import ArmWorker
from rankopt.errors import EnvironmentProblem, UsageError
from rankopt.units import BYTES_PER_MIB

PLACEMENT_TIMEOUT_S = 120  # whole seconds: Ray cuts the rest off
CHUNK_BYTES = 64 * BYTES_PER_MIB
# Rows and artifacts travel by path on one machine; only a cluster needs more than messages.
OBJECT_STORE_BYTES = 256 * BYTES_PER_MIB


class RayWorker:
    """An actor that holds one arm."""

    def __init__(self, label: str, actor: Any, *, ships: bool, timeout_s: float) -> None:
        self.label = label
        self._actor = actor
        self._ships = ships
        self._timeout_s = timeout_s
        self._placed: dict[Path, Path] = {}

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of `ArmWorker` in the actor.

        Raises:
            WorkerDied: the actor's process or node ended, or stayed silent too long.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            answer = ray.get(self._actor.answer.remote(method, args), timeout=self._timeout_s)
        except GetTimeoutError as error:
            self.close()
            raise WorkerDied(
                f"arm {self.label!r}: no answer to {method} in {self._timeout_s:.0f} s.",
                label=self.label,
            ) from error
        except RayError as error:
            self.close()
            raise WorkerDied(
                f"arm {self.label!r}: its Ray worker ended during {method}: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
                label=self.label,
            ) from error
        return unwrap_answer(self.label, answer)

    def place(self, path: Path) -> Path:
        """Send a file or folder to the actor's node, unless it sees the driver's disk.

        A card takes the Python file of its factory along.
        """
        if not self._ships:
            return path
        if path not in self._placed:
            root = f"{len(self._placed)}"
            self._placed[path] = self._send(path, root)
            if path.suffix in {".yaml", ".yml"} and (code := factory_file(path)) is not None:
                self._send_beside(path, code, root)
        return self._placed[path]

    def close(self) -> None:
        """End the actor's process."""
        import ray

        with contextlib.suppress(Exception):  # it may be dead already, or Ray shut down
            if self._placed:
                ray.get(self._actor.answer.remote("forget_received", ()), timeout=5)
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)

    def _send(self, path: Path, root: str) -> Path:
        if path.is_file():
            return self._send_file(path, f"{root}/{path.name}")
        for file in sorted(item for item in path.rglob("*") if item.is_file()):
            name = f"{root}/{path.name}/{file.relative_to(path)}"
            received = self._send_file(file, name)
            top = received.parents[len(file.relative_to(path).parts) - 1]
        return top

    def _send_beside(self, card: Path, code: Path, root: str) -> None:
        if not code.is_relative_to(card.parent):
            raise UsageError(
                f"{card}: its factory {code} lies outside the card's folder, so it cannot be sent "
                "to another node. Move it beside the card, or install it there as a package."
            )
        self._send_file(code, f"{root}/{code.relative_to(card.parent)}")

    def _send_file(self, path: Path, name: str) -> Path:
        with path.open("rb") as stream:
            received: Path = self.call("receive", name, stream.read(CHUNK_BYTES))
            while chunk := stream.read(CHUNK_BYTES):
                self.call("receive", name, chunk)
        return received


class RayBackend:
    """Ray actors that take turns on the cores of one node.

    Args:
        address: a running cluster; None starts Ray on this machine, or uses the one already
            started in this process.
        ship_files: send rows and arms to the actor's node; None: when it is not this machine.
    """

    name = "ray"

    def __init__(self, address: str | None = None, *, ship_files: bool | None = None) -> None:
        self._address = address
        self._ship_files = ship_files
        self._launch: Launch | None = None
        self._group: Any = None
        self._started_ray = False
        self._temp_folder: str | None = None
        self._workers: list[RayWorker] = []

    def open(self, launch: Launch) -> None:
        """Connect to Ray and reserve one bundle of CPUs for all arms.

        Raises:
            EnvironmentProblem: Ray cannot be reached, or has not that many free CPUs on one node.
        """
        self._launch = launch
        self._connect(launch.most_threads(physical_cores_available()))
        self._reserve(launch)

    def start(self, label: str) -> RayWorker:
        """Start a fresh actor for an arm.

        Raises:
            UsageError: the backend is not open.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._launch is None or self._group is None:
            raise UsageError("the Ray backend is not open.")
        launch = self._launch
        num_threads = launch.num_threads[label] or self._cores_of_node()
        variables = worker_environment(num_threads, launch.omp_wait_policy)
        if self._address is None:
            variables["PYTHONPATH"] = driver_import_path()
        actor_class: Any = ray.remote(ArmWorker)
        actor = actor_class.options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=1,
            runtime_env={"env_vars": variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=0
            ),
        ).remote(num_threads, launch.num_interop_threads, launch.omp_wait_policy)
        ships = self._must_ship() if self._ship_files is None else self._ship_files
        worker = RayWorker(label, actor, ships=ships, timeout_s=launch.call_timeout_s)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """End the actors and the group; end Ray too when it was started here."""
        import ray

        for worker in self._workers:
            worker.close()
        self._workers.clear()
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
            self._group = None
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False
        if self._temp_folder is not None:
            shutil.rmtree(self._temp_folder, ignore_errors=True)
            self._temp_folder = None
        self._launch = None

    def _connect(self, num_cpus: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Actors without num_gpus would otherwise have every GPU hidden from them.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if self._address is not None:
                ray.init(address=self._address, **quiet)
            else:
                # Sockets lie in this folder, and a socket's path has at most 107 characters.
                self._temp_folder = tempfile.mkdtemp(prefix="rk-", dir="/tmp")
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=self._temp_folder,
                    **quiet,
                )
        except Exception as error:
            where = f"at {self._address}" if self._address else "on this machine"
            raise EnvironmentProblem(f"Ray cannot be reached {where}: {error}") from error
        self._started_ray = True

    def _reserve(self, launch: Launch) -> None:
        import ray
        from ray.util.placement_group import placement_group

        nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
        largest = max(
            (int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]), default=0
        )
        # A node with fewer CPUs than threads is the user's choice; it is reserved whole.
        wanted = max(1, min(launch.most_threads(largest), largest))
        group = placement_group([{"CPU": wanted}], strategy="STRICT_PACK")
        self._group = group
        if not group.wait(PLACEMENT_TIMEOUT_S):
            resources: Any = ray.available_resources()  # type: ignore[no-untyped-call]
            free = resources.get("CPU", 0)
            raise EnvironmentProblem(
                f"Ray has no node with {wanted} free CPUs (free in all: {free:.0f}; largest node: "
                f"{largest}). Wait for other work to end, lower num_threads in the plan, or give "
                "another --ray-address."
            )

    def _cores_of_node(self) -> int:
        """Ask the reserved node for its physical cores: Ray counts hyper-threads."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        probe: Any = ray.remote(num_cpus=0)(physical_cores_available)
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group)
        return int(ray.get(probe.options(scheduling_strategy=strategy).remote()))

    def _must_ship(self) -> bool:
        import ray
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"].values()
        return any(node != ray.get_runtime_context().get_node_id() for node in nodes)
