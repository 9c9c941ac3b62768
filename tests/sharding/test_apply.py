from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankopt.errors import UsageError
from rankopt.jobs.shard_plan import plan_shards
from rankopt.sharding.apply import torchrec_plan
from rankopt.sharding.report import write_plan
from rankopt.sharding.setting import ShardingType
from rankopt.sharding.topology import Topology

SCRIPT = Path(__file__).with_name("run_sharded.py")


def card(folder: Path) -> Path:
    file = folder / "card.yaml"
    file.write_text(
        f"name: three\nfactory: {SCRIPT}:Net\noutputs: [{{name: y, label: y}}]\n"
        "inputs:\n- kind: kjt\n  name: features\n  features:\n"
        + "".join(
            f"  - {{key: f_{name}, column: {name}, num_ids: {rows}, max_length: 3}}\n"
            for name, rows in (("a", 50), ("b", 11), ("c", 7))
        )
    )
    return file


@pytest.mark.parametrize("kinds", [("table_wise",), ("column_wise",), ("data_parallel",)])
def test_two_processes_run_a_plan_and_agree_with_the_whole(
    tmp_path: Path, cpus: Topology, kinds: tuple[ShardingType, ...]
) -> None:
    plan = plan_shards(card(tmp_path), cpus, sharding_types=kinds)
    assert {table.sharding_type for table in plan.tables} == set(kinds)
    out = tmp_path / "plan.json"
    write_plan(plan, out)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(SCRIPT), str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_tables_outside_of_collections_are_named(cpus: Topology) -> None:
    plan = plan_shards("dlrm-synthetic", cpus)
    with pytest.raises(UsageError, match=r"tables\.bags\.0"):
        torchrec_plan(plan)
