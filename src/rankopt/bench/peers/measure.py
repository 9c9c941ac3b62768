"""Measure one model: every arm at its best setting, in one interleaved run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rankopt.bench.ab import Scores
from rankopt.bench.arms import ArmSpec, hash_path
from rankopt.bench.backend import WorkerDied
from rankopt.bench.peers.arm import peer_arm
from rankopt.bench.peers.breakdown import Breakdown, break_down_artifacts
from rankopt.bench.peers.eager import Eager
from rankopt.bench.peers.peer import Peer, PeerError, PeerJob, Setting
from rankopt.bench.peers.result import ModelResult, NotRun, TriedSetting
from rankopt.bench.peers.suite import EAGER, RANKOPT, PeerSuite, SuiteModel
from rankopt.bench.peers.summary import compare_with_eager, rows_of, summarise
from rankopt.bench.peers.trial import Trial, TrialBench, run_crew, shown
from rankopt.bench.peers.weights import model_card, trained_weights
from rankopt.bench.plan import BenchPlan, physical_cores_available
from rankopt.bench.rows_file import write_rows
from rankopt.bench.samples import BlockRecord
from rankopt.data.encode import load_rows
from rankopt.data.rows import Rows
from rankopt.data.splits import open_splits
from rankopt.environment import collect_environment
from rankopt.models.card import ModelCard, save_card
from rankopt.quality.parity import compare_quality
from rankopt.review.schema import MetricParity

HINT = "Install the peers with: make peers"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ChosenArm:
    """An arm with the setting that it runs at each batch size."""

    peer: Peer
    trials: tuple[Trial, ...]
    by_batch: Mapping[int, int]

    def spec(self, job: PeerJob) -> ArmSpec:
        """Describe it for the run that counts, holding only what is used."""
        used = sorted(set(self.by_batch.values()))
        settings = [(self.trials[index].setting, self.trials[index].folder) for index in used]
        by_batch = {size: used.index(index) for size, index in self.by_batch.items()}
        return peer_arm(self.peer.kind, self.peer, job, settings, by_batch)

    def setting(self, batch_size: int) -> Setting:
        return self.trials[self.by_batch[batch_size]].setting

    def files(self) -> dict[int, tuple[Setting, Path]]:
        """Return each batch size's setting with its prepared files, of an arm that has some."""
        used = {size: self.trials[index] for size, index in self.by_batch.items()}
        return {
            size: (trial.setting, trial.folder)
            for size, trial in used.items()
            if trial.folder is not None
        }


def measure_model(
    suite: PeerSuite, model: SuiteModel, workdir: Path, progress: Progress, detail: Progress
) -> ModelResult:
    """Train where needed, try every arm's settings, time all arms together.

    Args:
        suite: arms and plans.
        model: which model.
        workdir: for rows, samples and logs.
        progress: told one line per step.
        detail: told how far the current step is.

    Raises:
        RankoptError: the model itself cannot be read, trained or run in eager PyTorch.
    """
    card = model_card(suite, model)
    checkpoint = trained_weights(suite, model, card, progress, detail)
    progress(f"{model.name}: reading the test rows")
    workdir.mkdir(parents=True, exist_ok=True)
    rows = load_rows(card, open_splits(card).test)
    rows_file = write_rows(rows, workdir / "rows.safetensors")
    plan = suite.plan.at_least(card.min_batch)
    job = PeerJob(
        card=save_card(card, workdir / "card.yaml"),
        checkpoint=checkpoint,
        checkpoint_sha256=hash_path(checkpoint),
        num_threads=plan.num_threads or physical_cores_available(),
        batch_sizes=plan.batch_sizes,
    )
    bench = TrialBench(
        card=card,
        job=job,
        rows_file=rows_file,
        num_rows=rows.num_rows,
        plan=suite.search_plan.at_least(card.min_batch),
        prepare_timeout_s=suite.prepare_timeout_s,
        workdir=workdir,
        machine=collect_environment().fingerprint(),
        progress=detail,
    )
    run = _ModelRun(suite, model, card, rows, bench, plan, progress, detail)
    return run.measure()


class _ModelRun:
    """One model's arms, tried one after the other and timed together."""

    def __init__(
        self,
        suite: PeerSuite,
        model: SuiteModel,
        card: ModelCard,
        rows: Rows,
        bench: TrialBench,
        plan: BenchPlan,
        progress: Progress,
        detail: Progress,
    ) -> None:
        self.suite, self.model, self.card = suite, model.name, card
        self.rows, self.bench, self.plan = rows, bench, plan
        self.progress, self.detail = progress, detail
        self.not_run: list[NotRun] = []
        self.tried: list[TriedSetting] = []
        self.chosen: dict[str, ChosenArm] = {}
        self.quality: dict[tuple[str, int], dict[str, MetricParity]] = {}

    def measure(self) -> ModelResult:
        control = self._control()
        for peer in self.suite.arms:
            self._try(peer, control)
        records = self._time()
        ok = {
            (kind, size): self._holds(kind, arm.by_batch[size])
            for kind, arm in self.chosen.items()
            for size in self.plan.batch_sizes
        }
        settings = {
            (kind, size): arm.setting(size)
            for kind, arm in self.chosen.items()
            for size in self.plan.batch_sizes
        }
        rows = rows_of(self.model, records, ok, settings)
        breakdown = self._break_down()
        return ModelResult(
            model=self.model,
            rows=tuple(rows),
            summary=tuple(summarise(rows, records)),
            against_eager=tuple(compare_with_eager(rows, records)),
            not_run=tuple(self.not_run),
            settings=tuple(self.tried),
            notes=tuple(self._notes(records)),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            time_breakdown=breakdown.rows,
            peaks=breakdown.peaks,
            not_broken_down=breakdown.failed,
        )

    def _break_down(self) -> Breakdown:
        """Say where the time of rankopt's arm goes; every arm's process has ended."""
        arm = self.chosen.get(RANKOPT)
        if not self.suite.breakdown or arm is None:
            return Breakdown()
        self.progress(f"{self.model}: where the time of {RANKOPT}'s arm goes")
        threads = self.bench.job.num_threads
        return break_down_artifacts(self.model, arm.files(), self.rows, threads, self.detail)

    def _control(self) -> dict[str, Scores]:
        """Score the test rows in eager PyTorch, which every arm is judged against."""
        eager = next((peer for peer in self.suite.arms if peer.kind == EAGER), Eager())
        self.progress(f"{self.model}: scoring in eager PyTorch")
        [trial] = self.bench.try_settings(eager)
        if trial.error is not None:
            raise PeerError(f"{self.model}: does not run in eager PyTorch: {trial.error}")
        return trial.predictions

    def _try(self, peer: Peer, control: Mapping[str, Scores]) -> None:
        """Find a peer's best setting at each batch size, or say why it has none."""
        reason = self._why_not(peer)
        if reason is not None:
            self.not_run.append(NotRun(model=self.model, arm=peer.kind, error=reason))
            return
        self.progress(f"{self.model}: {peer.title}: trying its settings")
        trials = self.bench.try_settings(peer)
        sound = [trial for trial in trials if trial.error is None]
        for index, trial in enumerate(sound):
            self.quality[peer.kind, index] = self._judge(trial, control)
        chosen: ChosenArm | None = None
        if sound:
            by_batch = self._choose(peer, sound)
            chosen = self.chosen[peer.kind] = ChosenArm(peer, tuple(sound), by_batch)
        else:
            errors = dict.fromkeys(str(trial.error) for trial in trials)
            error = "; ".join(errors)
            self.not_run.append(NotRun(model=self.model, arm=peer.kind, error=error))
        self.tried += [self._record(peer, trial, sound, chosen) for trial in trials]

    def _why_not(self, peer: Peer) -> str | None:
        if missing := peer.missing_packages():
            names = ", ".join(repr(name) for name in missing)
            return f"ModuleNotFoundError: not installed: {names}. {HINT}"
        return peer.why_not(self.card)

    def _judge(self, trial: Trial, control: Mapping[str, Scores]) -> dict[str, MetricParity]:
        margins = {"ne": self.suite.ne_margin}
        return {
            output.name: compare_quality(
                control[output.name],
                trial.predictions[output.name],
                self.rows.labels[output.label],
                clusters=self.rows.clusters,
                margins=margins,
            )["ne"]
            for output in self.card.outputs
        }

    def _holds(self, kind: str, index: int) -> bool:
        return all(parity.verdict == "pass" for parity in self.quality[kind, index].values())

    def _choose(self, peer: Peer, sound: Sequence[Trial]) -> dict[int, int]:
        """Pick the fastest setting of each batch size, among those whose quality holds if any."""
        holding = [i for i in range(len(sound)) if self._holds(peer.kind, i)]
        eligible = holding or list(range(len(sound)))
        sizes = self.plan.batch_sizes
        if len(eligible) == 1:
            return dict.fromkeys(sizes, eligible[0])
        if not peer.mixes:
            best = min(
                eligible, key=lambda i: sum(math.log(sound[i].p50_ns[size]) for size in sizes)
            )
            return dict.fromkeys(sizes, best)
        return {size: min(eligible, key=lambda i: sound[i].p50_ns[size]) for size in sizes}

    def _record(
        self, peer: Peer, trial: Trial, sound: Sequence[Trial], chosen: ChosenArm | None
    ) -> TriedSetting:
        index = next((i for i, other in enumerate(sound) if other is trial), None)
        used: tuple[int, ...] = ()
        if chosen is not None and index is not None:
            used = tuple(size for size, position in chosen.by_batch.items() if position == index)
        return TriedSetting(
            model=self.model,
            arm=peer.kind,
            setting=trial.setting,
            chosen_for=used,
            p50_ns=trial.p50_ns,
            quality={} if index is None else self.quality[peer.kind, index],
            quality_ok=None if index is None else self._holds(peer.kind, index),
            error=trial.error,
        )

    def _time(self) -> list[BlockRecord]:
        """Time all arms together; one that dies for good is listed and left out."""
        while self.chosen:
            # When to stop is decided by the intervals around the second arm.
            order = sorted(self.chosen, key=lambda kind: (kind != EAGER, kind != RANKOPT))
            arms = [self.chosen[kind].spec(self.bench.job) for kind in order]
            self.progress(f"{self.model}: timing {len(arms)} arms in turns")
            folder = self.bench.workdir / "timing"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                return run_crew(arms, self.bench.rows_file, self.plan, folder, self.detail)
            except WorkerDied as error:
                if error.label not in self.chosen:
                    raise
                del self.chosen[error.label]
                first = str(error).splitlines()[0]
                self.not_run.append(NotRun(model=self.model, arm=error.label, error=first))
        return []

    def _notes(self, records: Sequence[BlockRecord]) -> list[str]:
        notes = [f"{self.model}: {self.bench.job.num_threads} threads in every arm."]
        if disturbed := sum(record.disturbed for record in records):
            notes.append(
                f"{self.model}: may be unstable: {disturbed} of {len(records)} turns were kept "
                "although an idle arm used CPU in every try."
            )
        failing = [
            f"{kind} ({shown(arm.setting(size))}) at batch {size}"
            for kind, arm in self.chosen.items()
            for size in self.plan.batch_sizes
            if not self._holds(kind, arm.by_batch[size])
        ]
        if failing:
            notes.append(f"{self.model}: the NE margin is not held by {'; '.join(failing)}.")
        return notes
