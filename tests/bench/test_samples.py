from __future__ import annotations

import json

import numpy as np
import pytest

from rankopt.bench.samples import BlockRecord, SampleFile
from rankopt.errors import EnvironmentProblem, OutputExistsError, UsageError

FINGERPRINT = {"plan": {"batch_sizes": (1, 2)}, "rows": "abc"}


def make_record(arm, block=0, batch_size=1):
    return BlockRecord(
        batch_size=batch_size,
        block=block,
        arm=arm,
        turn=0,
        latency_ns=np.array([5, 2**40], dtype=np.int64),
        wall_ns=9,
        cpu_ns=8,
        started_ns=7,
        idle_cpu_share=0.25,
    )


def test_finished_blocks_come_back(tmp_path):
    path = tmp_path / "samples.jsonl"
    file = SampleFile(path, FINGERPRINT)
    file.set_num_calls(1, 17)
    file.add_event("restart", arm="control", reason="killed")
    file.add_block([make_record("control"), make_record("candidate")])

    again = SampleFile(path, FINGERPRINT, resume=True)

    control, candidate = again.block(1, 0, ["control", "candidate"])
    assert control.latency_ns.tolist() == [5, 2**40]
    assert control.latency_ns.dtype == np.int64
    assert (control.arm, candidate.arm) == ("control", "candidate")
    assert control.to_json() == make_record("control").to_json()
    assert again.num_calls(1) == 17
    assert [event["reason"] for event in again.events] == ["killed"]
    assert again.block(1, 1, ["control", "candidate"]) is None
    assert again.num_resumed == 2


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_costs_that_block_only(tmp_path, cut):
    path = tmp_path / "samples.jsonl"
    file = SampleFile(path, FINGERPRINT)
    file.add_block([make_record("control"), make_record("candidate")])
    file.add_block([make_record("control", 1), make_record("candidate", 1)])
    path.write_bytes(path.read_bytes()[:-cut])

    again = SampleFile(path, FINGERPRINT, resume=True)

    assert again.block(1, 0, ["control", "candidate"]) is not None
    assert again.block(1, 1, ["control", "candidate"]) is None
    again.add_block([make_record("control", 1), make_record("candidate", 1)])
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_file_with_samples_is_not_started_anew(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleFile(path, FINGERPRINT)
    before = path.read_bytes()
    with pytest.raises(OutputExistsError, match="--resume"):
        SampleFile(path, FINGERPRINT)
    assert path.read_bytes() == before


def test_another_run_is_refused_and_the_difference_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleFile(path, FINGERPRINT)
    with pytest.raises(UsageError, match="rows: 'abc' then, 'other' now"):
        SampleFile(path, {**FINGERPRINT, "rows": "other"}, resume=True)


def test_another_environment_is_refused_and_the_difference_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleFile(path, FINGERPRINT).add_environment("control", {"host": "one", "num_threads": 2})
    again = SampleFile(path, FINGERPRINT, resume=True)
    again.add_environment("control", {"host": "one", "num_threads": 2})
    with pytest.raises(UsageError, match="host: 'one' then, 'two' now"):
        again.add_environment("control", {"host": "two", "num_threads": 2})


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleFile(path, FINGERPRINT).add_block([make_record("control")])
    path.write_text(path.read_text() + "garbage\n" + "{}\n")
    with pytest.raises(UsageError, match="line 3 is damaged"):
        SampleFile(path, FINGERPRINT, resume=True)


def test_an_unwritable_file_is_a_clear_error(tmp_path):
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        SampleFile(tmp_path / "nowhere" / "samples.jsonl", FINGERPRINT)
