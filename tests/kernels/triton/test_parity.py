"""The Triton kernels against fp64 on the grid of their C++ siblings, under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rankopt.kernels.registry import KERNELS

pytest.importorskip("triton")
FOLDER = Path(__file__).parent
WITH_TRITON = sorted(name for name, kernel in KERNELS.items() if kernel.triton is not None)
# Of 994 cases of the lookup, those with many lists are left to a GPU: see grid.py.
MIN_CASES = {"lookup_rows": 500}


def run(script: str, *arguments: str) -> str:
    paths = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def grids() -> dict[str, Any]:
    """Run all grids, in two processes side by side: the interpreter keeps to one core."""
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(
            lambda names: run("grid.py", *names), (WITH_TRITON[::2], WITH_TRITON[1::2])
        )
        return {name: grid for half in halves for name, grid in json.loads(half).items()}


@pytest.fixture(scope="module")
def num_compiled() -> dict[str, int]:
    """Compile all kernels for an H100."""
    found: dict[str, int] = json.loads(run("compile_sm90.py", *WITH_TRITON))
    return found


@pytest.mark.parametrize("name", WITH_TRITON)
def test_kernel_agrees_with_its_reference_on_the_grid(grids: dict[str, Any], name: str) -> None:
    report = grids[name]
    assert report["num_cases"] >= MIN_CASES.get(name, len(KERNELS[name].cases))
    assert report["failed"] == {}


def test_fp16_adds_up_in_fp32() -> None:
    worst = json.loads(run("halves.py"))
    assert len(worst) == 4
    assert max(worst.values()) <= 1.0


def test_every_family_that_a_gpu_needs_has_a_kernel() -> None:
    needed = {"lookup_rows", "lookup_sequences", "dot_interaction", "fm_interaction"}
    needed |= {"target_attention", "hstu_attention", "hstu_candidate_attention", "ragged_sum"}
    assert set(WITH_TRITON) == needed


@pytest.mark.parametrize("name", WITH_TRITON)
def test_kernel_compiles_for_hopper_without_a_gpu(num_compiled: dict[str, int], name: str) -> None:
    assert num_compiled[name] >= 1


def test_compiler_sees_that_kernels_write_to_their_result_alone() -> None:
    written = json.loads(run("traced.py"))
    assert written.pop("ragged_rows") == []
    assert set(map(tuple, written.values())) == {("out",)}
    assert len(written) == len(WITH_TRITON)


def test_whole_models_score_the_same_with_the_operators_of_a_gpu() -> None:
    report = json.loads(run("graphs.py"))
    assert {operator for each in report.values() for operator in each["operators"]} == {
        f"rankopt_gpu.{name}"
        for name in (
            *("lookup_planned", "dot_interaction", "target_attention"),
            *("hstu_attention", "hstu_candidate_attention"),
        )
    }
    for name, each in report.items():
        assert each["error"] < 1e-5, name
