"""Arms with planted speeds, drift, spin and death, each in a real subprocess."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.conftest import QUICK
from rankopt.bench.ab import latency_rows, time_pair
from rankopt.bench.backend import ArmError, WorkerDied
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan
from rankopt.bench.rows_file import write_rows
from rankopt.bench.samples import BlockRecord, SampleFile
from rankopt.bench.timing import fingerprint, is_settled, time_arms
from rankopt.errors import OutputExistsError, UsageError
from rankopt.units import NS_PER_MS


@pytest.fixture
def rows_file(rows, tmp_path):
    return write_rows(rows, tmp_path / "rows.safetensors")


def lines_of(workdir: Path, kind: str) -> list[dict]:
    text = (workdir / "samples.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["type"] == kind]


def test_a_planted_slowdown_is_measured(rows, plan, arm):
    plan = plan.model_copy(update={"min_blocks": 12, "max_blocks": 12})
    [row] = time_pair(arm("control", busy_us=1500), arm("candidate", busy_us=1000), rows, plan)
    assert row.ci_low > 1.2
    assert row.ci_low <= 1.5 <= row.ci_high
    assert row.speedup == pytest.approx(row.control_p50_ns / row.candidate_p50_ns)
    assert row.control_p99_ns is None, "60 calls do not support a p99"
    assert row.num_blocks == 12


def test_drift_hits_both_arms_alike(rows_file, plan, arm):
    # Twice as slow after two seconds; the run takes about that long once workers are up.
    plan = plan.model_copy(update={"min_blocks": 16, "max_blocks": 16, "max_worker_restarts": 0})
    drift = {"busy_us": 1000, "growth_per_s": 0.5, "since_ns": time.monotonic_ns()}
    arms = [arm("control", **drift), arm("candidate", **drift)]
    records = time_arms(arms, rows_file, plan, LocalBackend())
    [row] = latency_rows(records, "control", "candidate")
    control = [record for record in records if record.arm == "control"]
    assert control[-1].latency_ns.min() > 1.1 * control[0].latency_ns.min(), "drift was planted"
    assert row.ci_low <= 1 <= row.ci_high
    assert row.speedup == pytest.approx(1, abs=0.25), "one after the other would give 0.5"


def test_three_arms_take_turns_in_mirrored_order(rows_file, plan, arm, tmp_path):
    told = []
    arms = [arm("control"), arm("candidate"), arm("plain")]
    records = time_arms(
        arms, rows_file, plan, LocalBackend(), workdir=tmp_path, on_block=told.append
    )
    assert len(records) == 3 * plan.min_blocks
    blocks = {}
    for record in sorted(records, key=lambda record: record.started_ns):
        blocks.setdefault(record.block, []).append(record.arm)
    assert all(sorted(order) == ["candidate", "control", "plain"] for order in blocks.values())
    assert all(blocks[index] == blocks[index + 1][::-1] for index in range(0, len(blocks), 2))
    assert len({tuple(order) for order in blocks.values()}) > 2, "orders are drawn, not fixed"
    assert len(told) == plan.min_blocks
    assert len(lines_of(tmp_path, "turn")) == len(records)
    assert {line["arm"] for line in lines_of(tmp_path, "warm_up")} == {arm.label for arm in arms}


def test_threads_in_effect_are_the_plans(rows_file, plan, arm, tmp_path):
    plan = plan.model_copy(update={"num_threads": 2, "omp_wait_policy": "passive"})
    wide, narrow = arm("control"), arm("candidate").model_copy(update={"num_threads": 1})
    time_arms([wide, narrow], rows_file, plan, LocalBackend(), workdir=tmp_path)
    seen = {line["arm"]: line["environment"] for line in lines_of(tmp_path, "environment")}
    for label, count in (("control", 2), ("candidate", 1)):
        environment = seen[label]
        assert environment["num_threads"] == count
        assert environment["omp_max_threads"] == count
        assert environment["omp_num_threads"] == str(count)
        assert environment["omp_wait_policy"] == "passive"
        assert environment["threads_set_before_torch"]


def test_a_killed_worker_is_replaced_and_its_block_run_again(rows_file, plan, arm, tmp_path):
    fragile = arm("candidate", kind="fragile", die_at=20, tally=str(tmp_path / "tally"))
    records = time_arms(
        [arm("control"), fragile], rows_file, plan, LocalBackend(), workdir=tmp_path / "run"
    )
    assert (tmp_path / "tally").read_text() == "x", "the death was planted"
    keys = Counter((record.block, record.arm) for record in records)
    assert len(keys) == 2 * plan.min_blocks
    assert set(keys.values()) == {1}
    [event] = lines_of(tmp_path / "run", "event")
    assert event["arm"] == "candidate"
    assert "signal 9" in event["reason"]
    assert len([w for w in lines_of(tmp_path / "run", "warm_up") if w["arm"] == "candidate"]) == 2


def test_a_worker_that_always_dies_ends_the_run_and_keeps_its_blocks(
    rows_file, plan, arm, tmp_path
):
    plan = plan.model_copy(update={"max_worker_restarts": 1})
    # A block has at most 21 calls, so the first one is finished before the 40th call.
    fragile = arm("candidate", kind="fragile", die_at=40, times=9, tally=str(tmp_path / "tally"))
    with pytest.raises(WorkerDied, match="1 restarts are used up"):
        time_arms(
            [arm("control"), fragile], rows_file, plan, LocalBackend(), workdir=tmp_path / "run"
        )
    assert lines_of(tmp_path / "run", "turn")


def test_an_arm_that_raises_is_named_with_its_reason(rows_file, plan, arm):
    with pytest.raises(ArmError, match=r"(?s)'candidate'.*weights are made of cheese"):
        time_arms([arm("candidate", kind="broken")], rows_file, plan, LocalBackend())


def test_a_silent_worker_counts_as_dead(rows_file, plan, arm):
    plan = plan.model_copy(update={"call_timeout_s": 0.01, "max_worker_restarts": 0})
    with pytest.raises(WorkerDied, match="no answer"):
        time_arms([arm("control")], rows_file, plan, LocalBackend())


def test_an_idle_arm_that_spins_a_while_has_its_blocks_run_again(rows_file, arm, tmp_path):
    plan = BenchPlan(**{**QUICK, "idle_cpu_limit": 0.3, "max_block_reruns": 200})
    spinner = arm("candidate", kind="spinner", spin_s=1.0)
    records = time_arms(
        [arm("control"), spinner], rows_file, plan, LocalBackend(), workdir=tmp_path
    )
    discarded = lines_of(tmp_path, "discarded")
    assert discarded
    assert {line["arm"] for line in discarded} == {"control"}
    assert all(line["idle_cpu_share"] > 0.3 for line in discarded)
    assert not any(record.disturbed for record in records)
    assert all(record.idle_cpu_share <= 0.3 for record in records)


def test_an_idle_arm_that_never_rests_is_marked(rows_file, arm):
    values = {"idle_cpu_limit": 0.1, "max_block_reruns": 1, "block_duration_ns": 20 * NS_PER_MS}
    plan = BenchPlan(**{**QUICK, **values})
    spinner = arm("candidate", kind="spinner", spin_s=120)
    records = time_arms([arm("control"), spinner], rows_file, plan, LocalBackend())
    control = [record for record in records if record.arm == "control"]
    disturbed = [record for record in control if record.disturbed]
    assert len(disturbed) >= len(control) / 2  # a busy machine may keep even a spinner waiting
    assert all(record.attempt == 1 for record in disturbed)


DRIVER = """
import sys
from pathlib import Path
from bench import fake_arms
fake_arms.register()
from bench.test_timing import long_run
long_run(Path(sys.argv[1]), Path(sys.argv[2]), resume=False)
"""


def long_run(rows_file: Path, workdir: Path, *, resume: bool, on_block=None):
    from rankopt.bench.arms import ArmSpec

    plan = BenchPlan(**{**QUICK, "batch_sizes": (2, 3), "block_duration_ns": 20 * NS_PER_MS})
    arms = [ArmSpec(label=label, kind="fake-busy") for label in ("control", "candidate")]
    return time_arms(
        arms, rows_file, plan, LocalBackend(), workdir=workdir, resume=resume, on_block=on_block
    )


def test_a_killed_driver_is_resumed_without_timing_finished_blocks_again(rows_file, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(rows_file), str(workdir)],
        env={**os.environ, "PYTHONPATH": path},
    )
    samples = workdir / "samples.jsonl"
    deadline = time.monotonic() + 60
    while not (samples.exists() and samples.read_text().count('"type":"turn"') >= 8):
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = samples.read_text().rpartition("\n")[0].splitlines()

    with pytest.raises(OutputExistsError):
        long_run(rows_file, workdir, resume=False)
    fresh = []
    records = long_run(rows_file, workdir, resume=True, on_block=fresh.append)

    after = samples.read_text().splitlines()
    assert after[: len(before)] == before
    keys = Counter((turn["batch_size"], turn["block"], turn["arm"]) for turn in lines_of(
        workdir, "turn"))  # fmt: skip
    assert len(keys) == len(records) == 2 * 2 * QUICK["min_blocks"]
    assert set(keys.values()) == {1}
    assert len(fresh) <= 2 * QUICK["min_blocks"] - 4


def test_a_resumed_run_with_another_plan_or_arm_is_refused(rows_file, plan, arm, tmp_path):
    arms = [arm("control"), arm("candidate")]
    backend = LocalBackend()
    SampleFile(tmp_path / "samples.jsonl", fingerprint(arms, rows_file, plan, backend))
    other_plan = plan.model_copy(update={"seed": 5})
    with pytest.raises(UsageError, match=r"the run differs.*'seed': 0"):
        time_arms(arms, rows_file, other_plan, backend, workdir=tmp_path, resume=True)
    other_arms = [arm("control"), arm("candidate", busy_us=1)]
    with pytest.raises(UsageError, match=r"the run differs.*arm candidate"):
        time_arms(other_arms, rows_file, plan, backend, workdir=tmp_path, resume=True)


def test_labels_must_differ(rows_file, plan, arm):
    with pytest.raises(UsageError, match="stand twice"):
        time_arms([arm("control"), arm("control")], rows_file, plan, LocalBackend())


def test_the_same_arm_twice_rarely_claims_a_difference(rows_file, arm):
    # Twenty A/A comparisons: one run, one per batch size. At 95 % each, more than 3 alarms have a
    # chance of 1.6 % if the intervals are honest; those of PROCESS_SD are wider than that.
    plan = BenchPlan(**{**QUICK, "batch_sizes": tuple(range(1, 21))})
    arms = [arm("control", kind="matmul"), arm("candidate", kind="matmul")]
    records = time_arms(arms, rows_file, plan, LocalBackend())
    rows = []
    for size in plan.batch_sizes:
        some = [record for record in records if record.batch_size == size]
        rows += latency_rows(some, "control", "candidate")
    assert len(rows) == 20
    assert sum(row.ci_low > 1 or row.ci_high < 1 for row in rows) <= 3


def make_turns(arm, block_ns, num_blocks=8, num_calls=10):
    return [
        BlockRecord(1, block, arm, 0, np.full(num_calls, int(ns), dtype=np.int64), 1, 1, 0, 0.0)
        for block, ns in zip(range(num_blocks), block_ns, strict=True)
    ]


@pytest.mark.parametrize("speedup", [0.5, 1.0, 1.02, 3.0])
def test_stopping_looks_at_the_width_and_not_at_the_position(speedup):
    plan = BenchPlan(**{**QUICK, "target_relative_width": 0.06})
    quiet = [1000 * (1 + 0.002 * (-1) ** (block // 2)) for block in range(8)]
    noisy = [1000 * (1 + 0.2 * (-1) ** (block // 2)) for block in range(8)]
    for shape, settled in ((quiet, True), (noisy, False)):
        records = make_turns("control", [speedup * ns for ns in shape])
        records += make_turns("candidate", [1000] * 8)
        assert is_settled(records, ["control", "candidate"], plan) is settled


def test_too_few_calls_never_settle():
    plan = BenchPlan(**{**QUICK, "min_num_samples": 81})
    records = make_turns("control", [1000] * 8) + make_turns("candidate", [1000] * 8)
    assert not is_settled(records, ["control", "candidate"], plan)
