from __future__ import annotations

import json

import pytest
import torch
import yaml

from rankopt.cli.main import main
from rankopt.data.synthetic import SyntheticOptions, generate


@pytest.fixture
def card(tmp_path):
    options = SyntheticOptions(
        num_train=600, num_validation=300, num_test=300, num_dense=2, num_tables=2, ids_per_table=9
    )
    generate(options, tmp_path / "data")
    raw = {
        "name": "tiny",
        "factory": "rankopt.models.deepfm:DeepFM",
        "config": {"num_ids": [9, 9], "num_dense": 2, "embedding_dim": 4, "deep_mlp": [8]},
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": ["I1", "I2"]},
            {"name": "sparse", "kind": "ids", "columns": ["C1", "C2"], "num_ids": 9},
        ],
        "outputs": [{"name": "click", "label": "label"}],
        "data": {name: f"data/{name}.parquet" for name in ("train", "validation", "test")},
        "train": {"epochs": 2, "batch_size": 100},
    }
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "card.yaml"


def test_flags_go_before_the_cards_settings_and_the_result_trains_again(card, tmp_path, capsys):
    out = tmp_path / "runs" / "one"
    assert (
        main(["train", str(card), "--out", str(out), "--epochs", "1", "--seed", "5", "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["epochs"] == 1
    assert told["settings"]["batch_size"] == 100
    assert told["seed"] == 5
    assert told["card"] == str(out / "card.yaml")
    # The card that was written names its rows from its own folder.
    again = main(["train", str(out / "card.yaml"), "--out", str(tmp_path / "two")])
    assert again == 0
    assert "test, click: NE" in capsys.readouterr().out
    first, second = (
        json.loads((folder / "metrics.json").read_text()) for folder in (out, tmp_path / "two")
    )
    assert first["test"] == second["test"]


def test_a_trace_names_the_phases_of_a_few_steps_and_the_run_says_where_they_go(
    card, tmp_path, capsys
):
    out = tmp_path / "traced"
    flags = ["--epochs", "4", "--batch-size", "50", "--num-threads", "1", "--trace"]
    assert main(["train", str(card), "--out", str(out), *flags]) == 0
    told = capsys.readouterr().out
    breakdown = json.loads((out / "metrics.json").read_text())["steps"]["breakdown"]
    assert breakdown["trace"] == "trace.json"
    assert breakdown["num_sampled"] > 1
    shares = {row["phase"]: row["share"] for row in breakdown["phases"]}
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares[p] for p in ("data_wait", "lookup", "forward", "backward")) > 0
    assert "optimizer, dense and tables in one" in told
    assert breakdown["dense"]["flops"] > 0
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in spans]
    assert [names.count(f"step {number}") for number in (3, 4, 5, 6, 7)] == [0, 1, 1, 1, 0]
    assert names.count("step: backward") == names.count("step: dense forward") == 3
    assert names.count("step: data wait") == 2
    [first, *_] = [event for event in spans if event["name"] == "step: dense forward"]
    inside = [event for event in spans if event["name"] == "step: lookup"]
    assert any(
        first["ts"] <= event["ts"] and event["ts"] + event["dur"] <= first["ts"] + first["dur"]
        for event in inside
    )
    assert any(event.get("name", "").startswith("aten::") for event in events)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--epochs", "0"], "epochs: input should be greater than 0"),
        (["--learning-rate", "-1"], "learning_rate: input should be greater than 0"),
        (["--batch-size", "1"], "batch_size: input should be greater than 1"),
    ],
)
def test_a_value_not_allowed_is_bad_usage(card, tmp_path, capsys, flags, expected):
    assert main(["train", str(card), "--out", str(tmp_path / "out"), *flags]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_recipe_of_serving_passes_is_refused(card, tmp_path, capsys):
    recipe = tmp_path / "serve.yaml"
    recipe.write_text("name: serve\npasses:\n  - quantize_dense: {}\n  - export_aoti: {}\n")
    code = main(["train", str(card), "--recipe", str(recipe), "--out", str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert code == 2
    assert "passes[0]: must be a training pass (train_*); got 'quantize_dense'" in told
    assert "passes[1]" in told
    assert "rankopt optimize" in told


def test_an_unknown_card_is_bad_usage(tmp_path, capsys):
    assert main(["train", "din-movielen", "--out", str(tmp_path / "out")]) == 2
    assert "din-movielens" in capsys.readouterr().err


def test_a_training_recipe_is_followed_and_its_cost_told(card, tmp_path, capsys):
    recipe = tmp_path / "fast.yaml"
    recipe.write_text(
        "name: fast\npasses:\n  - train_fuse_embeddings: {optimizer: adagrad}\n"
        "  - train_dedup_ids\n  - train_pipeline: {depth: 2}\n"
    )
    out = tmp_path / "out"
    assert main(["train", str(card), "--recipe", str(recipe), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "train_dedup_ids: changed nothing" in told
    assert "samples/s" in told
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["recipe"] == "fast"
    kept = {record["kind"]: record["kept"] for record in metrics["passes"]}
    assert kept == {
        "train_fuse_embeddings": True, "train_dedup_ids": False, "train_pipeline": True
    }  # fmt: skip
    steps = metrics["steps"]
    assert steps["num_steps"] == 12
    assert steps["step_p50_ns"] > 0
    assert 0 <= steps["data_wait_share"] < 1
    assert steps["peak_memory_bytes"] > 50_000_000
    # The checkpoint is the plain module's, so what was trained can be optimised and trained again.
    assert main(["train", str(out / "card.yaml"), "--out", str(tmp_path / "again")]) == 0


def test_a_recipe_that_cannot_work_here_is_bad_usage(card, tmp_path, capsys):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("name: bad\npasses:\n  - train_fuse_embeddings: {optimizer: adam}\n")
    out = tmp_path / "out"
    assert main(["train", str(card), "--recipe", str(recipe), "--out", str(out)]) == 2
    assert "Adam has no fused step on the CPU" in capsys.readouterr().err
    assert not out.exists()


def test_optimize_refuses_a_training_recipe(card, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["optimize", "train-fast", "--model", str(card), "--out", str(out)]) == 2
    assert "rankopt train CARD --recipe train-fast" in capsys.readouterr().err


def test_a_run_goes_on_from_weights_and_optimizers(card, tmp_path, capsys):
    recipe = tmp_path / "fused.yaml"
    recipe.write_text("name: fused\npasses:\n  - train_fuse_embeddings: {learning_rate: 0.05}\n")
    fused = ["train", str(card), "--recipe", str(recipe), "--epochs", "1"]
    first = tmp_path / "first"
    assert main([*fused, "--out", str(first), "--save-optimizer"]) == 0
    sums = torch.load(first / "optimizer.pt", weights_only=True)["states"][-1]["state"]
    assert all(bool((state["sum"] > 0).any()) for state in sums.values())
    second = tmp_path / "second"
    assert main([*fused, "--out", str(second), "--start", str(first), "--save-optimizer"]) == 0
    later = torch.load(second / "optimizer.pt", weights_only=True)["states"][-1]["state"]
    for key, state in later.items():
        assert bool((state["sum"] >= sums[key]["sum"]).all())
    capsys.readouterr()
    plain = ["train", str(card), "--out", str(tmp_path / "plain"), "--start", str(first)]
    assert main(plain) == 2
    assert "must be the state of AdamW" in capsys.readouterr().err
    assert main([*plain[:-1], str(tmp_path / "nothing")]) == 2
