"""The gate on quality: non-inferiority of any metric, of any output."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, RootModel

from rankopt.errors import Problem, nearest
from rankopt.quality.registry import FAMILIES, KNOWN_NAMES, find_metric
from rankopt.review import wording
from rankopt.review.gate import (
    Finding,
    Gate,
    Margin,
    Scope,
    at_least,
    at_most,
    relation,
    worst,
)
from rankopt.review.schema import MetricParity, Report, Verdict


class QualityGate(RootModel[Annotated[dict[str, Margin], Field(min_length=1)]], Gate):
    """Hold quality metrics within a margin of the control: non-inferiority, in each direction.

    Metrics of single rows: ne, log_loss, auc, calibration. Metrics of the rows that share the
    card's request_key: gauc, ndcg@K and hr@K for any K. A margin holds for every output of the
    model; `love.ne` is the margin of the output `love` in place of the general one.

    Example:
        ```yaml
        quality: {ne: 0.1%, love.ne: 0.3%, gauc: 0.001, ndcg@10: 0.002}
        ```
    """

    # A RootModel is its own mapping: it has no keys of its own to refuse.
    model_config = ConfigDict(frozen=True, extra=None)

    def margins(self) -> dict[str, float]:
        """Return the margin of each name in the recipe, in the unit of the metric's delta."""
        return dict(self.root)

    def margins_of(self, output: str) -> dict[str, float]:
        """Return the margin of each metric of one output: its own where it has one."""
        named = {wording.split_metric(name): margin for name, margin in self.root.items()}
        general = {metric: margin for (of, metric), margin in named.items() if of is None}
        return general | {metric: margin for (of, metric), margin in named.items() if of == output}

    def check(self, path: str, scope: Scope) -> list[Problem]:
        problems = []
        for name in self.root:
            where = f"{scope.where}: {path}.{name}"
            output, metric = wording.split_metric(name)
            if find_metric(metric) is None:
                problems.append(
                    Problem(where, "is not a quality metric", hint=_metric_hint(metric))
                )
            if output is not None and scope.outputs and output not in scope.outputs:
                what = f"must name an output of the model ({', '.join(scope.outputs)})"
                hint = nearest(output, scope.outputs)
                problems.append(Problem(where, what, output, hint))
        return problems

    def judge(self, path: str, draft: Report) -> list[Finding]:
        findings = []
        for name, margin in self.root.items():
            keys = [key for key in draft.quality if self._margin_name(key, draft.outputs) == name]
            findings += [self._judge_metric(f"{path}.{key}", key, margin, draft) for key in keys]
            if not keys and not self._is_replaced(name, draft):
                findings.append(
                    Finding(
                        f"{path}.{name}",
                        "inconclusive",
                        f"{wording.metric_title(name)} was not measured, and its margin is "
                        f"{wording.delta(name, margin, signed=False)}.",
                    )
                )
        return findings

    def _margin_name(self, key: str, outputs: tuple[str, ...]) -> str:
        """Say which entry holds for a metric of the report: the output's own before the general.

        The report of a model with one output leaves the output's name out.
        """
        output, metric = wording.split_metric(key)
        if output is None and len(outputs) == 1:
            output = outputs[0]
        own = f"{output}.{metric}"
        return own if own in self.root else metric if metric in self.root else key

    def _is_replaced(self, name: str, draft: Report) -> bool:
        """Tell whether every output of the report has a margin of its own for a general one."""
        output, metric = wording.split_metric(name)
        if output is not None:
            return False
        return any(wording.split_metric(key)[1] == metric for key in draft.quality)

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


def _metric_hint(metric: str) -> str:
    family = metric.partition("@")[0]
    if family in FAMILIES:
        return f"Name how many of the best rows count, a whole number from 1: {family}@10."
    return nearest(metric, KNOWN_NAMES)


def _non_inferior(key: str, parity: MetricParity, margin: float) -> Verdict:
    # A metric arrives judged, perhaps by another margin than the recipe's: it is judged again here,
    # and neither answer can soften the other.
    if parity.num_rows <= 0 or parity.delta is None:
        return "inconclusive"
    metric = find_metric(wording.split_metric(key)[1])
    if metric is not None and metric.target is not None:
        # Nearer to a target is better on either side, which the interval of delta alone does not
        # tell: only the answer by this margin, or by a tighter one, counts.
        judged = parity.margin is not None and parity.margin <= margin
        return parity.verdict if judged else "inconclusive"
    if parity.direction == "lower":
        return at_most(parity.ci_low, parity.ci_high, margin)
    return at_least(parity.ci_low, parity.ci_high, -margin)
