"""Runs killed by kill -9 at any moment, and taken up again, end as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run_killed.py")

PLAN = {
    "plain": [
        [],
        [["step", 30]],  # between two checkpoints, after an evaluation
        [["write", 1], ["write", 4], ["index", 3]],  # within checkpoints and best weights
        [["swap", 2], ["swap", 4], ["step", 10], ["result", 1]],
        [["time", 0.2], ["time", 0.3], ["time", 0.25]],
    ],
    "stops": [[["evaluation", 6]], [["evaluation", 1], ["step", 40], ["end", 1]]],
    "sparse": [[["step", 45], ["step", 9]]],
    "fused": [[["step", 33], ["index", 2]]],
    "compiled": [[["step", 17], ["step", 9]]],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    (folder / "plan.json").write_text(json.dumps(PLAN))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def runs_of(answers):
    for variant, (undisturbed, *runs) in answers.items():
        for index, run in enumerate(runs):
            yield f"{variant} {index}", undisturbed, run, PLAN[variant][index]


def test_every_process_was_killed_but_the_last(answers):
    for name, _, run, kills in runs_of(answers):
        by_clock = any(moment == "time" for moment, _ in kills)
        assert by_clock or run["ends"] == [*["killed"] * len(kills), "0"], name
        assert set(run["ends"]) <= {"killed", "0"}, name
        assert run["beside"] == ["out"], name


@pytest.mark.parametrize("what", ["files", "curve", "quality"])
def test_weights_optimizers_curve_and_quality_are_those_of_an_undisturbed_run(answers, what):
    for name, undisturbed, run, _ in runs_of(answers):
        assert run[what] == undisturbed[what], name
    assert set(answers["sparse"][0]["files"]) == {"checkpoint.safetensors", "optimizer.pt"}


def test_the_variants_learn_differently_and_one_stops_early(answers):
    weights = [runs[0]["files"]["checkpoint.safetensors"] for runs in answers.values()]
    assert len(set(weights)) == len(weights)
    curve = [point["validation_ne"] for point in answers["stops"][0]["curve"]]
    assert len(curve) < 18
    assert min(curve) not in curve[-3:]


def test_the_journal_tells_of_every_process_and_its_time_adds_up(answers):
    for name, undisturbed, run, kills in runs_of(answers):
        events = [json.loads(line) for line in run["journal"]]
        assert events[0]["event"] == "start", name
        assert events[-1]["event"] == "end", name
        told = run["goodput"]
        wall_ns = events[-1]["t_ns"] - events[0]["t_ns"]
        assert sum(told["times_ns"].values()) == told["wall_ns"], name
        assert told["wall_ns"] == pytest.approx(wall_ns, rel=0.02), name
        done = [event for event in events if event["event"] == "steps"]
        # What is left of every step, once the lost ones are taken off, is each step once.
        num_done = sum(event["last"] - event["first"] + 1 for event in done)
        assert num_done - told["num_redone_steps"] == events[-1]["num_steps"], name
        assert told["times_ns"]["steps"] > 0, name
        assert (told["times_ns"]["checkpoint"] > 0) == (run is not undisturbed), name
        if any(moment == "step" and count > 8 for moment, count in kills):
            assert told["num_redone_steps"] > 0, name
            assert told["times_ns"]["redone_steps"] > 0, name
            assert told["times_ns"]["down"] > 0, name


def test_a_run_without_checkpoints_has_a_journal_too(answers):
    undisturbed = answers["plain"][0]
    told = undisturbed["goodput"]
    assert undisturbed["beside"] == ["out"]
    assert told["times_ns"]["checkpoint"] == told["times_ns"]["down"] == 0
    assert told["num_restarts"] == 0
    assert [json.loads(line)["event"] for line in undisturbed["journal"]][-1] == "end"
