"""Arms in Ray actors. Ray takes seconds to start, so the tests share one where they can."""

from __future__ import annotations

import json
import logging
import tempfile

import numpy as np
import pytest
import ray
import torch

from bench.conftest import QUICK
from rankopt.bench import ray_backend
from rankopt.bench.ab import run_ab
from rankopt.bench.plan import BenchPlan
from rankopt.bench.ray_backend import RayBackend
from rankopt.bench.rows_file import write_rows
from rankopt.bench.timing import time_arms
from rankopt.errors import EnvironmentProblem

CARD = """
name: sent
factory: net.py:Net
inputs: [{name: dense, kind: dense, columns: [a, b, c, d]}]
outputs: [{name: score, label: y}]
"""


def test_ray_is_started_used_and_ended(rows, card, arm, tmp_path):
    assert not ray.is_initialized()
    # Two threads each and two cores in all: three actors asking for cores of their own would hang.
    plan = BenchPlan(**{**QUICK, "num_threads": 2})
    arms = arm("control", busy_us=900), arm("candidate", busy_us=300)
    result = run_ab(
        *arms, baselines=[arm("plain", busy_us=600)],
        rows=rows, card=card, plan=plan, backend=RayBackend(), workdir=tmp_path,
    )  # fmt: skip
    assert not ray.is_initialized()
    expected = torch.sigmoid(rows.features["dense"].double().sum(dim=1)).numpy()
    np.testing.assert_allclose(result.candidate_predictions["score"], expected, rtol=1e-5)
    [row] = result.latency
    assert 2 < row.speedup < 4
    for environment in result.environments.values():
        assert environment["num_threads"] == environment["omp_max_threads"] == 2
        assert environment["omp_num_threads"] == "2"
        assert environment["threads_set_before_torch"]
    assert all(record.idle_cpu_share is not None for record in result.records)


@pytest.fixture(scope="module")
def local_ray():
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100 * 2**20,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


def test_a_killed_actor_is_replaced_and_files_are_sent_again(local_ray, rows, arm, tmp_path):
    model = tmp_path / "model"
    (model / "artifact" / "weights").mkdir(parents=True)
    (model / "artifact" / "weights" / "scale.txt").write_text("3.0")
    (model / "artifact" / "manifest.json").write_text("{}")
    (model / "card.yaml").write_text(CARD)
    (model / "net.py").write_text("# 0.5\n")
    fragile = arm(
        "candidate", kind="sent", driver_folder=str(model), die_at=20, tally=str(tmp_path / "tally")
    ).model_copy(update={"card": model / "card.yaml", "artifact": model / "artifact"})
    rows_file = write_rows(rows, tmp_path / "rows.safetensors")
    plan = BenchPlan(**QUICK)

    records = time_arms(
        [arm("control"), fragile], rows_file, plan, RayBackend(ship_files=True),
        workdir=tmp_path / "run",
    )  # fmt: skip

    assert ray.is_initialized(), "a Ray that was there before is left running"
    assert (tmp_path / "tally").read_text() == "x", "the death was planted"
    assert len(records) == 2 * plan.min_blocks
    lines = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    [event] = [line for line in lines if line["type"] == "event"]
    assert event["arm"] == "candidate"
    assert "Ray worker ended" in event["reason"]


def test_a_cluster_without_free_cpus_is_an_error_and_not_a_hang(
    local_ray, rows, arm, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray_backend, "PLACEMENT_TIMEOUT_S", 1)
    taken = ray.util.placement_group([{"CPU": 2}])
    assert taken.wait(30)
    rows_file = write_rows(rows, tmp_path / "rows.safetensors")
    try:
        with pytest.raises(EnvironmentProblem, match="no node with 1 free CPUs"):
            time_arms([arm("control")], rows_file, BenchPlan(**QUICK), RayBackend())
    finally:
        ray.util.remove_placement_group(taken)


def test_an_address_where_no_ray_is_is_an_error(arm, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(**_):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    rows_file = write_rows(rows, tmp_path / "rows.safetensors")
    with pytest.raises(EnvironmentProblem, match=r"cannot be reached at 10.0.0.1:6379: nobody"):
        time_arms([arm("control")], rows_file, BenchPlan(**QUICK), RayBackend("10.0.0.1:6379"))
