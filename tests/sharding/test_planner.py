from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankopt.errors import UsageError
from rankopt.jobs.shard_plan import plan_shards
from rankopt.sharding.planner import SettingProblem, Solution, solve
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.setting import SHARDING_TYPES, Kernel, Setting, ShardingType
from rankopt.sharding.tables import ModelTables, Table
from rankopt.sharding.topology import Topology, load_topology
from sharding.planted import model_of

BATCH = 256
TRAINING: tuple[Kernel, ...] = ("dense", "fused")


def of(
    kinds: tuple[ShardingType, ...] = SHARDING_TYPES,
    kernels: tuple[Kernel, ...] = TRAINING,
    load_factor: float | None = None,
) -> Setting:
    return Setting("s", kinds, kernels, "fp32", "adagrad", load_factor)


def assert_tiles(solution: Solution, model: ModelTables) -> None:
    """Every value of every table lies on exactly one rank, or on all of them."""
    for table in model.tables:
        held = np.zeros((table.num_rows, table.dim), dtype=np.int8)
        shards = [s for s in solution.shards if s.shard.table.name == table.name]
        for part in shards:
            rows = slice(part.row_offset, part.row_offset + part.shard.num_rows)
            columns = slice(part.column_offset, part.column_offset + part.shard.num_columns)
            held[rows, columns] += 1
        copies = solution.topology.world_size
        expected = copies if shards[0].shard.sharding_type == "data_parallel" else 1
        assert (held == expected).all()


@pytest.mark.parametrize("kind", SHARDING_TYPES)
def test_each_way_to_shard_tiles_every_table(
    model: ModelTables, gpus: Topology, kind: ShardingType
) -> None:
    solution = solve(model, gpus, of((kind,)), BATCH)
    assert solution.fits
    assert {part.shard.sharding_type for part in solution.shards} == {kind}
    assert_tiles(solution, model)


def test_ranks_add_up_and_stay_within_what_they_have(model: ModelTables, gpus: Topology) -> None:
    solution = solve(model, gpus, of(), BATCH)
    assert_tiles(solution, model)
    for rank in solution.ranks:
        own = [part for part in solution.shards if part.rank == rank.rank]
        dense = 20 * model.dense_parameters
        assert rank.use.hbm.total == sum(part.use.hbm.total for part in own) + dense
        assert rank.use.hbm.total <= gpus.hbm_bytes
    assert solution.step_ns == max(rank.step_ns for rank in solution.ranks)


def test_a_free_choice_is_no_slower_than_one_way(model: ModelTables, gpus: Topology) -> None:
    free = solve(model, gpus, of(), BATCH)
    forced = [solve(model, gpus, of((kind,)), BATCH) for kind in ("table_wise", "row_wise")]
    assert free.step_ns <= min(solution.step_ns for solution in forced) * 1.001


def test_more_bandwidth_takes_less_time(model: ModelTables, gpus: Topology) -> None:
    rates = gpus.bandwidth_gb_per_s.model_copy(update={"inter_host": 250.0})
    faster = gpus.model_copy(update={"bandwidth_gb_per_s": rates})
    setting = of(("table_wise",))
    slow, fast = solve(model, gpus, setting, BATCH), solve(model, faster, setting, BATCH)
    assert fast.all_to_all_ns == pytest.approx(slow.all_to_all_ns / 10, rel=0.05)


def test_vectors_in_half_the_bytes_take_half_the_time(model: ModelTables, gpus: Topology) -> None:
    setting = of(("table_wise",))
    whole = solve(model, gpus, setting, BATCH)
    half = solve(model, gpus, replace(setting, communication="fp16"), BATCH)

    def vectors(solution: Solution) -> float:
        return sum(rank.times.vectors_ns for rank in solution.ranks)

    assert vectors(half) == pytest.approx(vectors(whole) / 2)


def test_on_one_rank_a_lookup_takes_its_bytes_over_the_bandwidth(gpus: Topology) -> None:
    single = gpus.model_copy(update={"num_hosts": 1, "ranks_per_host": 1})
    table = Table("t", "t", num_rows=100_000, dim=128, ids_per_row=10)
    solution = solve(model_of(table), single, of(("table_wise",)), BATCH)
    # Ids in, rows read, pooled vectors out; torchrec's formula for a 128-wide row.
    moved = BATCH * (10 * 8 + 10 * 128 * 4 + 128 * 4)
    assert solution.ranks[0].times.lookup_ns == pytest.approx(moved / 2000e9 * 1e9, rel=0.01)


def test_large_tables_spill_to_the_host_and_hot_ones_stay(gpus: Topology) -> None:
    cold = [Table(f"cold_{i}", "c", num_rows=6_000_000, dim=64) for i in range(2)]
    hot = Table("hot", "hot", num_rows=1_000_000, dim=64, ids_per_row=50)
    model = model_of(*cold, hot)
    assert not solve(model, gpus, of(), BATCH).fits
    cached = of(kernels=(*TRAINING, "fused_uvm_caching"), load_factor=0.1)
    solution = solve(model, gpus, cached, BATCH)
    assert solution.fits
    kernels = {part.shard.table.name: part.shard.kernel for part in solution.shards}
    assert "fused_uvm_caching" in {kernels["cold_0"], kernels["cold_1"]}
    assert kernels["hot"] == "fused"
    assert all(rank.use.host.total <= gpus.host_bytes for rank in solution.ranks)


def test_what_does_not_run_on_cpus_is_said(model: ModelTables, cpus: Topology) -> None:
    # fbgemm's dense lookup would pool the sequence, and take a rank without a row for a GPU.
    for kind, name in (("data_parallel", "item"), ("row_wise", "one")):
        with pytest.raises(SettingProblem, match=f"{kind}.*does not run on cpu for {name}"):
            solve(model, cpus, of((kind,), ("dense", "fused")), BATCH)


def tables_file(folder: Path, num_rows: int, **options: int) -> Path:
    file = folder / "tables.yaml"
    dense = options.get("dense_parameters", 0)
    file.write_text(
        f"name: planted\ntables: [{{name: t, num_rows: {num_rows}, dim: 64, count: 4}}]\n"
        f"dense_parameters: {dense}\n"
    )
    return file


def test_a_plan_that_fits_keeps_fp32_in_device_memory(tmp_path: Path, gpus: Topology) -> None:
    plan = plan_shards(tables_file(tmp_path, 100_000), gpus, load_factors=(0.2,))
    assert (plan.fits, plan.precision, plan.remedies) == (True, "fp32", ())
    assert {table.compute_kernel for table in plan.tables} <= {"fused", "dense"}
    assert sum(alternative.chosen for alternative in plan.alternatives) == 1
    chosen = next(alternative for alternative in plan.alternatives if alternative.chosen)
    exact = [a.step_ns for a in plan.alternatives if a.fits and a.changes is None]
    assert chosen.step_ns == min(step for step in exact if step is not None) == plan.step_ns
    names = [alternative.name for alternative in plan.alternatives]
    assert len(set(names)) == len(names)
    for kind in SHARDING_TYPES:
        assert f"{plan.chosen}, {kind} alone" in names or plan.chosen.endswith("alone")


def test_caching_comes_before_fp16_and_fp16_where_it_must(tmp_path: Path, gpus: Topology) -> None:
    # 3.5 GiB of rows and as much state over 4 ranks with 0.9 GiB each; the hosts have room.
    file = tables_file(tmp_path, 3_600_000)
    plan = plan_shards(file, gpus, load_factors=(0.2,))
    assert (plan.fits, plan.precision) == (True, "fp32")
    assert "fused_uvm_caching" in {table.compute_kernel for table in plan.tables}
    assert "has 922 MiB" in plan.reason

    # Without room on the hosts, and with row-wise state, only smaller rows fit.
    file = tables_file(tmp_path, 5_000_000)
    full = gpus.model_copy(update={"host_memory_gib": 0.5})
    plan = plan_shards(file, full, optimizer="row_wise_adagrad", load_factors=(0.2,))
    assert (plan.fits, plan.precision) == (True, "fp16")
    assert "no plan with fp32 rows fits" in plan.reason
    assert max(rank.hbm.total_bytes for rank in plan.ranks) <= full.hbm_bytes


def test_an_overcommitted_plan_keeps_its_breakdown_and_lists_what_helps(
    tmp_path: Path, gpus: Topology
) -> None:
    poor = gpus.model_copy(update={"host_memory_gib": 2.0})
    file = tables_file(tmp_path, 6_000_000)
    plan = plan_shards(file, poor, load_factors=(0.1, 0.2))
    assert not plan.fits
    assert plan.step_ns is None
    assert any(a.fits for a in plan.alternatives) is False
    stored = sum(rank.hbm.weights_bytes + rank.host_memory.weights_bytes for rank in plan.ranks)
    assert stored >= plan.table_bytes == 4 * 6_000_000 * 64 * 4
    assert max(r.hbm.over_bytes + r.host_memory.over_bytes for r in plan.ranks) > 0
    assert [remedy.number for remedy in plan.remedies] == list(range(1, len(plan.remedies) + 1))
    texts = [remedy.text for remedy in plan.remedies]
    assert any(text.startswith("fp16 rows") for text in texts)
    assert any("load factor" in text for text in texts)
    assert all("GiB" in text or "MiB" in text for text in texts)
    assert [r.fits for r in plan.remedies] == sorted((r.fits for r in plan.remedies), reverse=True)

    # What is promised holds: the plan over that many hosts fits, over one fewer it does not.
    hosts = next(remedy for remedy in plan.remedies if "more host" in remedy.what)
    assert hosts.fits
    count = int(hosts.what.split(", ")[1].split()[0])
    for number, fits in ((count, True), (count - 1, False)):
        wider = poor.model_copy(update={"num_hosts": number})
        setting = replace(of(), name="again")
        chosen = next(a for a in plan.alternatives if a.name == plan.chosen)
        setting = replace(setting, kernels=chosen.kernels, load_factor=chosen.load_factor)
        assert solve(_tables(file), wider, setting, 2048).fits is fits


def _tables(file: Path) -> ModelTables:
    from rankopt.sharding.card_tables import read_model_tables

    return read_model_tables(file)


def test_serving_quantises_and_keeps_no_state(tmp_path: Path, gpus: Topology) -> None:
    plan = plan_shards(tables_file(tmp_path, 3_600_000), gpus, serving=True, load_factors=(0.2,))
    assert (plan.fits, plan.precision, plan.optimizer) == (True, "int8", None)
    assert {table.compute_kernel for table in plan.tables} == {"quant"}
    for rank in plan.ranks:
        assert rank.hbm.optimizer_bytes == 0
        assert rank.update_ns == 0
    assert plan.table_bytes == 4 * 3_600_000 * 68


def test_adam_of_a_card_is_not_planned_on_cpus(cpus: Topology) -> None:
    plan = plan_shards("dlrm-synthetic", cpus)
    assert plan.optimizer == "adagrad"
    assert any("Adam" in note for note in plan.notes)
    asked = plan_shards("dlrm-synthetic", cpus, optimizer="adam")
    assert {table.sharding_type for table in asked.tables} == {"data_parallel"}


def test_wrong_settings_are_told_all_at_once(tmp_path: Path, cpus: Topology) -> None:
    with pytest.raises(UsageError) as caught:
        plan_shards(
            tables_file(tmp_path, 10),
            cpus,
            batch_size=0,
            precision="int8",
            kernels=("fused_uvm",),
            load_factors=(0.0, 1.0),
        )
    wheres = {problem.where for problem in caught.value.problems}
    assert wheres == {"--batch-size", "--precision", "--kernels", "--load-factors"}
    with pytest.raises(UsageError, match=r"--sharding-types: .*table_wise"):
        plan_shards(
            tables_file(tmp_path, 10), cpus, serving=True, sharding_types=("data_parallel",)
        )


def test_a_table_that_nothing_asked_for_can_shard_is_named(tmp_path: Path, cpus: Topology) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(
        "name: m\ntables:\n- {name: bag, num_rows: 10, dim: 16}\n"
        "- {name: clicks, num_rows: 10, dim: 16, pooling: none}\n"
    )
    with pytest.raises(
        UsageError,
        match=r"--sharding-types: .*data_parallel with .* does not run on cpu for clicks",
    ):
        plan_shards(file, cpus, sharding_types=("data_parallel",))
    # Every table may be copied but the sequence.
    plan = plan_shards(file, cpus)
    kinds = {table.name: table.sharding_type for table in plan.tables}
    assert kinds["clicks"] != "data_parallel"


def test_a_plan_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    file = tables_file(tmp_path, 30_000_000)
    answers = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [
                sys.executable, "-m", "rankopt", "shard", "plan", str(file),
                "--topology", "8xh100", "--load-factors", "0.2", "--json",
            ],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )  # fmt: skip
        answers.append(done.stdout)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["8xh100", "2x8xa100"])
def test_a_terabyte_is_planned_in_a_minute_and_little_memory(name: str) -> None:
    code = (
        "import resource, sys; from rankopt.cli.main import main;"
        f"code = main(['shard', 'plan', '1tb', '--topology', {name!r}, '--json',"
        " '--load-factors', '0.1']);"
        "use = resource.getrusage(resource.RUSAGE_SELF);"
        "print(use.ru_maxrss, use.ru_utime + use.ru_stime, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak_kib, cpu_s = map(float, done.stderr.splitlines()[-1].split())
    assert peak_kib < 4 * 2**20
    # CPU time: the suite shares its cores, and a plan is one thread.
    assert cpu_s < 60
    plan = ShardPlan.model_validate(json.loads(done.stdout))
    topology = load_topology(name)
    assert plan.fits
    assert plan.table_bytes >= 10**12
    # It must: fp32 rows and their state do not fit device memory.
    assert 2 * plan.table_bytes > topology.world_size * topology.hbm_bytes
    kernels = {table.compute_kernel for table in plan.tables}
    assert plan.precision == "fp16" or kernels & {"fused_uvm", "fused_uvm_caching"}
    for rank in plan.ranks:
        assert rank.hbm.total_bytes <= rank.hbm.capacity_bytes == topology.hbm_bytes
        assert rank.host_memory.total_bytes <= rank.host_memory.capacity_bytes
