"""One training run through Ray Train, its workers on this machine or on a cluster.

The driver neither reads rows nor builds the module: every worker runs what `torchrun` would run,
and the first writes the result. Cards, rows and the result have to lie where all workers see them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rankopt.bench.backend import driver_import_path, worker_environment
from rankopt.bench.plan import physical_cores_available
from rankopt.bench.ray_backend import OBJECT_STORE_BYTES
from rankopt.errors import EnvironmentProblem, RankoptError
from rankopt.train.distributed.ranks import TIMEOUT_S, OtherRankFailed, Ranks, once

_LISTEN_S = 0.2

Progress = Callable[[str], None]


@dataclass(frozen=True)
class TrainJob:
    """What a worker is asked to do, in plain values.

    Attributes:
        card: the card's path, or its name in models/.
        out: the folder to write.
        settings: of `TrainSettings`.
        recipe: a training recipe's path or name.
        data: rows in place of the card's.
        start: an earlier run to begin with.
        save_optimizer: write the optimizers' state.
        trace: write a Chrome trace of a few steps.
        peaks: measure the machine's peaks where they are not known.
        overwrite: replace an earlier result.
        checkpoint_every: steps between checkpoints.
        resume: go on with a run that was killed.
        launch: names this start of all workers; a run that it began goes on by itself.
        command: what run.json calls the command.
    """

    card: str
    out: str
    settings: dict[str, Any]
    recipe: str | None = None
    data: str | None = None
    start: str | None = None
    save_optimizer: bool = False
    trace: bool = False
    peaks: bool = False
    overwrite: bool = False
    checkpoint_every: int | None = None
    resume: bool = False
    launch: str | None = None
    command: str = "rankopt.train.distributed.launch"


def run_job(job: TrainJob, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Train as one of the ranks; return the content of metrics.json.

    Raises:
        RankoptError: see `rankopt.train.loop.train`.
    """
    from rankopt.data.splits import open_splits
    from rankopt.models.card import load_card
    from rankopt.train.loop import train
    from rankopt.train.recipes import load_training_recipe
    from rankopt.train.settings import TrainSettings

    card = load_card(job.card)
    recipe = load_training_recipe(job.recipe) if job.recipe else None
    done = train(
        card,
        ranks.first_then_others(lambda: open_splits(card, job.data)),
        job.out,
        TrainSettings.model_validate(job.settings),
        progress,
        recipe=recipe,
        start=job.start,
        save_optimizer=job.save_optimizer,
        trace=job.trace,
        peaks=job.peaks,
        overwrite=job.overwrite,
        checkpoint_every=job.checkpoint_every,
        resume=job.resume,
        launch=job.launch,
        ranks=ranks,
        command=job.command,
    )
    return done.metrics


def train_on_ray(
    job: TrainJob,
    num_workers: int,
    *,
    address: str | None = None,
    max_restarts: int = 0,
    progress: Progress = lambda line: None,
) -> None:
    """Train with Ray Train's workers, each with as many threads as the others.

    Args:
        job: what to train.
        num_workers: ranks.
        address: a running cluster; None starts Ray on this machine.
        max_restarts: how often all workers are started again after one has died.
        progress: told what the first rank says.

    Raises:
        RankoptError: what a rank raised.
        EnvironmentProblem: Ray cannot be reached, or a worker was lost.
    """
    num_threads = job.settings.get("num_threads")
    if num_threads is None:
        num_threads = max(1, physical_cores_available() // num_workers)
    with connected(address, num_workers * num_threads) as folder, _heard(progress) as lines:
        from ray.train.torch import TorchConfig
        from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.exceptions import TrainingFailedError
        from ray.train.v2.torch.torch_trainer import TorchTrainer

        variables = worker_environment(num_threads, None)
        if address is None:
            variables["PYTHONPATH"] = driver_import_path()
        trainer = TorchTrainer(
            _work,
            train_loop_config={
                "job": asdict(replace(job, launch=uuid.uuid4().hex)),
                "lines": lines,
            },
            torch_config=TorchConfig(backend="gloo", timeout_s=TIMEOUT_S),
            scaling_config=ScalingConfig(
                num_workers=num_workers, resources_per_worker={"CPU": num_threads}
            ),
            run_config=RunConfig(
                name="train",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=max_restarts),
                worker_runtime_env={"env_vars": variables},
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise _cause(error) from error


def _work(config: dict[str, Any]) -> None:
    """Run in each worker; started again with the others when one of them has died.

    A run with checkpoints then goes on from its last one, since `launch` is the same.
    """
    ranks = Ranks.of_group("ray")
    with once():
        run_job(TrainJob(**config["job"]), ranks, config["lines"].put)


def _cause(error: Exception) -> RankoptError:
    """Find what a worker said, among the errors of those that only lost it."""
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    for failure in failures.values():
        inner: BaseException | None = failure
        while inner is not None:
            if isinstance(inner, RankoptError) and not isinstance(inner, OtherRankFailed):
                return inner
            inner = getattr(inner, "cause", None) or inner.__cause__
    told = [str(failure).strip().splitlines() for failure in failures.values()]
    lines = [text[-1] for text in told if text] or str(error).strip().splitlines()[-1:]
    return EnvironmentProblem(
        f"a Ray Train worker was lost: {lines[0] if lines else type(error).__name__}"
    )


@contextlib.contextmanager
def connected(address: str | None, num_cpus: int) -> Iterator[Path]:
    """Start Ray or reach a cluster; give a folder for what Ray Train writes of itself."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray

    # Sockets lie in this folder, and a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="rk-", dir="/tmp"))
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    started = not ray.is_initialized()
    try:
        if started and address is not None:
            ray.init(address=address, **quiet)
        elif started:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                **quiet,
            )
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        where = f"at {address}" if address else "on this machine"
        raise EnvironmentProblem(f"Ray cannot be reached {where}: {error}") from error
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    try:
        yield folder
    finally:
        if started:
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _heard(progress: Progress) -> Iterator[Any]:
    """Give a queue; what workers put into it is passed on as it comes."""
    from ray.exceptions import RayError
    from ray.util.queue import Empty, Queue

    lines = Queue(actor_options={"num_cpus": 0})
    ended = threading.Event()

    def listen() -> None:
        while True:
            last = ended.is_set()
            try:
                while True:
                    progress(lines.get(timeout=_LISTEN_S))
            except Empty:
                if last:
                    return
            except RayError:  # its process has ended with Ray
                return

    listener = threading.Thread(target=listen, name="rankopt-heard", daemon=True)
    listener.start()
    try:
        yield lines
    finally:
        ended.set()
        listener.join()
        lines.shutdown(force=True)
