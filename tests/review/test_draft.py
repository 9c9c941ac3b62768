"""What an A/B measured, laid out for a model of several outputs."""

from __future__ import annotations

import numpy as np
import pytest

from rankopt.bench.ab import AbResult
from rankopt.data.rows import Rows
from rankopt.environment import collect_environment
from rankopt.models.card import ModelCard
from rankopt.review.draft import Subject, draft_report
from rankopt.review.gates import Gates
from rankopt.review.judge import judge
from rankopt.review.schema import Report, Size

SIZE = Size(control_bytes=4, candidate_bytes=1, control_code_bytes=None, candidate_code_bytes=None)


def card(outputs: tuple[str, ...], request_key: str | None = "user_id") -> ModelCard:
    return ModelCard.model_validate(
        {
            "name": "tasks",
            "factory": "nowhere:Model",
            "inputs": [{"kind": "dense", "name": "x", "columns": ["a"]}],
            "outputs": [
                {"name": name, "label": f"{name}ed", "index": index}
                for index, name in enumerate(outputs)
            ],
            "data": {"request_key": request_key},
        }
    )


def report(
    outputs: tuple[str, ...],
    gates: str | dict[str, str],
    *,
    clusters: np.ndarray | None,
    unlabelled: str | None = None,
) -> Report:
    """Judge an A/B of arms that differ a little on every output."""
    rng = np.random.default_rng(0)
    num_rows = 6_000
    control, candidate, labels = {}, {}, {}
    for name in outputs:
        logit = rng.normal(-1, 1.2, num_rows)
        control[name] = 1 / (1 + np.exp(-logit))
        candidate[name] = 1 / (1 + np.exp(-logit - rng.normal(0, 0.01, num_rows)))
        label = (rng.random(num_rows) < control[name]).astype(float)
        if name == unlabelled:
            label[::2] = np.nan
        labels[f"{name}ed"] = label
    result = AbResult(control, candidate, [], [], {}, [], {}, ())
    held = Gates.model_validate({"quality": gates})
    rows = Rows({}, labels, clusters, num_rows)
    key = None if clusters is None else "user_id"
    subject = Subject(SIZE, {}, "rankopt run", capture=("branch assumed",))
    drafted = draft_report(card(outputs, key), rows, result, held, subject, collect_environment())
    return judge(drafted, held)


def test_every_output_is_judged_by_its_own_margins():
    users = np.arange(6_000) // 20
    found = report(
        ("click", "love"),
        {"ne": "0.5%", "love.ne": "0.7%", "love.hr@3": "5%", "gauc": "1%"},
        clusters=users,
    )
    assert found.outputs == ("click", "love")
    assert found.capture == ("branch assumed",)
    margins = {
        key: found.quality[key].margin
        for key in ("click.ne", "love.ne", "click.gauc", "love.gauc", "love.hr@3")
    }
    assert list(margins.values()) == pytest.approx([0.005, 0.007, 0.01, 0.01, 0.05])
    assert "click.hr@3" not in found.quality
    assert {"click.ndcg@10", "love.hr@10"} <= set(found.quality)
    assert sorted(result.gate for result in found.gates) == [
        "quality.click.gauc", "quality.click.ne", "quality.love.gauc", "quality.love.hr@3",
        "quality.love.ne",
    ]  # fmt: skip
    assert found.verdict == "pass", found.reasons


def test_the_only_output_is_left_out_of_names_and_may_be_named_in_a_gate():
    found = report(("like",), {"like.ne": "0.5%"}, clusters=None)
    assert "ne" in found.quality
    assert found.quality["ne"].margin == pytest.approx(0.005)
    assert found.verdict == "pass", found.reasons


def test_a_grouped_gate_without_a_request_key_is_inconclusive():
    found = report(("like",), {"gauc": "1%"}, clusters=None)
    assert found.verdict == "inconclusive"
    assert "names no request_key" in found.reasons[0]
    assert found.quality["gauc"].control is None


def test_an_output_that_has_a_label_on_some_rows_is_judged_on_those():
    found = report(("click", "buy"), {"ne": "0.5%"}, clusters=None, unlabelled="buy")
    assert (found.quality["click.ne"].num_rows, found.quality["buy.ne"].num_rows) == (6000, 3000)
    points = found.calibration_curve["buy"]["candidate"]
    assert sum(point.num_rows for point in points) == 3000
    assert found.data["positives"]["buy"] < 3000
    assert found.verdict == "pass", found.reasons
