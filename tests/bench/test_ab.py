from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.conftest import QUICK, PlainRows
from rankopt.bench.ab import baseline_rows, run_ab, throughput
from rankopt.bench.backend import ArmError
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan
from rankopt.bench.samples import BlockRecord


def test_an_ab_gives_predictions_latency_baselines_and_notes(rows, card, arm, tmp_path):
    # Batch 150 is more rows than there are: windows go round.
    plan = BenchPlan(**{**QUICK, "batch_sizes": (1, 150)})
    told = []
    run = {
        "baselines": [arm("plain", busy_us=600)],
        "rows": rows,
        "card": card,
        "plan": plan,
        "backend": LocalBackend(),
        "workdir": tmp_path / "work",
    }
    arms = arm("control", busy_us=900), arm("candidate", busy_us=300)

    result = run_ab(*arms, **run, progress=told.append)

    logits = rows.features["dense"].double().sum(dim=1)
    expected = torch.sigmoid(logits).numpy()
    for predictions in (result.control_predictions, result.candidate_predictions):
        assert predictions["score"].dtype == np.float64
        np.testing.assert_allclose(predictions["score"], expected, rtol=1e-5)
    assert [row.batch_size for row in result.latency] == [1, 150]
    for row in result.latency:
        assert row.ci_low < 3 < row.ci_high or row.speedup == pytest.approx(3, rel=0.1)
        assert row.num_samples >= 8 * QUICK["calls_per_block"]
    assert [(row.arm, row.batch_size) for row in result.baselines] == [("plain", 1), ("plain", 150)]
    assert all(1.5 < row.speedup < 2.5 for row in result.baselines)
    # Closed loop at 300 µs a call is at most 3,333 calls a second.
    assert 0 < result.throughput_per_s["candidate"][1] < 1 / 300e-6
    assert result.throughput_per_s["candidate"][150] < 150 / 300e-6
    assert set(result.environments) == {"control", "candidate", "plain"}
    assert any("threads in effect: control 1, candidate 1, plain 1" in n for n in result.notes)
    assert any("predictions" in line for line in told)
    assert any("block 8" in line for line in told)

    before = (tmp_path / "work" / "samples.jsonl").read_text()
    again = run_ab(*arms, **run, resume=True)
    assert (tmp_path / "work" / "samples.jsonl").read_text() == before
    assert again.latency == result.latency
    np.testing.assert_array_equal(
        again.control_predictions["score"], result.control_predictions["score"]
    )
    assert any("resumed: 48 turns" in note for note in again.notes)


def test_an_arm_of_the_wrong_shape_is_named(rows, card, plan, arm, tmp_path):
    with pytest.raises(ArmError, match="arm 'control': output 'score' must hold one score per row"):
        run_ab(
            arm("control", kind="odd_shape"), arm("candidate"),
            rows=rows, card=card, plan=plan, backend=LocalBackend(), workdir=tmp_path,
        )  # fmt: skip


def test_an_output_that_the_card_names_and_the_arm_lacks_is_named(card):
    from rankopt.bench.ab import probabilities_of

    with pytest.raises(ArmError, match=r"'control': gives outputs \['other'\].*\['score'\]"):
        probabilities_of({"other": np.zeros(2, dtype=np.float32)}, card, "control")


def test_logits_far_out_keep_their_tails(card):
    from rankopt.bench.ab import probabilities_of

    logits = np.array([-100, -40, 0, 40, 100], dtype=np.float32)
    got = probabilities_of({"score": logits}, card, "control")["score"]
    np.testing.assert_allclose(got[:3], [np.exp(-100.0), np.exp(-40.0), 0.5], rtol=1e-12)
    np.testing.assert_allclose(got[3:], 1.0)


def make_record(arm, batch_size, block, latency_ns, wall_ns):
    samples = np.full(10, latency_ns, dtype=np.int64)
    return BlockRecord(batch_size, block, arm, 0, samples, wall_ns, 1, 0, 0.0)


def test_throughput_is_rows_over_wall_time():
    records = [make_record("control", 64, block, 10, 1_000_000) for block in range(4)]
    assert throughput(records) == {"control": {64: 64 * 10 / 1e-3}}


def test_a_baselines_speedup_is_that_of_the_candidate_over_it():
    records = [make_record("plain", 8, block, 3_000, 1) for block in range(8)]
    records += [make_record("candidate", 8, block, 2_000, 1) for block in range(8)]
    [row] = baseline_rows(records, ["plain"], "candidate")
    assert row.speedup == pytest.approx(1.5)
    assert (row.arm_p50_ns, row.candidate_p50_ns) == pytest.approx((3_000, 2_000))


def test_predictions_that_are_not_finite_are_noted(card, arm, tmp_path):
    dense = torch.ones(20, 4)
    dense[3, 0] = float("nan")
    plan = BenchPlan(**{**QUICK, "min_blocks": 4, "max_blocks": 4})
    result = run_ab(
        arm("control"), arm("candidate"),
        rows=PlainRows({"dense": dense}, 20), card=card, plan=plan,
        backend=LocalBackend(), workdir=tmp_path,
    )  # fmt: skip
    assert "candidate: 1 of 20 predictions of 'score' are not finite." in result.notes
