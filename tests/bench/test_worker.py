"""The worker in this process: what backends carry messages to."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from bench import fake_arms
from rankopt.bench.arms import loader_reference
from rankopt.bench.backend import KEPT_MEMORY, worker_environment
from rankopt.bench.rows_file import write_rows
from rankopt.bench.worker import ArmWorker, BlockSamples
from rankopt.errors import RankoptError


@pytest.fixture
def worker(rows, arm, tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # put back afterwards; the worker sets them too
    monkeypatch.setenv("NUMEXPR_NUM_THREADS", "1")
    for name, value in KEPT_MEMORY.items():
        monkeypatch.setenv(name, value)
    worker = ArmWorker(1)
    worker.load(arm(busy_us=300), loader_reference("fake-busy"))
    worker.put_rows(write_rows(rows, tmp_path / "rows.safetensors"))
    return worker


def test_a_block_times_each_call_and_its_own_cpu(worker):
    worker.warm_up(2, 3, 0)
    block = worker.time_block(2, 0, 10, 0, [])
    assert block.latency_ns.shape == (10,)
    assert block.latency_ns.min() >= 300_000
    assert block.wall_ns >= block.latency_ns.sum()
    # Far below the 3 ms of busy looping: the machine may be shared, and preempt it.
    assert 500_000 <= block.cpu_ns <= 4 * block.wall_ns
    assert block.idle_cpu_share == 0


def test_arms_keep_their_memory_between_calls(worker):
    assert worker.environment()["malloc"] == KEPT_MEMORY


def test_the_callers_own_malloc_settings_stand(monkeypatch):
    for name in KEPT_MEMORY:
        monkeypatch.delenv(name, raising=False)
    assert KEPT_MEMORY.items() <= worker_environment(2, None).items()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    assert worker_environment(2, None)["MALLOC_TRIM_THRESHOLD_"] == "65536"


SPINNER = """
import threading, time
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
print("spinning", flush=True)
time.sleep(60)
"""


def test_a_neighbour_whose_threads_spin_shows_in_its_cpu_clock(worker):
    worker.warm_up(2, 3, 0)
    with subprocess.Popen([sys.executable, "-c", SPINNER], stdout=subprocess.PIPE) as neighbour:
        neighbour.stdout.readline()
        block = worker.time_block(2, 0, 100, 0, [neighbour.pid])
        neighbour.kill()
    assert block.idle_cpu_share > 0.05
    assert worker.time_block(2, 0, 5, 0, [neighbour.pid]).idle_cpu_share is None, "it has ended"


def test_a_process_without_a_clock_is_not_guessed_at():
    block = BlockSamples(np.ones(1, dtype=np.int64), 10, 1, 0, None)
    assert block.idle_cpu_share is None


def test_warm_up_lasts_as_long_as_asked(worker):
    assert len(worker.warm_up(2, 5, 0)) == 5
    assert len(worker.warm_up(2, 1, 10_000_000)) > 5


@pytest.mark.parametrize("batch_size", [1, 7, 16, 100, 512])
def test_predictions_follow_the_rows_whatever_the_batch(worker, rows, batch_size):
    expected = rows.features["dense"].double().sum(dim=1).numpy()
    scores = worker.predict(0, 100, batch_size)["score"]
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    part = worker.predict(33, 34, batch_size)["score"]
    np.testing.assert_allclose(part, expected[33:34], rtol=1e-5, atol=1e-6)


def test_no_call_is_smaller_than_the_batch_when_rows_allow(worker):
    sizes = []

    def run(features):
        sizes.append(len(features["dense"]))
        return fake_arms._score(features)

    worker._run = run
    worker.predict(0, 100, 33)  # 100 = 3 * 33 + 1
    assert sizes == [33, 33, 33, 33]


def test_blocks_cycle_through_the_rows(worker):
    seen = []

    def run(features):
        seen.append(features["dense"][0, 0].item())
        return fake_arms._score(features)

    worker._run = run
    worker.warm_up(2, 1, 0)
    seen.clear()
    worker.time_block(2, 0, 25, 0, [])
    first, seen[:] = seen[1:], []  # the first call is the lead-in
    worker.time_block(2, 1, 25, 0, [])
    assert len(set(first)) == 25
    assert not set(first) & set(seen[1:])


def test_errors_come_back_as_values(worker):
    status, value = worker.answer("predict", (0, 0, "x"))
    assert status == "error"
    assert "predict failed" in value
    status, value = ArmWorker(1).answer("predict", (0, 1, 1))
    assert status == "error"
    assert isinstance(value, RankoptError)


def test_received_files_are_joined_and_forgotten(worker):
    path = worker.receive("0/sub/a.bin", b"one")
    assert worker.receive("0/sub/a.bin", b"two") == path
    assert path.read_bytes() == b"onetwo"
    worker.forget_received()
    assert not path.exists()
