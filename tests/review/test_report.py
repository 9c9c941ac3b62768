from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from rankopt.errors import InputError
from rankopt.review import report as report_module
from rankopt.review.gates import Gates
from rankopt.review.judge import judge
from rankopt.review.plots import figures
from rankopt.review.report import (
    load_report,
    review,
    to_html,
    to_json,
    to_markdown,
    write_report,
)
from rankopt.review.schema import (
    BaselineRow,
    CalibrationPoint,
    Cost,
    GateResult,
    LatencyRow,
    MetricParity,
    PassRecord,
    PredictionChange,
    Report,
    Size,
)
from review.samples import GATES, PASSES, draft, latency, ne, undefined

CONTRACT = {
    "verdict", "reasons", "quality", "latency", "size", "cost", "passes", "environment",
    "reproduce",
}  # fmt: skip
ADDED = {
    "gates", "baselines", "prediction_change", "calibration_curve", "scatter", "statistics_unit",
    "model", "recipe", "objective", "data", "made_at", "capture", "outputs", "training",
}  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return judge(draft(), GATES)


def test_the_keys_are_those_of_the_contract(report: Report, tmp_path: Path):
    held = json.loads(write_report(report, tmp_path)["json"].read_text(encoding="utf-8"))
    assert set(held) == CONTRACT | ADDED
    assert set(held["quality"]["ne"]) == {
        "control", "candidate", "delta", "ci_low", "ci_high", "margin", "direction", "num_rows",
        "num_clusters", "verdict", "reason", "rows_to_decide",
    }  # fmt: skip
    assert {
        "batch_size", "control_p50_ns", "candidate_p50_ns", "control_p99_ns", "candidate_p99_ns",
        "speedup", "ci_low", "ci_high", "num_samples",
    } <= set(held["latency"][0])  # fmt: skip
    assert {
        "control_bytes", "candidate_bytes", "control_code_bytes", "candidate_code_bytes",
    } <= set(held["size"])  # fmt: skip
    assert {
        "price_per_hour", "slo_p99_ns", "control_usd_per_million", "candidate_usd_per_million",
    } <= set(held["cost"])  # fmt: skip
    assert {
        "kind", "changed", "kept", "reason", "bytes_before", "bytes_after", "predicted_speedup",
        "measured_speedup",
    } <= set(held["passes"][0])  # fmt: skip
    assert held["latency"][2]["candidate_p99_ns"] is None
    assert held["cost"]["candidate_usd_per_million"] is None
    assert held["cost"]["reason"] == "no hourly price was given"


def test_reads_back_what_it_wrote(report: Report, tmp_path: Path):
    write_report(report, tmp_path / "made" / "here")
    assert load_report(tmp_path / "made" / "here") == report
    assert load_report(tmp_path / "made" / "here" / "report.json") == report


def test_writes_nothing_but_the_three_files_and_replaces_old_ones(report: Report, tmp_path: Path):
    (tmp_path / "report.md").write_text("old")
    paths = write_report(report, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "report.html", "report.json", "report.md",
    ]  # fmt: skip
    assert paths["md"].read_text(encoding="utf-8").startswith("# PASS: cpu-int8 on din-movielens")


def test_a_result_outlives_trouble_with_drawing_it(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(_: Report) -> str:
        raise RuntimeError("no disk")

    monkeypatch.setattr(report_module, "to_html", broken)
    with pytest.raises(RuntimeError):
        write_report(report, tmp_path)
    assert load_report(tmp_path) == report
    assert not (tmp_path / "report.html").exists()


def test_nothing_that_is_not_finite_is_written():
    odd = draft(
        quality={"ne": ne(float("nan"), candidate=np.float32("inf"))},
        latency=[latency(1, float("inf"), float("nan"))],
        prediction_change={"click": PredictionChange(max_abs=float("nan"), mean_abs=math.inf)},
        scatter={"click": [(0.1, float("nan")), (0.2, 0.3)]},
        environment={"load": float("nan"), "nested": [math.inf, np.float64("nan"), np.int64(3)],
                     "path": Path("models/x.yaml")},
    )  # fmt: skip
    text = to_json(judge(odd, GATES))
    held = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} was written"))
    assert held["quality"]["ne"]["delta"] is None
    assert held["latency"][0]["speedup"] is None
    assert held["prediction_change"]["click"] == {"max_abs": None, "mean_abs": None}
    assert held["scatter"]["click"] == [[0.2, 0.3]]
    assert held["environment"] == {
        "load": None, "nested": [None, None, 3], "path": "models/x.yaml",
    }  # fmt: skip
    assert held["verdict"] == "inconclusive"
    Report.model_validate(held)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b'{"verdict": "pa', "damaged or cut short"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1, 2]", "This is not a report of rankopt"),
        (b'{"verdict": "maybe"}', "verdict: must be one of"),
    ],
)
def test_a_damaged_report_is_a_clear_error(tmp_path: Path, content: bytes, said: str):
    file = tmp_path / "report.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_report(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_report_says_who_writes_one(tmp_path: Path):
    with pytest.raises(InputError, match=r"report\.json: cannot be read .* `rankopt ab`"):
        load_report(tmp_path)


def test_review_takes_a_report_or_its_path(report: Report, tmp_path: Path):
    first = review(report, tmp_path / "a")
    second = review(tmp_path / "a" / "report.json", tmp_path / "b")
    assert first == tmp_path / "a" / "report.html"
    assert second.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("changes", [{}, {"quality": {"ne": ne(0.01, 0.0001)}}, {"latency": []}])
def test_markdown_and_html_hold_the_verdict_and_each_reason(changes):
    judged = judge(draft(**changes), GATES)
    markdown, html = to_markdown(judged), to_html(judged).replace("\u00a0", " ")
    assert judged.verdict.capitalize() in markdown
    assert f"<title>{judged.verdict.upper()}: cpu-int8 on din-movielens</title>" in html
    for reason in judged.reasons:
        assert reason in markdown
        assert reason in html.replace("&#39;", "'")


def test_tables_of_the_markdown_are_square(report: Report):
    rows = [line for line in to_markdown(report).splitlines() if line.startswith("|")]
    assert len(rows) > 15
    tables: list[list[int]] = []
    previous = ""
    for line in to_markdown(report).splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                tables.append([])
            tables[-1].append(len(re.findall(r"(?<!\\)\|", line)))
        previous = line
    assert len(tables) == 5
    assert all(len(set(widths)) == 1 for widths in tables)


def test_raw_nanoseconds_and_bytes_are_not_shown(report: Report):
    page = to_html(report).split("<main>")[1].split("</main>")[0]
    shown = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "_ns" not in shown
    assert "96,000,000" not in shown
    assert "96000000" not in shown
    assert "91.6 MiB" in shown
    assert "1.15 ms" in shown


def test_an_interval_stands_beside_each_speedup(report: Report):
    html = to_html(report)
    for row in [*report.latency, *report.baselines]:
        assert f"{row.ci_low:.4g}x to {row.ci_high:.4g}x" in html


def test_each_output_has_a_table_and_a_plot_of_its_own():
    quality = {
        f"{output}.{name}": ne()
        for output in ("click", "love", "buy")
        for name in ("ne", "log_loss", "auc", "calibration", "gauc", "ndcg@10", "hr@10")
    }
    many = judge(draft(quality=quality, outputs=("click", "love", "buy")), Gates())
    markdown, html = to_markdown(many), to_html(many)
    for output in ("click", "love", "buy"):
        part = markdown.split(f"### Output {output}\n")[1].split("#")[0]
        assert len([line for line in part.splitlines() if line.startswith("|")]) == 9
        assert f'<h3 class="apart">Output {output}</h3>' in html
        assert f"Change of quality against its margin: {output}" in html
    assert "| Hit rate@10 |" in markdown
    assert (
        "Shown but not gated: Log loss, AUC, Calibration, GAUC, NDCG@10, Hit rate@10." in markdown
    )


def test_a_metric_that_some_outputs_do_not_gate_names_them():
    quality = {"click.ne": ne(), "love.ne": ne()}
    report = judge(draft(quality=quality), Gates.model_validate({"quality": {"love.ne": 0.01}}))
    assert "Shown but not gated: Normalized entropy (click)." in to_markdown(report)


def test_why_a_metric_has_no_figures_stands_in_its_row():
    gauc = undefined("no group holds rows of both classes")
    report = judge(draft(quality={"ne": ne(), "gauc": gauc}), Gates())
    assert report.verdict == "pass"
    (line,) = [row for row in to_markdown(report).splitlines() if row.startswith("| GAUC")]
    assert "not measured (no group holds rows of both classes)" in line
    assert "inconclusive, not gated" in line
    assert '<span class="why">no group holds rows of both classes</span>' in to_html(report)


@pytest.mark.parametrize(
    ("unit", "why"),
    [("row", "the card names no request_key"), ("user_id", "every group of the request_key is a")],
)
def test_metrics_of_groups_that_are_left_out_are_named(unit: str, why: str):
    said = "GAUC, NDCG and hit rate are left out"
    assert f"{said}: {why}" in to_markdown(judge(draft(statistics_unit=unit), GATES))
    grouped = judge(draft(quality={"ne": ne(), "gauc": ne()}, statistics_unit=unit), GATES)
    assert said not in to_markdown(grouped)


def test_an_output_that_has_no_label_on_some_rows_is_named():
    quality = {"click.ne": ne(num_rows=20_012), "buy.ne": ne(num_rows=800)}
    text = to_markdown(judge(draft(quality=quality), GATES))
    assert "buy has a label on 800 of 20,012 rows" in text
    assert "click has a label on" not in text


def test_how_the_model_was_captured_is_shown_where_there_is_something_to_say():
    heading = "How the model was captured"
    notes = ("`gru` was left eager: <b>lengths.max()</b>", "x.size(0) == 1 was taken as False")
    report = judge(draft(capture=notes), GATES)
    assert to_markdown(report).count(heading) == to_html(report).count(heading) == 1
    assert "x.size(0) == 1 was taken as False" in to_markdown(report)
    assert "&lt;b&gt;lengths.max()" in to_html(report)
    plain = judge(draft(), GATES)
    assert heading not in to_markdown(plain) + to_html(plain)


def test_one_wide_interval_does_not_hide_the_others():
    (figure,) = figures(draft(quality={"ne": ne(), "hr@10": ne(0.0, 0.9), "auc": ne(0.02, 0.001)}))[
        "quality"
    ]
    low, high = figure.layout["xaxis"]["range"]
    assert -8 < low < -4
    assert 20 < high < 25, "a value of 20 margins shows; an interval of 900 does not stretch it"


ATTACK = '<script>alert("x")</script><img src=x onerror=alert(1)>'


def test_names_from_outside_are_text_and_nothing_else():
    hostile = draft(
        model=ATTACK,
        recipe=ATTACK,
        reproduce=f"rankopt run '{ATTACK}' ```",
        environment={ATTACK: ATTACK},
        data={"source": ATTACK},
        statistics_unit=ATTACK,
        quality={f"{ATTACK}.ne": ne()},
        baselines=[row.model_copy(update={"arm": ATTACK}) for row in draft().baselines],
        passes=[PASSES[1].model_copy(update={"kind": ATTACK, "reason": ATTACK,
                                             "details": (ATTACK,)})],
        calibration_curve={ATTACK: draft().calibration_curve["click"]},
        scatter={ATTACK: draft().scatter["click"]},
    )  # fmt: skip
    judged = judge(hostile, GATES)
    html = to_html(judged)
    assert ATTACK not in html
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    # In Markdown a tag is text only inside code.
    prose = re.sub(r"`[^`]*`|^    .*$", "", to_markdown(judged), flags=re.M)
    assert "&lt;script>" in prose
    assert "<" not in prose
    figures = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, flags=re.S)
    # Plotly reads tags in its texts: they must reach it as entities.
    texts = [text for figure in figures for text in _texts(json.loads(figure))]
    assert texts
    assert not [text for text in texts if "<img" in text or "<script" in text]


def _texts(value):
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def test_the_page_asks_the_network_for_nothing(report: Report):
    html = to_html(report)
    assert "default-src 'none'" in html
    own = html.replace(get_plotlyjs(), "")
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", own)
    assert len(html.encode()) < 6_000_000


def test_a_metric_without_a_gate_is_shown_as_such():
    quality = {**draft().quality, "log_loss": ne(0.05, 0.001, verdict="fail")}
    judged = judge(draft(quality=quality), GATES)
    assert judged.verdict == "pass"
    assert "fail, not gated" in to_markdown(judged)
    assert "Shown but not gated: Log loss." in to_markdown(judged)


def test_an_almost_empty_report_can_be_written(tmp_path: Path):
    bare = Report(
        quality={},
        latency=[],
        size=Size(
            control_bytes=None,
            candidate_bytes=None,
            control_code_bytes=None,
            candidate_code_bytes=None,
        ),
        cost=Cost(),
        passes=[],
        model="m",
        environment={},
        reproduce="",
        made_at="",
    )
    write_report(judge(bare, GATES), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# INCONCLUSIVE: A/B on m")
    assert "No latency was measured." in text
    assert load_report(tmp_path).verdict == "inconclusive"


number = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
optional = st.none() | number
verdicts = st.sampled_from(["pass", "fail", "inconclusive"])
duration = st.floats(1, 1e12)
whole = st.integers(0, 10**12)
maybe = st.none() | whole
name = st.text(max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | name,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(name, inner, max_size=2),
    max_leaves=5,
)
parity = st.builds(
    MetricParity, control=optional, candidate=optional, delta=optional, ci_low=optional,
    ci_high=optional, margin=optional, direction=st.sampled_from(["higher", "lower"]),
    num_rows=whole, num_clusters=whole, verdict=verdicts, reason=st.none() | name,
    rows_to_decide=maybe,
)  # fmt: skip
latency_row = st.builds(
    LatencyRow, batch_size=st.integers(1, 10_000), control_p50_ns=duration,
    candidate_p50_ns=duration, control_p99_ns=optional, candidate_p99_ns=optional,
    speedup=optional, ci_low=optional, ci_high=optional, num_samples=whole, num_blocks=whole,
    verdict=st.none() | verdicts, candidate_p99_low_ns=optional, candidate_p99_high_ns=optional,
)  # fmt: skip
baseline_row = st.builds(
    BaselineRow, arm=name, batch_size=st.integers(1, 10_000), arm_p50_ns=duration,
    candidate_p50_ns=duration, speedup=optional, ci_low=optional, ci_high=optional,
    num_samples=whole, verdict=st.none() | verdicts,
)  # fmt: skip
point = st.builds(CalibrationPoint, mean_predicted=optional, observed_rate=optional, num_rows=whole)
pass_record = st.builds(
    PassRecord, kind=name, changed=st.booleans(), kept=st.booleans(), reason=name,
    bytes_before=maybe, bytes_after=maybe, predicted_speedup=optional, measured_speedup=optional,
    ci_low=optional, ci_high=optional, batch_size=maybe, duration_ns=maybe,
    max_abs_drift=optional, details=st.lists(name, max_size=2).map(tuple),
)  # fmt: skip
reports = st.builds(
    Report, verdict=verdicts, reasons=st.lists(name, max_size=3),
    gates=st.lists(st.builds(GateResult, gate=name, verdict=verdicts, reason=name), max_size=3),
    quality=st.dictionaries(st.sampled_from(["ne", "click.ne", "gauc", "click.hr@5"]) | name,
                            parity, max_size=3),
    latency=st.lists(latency_row, max_size=3), baselines=st.lists(baseline_row, max_size=2),
    size=st.builds(Size, control_bytes=maybe, candidate_bytes=maybe, control_code_bytes=maybe,
                   candidate_code_bytes=maybe, candidate_resident_bytes=maybe),
    cost=st.builds(Cost, price_per_hour=optional, control_usd_per_million=optional,
                   candidate_usd_per_million=optional, batch_size=maybe, reason=st.none() | name,
                   ratio=optional, ratio_low=optional, ratio_high=optional),
    passes=st.lists(pass_record, max_size=2),
    prediction_change=st.dictionaries(
        name, st.builds(PredictionChange, max_abs=optional, mean_abs=optional), max_size=2),
    calibration_curve=st.dictionaries(
        name, st.dictionaries(st.sampled_from(["control", "candidate"]),
                              st.lists(point, max_size=3)), max_size=2),
    scatter=st.dictionaries(name, st.lists(st.tuples(number, number), max_size=3), max_size=2),
    statistics_unit=name, model=name, recipe=st.none() | name, objective=st.none() | name,
    data=st.dictionaries(name, plain, max_size=2),
    environment=st.dictionaries(name, plain, max_size=2), reproduce=name, made_at=name,
)  # fmt: skip


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking a whole report takes minutes and tells little: the traceback names the field.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(reports)
def test_any_report_round_trips_and_can_be_judged_and_drawn(drawn: Report):
    assert Report.model_validate(json.loads(to_json(drawn))) == drawn
    judged = judge(drawn, GATES)
    assert Report.model_validate(json.loads(to_json(judged))) == judged
    assert to_markdown(judged)
    assert to_html(judged)


def test_a_number_of_another_library_is_written():
    odd = SimpleNamespace(ndim=0, item=lambda: 3)
    held = json.loads(to_json(draft(environment={"value": odd})))
    assert held["environment"] == {"value": 3}
