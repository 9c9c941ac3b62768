"""Two ways of training compared: statistics over seeds, and `rankopt ab` over training recipes."""

from __future__ import annotations

import json

import pytest
import yaml

from rankopt.cli.main import main
from rankopt.data.synthetic import SyntheticOptions, generate
from rankopt.errors import RecipeError, UsageError
from rankopt.jobs.compare_training import read_pair
from rankopt.train.recipes import find_training_recipe
from rankopt.train.seeds import compare_seeds
from small import write_plan


@pytest.fixture
def folder(tmp_path):
    options = SyntheticOptions(
        num_train=2000, num_validation=500, num_test=1000, num_dense=2, num_tables=2,
        ids_per_table=50,
    )  # fmt: skip
    generate(options, tmp_path / "data")
    config = {"num_ids": [50, 50], "num_dense": 2, "embedding_dim": 4, "bottom_mlp": [8],
              "top_mlp": [8]}  # fmt: skip
    raw = {
        "name": "tiny",
        "factory": "rankopt.models.dlrm:DLRM",
        "config": config,
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": ["I1", "I2"]},
            {"name": "sparse", "kind": "ids", "columns": ["C1", "C2"], "num_ids": 50},
        ],
        "outputs": [{"name": "click", "label": "label"}],
        "data": {name: f"data/{name}.parquet" for name in ("train", "validation", "test")},
        "train": {"epochs": 1, "batch_size": 200, "table_optimizer": "adagrad", "num_threads": 1},
    }
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "fast.yaml").write_text(
        "name: fast\npasses:\n  - train_fuse_embeddings: {}\n  - train_dense_optimizer: {}\n"
        "gates:\n  quality: {ne: 1%}\n"
    )
    write_plan(tmp_path / "plan.yaml")
    return tmp_path


def test_ab_over_a_card_and_a_training_recipe(folder, capsys):
    out = folder / "ab"
    arms = ["--control", str(folder / "card.yaml"), "--candidate", str(folder / "fast.yaml")]
    plan = ["--plan", str(folder / "plan.yaml"), "--seeds", "2"]
    code = main(["ab", *arms, *plan, "--out", str(out)])
    told = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    assert code == 0, told
    assert report["verdict"] == "pass"
    [row] = report["latency"]
    assert row["batch_size"] == 200
    assert row["ci_low"] < row["speedup"] < row["ci_high"]
    ne = report["quality"]["ne"]
    assert (ne["direction"], ne["margin"], ne["num_clusters"]) == ("lower", 0.01, 2)
    assert ne["num_rows"] == 1000
    assert abs(ne["delta"]) < 1e-4  # exact Adagrad: the same mathematics
    assert {record["kind"] for record in report["passes"] if record["kept"]} == {
        "train_fuse_embeddings", "train_dense_optimizer"
    }  # fmt: skip
    for arm in ("control", "candidate"):
        cost = report["training"][arm]
        assert cost["samples_per_s"] > 0
        assert cost["num_rows_seen"] == [2000, 2000]
        assert cost["peak_memory_bytes"] > 50_000_000
        assert cost["breakdown"]["num_sampled"] > 0
        assert cost["breakdown"]["dense"]["flops"] > 0
    assert "times faster" in told
    assert "samples/s" in told
    page = (out / "report.md").read_text()
    assert "## Training: where a step goes" in page
    assert "| Step: optimizer, tables |" in page
    assert "Training: where a step goes" in (out / "report.html").read_text()


def test_a_control_recipe_needs_the_card_to_be_named(folder):
    with pytest.raises(UsageError, match="--model: names the card"):
        read_pair(folder / "fast.yaml", "train-fast")
    pair = read_pair(folder / "fast.yaml", "train-fast", folder / "card.yaml")
    assert [pair.control.name, pair.candidate.name] == ["fast", "train-fast"]
    with pytest.raises(UsageError, match="is no training recipe"):
        read_pair(folder / "card.yaml", "serve-int8")


def test_what_is_no_training_recipe_is_not_taken_for_one(folder):
    assert find_training_recipe("train-fast").name == "train-fast"
    for other in ("serve-int8", folder / "card.yaml", folder, folder / "nothing.yaml"):
        assert find_training_recipe(other) is None
    bad = folder / "bad.yaml"
    bad.write_text("name: bad\npasses:\n  - train_precision: {dtype: fp15}\n")
    with pytest.raises(RecipeError, match="dtype"):
        find_training_recipe(bad)


def test_a_change_over_seeds_is_judged_by_its_t_interval() -> None:
    control = [0.80, 0.81, 0.79, 0.80, 0.82]
    same = compare_seeds("ne", control, [x * 1.0002 for x in control], 0.001, 100)
    assert same.verdict == "pass"
    assert same.delta == pytest.approx(0.0002)
    worse = compare_seeds("ne", control, [x * 1.01 for x in control], 0.001, 100)
    assert worse.verdict == "fail"
    better = compare_seeds("ne", control, [x * 0.95 for x in control], 0.001, 100)
    assert better.verdict == "pass"
    noisy = compare_seeds("ne", control, control[::-1], 0.001, 100)
    assert noisy.verdict == "inconclusive"
    assert "add seeds" in noisy.reason
    # By hand: changes 1, 2, 3 per mille; t(2) = 4.3027 for 95 %.
    by_hand = compare_seeds("ne", [1.0] * 3, [1.001, 1.002, 1.003], 0.1, 100)
    assert by_hand.ci_high - by_hand.delta == pytest.approx(4.3027 * 0.001 / 3**0.5, rel=1e-4)


def test_a_metric_that_should_rise_is_judged_the_other_way() -> None:
    control = [0.70, 0.71, 0.72]
    lower = compare_seeds("auc", control, [x - 0.02 for x in control], 0.001, 100)
    assert (lower.verdict, lower.direction) == ("fail", "higher")
    assert lower.delta == pytest.approx(-0.02)
    assert compare_seeds("auc", control, [x + 0.02 for x in control], 0.001, 100).verdict == "pass"


def test_one_seed_decides_nothing() -> None:
    one = compare_seeds("ne", [0.8], [0.7], 0.001, 100)
    assert (one.verdict, one.ci_low) == ("inconclusive", None)
