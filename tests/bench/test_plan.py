from __future__ import annotations

import pytest
from pydantic import ValidationError

from rankopt.bench.plan import BenchPlan, load_plan, physical_cores_available
from rankopt.errors import UsageError
from rankopt.units import NS_PER_MS


def test_committed_plans_load_by_name():
    default = load_plan("ab-default")
    assert default == BenchPlan(), "the file spells out the defaults; change both together"
    assert load_plan("ab-quick").max_blocks < default.max_blocks


def test_every_problem_of_a_file_is_listed_with_the_nearest_key(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("batch_size: [1]\nmin_blocks: many\nidle_cpu_limit: -1\n")
    with pytest.raises(UsageError) as caught:
        load_plan(file)
    text = str(caught.value)
    assert "batch_size: is not a known key" in text
    assert "'batch_sizes'" in text
    assert "min_blocks" in text
    assert "idle_cpu_limit" in text
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "\xff"])
def test_what_is_no_plan_is_refused(tmp_path, text):
    file = tmp_path / "plan.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"plan\.yaml"):
        load_plan(file)


def test_an_empty_file_is_the_default_plan(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("# nothing\n")
    assert load_plan(file) == BenchPlan()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"batch_sizes": (0, 1)}, "at least 1"),
        ({"batch_sizes": (1, 1)}, "must differ"),
        ({"min_blocks": 5}, "even"),
        ({"min_blocks": 8, "max_blocks": 6}, "at least min_blocks"),
        ({"block_duration_ns": 10, "max_block_duration_ns": 5}, "below"),
    ],
)
def test_bounds_that_disagree_are_refused(values, match):
    with pytest.raises(ValidationError, match=match):
        BenchPlan(**values)


def test_calls_of_a_block_follow_the_fastest_arm_and_are_capped_by_the_slowest():
    plan = BenchPlan(
        calls_per_block=3, block_duration_ns=100 * NS_PER_MS, max_block_duration_ns=200 * NS_PER_MS
    )
    assert plan.num_calls([NS_PER_MS, NS_PER_MS]) == 100
    assert plan.num_calls([NS_PER_MS, 10 * NS_PER_MS]) == 20
    assert plan.num_calls([NS_PER_MS, 1000 * NS_PER_MS]) == 3


def test_cores_are_at_least_one_and_follow_the_affinity():
    import os

    allowed = os.sched_getaffinity(0)
    assert 1 <= physical_cores_available() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert physical_cores_available() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_sizes_below_what_a_module_can_score_are_raised() -> None:
    assert BenchPlan(batch_sizes=(1, 2, 512)).at_least(2).batch_sizes == (2, 512)
    assert BenchPlan(batch_sizes=(1, 512)).at_least(1).batch_sizes == (1, 512)
