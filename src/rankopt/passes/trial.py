"""Trials: a bundle as it would be deployed, compiled and timed.

The graph run by PyTorch says little about the compiled artifact, so every keep-or-drop decision is
made on what the export pass of the same recipe would ship.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankopt.artifact.build import write_artifact
from rankopt.bench.ab import latency_rows
from rankopt.bench.arms import ArmSpec
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan
from rankopt.bench.request_rows import whole_requests
from rankopt.bench.rows_file import write_rows
from rankopt.bench.timing import time_arms
from rankopt.bundle import ModelBundle
from rankopt.data.rows import Rows
from rankopt.passes.base import Pass, PassContext
from rankopt.passes.decision import Gain, combine
from rankopt.review.schema import LatencyRow
from rankopt.units import NS_PER_MS

TRIAL_PLAN = BenchPlan(
    batch_sizes=(1, 512),
    min_blocks=6,
    max_blocks=10,
    block_duration_ns=50 * NS_PER_MS,
    max_block_duration_ns=400 * NS_PER_MS,
    calls_per_block=5,
    min_num_samples=40,
    warm_up_duration_ns=100 * NS_PER_MS,
    target_relative_width=0.06,
)
"""Enough to tell a pass that loses from one that wins; the A/B measures the whole more closely."""

TIMED_REQUESTS = 16


@dataclass(frozen=True)
class Trial:
    """A bundle and the artifact compiled from it."""

    bundle: ModelBundle
    artifact: Path


class TrialBench:
    """Compiles and times trials of one model.

    Args:
        export: the recipe's export pass.
        control: the eager arm.
        rows: rows that decisions may look at.
        plan: how much to time.
        context: handed to the export pass.
        control_size_bytes: recorded in every artifact.
        progress: told one line per step.
        detail: told how far a step is.
    """

    def __init__(
        self,
        export: Pass,
        control: ArmSpec,
        rows: Rows,
        plan: BenchPlan,
        context: PassContext,
        control_size_bytes: int,
        recipe: str,
        progress: Callable[[str], None],
        detail: Callable[[str], None],
    ) -> None:
        self._export = export
        self._control = control
        self._plan = plan
        self._context = context
        self._control_size_bytes = control_size_bytes
        self._recipe = recipe
        self._progress = progress
        self._detail = detail
        self._rows = rows
        self._rows_file = write_rows(rows, context.workdir / "tuning-rows.safetensors")
        self._count = 0

    def compile(self, bundle: ModelBundle, name: str) -> Trial:
        """Build the artifact that this bundle would ship as.

        Raises:
            ExportError: the compiler refused it.
        """
        self._progress(f"{name}: compiling")
        folder = self._context.workdir / f"trial-{self._count}-{name}"
        self._count += 1
        exported = self._export.apply(bundle, self._context)
        write_artifact(
            exported, folder, control_size_bytes=self._control_size_bytes, recipe=self._recipe
        )
        return Trial(bundle, folder)

    def time(self, before: Trial, after: Trial, name: str) -> Gain:
        """Time the trial before and the new one in turns."""
        self._progress(f"{name}: timing against the step before")
        return combine(self._paired(_arm("before", before), _arm("after", after)))

    def time_requests(self, trial: Trial, request_size: int) -> Gain:
        """Time whole requests in turns: a row for every candidate, then the form for requests."""
        self._progress(f"timing requests of {request_size} candidates in both forms")
        rows = whole_requests(self._rows, trial.bundle.card, request_size, TIMED_REQUESTS)
        file = write_rows(rows, self._context.workdir / "requests.safetensors")
        plain = _arm("before", trial)
        hoisted = plain.model_copy(
            update={
                "label": "after",
                "kind": "requests",
                "options": {"request_size": request_size},
            }
        )
        plan = self._plan.model_copy(update={"batch_sizes": (request_size,)})
        records = time_arms([plain, hoisted], file, plan, LocalBackend(), progress=self._detail)
        return combine(latency_rows(records, plain.label, hoisted.label))

    def against_control(self, trial: Trial) -> list[LatencyRow]:
        """Time a trial and the eager control in turns."""
        self._progress("timing the whole candidate against the control")
        return self._paired(self._control, _arm("candidate", trial))

    def _paired(self, left: ArmSpec, right: ArmSpec) -> list[LatencyRow]:
        records = time_arms(
            [left, right], self._rows_file, self._plan, LocalBackend(), progress=self._detail
        )
        return latency_rows(records, left.label, right.label)


def _arm(label: str, trial: Trial) -> ArmSpec:
    return ArmSpec(label=label, kind="artifact", artifact=trial.artifact)


def trial_plan(batch_sizes: Sequence[int], num_threads: int | None = None) -> BenchPlan:
    """Return the plan of keep-or-drop timings for a recipe's batch sizes."""
    return TRIAL_PLAN.model_copy(
        update={"batch_sizes": tuple(batch_sizes), "num_threads": num_threads}
    )
