from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankopt.quality.parity import compare_quality
from rankopt.review.gates import Gates, exit_code
from rankopt.review.judge import judge
from rankopt.review.schema import Cost, Report, Size
from review.samples import GATES, MS, auc, baseline, draft, latency, ne

SEVERITY = {"pass": 0, "inconclusive": 1, "fail": 2}


def judged(**changes) -> Report:
    return judge(draft(**changes), GATES)


def result(report: Report, gate: str):
    (found,) = [item for item in report.gates if item.gate == gate]
    return found


def test_a_candidate_that_meets_everything_passes_with_every_reason():
    report = judged()
    assert report.verdict == "pass"
    assert len(report.reasons) == len(report.gates) == 7
    assert {item.verdict for item in report.gates} == {"pass"}
    assert [row.verdict for row in report.latency] == ["pass", None, "pass"]
    assert [row.verdict for row in report.baselines] == ["pass", None, None]


def test_a_reason_holds_value_interval_limit_and_samples():
    reason = result(judged(), "quality.ne").reason
    for part in ("+0.020 %", "-0.010 %", "+0.050 %", "0.100 %", "20,012 rows", "301 clusters"):
        assert part in reason
    reason = result(judged(), "latency[batch_size=512].min_speedup").reason
    for part in ("1.82x", "1.72x", "1.92x", "1.5x", "240 timed calls"):
        assert part in reason


@pytest.mark.parametrize("claimed", ["pass", "inconclusive", "fail"])
def test_a_worse_ne_fails_whatever_else_is_good_and_whatever_it_claims(claimed):
    worse = ne(0.004, 0.0005, verdict=claimed)
    fast = [latency(1, 40.0), latency(64, 40.0), latency(512, 40.0)]
    report = judged(quality={"ne": worse, "auc": auc(0.01), "calibration": auc()}, latency=fast)
    assert report.verdict == "fail"
    assert "beyond the margin of 0.100 %" in report.reasons[0]
    assert report.quality["ne"].verdict == "fail"
    assert exit_code(report.verdict) == 1


def test_a_better_ne_passes_however_far():
    report = judged(quality={**draft().quality, "ne": ne(-0.05, 0.0001)})
    assert report.verdict == "pass"


def test_directions_are_not_mixed_up():
    lower_auc = {**draft().quality, "auc": auc(-0.01, 0.0001)}
    assert judged(quality=lower_auc).verdict == "fail"
    higher_auc = {**draft().quality, "auc": auc(0.01, 0.0001)}
    assert judged(quality=higher_auc).verdict == "pass"


def test_the_recipes_margin_holds_over_the_one_a_metric_was_judged_by():
    loose = ne(0.004, 0.0005, margin=0.05, verdict="pass")
    assert judged(quality={**draft().quality, "ne": loose}).verdict == "fail"


def test_calibration_judged_by_a_looser_margin_is_not_taken():
    loose = auc(0.0, 0.0001, margin=0.05, verdict="pass")
    report = judged(quality={**draft().quality, "calibration": loose})
    assert report.verdict == "inconclusive"


def test_too_few_rows_are_inconclusive_and_exit_3():
    few = ne(0.0002, 0.002, num_rows=200, verdict="inconclusive", rows_to_decide=900)
    report = judged(quality={**draft().quality, "ne": few})
    assert report.verdict == "inconclusive"
    assert exit_code(report.verdict) == 3
    assert "about 900 rows would decide it" in report.reasons[0]


def test_a_candidate_that_predicts_nan_fails_with_the_reason():
    random = np.random.default_rng(0)
    control = random.uniform(0.1, 0.9, 500)
    labels = (random.uniform(size=500) < control).astype(float)
    candidate = control.copy()
    candidate[7] = np.nan
    report = judged(quality=compare_quality(control, candidate, labels, margins=GATES.margins()))
    assert report.verdict == "fail"
    assert "NaN" in result(report, "quality.ne").reason


def test_planted_changes_of_real_rows_are_told_apart():
    random = np.random.default_rng(1)
    control = random.beta(2, 5, 4_000)
    labels = (random.uniform(size=4_000) < control).astype(float)
    ruined = random.permutation(control)
    for candidate, verdict in ((control, "pass"), (ruined, "fail")):
        quality = compare_quality(control, candidate, labels, margins=GATES.margins())
        assert judged(quality=quality).verdict == verdict


def test_a_metric_that_was_not_measured_is_inconclusive():
    report = judged(quality={"auc": auc(), "calibration": auc()})
    assert report.verdict == "inconclusive"
    assert "was not measured" in result(report, "quality.ne").reason


def test_a_margin_holds_for_every_output():
    quality = {"click.ne": ne(), "buy.ne": ne(0.01, 0.0001)}
    gates = Gates.model_validate({"quality": {"ne": "0.1%"}})
    report = judge(draft(quality=quality), gates)
    assert report.verdict == "fail"
    assert result(report, "quality.click.ne").verdict == "pass"
    assert "(buy)" in report.reasons[0]
    only = Gates.model_validate({"quality": {"click.ne": "0.1%"}})
    assert judge(draft(quality=quality), only).verdict == "pass"


@pytest.mark.parametrize("order", [("ne", "love.ne"), ("love.ne", "ne")])
def test_the_margin_of_one_output_holds_in_place_of_the_general_one(order):
    margins = {"ne": "0.1%", "love.ne": "0.3%"}
    gates = Gates.model_validate({"quality": {name: margins[name] for name in order}})
    love = ne(0.002, 0.0001, margin=0.003)
    report = judge(draft(quality={"click.ne": ne(), "love.ne": love}), gates)
    assert report.verdict == "pass"
    assert sorted(item.gate for item in report.gates) == ["quality.click.ne", "quality.love.ne"]
    assert "within the margin of 0.300 %" in result(report, "quality.love.ne").reason
    assert "within the margin of 0.100 %" in result(report, "quality.click.ne").reason
    # A tighter one does not give way to the general one either.
    tight = Gates.model_validate({"quality": {"ne": "1%", "love.ne": "0.1%"}})
    report = judge(draft(quality={"click.ne": ne(), "love.ne": love}), tight)
    assert result(report, "quality.love.ne").verdict == "fail"


def test_a_general_margin_that_every_output_replaces_is_not_missed():
    gates = Gates.model_validate({"quality": {"ne": "0.1%", "a.ne": "1%", "b.ne": "1%"}})
    report = judge(draft(quality={"a.ne": ne(0.002), "b.ne": ne(0.002)}), gates)
    assert report.verdict == "pass"
    assert len(report.gates) == 2


def test_the_only_output_may_be_named_too():
    gates = Gates.model_validate({"quality": {"ne": "0.1%", "like.ne": "0.3%"}})
    report = judge(draft(quality={"ne": ne(0.002)}, outputs=("like",)), gates)
    assert report.verdict == "pass"
    (found,) = report.gates
    assert "within the margin of 0.300 %" in found.reason
    other = judge(draft(quality={"ne": ne()}, outputs=("click",)), gates)
    assert other.verdict == "inconclusive"
    assert "(like) was not measured" in result(other, "quality.like.ne").reason


def test_a_gate_on_a_metric_without_figures_is_inconclusive_with_the_reason():
    random = np.random.default_rng(2)
    control = random.uniform(0.1, 0.9, 400)
    labels = (random.uniform(size=400) < control).astype(float)
    gates = Gates.model_validate({"quality": {"ne": "1%", "hr@5": "1%", "gauc": "1%"}})
    for clusters, said in (
        (None, "names no request_key"),
        (np.arange(400), "a single row"),
        (np.arange(400) // 2, "no group with a positive row has 6 rows or more"),
    ):
        quality = compare_quality(
            control, control, labels, clusters=clusters, margins=gates.margins()
        )
        report = judge(draft(quality=quality), gates)
        assert report.verdict == "inconclusive"
        assert said in result(report, "quality.hr@5").reason
        assert result(report, "quality.ne").verdict == "pass"


def test_an_output_whose_labels_are_of_one_class_is_undecided_alone():
    control = np.random.default_rng(3).uniform(0.1, 0.9, 400)
    labels = (np.random.default_rng(4).uniform(size=400) < control).astype(float)
    quality = {
        f"{output}.{name}": parity
        for output, column in (("click", labels), ("refund", np.zeros(400)))
        for name, parity in compare_quality(control, control, column).items()
    }
    report = judge(draft(quality=quality), Gates())
    assert report.verdict == "inconclusive"
    assert result(report, "quality.click.ne").verdict == "pass"
    assert "all 400 labels are 0" in result(report, "quality.refund.ne").reason


@pytest.mark.parametrize(
    ("speedup", "half", "verdict"),
    [(3.2, 0.1, "pass"), (3.0, 0.1, "inconclusive"), (2.8, 0.1, "fail"), (3.1, 0.1, "pass")],
)
def test_latency_is_judged_by_its_interval(speedup: float, half: float, verdict: str):
    rows = [latency(1, speedup, half, ci_low=round(speedup - half, 9)), latency(512, 1.8)]
    report = judged(latency=rows)
    assert report.latency[0].verdict == verdict
    assert report.verdict == verdict


@pytest.mark.parametrize("missing", ["speedup", "ci_low", "ci_high"])
def test_a_speedup_without_interval_is_inconclusive(missing: str):
    report = judged(latency=[latency(1, 9.0, **{missing: float("nan")}), latency(512, 1.8)])
    assert report.verdict == "inconclusive"
    assert "2,400 timed calls" in report.reasons[0]


def test_a_batch_size_or_arm_that_was_not_measured_is_inconclusive():
    report = judged(latency=[latency(1, 3.4)], baselines=[])
    assert report.verdict == "inconclusive"
    assert "Batch 512 was not measured." in report.reasons
    assert "The baseline aoti-fp32 was not measured at batch 1." in report.reasons


def test_losing_to_a_baseline_fails():
    report = judged(baselines=[baseline(1, 0.9)])
    assert report.verdict == "fail"
    assert "as fast as aoti-fp32" in report.reasons[0]


@pytest.mark.parametrize(
    ("p99", "low", "high", "verdict"),
    [
        (4 * MS, 3.5 * MS, 4.5 * MS, "pass"),
        (5.2 * MS, 4.5 * MS, 6 * MS, "inconclusive"),
        (7 * MS, 6 * MS, 8 * MS, "fail"),
        (4 * MS, None, None, "inconclusive"),
        (None, None, None, "inconclusive"),
    ],
)
def test_p99_needs_the_samples_that_support_it(p99, low, high, verdict: str):
    gates = Gates.model_validate({"latency": [{"batch_size": 1, "max_candidate_p99_ns": 5 * MS}]})
    row = latency(
        1, 3.0, candidate_p99_ns=p99, candidate_p99_low_ns=low, candidate_p99_high_ns=high
    )
    report = judge(draft(latency=[row]), gates)
    assert result(report, "latency[batch_size=1].max_candidate_p99_ns").verdict == verdict
    assert "2,400 timed calls" in report.reasons[-1] or "2,400 timed calls" in report.reasons[0]


@pytest.mark.parametrize(
    ("candidate_bytes", "verdict"),
    [(32_000_000, "pass"), (32_000_001, "fail"), (None, "inconclusive"), (0, "inconclusive")],
)
def test_size_is_exact(candidate_bytes, verdict: str):
    size = Size(
        control_bytes=96_000_000,
        candidate_bytes=candidate_bytes,
        control_code_bytes=None,
        candidate_code_bytes=None,
    )
    assert judged(size=size).verdict == verdict


def test_a_size_limit_in_bytes():
    gates = Gates.model_validate({"size": {"max_candidate_bytes": 25_000_000}})
    assert judge(draft(), gates).verdict == "fail"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (0.4, 0.38, 0.42, "pass"),
        (0.5, 0.48, 0.52, "inconclusive"),
        (0.6, 0.58, 0.62, "fail"),
        (0.4, None, None, "inconclusive"),
        (None, None, None, "inconclusive"),
    ],
)
def test_cost_is_judged_by_its_interval(ratio, low, high, verdict: str):
    gates = Gates.model_validate({"cost": {"max_ratio": 0.5}})
    cost = Cost(ratio=ratio, ratio_low=low, ratio_high=high, batch_size=512, num_blocks=24)
    report = judge(draft(cost=cost), gates)
    assert result(report, "cost.max_ratio").verdict == verdict


def test_dollars_without_a_price_are_inconclusive_with_the_reason():
    gates = Gates.model_validate({"cost": {"max_usd_per_million": 0.2}})
    report = judge(draft(), gates)
    assert report.verdict == "inconclusive"
    assert "no hourly price was given" in result(report, "cost.max_usd_per_million").reason


def test_an_earlier_verdict_is_replaced():
    stale = draft(verdict="pass", reasons=["old"], quality={"ne": ne(0.01, 0.0001)})
    report = judge(stale, Gates())
    assert report.verdict == "fail"
    assert "old" not in report.reasons
    assert judge(report, Gates()) == report


@settings(max_examples=150, deadline=None)
@given(
    delta=st.floats(-0.01, 0.01),
    half=st.floats(0, 0.005),
    harm=st.floats(0, 0.01),
    speedup=st.floats(0.2, 6),
    spread=st.floats(0, 0.5),
    slowdown=st.floats(0, 3),
    growth=st.integers(0, 100_000_000),
)
def test_nothing_worse_ever_improves_the_verdict(
    delta, half, harm, speedup, spread, slowdown, growth
):
    def report(harm: float, slowdown: float, growth: int) -> Report:
        return judged(
            quality={"ne": ne(delta + harm, half), "auc": auc(-delta - harm, half),
                     "calibration": auc()},
            latency=[latency(1, 3.4), latency(512, speedup, spread, ci_low=speedup - spread
                     - slowdown, ci_high=speedup + spread - slowdown)],
            size=Size(control_bytes=96_000_000, candidate_bytes=25_000_000 + growth,
                      control_code_bytes=None, candidate_code_bytes=None),
        )  # fmt: skip

    before = SEVERITY[report(0.0, 0.0, 0).verdict]
    for worse in ((harm, 0.0, 0), (0.0, slowdown, 0), (0.0, 0.0, growth)):
        assert SEVERITY[report(*worse).verdict] >= before
