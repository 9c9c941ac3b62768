"""Quality of a bundle on the tuning rows, so that a pass that costs too much of it is dropped.

The verdict is on rows that nothing here has seen. What is looked for is only whether a pass will
plainly not hold the recipe's quality gates: its graph is run by PyTorch, before any compile.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rankopt.bundle import ModelBundle
from rankopt.data.rows import Rows
from rankopt.quality.metrics import Array
from rankopt.quality.parity import compare_quality
from rankopt.review import wording
from rankopt.review.gates import Gates
from rankopt.review.schema import MetricParity

BATCH_ROWS = 512


class TuningQuality:
    """Compares bundles with the one it was made of, on labelled rows.

    Args:
        control: the bundle before any pass.
        rows: with labels.
        gates: whose quality gates are to be held.
    """

    def __init__(self, control: ModelBundle, rows: Rows, gates: Gates) -> None:
        self._rows = rows
        self._gates = gates
        self._control = _probabilities(control, rows)

    def lost(self, bundle: ModelBundle) -> str | None:
        """Say which gate the bundle will not hold; None when it holds all, as far as this tells."""
        candidate = _probabilities(bundle, self._rows)
        for output in bundle.card.outputs:
            margins = self._gates.quality.margins_of(output.name)
            found = compare_quality(
                self._control[output.name],
                candidate[output.name],
                self._rows.labels[output.label],
                clusters=self._rows.clusters,
                margins=margins,
            )
            for name, margin in margins.items():
                if name in found and _is_lost(found[name], margin):
                    key = f"{output.name}.{name}" if len(bundle.card.outputs) > 1 else name
                    return self._sentence(key, found[name], margin)
        return None

    def _sentence(self, key: str, parity: MetricParity, margin: float) -> str:
        if parity.delta is None:
            return f"{wording.metric_title(key)} cannot be computed: {parity.reason}"
        return (
            f"{wording.metric_title(key)} changes by {wording.delta(key, parity.delta)} "
            f"({wording.delta_interval(key, parity)}) on {self._rows.num_rows:,} tuning rows, "
            f"against a margin of {wording.delta(key, margin, signed=False)}"
        )


def _is_lost(parity: MetricParity, margin: float) -> bool:
    """Tell whether other rows will hardly show the change to be harmless.

    Beyond the margin it is lost. Undecided and more than half-way there it is, too: the verdict's
    interval would have to be narrower than this one to pass.
    """
    if parity.verdict == "fail":
        return True
    if parity.verdict == "pass" or parity.delta is None:
        return False
    harm = parity.delta if parity.direction == "lower" else -parity.delta
    return harm > margin / 2


def _probabilities(bundle: ModelBundle, rows: Rows) -> Mapping[str, Array]:
    parts: dict[str, list[Array]] = {output.name: [] for output in bundle.card.outputs}
    for start in range(0, rows.num_rows, BATCH_ROWS):
        scores = bundle.run(rows.slice(start, start + BATCH_ROWS).features)
        for output in bundle.card.outputs:
            wide = scores[output.name].double()
            held = torch.sigmoid(wide) if output.activation == "logit" else wide
            parts[output.name].append(held.numpy())
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
