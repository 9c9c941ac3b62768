from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rankopt.errors import UsageError
from rankopt.jobs.shard_measure import GIVEN, measure_plans
from rankopt.jobs.shard_plan import plan_shards
from rankopt.sharding.comparing import compare, order
from rankopt.sharding.measure_task import PartTimes, RankPlan
from rankopt.sharding.measured import PlanMeasurement
from rankopt.sharding.memory import Parts, Use
from rankopt.sharding.report import write_plan
from rankopt.sharding.schema import MemoryParts, RankLoad, ShardPlan
from rankopt.sharding.stand_in import batches, draw_ids, groups, stand_in
from rankopt.sharding.tables import Table
from rankopt.sharding.topology import Topology
from sharding import small_net

TABLES = """
name: few
tables:
  - {name: big, num_rows: 4_000, dim: 32, ids_per_row: 1.5, count: 2}
  - {name: tags, num_rows: 900, dim: 16, ids_per_row: 3, weighted: true}
  - {name: clicks, num_rows: 700, dim: 16, ids_per_row: 2, pooling: none}
dense_parameters: 1_000
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tables") / "few.yaml"
    file.write_text(TABLES)
    return file


def test_plans_are_run_in_turns_and_held_against_what_was_predicted(
    cli: Any, tables: Path, tmp_path: Path
) -> None:
    given, out = tmp_path / "plan.json", tmp_path / "measured"
    plan = plan_shards(
        tables, "2-cpu-hosts", batch_size=64, sharding_types=("table_wise", "row_wise")
    )
    write_plan(plan, given)
    result = cli(
        "shard", "measure", tables, "--topology", "2-cpu-hosts", "--plan", given, "--steps", "3",
        "--sharding-types", "table_wise,row_wise", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "Traceback" not in result.stderr
    found = PlanMeasurement.model_validate_json((out / "measured.json").read_text())
    assert (found.backend, found.world_size, found.batch_size) == ("gloo", 2, 64)
    chosen, *others = found.plans
    assert (chosen.name, chosen.chosen) == (GIVEN, True)
    assert {"table_wise", "row_wise"} <= {one.name for one in found.plans}
    # The given plan is one of the two where the planner found nothing better to mix.
    assert all(one.compared or one.same_as == GIVEN for one in others)
    for one in found.plans:
        if not one.compared:
            continue
        for part in ("step", "lookup", "update", "all_to_all", "all_reduce"):
            item = one.of(part)
            assert item is not None
            assert item.measured is not None
            assert item.measured > 0
            assert item.num_samples == 3
            assert item.ratio is not None
            assert item.ci_low is not None
            assert item.ci_high is not None
            assert item.ci_low <= item.ratio <= item.ci_high
        for part in ("weights", "optimizer"):
            item = one.of(part)
            assert item is not None
            # What a rank holds is counted to the byte.
            assert item.measured == item.predicted > 0
    assert found.ordering.fastest_measured in {one.name for one in found.plans}
    assert "in turns" in (out / "measured.html").read_text()
    assert "Rank correlation" in (out / "measured.html").read_text()
    again = cli(
        "shard", "measure", tables, "--topology", "2-cpu-hosts", "--steps", "3", "--out", out
    )
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_what_cannot_be_measured_is_told_at_once(tables: Path, cpus: Topology) -> None:
    plan = plan_shards(tables, "8xh100")
    with pytest.raises(UsageError) as caught:
        measure_plans(tables, cpus, plan=plan, batch_size=7, zipf=-1, num_steps=1)
    text = str(caught.value)
    for said in ("--zipf", "--steps", "2 ranks on cpu", "--batch-size"):
        assert said in text
    with pytest.raises(UsageError, match="has 0 GPUs"):
        measure_plans(tables, "2x8xa100")
    small = cpus.model_copy(update={"host_memory_gib": 1e-4})
    with pytest.raises(UsageError, match="no plan fits"):
        measure_plans(tables, small)
    other = plan_shards(tables, cpus, ids_per_row={"clicks": 9.0})
    with pytest.raises(UsageError, match=r"other tables than the model.*clicks"):
        measure_plans(tables, cpus, plan=other)


def planned(step_ns: float) -> ShardPlan:
    """A plan of one rank that predicts a step, half of it lookups."""
    parts = MemoryParts(
        weights_bytes=110, optimizer_bytes=220, activations_bytes=30, buffers_bytes=40,
        total_bytes=400, capacity_bytes=1000,
    )  # fmt: skip
    nothing = MemoryParts(
        weights_bytes=0, optimizer_bytes=0, activations_bytes=0, buffers_bytes=0, total_bytes=0,
        capacity_bytes=0,
    )  # fmt: skip
    rank = RankLoad(
        rank=0, host=0, num_shards=1, hbm=nothing, host_memory=parts, lookup_ns=step_ns / 2,
        update_ns=step_ns / 4, all_to_all_ns=step_ns / 4, all_reduce_ns=0.0, dense_ns=1000.0,
        step_ns=step_ns + 1000.0,
    )  # fmt: skip
    return small_net.plan(1, 1, small_net.KINDS).model_copy(update={"ranks": (rank,)})


def ran(step_ns: float, *, faster: float = 1.0, blocks: int = 5) -> list[RankPlan]:
    """Two ranks, of which the second takes longer by itself."""

    def times(share: float, block: int) -> PartTimes:
        # A little noise, the same in all plans.
        t = step_ns * share * (1 + 0.01 * (block % 3 - 1))
        return PartTimes(
            step_ns=t, ids_ns=t / 12, lookup_ns=t / 2, vectors_ns=t / 12, gradients_ns=t / 12,
            update_ns=t / 4, all_reduce_ns=0.0,
        )  # fmt: skip

    return [
        RankPlan(
            weights_bytes=100,
            optimizer_bytes=200,
            peak_bytes=size,
            blocks=[[times(share, block)] * 2 for block in range(blocks)],
        )
        for share, size in ((1 / faster / 2, 500), (1 / faster, 700))
    ]


def test_ratios_are_of_the_slowest_rank_without_the_dense_layers() -> None:
    dense = Use(host=Parts(weights=10, optimizer=20, buffers=20))
    found = compare("one", planned(1e6), ran(3e6), dense, chosen=True)
    for part in ("step", "parts", "lookup", "update", "all_to_all"):
        item = found.of(part)
        assert item is not None
        assert item.ratio == pytest.approx(3.0, rel=0.01)
        assert item.ci_low is not None
        assert item.ci_high is not None
        assert item.ci_low < 3.0 < item.ci_high
        assert item.num_samples == 10
    nothing = found.of("all_reduce")
    assert nothing is not None
    assert (nothing.measured, nothing.ratio) == (None, None)
    for part, predicted, measured in (
        ("weights", 100, 100), ("optimizer", 200, 200), ("memory", 350, 700),
    ):  # fmt: skip
        item = found.of(part)  # type: ignore[arg-type]
        assert item is not None
        assert (item.predicted, item.measured) == (predicted, measured)


def test_an_order_is_judged_by_what_differs_beyond_its_interval() -> None:
    plans = {"a": planned(1e6), "b": planned(2e6), "c": planned(3e6), "d": planned(4e6)}
    right = order(plans, {name: ran(5e6 * (i + 1)) for i, name in enumerate(plans)})
    assert right.rank_correlation == pytest.approx(1.0)
    assert (right.num_pairs, right.num_pairs_in_order) == (6, 6)
    assert (right.fastest_measured, right.cost_of_choice) == ("a", 1.0)
    # a and b change places, c and d are alike: five pairs differ, one of them the other way round.
    steps = {"a": 8e6, "b": 4e6, "c": 12e6, "d": 12e6}
    wrong = order(plans, {name: ran(step) for name, step in steps.items()})
    assert (wrong.num_pairs, wrong.num_pairs_in_order) == (5, 4)
    assert (wrong.fastest_predicted, wrong.fastest_measured) == ("a", "b")
    assert wrong.cost_of_choice == pytest.approx(2.0, rel=0.01)
    assert wrong.ci_low < 2.0 < wrong.ci_high


def test_batches_bring_the_mean_number_of_ids() -> None:
    listed = [
        Table("whole", "whole", num_rows=50, dim=8, ids_per_row=3.0),
        Table("part", "part", num_rows=9, dim=8, ids_per_row=0.25),
        Table("heavy", "heavy", num_rows=7, dim=8, weighted=True),
        Table("held", "net.bags", num_rows=7, dim=8, key="inner"),
    ]
    module = stand_in(listed)
    assert [group.path for group in groups(listed)] == ["plain", "weighted", "net_bags"]
    assert all(parameter.is_meta for parameter in module.parameters())
    generator = torch.Generator().manual_seed(0)
    batch = next(batches(listed, 4_000, 1.05, generator))
    plain = batch["plain"].to_dict()
    assert set(plain["whole"].lengths().tolist()) == {3}
    assert plain["part"].lengths().float().mean() == pytest.approx(0.25, abs=0.03)
    assert plain["whole"].values().max() < 50
    assert batch["weighted"].weights_or_none() is not None


@pytest.mark.parametrize("zipf", [0.0, 0.5, 1.0, 1.05, 2.0])
def test_ids_follow_the_law_that_is_asked_for(zipf: float) -> None:
    num_rows = 1_000
    ids = draw_ids(num_rows, 200_000, zipf, torch.Generator().manual_seed(0))
    counts = torch.bincount(ids, minlength=num_rows).sort(descending=True).values.double()
    assert len(counts) == num_rows
    # Between two ranks far enough down, counts fall as the power says.
    ratio = (counts[19:22].mean() / counts[79:82].mean()).item()
    assert ratio == pytest.approx(4.0**zipf, rel=0.25)
    assert draw_ids(1, 5, zipf, torch.Generator()).tolist() == [0] * 5


def test_the_schema_of_what_is_written_is_closed() -> None:
    with pytest.raises(ValueError, match="extra"):
        PlanMeasurement.model_validate(json.loads('{"extra": 1}'))
