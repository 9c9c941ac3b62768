"""The gates a recipe can set, as they stand in its `gates:` mapping.

Adding a gate is one class (here, in a file of its own, or in a package that announces it under the
entry point group `rankopt.gates`) and one line in `GATE_KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, create_model, model_validator

from rankopt.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS, EnvironmentProblem, Problem
from rankopt.review import wording
from rankopt.review.gate import Count, Finding, Gate, Ratio, Scope, at_least, at_most, relation
from rankopt.review.latency_gates import BaselineGate, LatencyGate
from rankopt.review.quality_gate import QualityGate
from rankopt.review.schema import Report, Verdict

DEFAULT_NE_MARGIN: Final = 0.001
ENTRY_POINT_GROUP: Final = "rankopt.gates"


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
