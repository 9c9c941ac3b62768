from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankopt.errors import InputError
from rankopt.sharding.lookup_times import lookup_times
from rankopt.sharding.lookups import LookupsFile
from rankopt.sharding.memory import Shard
from rankopt.sharding.planner import solve
from rankopt.sharding.setting import Kernel, Setting, ShardingType
from rankopt.sharding.tables import Table
from rankopt.sharding.topology import Topology, load_topology
from sharding.planted import model_of

BATCH = 100


def costs(**changes: Any) -> dict[str, Any]:
    def cost(id_ns: float, vector_ns: float) -> dict[str, float]:
        return {"id_ns": id_ns, "vector_ns": vector_ns}

    rows = [
        {
            "dim": dim,
            "lookup": cost(dim, 10.0),
            "update": {"sgd": cost(2.0 * dim, 0.0), "adagrad": cost(5.0 * dim, 20.0)},
        }
        for dim in (16, 64)
    ]
    return {
        "made_at": "now", "device": "cpu", "world_size": 2, "num_rows": 1000, "zipf": 1.05,
        "num_samples": 3, "rows": rows, "copied_value_ns": {"adagrad": 2.0},
        "host_memory_bytes_per_s": 1e10, **changes,
    }  # fmt: skip


def measured(cpus: Topology, **changes: Any) -> Topology:
    found = LookupsFile.model_validate(costs(**changes))
    return cpus.model_copy(update={"measured_lookups": found})


def setting(
    kinds: tuple[ShardingType, ...] = ("table_wise",), optimizer: Any = "adagrad"
) -> Setting:
    return Setting("one", kinds, ("dense", "fused"), "fp32", optimizer)


def test_times_are_read_off_between_the_widths() -> None:
    found = LookupsFile.model_validate(costs())
    assert found.lookup_ns(8, 1, 1) == found.lookup_ns(16, 1, 1) == 26
    assert found.lookup_ns(40, 1, 1) == 50
    assert found.lookup_ns(128, 1, 1) == 2 * found.lookup_ns(64, 1, 1)
    assert found.update_ns(64, "adagrad", 2, 3) == 2 * 320 + 3 * 20
    assert found.update_ns(64, "row_wise_adagrad", 2, 3) is None
    assert found.copied_ns("sgd", 10) is None


@pytest.mark.parametrize(
    ("kind", "ids", "vectors"),
    [
        ("table_wise", 2 * BATCH * 3, 2 * BATCH),
        ("column_wise", 2 * BATCH * 3, 2 * BATCH),
        ("row_wise", BATCH * 3, 2 * BATCH),
        ("table_row_wise", 2 * BATCH * 3, 2 * BATCH),
        ("data_parallel", BATCH * 3, BATCH),
    ],
)
def test_a_shard_works_for_the_rows_it_is_sent(
    cpus: Topology, kind: ShardingType, ids: int, vectors: int
) -> None:
    table = Table("t", "t", num_rows=1000, dim=64, ids_per_row=3.0)
    kernel: Kernel = "dense" if kind == "data_parallel" else "fused"
    shard = Shard(table, kind, kernel, num_rows=1000, num_columns=16)
    times = lookup_times(shard, setting(), measured(cpus), BATCH)
    assert times is not None
    assert times[0] == ids * 16 + vectors * 10
    if kind == "data_parallel":
        # Every value of the table is stepped over, whatever was looked up.
        assert times[1] == ids * 32 + 1000 * 16 * 2
    else:
        assert times[1] == ids * 80 + vectors * 20


def test_what_was_not_measured_is_left_to_torchrec(cpus: Topology) -> None:
    shard = Shard(Table("t", "t", num_rows=10, dim=16), "table_wise", "fused", 10, 16)
    assert lookup_times(shard, setting(), cpus, BATCH) is None
    over = measured(cpus)
    assert lookup_times(shard, setting(optimizer="row_wise_adagrad"), over, BATCH) is None
    assert lookup_times(shard, setting(optimizer=None), over, BATCH) == (BATCH * 2 * 26, 0.0)


def test_a_plan_takes_its_times_from_the_measurement(cpus: Topology) -> None:
    table = Table("t", "t", num_rows=1000, dim=64, ids_per_row=2.0)
    solution = solve(model_of(table), measured(cpus), setting(), BATCH)
    (holder,) = [rank for rank in solution.ranks if rank.num_shards]
    assert holder.times.lookup_ns == pytest.approx(2 * BATCH * (2 * 64 + 10))
    assert holder.times.update_ns == pytest.approx(2 * BATCH * (2 * 320 + 20))
    stated = solve(model_of(table), cpus, setting(), BATCH).slowest
    assert stated.times.lookup_ns != pytest.approx(holder.times.lookup_ns, rel=0.5)
    assert stated.times.vectors_ns == pytest.approx(holder.times.vectors_ns)


def test_copying_a_large_table_is_no_longer_free(cpus: Topology) -> None:
    """A step over a whole table makes copies lose to a table that one rank holds."""
    table = Table("t", "t", num_rows=100_000, dim=64)
    both = setting(("data_parallel", "table_wise"))
    (placed, *_) = solve(model_of(table), measured(cpus), both, BATCH).shards
    assert placed.shard.sharding_type == "table_wise"


def test_a_topology_takes_in_a_measurement(tmp_path: Path) -> None:
    raw = {
        "device": "cpu", "num_hosts": 1, "ranks_per_host": 2, "host_memory_gib": 4,
        "bandwidth_gb_per_s": {"host_memory": 50, "intra_host": 6, "inter_host": 3},
        "lookups": "mine.json",
    }  # fmt: skip
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(InputError, match="rankopt diagnose --collectives"):
        load_topology(file)
    (tmp_path / "mine.json").write_text(json.dumps(costs()))
    found = load_topology(file).measured_lookups
    assert found is not None
    assert found.rows[1].dim == 64
    assert "measured_lookups" not in load_topology(file).model_dump()
    for changes, said in (
        ({"device": "cuda"}, "must be the topology's, cpu"),
        ({"rows": costs()["rows"][::-1]}, "must rise in dim"),
        ({"copied_value_ns": {"adagrad": -1.0}}, "copied_value_ns"),
        ({"zipf": float("nan")}, "zipf"),
    ):
        (tmp_path / "mine.json").write_text(json.dumps(costs(**changes)))
        with pytest.raises(InputError, match=said):
            load_topology(file)
