"""Put what an A/B measured into a report that the gates can judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rankopt.bench.ab import AbResult
from rankopt.data.rows import Rows
from rankopt.environment import Environment
from rankopt.models.card import ModelCard
from rankopt.quality.metrics import calibration_curve, prediction_change
from rankopt.quality.parity import compare_quality
from rankopt.review.cost import BlockTimes, closed_loop_cost
from rankopt.review.gates import Gates
from rankopt.review.schema import (
    CalibrationPoint,
    Cost,
    MetricParity,
    PassRecord,
    Report,
    Size,
)

SCATTER_POINTS = 1_000


@dataclass(frozen=True)
class Subject:
    """What was compared, in words and figures the report carries.

    Attributes:
        recipe, objective, passes: of the candidate; None and empty where it names none.
        capture: notes on how the candidate's graph was captured.
        data: where the rows came from (`Splits.description`).
        price_per_hour, slo_p99_ns: what the user named.
        reproduce: the command.
    """

    size: Size
    data: Mapping[str, Any]
    reproduce: str
    recipe: str | None = None
    objective: str | None = None
    passes: Sequence[PassRecord] = ()
    capture: Sequence[str] = ()
    price_per_hour: float | None = None
    slo_p99_ns: float | None = None


def draft_report(
    card: ModelCard,
    rows: Rows,
    result: AbResult,
    gates: Gates,
    subject: Subject,
    environment: Environment,
) -> Report:
    """Compute quality on the rows and lay everything out; `judge` fills in the verdict.

    Args:
        card: names outputs, labels and the request key.
        rows: the rows both arms scored.
        result: of the A/B on those rows.
        gates: for the margins.
        subject: what was compared.
        environment: of the driver; the arms' own stand beside it.
    """
    control, candidate = result.control_predictions, result.candidate_predictions
    labels = {output.name: rows.labels[output.label] for output in card.outputs}
    return Report(
        quality=_quality(card, rows, result, gates),
        latency=result.latency,
        baselines=result.baselines,
        size=subject.size,
        cost=_cost(result, subject),
        passes=list(subject.passes),
        capture=tuple(subject.capture),
        outputs=tuple(labels),
        prediction_change={
            name: prediction_change(control[name], candidate[name]) for name in labels
        },
        calibration_curve={
            name: {
                "control": _curve(control[name], label),
                "candidate": _curve(candidate[name], label),
            }
            for name, label in labels.items()
        },
        scatter={name: _scatter(control[name], candidate[name]) for name in labels},
        statistics_unit=card.data.request_key or "row",
        model=card.name,
        recipe=subject.recipe,
        objective=subject.objective,
        data={
            **subject.data,
            "num_rows": rows.num_rows,
            "positives": {name: int(np.nansum(label)) for name, label in labels.items()},
        },
        environment={
            **environment.model_dump(mode="json"),
            "fingerprint": environment.fingerprint(),
            "arms": result.environments,
            "notes": list(result.notes),
        },
        reproduce=subject.reproduce,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _quality(
    card: ModelCard, rows: Rows, result: AbResult, gates: Gates
) -> dict[str, MetricParity]:
    """Compare every output; with several of them a metric is named `output.metric`."""
    found: dict[str, MetricParity] = {}
    for output in card.outputs:
        prefix = f"{output.name}." if len(card.outputs) > 1 else ""
        parity = compare_quality(
            result.control_predictions[output.name],
            result.candidate_predictions[output.name],
            rows.labels[output.label],
            clusters=rows.clusters,
            margins=gates.quality.margins_of(output.name),
        )
        found |= {f"{prefix}{name}": value for name, value in parity.items()}
    return found


def _curve(prob_N: Any, labels_N: Any) -> list[CalibrationPoint]:
    labelled_N = ~np.isnan(labels_N)
    return list(calibration_curve(prob_N[labelled_N], labels_N[labelled_N]))


def _cost(result: AbResult, subject: Subject) -> Cost:
    sizes = [record.batch_size for record in result.records]
    if not sizes:
        return Cost(price_per_hour=subject.price_per_hour, reason="no latency was measured")
    # Throughput is sold at the largest batch of the plan: that is where a server would run.
    batch_size = max(sizes)
    return closed_loop_cost(
        subject.price_per_hour,
        batch_size,
        BlockTimes.of(result.records, "control", batch_size),
        BlockTimes.of(result.records, "candidate", batch_size),
        slo_p99_ns=subject.slo_p99_ns,
    )


def _scatter(control: Any, candidate: Any) -> list[tuple[float, float]]:
    """Sample rows evenly over the ranks of the control's score, so that the tails show."""
    order = np.argsort(control, kind="stable")
    picked = order[np.linspace(0, len(order) - 1, min(SCATTER_POINTS, len(order))).astype(int)]
    return [(float(control[row]), float(candidate[row])) for row in picked]
