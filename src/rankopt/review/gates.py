"""The gates a recipe can set, as they stand in its `gates:` mapping.

Adding a gate is one class here (or in a file of its own, or in a package that announces it under
the entry point group `rankopt.gates`) and one line in `GATE_KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model, model_validator

from rankopt.errors import (
    EXIT_FAIL,
    EXIT_INCONCLUSIVE,
    EXIT_PASS,
    EnvironmentProblem,
    Problem,
    nearest,
)
from rankopt.quality.metrics import METRICS
from rankopt.review import wording
from rankopt.review.gate import (
    Count,
    Finding,
    Gate,
    Margin,
    Ratio,
    Scope,
    at_least,
    at_most,
    relation,
    worst,
)
from rankopt.review.schema import BaselineRow, LatencyRow, MetricParity, Report, Verdict

DEFAULT_NE_MARGIN: Final = 0.001
ENTRY_POINT_GROUP: Final = "rankopt.gates"


class QualityGate(RootModel[Annotated[dict[str, Margin], Field(min_length=1)]], Gate):
    """Hold quality metrics within a margin of the control: non-inferiority, in each direction.

    A metric holds for every output of the model; `click.ne` names that of one output.

    Example:
        ```yaml
        quality: {ne: 0.1%, auc: 0.001}
        ```
    """

    # A RootModel is its own mapping: it has no keys of its own to refuse.
    model_config = ConfigDict(frozen=True, extra=None)

    def margins(self) -> dict[str, float]:
        """Return the margin of each metric, in the unit of its delta."""
        return dict(self.root)

    def check(self, path: str, scope: Scope) -> list[Problem]:
        return [
            Problem(
                f"{scope.where}: {path}.{name}",
                "is not a quality metric",
                hint=nearest(wording.split_metric(name)[1], METRICS),
            )
            for name in self.root
            if wording.split_metric(name)[1] not in METRICS
        ]

    def judge(self, path: str, draft: Report) -> list[Finding]:
        findings = []
        for name, margin in self.root.items():
            keys = [key for key in draft.quality if name in (key, wording.split_metric(key)[1])]
            findings += [
                self._judge_metric(f"{path}.{key}", key, margin, draft) for key in keys
            ] or [
                Finding(
                    f"{path}.{name}",
                    "inconclusive",
                    f"{wording.metric_title(name)} was not measured, and its margin is "
                    f"{wording.delta(name, margin, signed=False)}.",
                )
            ]
        return findings

    def _judge_metric(self, gate: str, key: str, margin: float, draft: Report) -> Finding:
        parity = draft.quality[key]
        verdict = worst([parity.verdict, _non_inferior(key, parity, margin)])
        limit = wording.delta(key, margin, signed=False)
        shown = wording.delta_interval(key, parity)
        rows = wording.rows_of(parity, draft.statistics_unit)
        title = wording.metric_title(key)
        row = ("quality", key)
        if parity.delta is None or shown is None:
            why = parity.reason or "no interval could be computed"
            state = "fails" if verdict == "fail" else "is undecided"
            return Finding(gate, verdict, f"{title} {state} on {rows}: {why}.", row)
        words = relation(verdict, met="within the margin of", missed="beyond the margin of")
        text = (
            f"{title} changed by {wording.delta(key, parity.delta)} ({shown}), {words} {limit} "
            f"({parity.direction} is better), on {rows}"
        )
        if verdict == "inconclusive" and parity.rows_to_decide:
            text += f"; about {wording.count(parity.rows_to_decide, 'row')} would decide it"
        return Finding(gate, verdict, f"{text}.", row)


def _non_inferior(key: str, parity: MetricParity, margin: float) -> Verdict:
    # A metric arrives judged, perhaps by another margin than the recipe's: it is judged again here,
    # and neither answer can soften the other.
    if parity.num_rows <= 0 or parity.delta is None:
        return "inconclusive"
    metric = METRICS.get(wording.split_metric(key)[1])
    if metric is not None and metric.target is not None:
        # Nearer to a target is better on either side, which the interval of delta alone does not
        # tell: only the answer by this margin, or by a tighter one, counts.
        judged = parity.margin is not None and parity.margin <= margin
        return parity.verdict if judged else "inconclusive"
    if parity.direction == "lower":
        return at_most(parity.ci_low, parity.ci_high, margin)
    return at_least(parity.ci_low, parity.ci_high, -margin)


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


class SizeGate(Gate):
    """Ask for smaller stored weights: every copy of parameters and tables, compiled code apart.

    Example:
        ```yaml
        size: {min_ratio: 3.0}
        ```
    """

    min_ratio: Ratio | None = None
    """Control's bytes over candidate's."""
    max_candidate_bytes: Count | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> SizeGate:
        if self.min_ratio is None and self.max_candidate_bytes is None:
            raise ValueError("needs min_ratio or max_candidate_bytes")
        return self

    def judge(self, path: str, draft: Report) -> list[Finding]:
        control, candidate = draft.size.control_bytes, draft.size.candidate_bytes
        findings = []
        if self.min_ratio is not None:
            gate = f"{path}.min_ratio"
            limit = wording.ratio(self.min_ratio)
            if not control or not candidate:
                text = f"The size of an arm was not measured; the limit is {limit}."
                findings.append(Finding(gate, "inconclusive", text))
            else:
                ratio = control / candidate  # exact bytes: the interval is the point itself
                verdict = at_least(ratio, ratio, self.min_ratio)
                joined = relation(verdict, met="at or above", missed="below")
                text = (
                    f"Stored weights are {wording.ratio(ratio)} smaller "
                    f"({wording.size(control)} to {wording.size(candidate)}, exact), "
                    f"{joined} the limit of {limit}."
                )
                findings.append(Finding(gate, verdict, text))
        if self.max_candidate_bytes is not None:
            findings.append(self._judge_bytes(f"{path}.max_candidate_bytes", candidate))
        return findings

    def _judge_bytes(self, gate: str, candidate: int | None) -> Finding:
        limit_bytes = self.max_candidate_bytes or 0
        limit = wording.size(limit_bytes)
        if not candidate:
            text = f"The candidate's size was not measured; the limit is {limit}."
            return Finding(gate, "inconclusive", text)
        verdict = at_most(candidate, candidate, limit_bytes)
        joined = relation(verdict, met="at or below", missed="above")
        text = f"The candidate stores {wording.size(candidate)}, {joined} the limit of {limit}."
        return Finding(gate, verdict, text)


class CostGate(Gate):
    """Limit the dollars per million predictions, closed-loop at the plan's batch size.

    `max_ratio` (candidate over control) needs no price, since the price cancels out;
    `max_usd_per_million` does.

    Example:
        ```yaml
        cost: {max_ratio: 0.5}
        ```
    """

    max_ratio: Ratio | None = None
    max_usd_per_million: Ratio | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> CostGate:
        if self.max_ratio is None and self.max_usd_per_million is None:
            raise ValueError("needs max_ratio or max_usd_per_million")
        return self

    def check(self, path: str, scope: Scope) -> list[Problem]:
        if self.max_usd_per_million is None or scope.price_given:
            return []
        place = f"{scope.where}: {path}.max_usd_per_million"
        hint = "Give the hourly price of the machine, or gate on max_ratio instead."
        return [Problem(place, "needs an hourly price, and none is given", hint=hint)]

    def judge(self, path: str, draft: Report) -> list[Finding]:
        cost = draft.cost
        blocks = wording.count(cost.num_blocks, "block")
        why = cost.reason or f"{blocks} do not support an interval"
        findings = []
        for key, limit, value, low, high, write, words in (
            ("max_ratio", self.max_ratio, cost.ratio, cost.ratio_low, cost.ratio_high,
             wording.ratio, "times the control's cost per prediction"),
            ("max_usd_per_million", self.max_usd_per_million, cost.candidate_usd_per_million,
             cost.candidate_usd_low, cost.candidate_usd_high, wording.usd,
             "per million predictions"),
        ):  # fmt: skip
            if limit is None:
                continue
            gate = f"{path}.{key}"
            if value is None or low is None or high is None:
                text = f"Cost was not measured: {why}; the limit is {write(limit)}."
                findings.append(Finding(gate, "inconclusive", text))
                continue
            verdict = at_most(low, high, limit)
            joined = relation(verdict, met="at or below the limit of", missed="above the limit of")
            text = (
                f"The candidate costs {write(value).removesuffix('x')} {words} "
                f"({wording.interval(write(low), write(high))}), {joined} {write(limit)}, "
                f"{cost.load_model} at batch {cost.batch_size}, from {blocks}."
            )
            findings.append(Finding(gate, verdict, text))
        return findings


GATE_KINDS: Mapping[str, type[Gate]] = {
    "quality": QualityGate,
    "latency": LatencyGate,
    "baselines": BaselineGate,
    "size": SizeGate,
    "cost": CostGate,
}


def _all_kinds() -> dict[str, type[Gate]]:
    kinds = dict(GATE_KINDS)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            kinds.setdefault(entry.name, entry.load())
        except Exception as error:
            text = f"the gate {entry.name!r} of the plug-in {entry.value!r} cannot be loaded"
            hint = "Mend or uninstall that package."
            raise EnvironmentProblem(f"{text}: {error}. {hint}") from error
    return kinds


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, kind in _all_kinds().items():
        if name == "quality":
            fields[name] = (kind, QualityGate({"ne": DEFAULT_NE_MARGIN}))
        elif kind.many:
            fields[name] = (tuple[kind, ...], ())  # type: ignore[valid-type]
        else:
            fields[name] = (kind | None, None)
    return fields


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


if TYPE_CHECKING:

    class _Fields(_Strict):
        quality: QualityGate = QualityGate({"ne": DEFAULT_NE_MARGIN})
        latency: tuple[LatencyGate, ...] = ()
        baselines: tuple[BaselineGate, ...] = ()
        size: SizeGate | None = None
        cost: CostGate | None = None

else:
    # The registry is the schema: a registered kind is a key of the mapping, with no second list.
    _Fields = create_model("_Fields", __base__=_Strict, **_fields())


class Gates(_Fields):
    """The `gates:` mapping of a recipe; without one, NE must stay within +0.1 %.

    Example:
        ```yaml
        gates:
          quality: {ne: 0.1%}
          latency: [{batch_size: 1, min_speedup: 3.0}]
          baselines: [{arm: aoti-fp32, batch_size: 1}]
          size: {min_ratio: 3.0}
        ```
    """

    def each(self) -> Iterator[tuple[str, Gate]]:
        """Yield every gate with its place, in the order of the registry."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, tuple):
                for index, gate in enumerate(value):
                    yield f"{name}[{index}]", gate
            elif value is not None:
                yield name, value

    def margins(self) -> dict[str, float]:
        """Return the margin of each gated quality metric."""
        return self.quality.margins()

    def check(self, scope: Scope) -> list[Problem]:
        """List every gate that the plan could not decide, before anything is run."""
        return [
            problem for path, gate in self.each() for problem in gate.check(f"gates.{path}", scope)
        ]


def exit_code(verdict: Verdict) -> int:
    """Return the exit code of a verdict: 0 pass, 1 fail, 3 inconclusive."""
    return {"pass": EXIT_PASS, "fail": EXIT_FAIL, "inconclusive": EXIT_INCONCLUSIVE}[verdict]
