from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankopt.diagnose.collectives import QUICK_SIZES, measure_collectives
from rankopt.errors import UsageError
from rankopt.sharding.collectives import CollectivesFile
from rankopt.sharding.lookups import LookupsFile
from rankopt.sharding.topology import load_topology


def test_two_processes_are_measured_and_feed_a_plan(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "machine"
    result = cli("diagnose", "--collectives", "--backend", "gloo", "--quick", "--out", out)
    assert result.exit_code == 0, result.stderr
    found = CollectivesFile.model_validate_json((out / "collectives.json").read_text())
    assert (found.backend, found.world_size) == ("gloo", 2)
    assert [item.collective for item in found.collectives] == ["all_to_all", "all_reduce"]
    for item in found.collectives:
        assert [message.size_bytes for message in item.messages] == list(QUICK_SIZES)
        for message in item.messages:
            assert message.lowest_ns <= message.p50_ns <= message.highest_ns
        # A thousand times the bytes do not take a thousand times as long.
        assert item.messages[-1].bytes_per_s > item.messages[0].bytes_per_s

    topology = load_topology(out / "topology.yaml")
    assert topology.world_size == 2
    measured = topology.curve("all_to_all", within_host=True)
    assert measured == found.collectives[0]

    lookups = LookupsFile.model_validate_json((out / "lookups.json").read_text())
    assert topology.measured_lookups == lookups
    assert topology.bandwidth_gb_per_s.host_memory == pytest.approx(
        lookups.host_memory_bytes_per_s / 1e9, abs=0.001
    )
    for row in lookups.rows:
        # Something is measured, and an update takes longer than nothing.
        assert row.lookup.time_ns(1, 1) > 0
        assert all(cost.time_ns(1, 1) > 0 for cost in row.update.values())

    tables = tmp_path / "tables.yaml"
    tables.write_text("name: m\ntables: [{name: t, num_rows: 100_000, dim: 32, count: 2}]\n")
    planned = cli(
        "shard", "plan", tables, "--topology", out / "topology.yaml",
        "--sharding-types", "table_wise", "--json",
    )  # fmt: skip
    plan = json.loads(planned.stdout)
    # Ids, vectors and gradients are a message each, none of them shorter than the latency.
    latency = min(message.p50_ns for message in found.collectives[0].messages)
    assert plan["all_to_all_ns"] >= 3 * latency
    # Each rank reads one of the tables for the rows of both.
    num_ids = 2 * plan["batch_size"]
    assert plan["ranks"][0]["lookup_ns"] == pytest.approx(lookups.lookup_ns(32, num_ids, num_ids))
    assert any("measured times of lookups" in note for note in plan["notes"])


def test_one_process_has_nobody_to_talk_to() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        measure_collectives(num_processes=1, backend="gloo")


def test_flags_that_do_not_go_together_are_refused(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("diagnose", "--out", out)
    assert result.exit_code == 2
    assert "--collectives" in result.stderr
    result = cli(
        "diagnose", "dlrm-synthetic", "--backend", "mpi", "--num-processes", 2, "--out", out
    )
    assert result.exit_code == 2
    assert "gloo or nccl" in result.stderr
    assert "--num-processes" in result.stderr
    assert not out.exists()
