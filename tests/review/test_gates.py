from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rankopt.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from rankopt.problems import problems_of_validation
from rankopt.review.gate import Scope, at_least, at_most, worst
from rankopt.review.gates import (
    GATE_KINDS,
    BaselineGate,
    CostGate,
    Gates,
    LatencyGate,
    QualityGate,
    SizeGate,
    exit_code,
)

PLAN = Scope(
    where="recipes/x.yaml", batch_sizes=(1, 512), baseline_arms=("aoti-fp32",), price_given=False
)


def read(text: str) -> Gates:
    return Gates.model_validate(yaml.safe_load(text))


def problems(text: str) -> str:
    with pytest.raises(ValidationError) as caught:
        read(text)
    found = problems_of_validation("recipes/x.yaml", caught.value, Gates, "gates")
    return "\n".join(str(problem) for problem in found)


def test_reads_the_mapping_as_a_recipe_holds_it():
    gates = read(
        """
        quality: {ne: 0.1%, auc: 0.001, calibration: 0.5%}
        latency: [{batch_size: 1, min_speedup: 3}, {batch_size: 512, min_speedup: 1.5}]
        baselines: [{arm: aoti-fp32, batch_size: 1}]
        size: {min_ratio: 3.0}
        cost: {max_ratio: 1.0}
        """
    )
    assert gates.margins() == pytest.approx({"ne": 0.001, "auc": 0.001, "calibration": 0.005})
    assert [gate.min_speedup for gate in gates.latency] == [3.0, 1.5]
    assert gates.baselines[0].min_speedup == 1.0
    assert [path for path, _ in gates.each()] == [
        "quality", "latency[0]", "latency[1]", "baselines[0]", "size", "cost",
    ]  # fmt: skip
    assert gates.check(PLAN) == []


def test_a_recipe_without_gates_still_holds_ne():
    assert Gates().margins() == {"ne": 0.001}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("latencyy: []", "gates.latencyy: is not a known key. Did you mean 'latency'?"),
        ("quality: {}", "gates.quality: dictionary should have at least 1 item"),
        ("quality: {ne: 3x}", "gates.quality.ne: must be a share such as 0.1% or 0.001; got '3x'"),
        ("quality: {ne: true}", "gates.quality.ne: must be a share"),
        ("quality: {ne: 0}", "gates.quality.ne: input should be greater than 0"),
        ("quality: {ne: 150%}", "gates.quality.ne: input should be less than 1"),
        ("quality: {ne: .nan}", "gates.quality.ne: input should be"),
        ("latency: [{batch_size: '1', min_speedup: 3}]", "gates.latency[0].batch_size"),
        ("latency: [{batch_size: 0, min_speedup: 3}]", "gates.latency[0].batch_size"),
        ("latency: [{batch_size: 1}]", "needs min_speedup or max_candidate_p99_ns"),
        ("latency: [{batch_size: 1, min_speedup: .inf}]", "gates.latency[0].min_speedup"),
        ("latency: [{batch_size: 1, min_speed: 3}]", "gates.latency[0].min_speed: is not a known"),
        ("baselines: [{batch_size: 1}]", "gates.baselines[0].arm: is required"),
        ("size: {}", "gates.size: needs min_ratio or max_candidate_bytes"),
        ("cost: {}", "gates.cost: needs max_ratio or max_usd_per_million"),
        ("cost: {max_ratio: '1'}", "gates.cost.max_ratio"),
    ],
)
def test_a_bad_mapping_is_refused_where_it_is_bad(text: str, said: str):
    assert said in problems(text)


def test_all_problems_are_listed_at_once():
    found = problems("{quality: {ne: x, auc: -1}, size: {min_ratio: no}, zzz: 1}")
    assert all(place in found for place in ("quality.ne", "quality.auc", "size.min_ratio", "zzz"))


def test_check_lists_every_gate_the_plan_cannot_decide():
    gates = read(
        """
        quality: {nee: 0.1%, click.ne: 0.1%}
        latency: [{batch_size: 64, min_speedup: 2}]
        baselines: [{arm: aoti, batch_size: 8}]
        cost: {max_usd_per_million: 0.2}
        """
    )
    found = [str(problem) for problem in gates.check(PLAN)]
    assert len(found) == 5
    assert found[0].startswith("recipes/x.yaml: gates.quality.nee: is not a quality metric.")
    assert "Did you mean 'ne'?" in found[0]
    assert "gates.latency[0].batch_size: must be a batch size that the plan measures" in found[1]
    assert "(1, 512); got 64" in found[1]
    assert "gates.baselines[0].batch_size" in found[2]
    assert "gates.baselines[0].arm" in found[3]
    assert "Did you mean 'aoti-fp32'?" in found[3]
    assert "needs an hourly price" in found[4]


@pytest.mark.parametrize(
    ("kind", "gate"), [(name, gate) for name, gate in sorted(GATE_KINDS.items())]
)
def test_the_sample_in_each_docstring_is_read(kind: str, gate: type):
    sample = (gate.__doc__ or "").split("```yaml")[1].split("```")[0]
    gates = read(sample)
    held = getattr(gates, kind)
    assert isinstance(held[0] if gate.many else held, gate)


def test_every_registered_kind_is_a_key():
    assert set(GATE_KINDS) == set(Gates.model_fields)
    assert {QualityGate, LatencyGate, BaselineGate, SizeGate, CostGate} == set(GATE_KINDS.values())


def test_gates_cannot_be_changed():
    with pytest.raises(ValidationError):
        Gates().size = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("pass", EXIT_PASS), ("fail", EXIT_FAIL), ("inconclusive", EXIT_INCONCLUSIVE)],
)
def test_exit_codes(verdict, code: int):
    assert exit_code(verdict) == code
    assert (EXIT_PASS, EXIT_FAIL, EXIT_INCONCLUSIVE) == (0, 1, 3)


@pytest.mark.parametrize(
    ("low", "high", "above", "below"),
    [
        (2.0, 3.0, "pass", "inconclusive"),
        (2.1, 3.0, "pass", "fail"),
        (1.0, 2.0, "inconclusive", "pass"),
        (1.0, 1.9, "fail", "pass"),
        (1.0, 3.0, "inconclusive", "inconclusive"),
        (None, 3.0, "inconclusive", "inconclusive"),
        (3.0, None, "inconclusive", "inconclusive"),
    ],
)
def test_limits_are_judged_by_the_interval(low, high, above: str, below: str):
    assert at_least(low, high, 2.0) == above
    assert at_most(low, high, 2.0) == below


@given(st.lists(st.sampled_from(["pass", "fail", "inconclusive"])))
def test_worst_never_softens(verdicts):
    joined = worst(verdicts)
    if "fail" in verdicts:
        assert joined == "fail"
    elif "inconclusive" in verdicts or not verdicts:
        assert joined == "inconclusive"
    else:
        assert joined == "pass"


TASKS = Scope(where="recipes/x.yaml", batch_sizes=(1,), outputs=("click", "love"))


def test_metrics_of_groups_are_gated_at_any_cutoff():
    gates = read("quality: {gauc: 0.1%, ndcg@10: 0.002, hr@5: 1%, love.ndcg@37: 0.3%}")
    assert gates.check(TASKS) == []
    assert gates.margins()["love.ndcg@37"] == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ndcg", "a whole number from 1: ndcg@10"),
        ("hr@0", "a whole number from 1: hr@10"),
        ("love.hr@x", "a whole number from 1: hr@10"),
        ("gaucc", "Did you mean 'gauc'"),
        ("ndgc@10", "Did you mean 'ndcg@10'"),
    ],
)
def test_a_name_that_is_no_metric_gets_the_next_step(name: str, said: str):
    (found,) = read(f"quality: {{{name}: 0.1%}}").check(TASKS)
    assert str(found).startswith(f"recipes/x.yaml: gates.quality.{name}: is not a quality metric")
    assert said in str(found)


def test_an_output_the_model_does_not_have_is_refused_once_the_card_is_known():
    gates = read("quality: {ne: 0.1%, lovee.ne: 0.1%, love.ne: 0.3%}")
    (found,) = gates.check(TASKS)
    said = str(found)
    assert said.startswith("recipes/x.yaml: gates.quality.lovee.ne: must name an output")
    assert "(click, love); got 'lovee'" in said
    assert "Did you mean 'love'?" in said
    assert gates.check(PLAN) == []


def test_the_margin_of_one_output_replaces_the_general_one():
    gate = read("quality: {love.ne: 0.3%, ne: 0.1%, gauc: 0.2%, love.auc: 0.001}").quality
    assert gate.margins_of("love") == pytest.approx({"ne": 0.003, "gauc": 0.002, "auc": 0.001})
    assert gate.margins_of("click") == pytest.approx({"ne": 0.001, "gauc": 0.002})
