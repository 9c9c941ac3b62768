"""Try a peer's settings on one model: score the test rows with each, and time them in turns.

What was found is kept in the cache by everything it depends on, this machine included, so that a
second run measures again only what has changed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankopt.bench.ab import Scores, predict_rows, probabilities_of
from rankopt.bench.arms import ArmSpec, hash_path
from rankopt.bench.backend import OpenBackend
from rankopt.bench.crew import Crew
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.peers.arm import peer_arm
from rankopt.bench.peers.peer import Peer, PeerJob, Setting, without_trace
from rankopt.bench.peers.preparation import files_identity, prepare_files
from rankopt.bench.plan import BenchPlan
from rankopt.bench.samples import BlockRecord, SampleFile
from rankopt.bench.timing import fingerprint, launch_of, prepare_arms, time_crew
from rankopt.data.cache import cached_folder
from rankopt.errors import RankoptError
from rankopt.models.card import ModelCard

Progress = Callable[[str], None]

FORMAT = 2
"""Raise it when what is kept of trials changes."""


@dataclass(frozen=True)
class Trial:
    """What one setting of a peer did.

    Attributes:
        setting: the setting.
        folder: its prepared files.
        predictions: output -> probabilities [N] of the test rows; empty after an error.
        p50_ns: batch size -> median of the search; empty where nothing was searched.
        error: why it does not run.
    """

    setting: Setting
    folder: Path | None
    predictions: dict[str, Scores]
    p50_ns: dict[int, float]
    error: str | None = None


@dataclass(frozen=True)
class TrialBench:
    """What trials of one model share.

    Attributes:
        card: the model's.
        job: the model for its peers.
        rows_file: the test rows.
        num_rows: how many there are.
        plan: how much to time.
        prepare_timeout_s: what preparing one setting may take.
        workdir: for samples and logs.
        machine: the machine's fingerprint.
        progress: told one line per step.
    """

    card: ModelCard
    job: PeerJob
    rows_file: Path
    num_rows: int
    plan: BenchPlan
    prepare_timeout_s: float
    workdir: Path
    machine: str
    progress: Progress

    def try_settings(self, peer: Peer) -> list[Trial]:
        """Prepare, score and time every setting; one that fails is returned with its error."""
        prepared: list[tuple[Setting, Path | None]] = []
        failed: list[Trial] = []
        settings = peer.settings(self.card)
        for number, setting in enumerate(settings, 1):
            self.progress(f"{peer.kind}: preparing {number} of {len(settings)} {shown(setting)}")
            try:
                folder = prepare_files(peer, self.job, setting, self.prepare_timeout_s)
            except RankoptError as error:
                failed.append(Trial(setting, None, {}, {}, without_trace(str(error))))
            else:
                prepared.append((setting, folder))
        return self._try_prepared(peer, prepared) + failed if prepared else failed

    def _try_prepared(
        self, peer: Peer, prepared: Sequence[tuple[Setting, Path | None]]
    ) -> list[Trial]:
        key = {
            "format": FORMAT,
            "settings": [[s, files_identity(peer, self.job, s)] for s, _ in prepared],
            "rows": hash_path(self.rows_file),
            "plan": self.plan.model_dump(mode="json"),
            "num_threads": self.job.num_threads,
            "machine": self.machine,
        }

        def make(folder: Path) -> None:
            trials = self._run(peer, prepared)
            # An arm that failed as a whole may work when it is tried again.
            if all(trial.error is not None for trial in trials):
                raise _NotKept(trials)
            _write(trials, folder)

        try:
            return _read(cached_folder(f"peers-trials-{peer.kind}", key, make), prepared)
        except _NotKept as outcome:
            return outcome.trials

    def _run(self, peer: Peer, prepared: Sequence[tuple[Setting, Path | None]]) -> list[Trial]:
        try:
            return self._together(peer, prepared)
        except RankoptError as error:
            if len(prepared) > 1:
                return self._one_by_one(peer, prepared)
            [(setting, folder)] = prepared
            return [Trial(setting, folder, {}, {}, without_trace(str(error)))]

    def _one_by_one(
        self, peer: Peer, prepared: Sequence[tuple[Setting, Path | None]]
    ) -> list[Trial]:
        """Find out which settings fail, and time the others."""
        failed: list[Trial] = []
        sound: list[tuple[Setting, Path | None]] = []
        last: list[Trial] = []
        for setting, folder in prepared:
            try:
                last = self._together(peer, [(setting, folder)])
            except RankoptError as error:
                failed.append(Trial(setting, folder, {}, {}, without_trace(str(error))))
            else:
                sound.append((setting, folder))
        if len(sound) > 1:
            last = self._together(peer, sound)
        return (last if sound else []) + failed

    def _together(self, peer: Peer, chosen: Sequence[tuple[Setting, Path | None]]) -> list[Trial]:
        arms = [
            peer_arm(f"{peer.kind}-{index}", peer, self.job, [item])
            for index, item in enumerate(chosen)
        ]
        folder = self.workdir / f"search-{peer.kind}"
        shutil.rmtree(folder, ignore_errors=True)
        # A setting that kills its process does so again.
        plan = self.plan.model_copy(update={"max_worker_restarts": 0})
        predictions: dict[str, dict[str, Scores]] = {}

        def score(crew: Crew) -> None:
            for label in crew.labels:
                outputs = predict_rows(crew, label, self.num_rows, folder)
                predictions[label] = probabilities_of(outputs, self.card, label)

        several = len(arms) > 1
        records = run_crew(arms, self.rows_file, plan, folder, self.progress, score, timed=several)
        shutil.rmtree(folder, ignore_errors=True)
        return [
            Trial(setting, files, predictions[arm.label], _medians(records, arm.label))
            for arm, (setting, files) in zip(arms, chosen, strict=True)
        ]


class _NotKept(Exception):  # noqa: N818 - carries an outcome out of the cache, and is no error
    def __init__(self, trials: list[Trial]) -> None:
        self.trials = trials


def run_crew(
    arms: Sequence[ArmSpec],
    rows_file: Path,
    plan: BenchPlan,
    workdir: Path,
    progress: Progress,
    before: Callable[[Crew], None] | None = None,
    timed: bool = True,
) -> list[BlockRecord]:
    """Start every arm in a process of its own, do something with them, then time them in turns."""
    workdir.mkdir(parents=True, exist_ok=True)
    arms = prepare_arms(arms)
    backend = LocalBackend()
    identity = fingerprint(arms, rows_file, plan, backend)
    samples = SampleFile(workdir / "samples.jsonl", identity)
    with OpenBackend(backend, launch_of(arms, plan, workdir)) as opened:
        crew = Crew(arms, rows_file, plan, opened, samples, progress)
        if before is not None:
            before(crew)
        return time_crew(crew) if timed else []


def shown(setting: Mapping[str, Any]) -> str:
    """Write a setting in one line."""
    return ", ".join(f"{key}={value}" for key, value in setting.items())


def _medians(records: Sequence[BlockRecord], label: str) -> dict[int, float]:
    medians: dict[int, list[float]] = {}
    for record in records:
        if record.arm == label:
            medians.setdefault(record.batch_size, []).append(float(np.median(record.latency_ns)))
    return {size: float(np.median(blocks)) for size, blocks in medians.items()}


def _write(trials: Sequence[Trial], folder: Path) -> None:
    content = [
        {
            "setting": trial.setting,
            "error": trial.error,
            "p50_ns": {str(size): p50 for size, p50 in trial.p50_ns.items()},
        }
        for trial in trials
    ]
    (folder / "trials.json").write_text(json.dumps(content), encoding="utf-8")
    for index, trial in enumerate(trials):
        with (folder / f"predictions-{index}.npz").open("wb") as stream:
            np.savez(stream, **trial.predictions)  # type: ignore[arg-type]


def _read(folder: Path, prepared: Sequence[tuple[Setting, Path | None]]) -> list[Trial]:
    trials = []
    stored = json.loads((folder / "trials.json").read_text(encoding="utf-8"))
    for index, item in enumerate(stored):
        with np.load(folder / f"predictions-{index}.npz") as arrays:
            predictions = {name: arrays[name] for name in arrays.files}
        files = next(files for setting, files in prepared if setting == item["setting"])
        p50_ns = {int(size): p50 for size, p50 in item["p50_ns"].items()}
        trials.append(Trial(item["setting"], files, predictions, p50_ns, item["error"]))
    return trials
