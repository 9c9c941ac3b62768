"""Join every gate's findings into the one verdict of a report."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rankopt.review.gate import Finding, worst
from rankopt.review.gates import Gates
from rankopt.review.schema import GateResult, Report, Verdict


def judge(draft: Report, gates: Gates) -> Report:
    """Return the report with its verdict, the reason of every gate, and a verdict per gated row.

    Fails when a gate fails; else is inconclusive when a gate is, or could not be measured; else
    passes. Any verdict the draft already carries is replaced.

    Args:
        draft: what was measured; its own verdict and reasons are ignored.
        gates: the limits of the recipe.
    """
    findings = [finding for path, gate in gates.each() for finding in gate.judge(path, draft)]
    ordered = sorted(findings, key=lambda f: {"fail": 0, "inconclusive": 1, "pass": 2}[f.verdict])
    return draft.model_copy(
        update={
            "verdict": worst(finding.verdict for finding in findings),
            "reasons": [finding.reason for finding in ordered],
            "gates": [
                GateResult(gate=finding.gate, verdict=finding.verdict, reason=finding.reason)
                for finding in ordered
            ],
            **_judged_rows(draft, findings),
        }
    )


def _judged_rows(draft: Report, findings: list[Finding]) -> dict[str, Any]:
    found: dict[tuple[str, str | int], list[Verdict]] = defaultdict(list)
    for finding in findings:
        if finding.row is not None:
            found[finding.row].append(finding.verdict)
    rows: dict[str, Any] = {}
    for name in sorted({name for name, _ in found}):
        held = getattr(draft, name)
        items = held.items() if isinstance(held, dict) else enumerate(held)
        judged = {
            key: row.model_copy(update={"verdict": worst(found[name, key])})
            if (name, key) in found
            else row
            for key, row in items
        }
        rows[name] = judged if isinstance(held, dict) else list(judged.values())
    return rows
