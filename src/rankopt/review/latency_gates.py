"""Gates on how fast the candidate is: against the control, a limit, or a further arm."""

from __future__ import annotations

from pydantic import model_validator

from rankopt.errors import Problem, nearest
from rankopt.review import wording
from rankopt.review.gate import Count, Finding, Gate, Ratio, Scope, at_least, at_most, relation
from rankopt.review.schema import BaselineRow, LatencyRow, Report, Verdict


class LatencyGate(Gate):
    """Ask for a speed-up over the control, or for a p99, at one batch size.

    Example:
        ```yaml
        latency:
          - {batch_size: 1, min_speedup: 3.0}
          - {batch_size: 512, min_speedup: 1.5, max_candidate_p99_ns: 20_000_000}
        ```
    """

    many = True

    batch_size: Count
    min_speedup: Ratio | None = None
    max_candidate_p99_ns: Count | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> LatencyGate:
        if self.min_speedup is None and self.max_candidate_p99_ns is None:
            raise ValueError("needs min_speedup or max_candidate_p99_ns")
        return self

    def check(self, path: str, scope: Scope) -> list[Problem]:
        return scope.batch_size_problems(path, self.batch_size)

    def judge(self, path: str, draft: Report) -> list[Finding]:
        place = f"latency[batch_size={self.batch_size}]"
        findings = []
        rows = [(i, r) for i, r in enumerate(draft.latency) if r.batch_size == self.batch_size]
        for index, row in rows:
            target = ("latency", index)
            if self.min_speedup is not None:
                verdict, reason = _judge_speedup("the control", row, self.min_speedup)
                findings.append(Finding(f"{place}.min_speedup", verdict, reason, target))
            if self.max_candidate_p99_ns is not None:
                verdict, reason = _judge_p99(row, self.max_candidate_p99_ns)
                findings.append(Finding(f"{place}.max_candidate_p99_ns", verdict, reason, target))
        return findings or [
            Finding(place, "inconclusive", f"Batch {self.batch_size} was not measured.")
        ]


def _judge_speedup(rival: str, row: LatencyRow | BaselineRow, limit: float) -> tuple[Verdict, str]:
    samples = wording.count(row.num_samples, "timed call")
    shown = wording.ratio_interval(row.ci_low, row.ci_high)
    if row.speedup is None or shown is None:
        return "inconclusive", (
            f"At batch {row.batch_size} the speed-up over {rival} has no interval, from {samples} "
            f"of each arm; the limit is {wording.ratio(limit)}."
        )
    verdict = at_least(row.ci_low, row.ci_high, limit)
    joined = relation(verdict, met="at or above the limit of", missed="below the limit of")
    return verdict, (
        f"At batch {row.batch_size} the candidate is {wording.ratio(row.speedup)} as fast as "
        f"{rival} ({shown}), {joined} {wording.ratio(limit)}, from {samples} of each arm."
    )


def _judge_p99(row: LatencyRow, limit_ns: float) -> tuple[Verdict, str]:
    samples = wording.count(row.num_samples, "timed call")
    words = f"At batch {row.batch_size} the candidate's p99"
    limit = wording.duration(limit_ns)
    low, high = row.candidate_p99_low_ns, row.candidate_p99_high_ns
    if row.candidate_p99_ns is None or low is None or high is None:
        return "inconclusive", (
            f"{words} is not known with an interval: {samples} do not support it; "
            f"the limit is {limit}."
        )
    verdict = at_most(low, high, limit_ns)
    joined = relation(verdict, met="at or below the limit of", missed="above the limit of")
    shown = wording.interval(wording.duration(low), wording.duration(high))
    return verdict, (
        f"{words} is {wording.duration(row.candidate_p99_ns)} ({shown}), {joined} {limit}, "
        f"from {samples}."
    )


class BaselineGate(Gate):
    """Ask that the candidate also beats a further arm of the same interleaved run.

    Example:
        ```yaml
        baselines: [{arm: aoti-fp32, batch_size: 1, min_speedup: 1.0}]
        ```
    """

    many = True

    arm: str
    batch_size: Count
    min_speedup: Ratio = 1.0

    def check(self, path: str, scope: Scope) -> list[Problem]:
        problems = scope.batch_size_problems(path, self.batch_size)
        if self.arm not in scope.baseline_arms:
            problems.append(
                Problem(
                    f"{scope.where}: {path}.arm",
                    "must be a baseline arm of the plan",
                    self.arm,
                    nearest(self.arm, scope.baseline_arms),
                )
            )
        return problems

    def judge(self, path: str, draft: Report) -> list[Finding]:
        place = f"baselines[arm={self.arm}, batch_size={self.batch_size}].min_speedup"
        findings = []
        for index, row in enumerate(draft.baselines):
            if (row.arm, row.batch_size) == (self.arm, self.batch_size):
                verdict, reason = _judge_speedup(self.arm, row, self.min_speedup)
                findings.append(Finding(place, verdict, reason, ("baselines", index)))
        text = f"The baseline {self.arm} was not measured at batch {self.batch_size}."
        return findings or [Finding(place, "inconclusive", text)]
