"""Reports with planted numbers, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankopt.review.gates import Gates
from rankopt.review.schema import (
    BaselineRow,
    CalibrationPoint,
    Cost,
    LatencyRow,
    MetricParity,
    PassRecord,
    PredictionChange,
    Report,
    Size,
)

MS = 1_000_000

GATES = Gates.model_validate(
    {
        "quality": {"ne": "0.1%", "auc": 0.001, "calibration": "0.5%"},
        "latency": [
            {"batch_size": 1, "min_speedup": 3.0},
            {"batch_size": 512, "min_speedup": 1.5},
        ],
        "baselines": [{"arm": "aoti-fp32", "batch_size": 1, "min_speedup": 1.0}],
        "size": {"min_ratio": 3.0},
    }
)


def ne(delta: float = 0.0002, half: float = 0.0003, **changes: Any) -> MetricParity:
    """Build the parity of NE from its change and the half width of its interval."""
    fields: dict[str, Any] = {
        "control": 0.81234,
        "candidate": 0.81234 * (1 + delta),
        "delta": delta,
        "ci_low": delta - half,
        "ci_high": delta + half,
        "margin": 0.001,
        "direction": "lower",
        "num_rows": 20_012,
        "num_clusters": 301,
        "verdict": "pass",
    }
    return MetricParity(**{**fields, **changes})


def auc(delta: float = -0.0001, half: float = 0.0002, **changes: Any) -> MetricParity:
    """Build the parity of AUC likewise."""
    fields = {"control": 0.7031, "candidate": 0.7031 + delta, "direction": "higher"}
    return ne(delta, half, **{**fields, **changes})


def undefined(reason: str) -> MetricParity:
    """Build the parity of a metric that the rows leave without a value."""
    nothing = dict.fromkeys(("control", "candidate", "delta", "ci_low", "ci_high"))
    return ne().model_copy(update={**nothing, "verdict": "inconclusive", "reason": reason})


def latency(batch_size: int, speedup: float, half: float = 0.1, /, **changes: Any) -> LatencyRow:
    """Build a latency row from its speed-up and the half width of its interval."""
    control = (1.1 + 0.05 * batch_size) * MS
    candidate = control / speedup
    fields: dict[str, Any] = {
        "batch_size": batch_size,
        "control_p50_ns": control,
        "candidate_p50_ns": candidate,
        "control_p99_ns": control * 1.3 if batch_size < 100 else None,
        "candidate_p99_ns": candidate * 1.4 if batch_size < 100 else None,
        "speedup": speedup,
        "ci_low": speedup - half,
        "ci_high": speedup + half,
        "num_samples": 2_400 if batch_size < 100 else 240,
        "num_blocks": 24,
        "candidate_p50_low_ns": candidate * 0.96,
        "candidate_p50_high_ns": candidate * 1.05,
        "control_p50_low_ns": control * 0.97,
        "control_p50_high_ns": control * 1.04,
    }
    return LatencyRow(**{**fields, **changes})


def baseline(batch_size: int, speedup: float, half: float = 0.05, /, **changes: Any) -> BaselineRow:
    """Build a row against plain fp32 AOTInductor."""
    candidate = latency(batch_size, 3.4).candidate_p50_ns
    fields: dict[str, Any] = {
        "arm": "aoti-fp32",
        "batch_size": batch_size,
        "arm_p50_ns": candidate * speedup,
        "candidate_p50_ns": candidate,
        "speedup": speedup,
        "ci_low": speedup - half,
        "ci_high": speedup + half,
        "num_samples": 2_400,
    }
    return BaselineRow(**{**fields, **changes})


PASSES = [
    PassRecord(
        kind="fuse_embeddings",
        changed=True,
        kept=True,
        reason="Six tables became one batched lookup.",
        bytes_before=96_000_000,
        bytes_after=96_000_000,
        measured_speedup=1.21,
        ci_low=1.15,
        ci_high=1.27,
        batch_size=1,
        duration_ns=2_300 * MS,
        max_abs_drift=0.0,
    ),
    PassRecord(
        kind="quantize_embeddings",
        changed=True,
        kept=True,
        reason="Stored weights shrank by 71 MB, and the candidate holds its latency gate.",
        bytes_before=96_000_000,
        bytes_after=25_100_000,
        predicted_speedup=1.05,
        measured_speedup=1.02,
        ci_low=0.98,
        ci_high=1.06,
        batch_size=1,
        duration_ns=900 * MS,
        max_abs_drift=0.0031,
        details=("user_bias: D = 1, a packed row takes 5 bytes against 4",),
    ),
    PassRecord(
        kind="precision",
        changed=True,
        kept=False,
        reason="bf16 matrix products are slower on this machine: the interval lies below 1.",
        bytes_before=25_100_000,
        bytes_after=24_800_000,
        measured_speedup=0.34,
        ci_low=0.31,
        ci_high=0.37,
        batch_size=512,
        duration_ns=41_000 * MS,
        max_abs_drift=0.012,
    ),
]


def draft(**changes: Any) -> Report:
    """Build a report that meets `GATES` and is not judged yet, with any field replaced."""
    random = np.random.default_rng(3)
    control = random.beta(2, 3, size=600)
    candidate = np.clip(control + random.normal(0, 0.008, size=600), 0, 1)
    bins = np.linspace(0.05, 0.95, 10)
    curve = {
        arm: [
            CalibrationPoint(
                mean_predicted=float(x), observed_rate=float(min(1, x**1.1 + shift)), num_rows=2_001
            )
            for x in bins
        ]
        for arm, shift in (("control", 0.0), ("candidate", 0.006))
    }
    fields: dict[str, Any] = {
        "quality": {"ne": ne(), "auc": auc(), "calibration": auc(0.0004, 0.0009, margin=0.005)},
        "latency": [latency(1, 3.43), latency(64, 2.6), latency(512, 1.82)],
        "baselines": [baseline(1, 1.24), baseline(64, 1.31), baseline(512, 1.17)],
        "size": Size(
            control_bytes=96_000_000,
            candidate_bytes=25_100_000,
            control_code_bytes=None,
            candidate_code_bytes=1_900_000,
            candidate_resident_bytes=26_000_000,
        ),
        "cost": Cost(reason="no hourly price was given", batch_size=512),
        "passes": PASSES,
        "prediction_change": {"click": PredictionChange(max_abs=0.031, mean_abs=0.0052)},
        "calibration_curve": {"click": curve},
        "scatter": {
            "click": [(float(a), float(b)) for a, b in zip(control, candidate, strict=True)]
        },
        "statistics_unit": "user_id",
        "model": "din-movielens",
        "recipe": "cpu-int8",
        "objective": "latency",
        "data": {"source": "movielens", "split": "test", "num_rows": 20_012, "positives": 11_080},
        "environment": {
            "cpu": {"model": "AMD EPYC 7763", "features": ["avx2", "fma"], "num_threads": 2},
            "versions": {"torch": "2.13.0", "fbgemm": "1.8.0", "ray": "2.60.0"},
            "gpu": None,
        },
        "reproduce": "rankopt run cpu-int8 --model models/din-movielens.yaml --out runs/demo",
        "made_at": "2026-01-05T10:22:31Z",
    }
    return Report(**{**fields, **changes})
