from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from rankopt.data.source import open_source
from rankopt.data.splits import Splits
from rankopt.data.synthetic import SyntheticOptions, generate
from rankopt.errors import CardError, DataError, OutputExistsError, UsageError
from rankopt.models.build import build_module
from rankopt.models.card import ModelCard, load_card
from rankopt.models.serving import ServingModule
from rankopt.recipe import parse_recipe
from rankopt.train.loop import judge, train
from rankopt.train.settings import TrainSettings

OPTIONS = SyntheticOptions(
    num_train=12_000,
    num_validation=3_000,
    num_test=3_000,
    num_dense=4,
    num_tables=3,
    ids_per_table=20,
    num_interactions=0,
    logit_std=2.5,
)
SETTINGS = TrainSettings(epochs=6, batch_size=256, learning_rate=0.01, patience=2, num_threads=1)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "planted"
    return folder, generate(OPTIONS, folder)


def splits_of(folder):
    train_rows, validation, test = (
        open_source(folder / f"{name}.parquet") for name in ("train", "validation", "test")
    )
    return Splits(train_rows, validation, test, {"origin": "planted"})


def make_card(**rest):
    config = {"num_ids": [20] * 3, "num_dense": 4, "embedding_dim": 4, "deep_mlp": [16]}
    raw = {
        "name": "planted",
        "factory": "rankopt.models.deepfm:DeepFM",
        "config": config,
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]},
            {"name": "sparse", "kind": "ids", "columns": ["C1", "C2", "C3"], "num_ids": 20},
        ],
        "outputs": [{"name": "click", "label": "label"}],
    }
    return ModelCard.model_validate(raw | rest)


@pytest.fixture(scope="module")
def trained(planted, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "out"
    lines = []
    result = train(make_card(), splits_of(planted[0]), out, SETTINGS, lines.append)
    return result, lines


def test_ne_comes_near_the_best_that_the_teacher_allows(planted, trained):
    best = planted[1]["test"].teacher_normalized_entropy
    ne = trained[0].metrics["test"]["click"]["ne"]
    assert best < 0.85  # the labels can be learned at all
    assert ne - best < 0.15 * (1 - best)


def test_the_result_is_a_card_that_scores_as_its_metrics_say(planted, trained):
    result, _ = trained
    card = load_card(result.card)
    assert card.train == SETTINGS
    module = ServingModule(card, build_module(card))
    again = judge(card, module.eval(), splits_of(planted[0]).test)
    assert again["click"] == pytest.approx(result.metrics["test"]["click"])
    written = json.loads((result.out / "metrics.json").read_text())
    assert written == result.metrics
    assert set(written["test"]["click"]) >= {"ne", "auc", "log_loss", "num_rows"}
    assert written["test"]["click"]["num_rows"] == 3_000


def test_the_weights_kept_are_those_of_the_best_evaluation(trained):
    result, lines = trained
    curve = result.metrics["curve"]
    assert len(lines) == len(curve)
    best = min(point["validation_ne"] for point in curve)
    assert result.metrics["validation"]["click"]["ne"] == pytest.approx(best)


def test_a_seed_gives_the_same_weights_and_another_seed_others(planted, tmp_path):
    settings = SETTINGS.model_copy(update={"epochs": 1, "table_optimizer": "adagrad"})
    threads_before = torch.get_num_threads()
    for name, seed in [("a", 3), ("b", 3), ("c", 4)]:
        torch.rand(seed + len(name))  # what the caller drew before must not matter
        chosen = settings.model_copy(update={"seed": seed})
        state_before = torch.random.get_rng_state()
        train(make_card(), splits_of(planted[0]), tmp_path / name, chosen)
        assert torch.equal(torch.random.get_rng_state(), state_before)
    weights = {n: load_file(tmp_path / n / "checkpoint.safetensors") for n in "abc"}
    assert all(torch.equal(weights["a"][k], weights["b"][k]) for k in weights["a"])
    assert not all(torch.equal(weights["a"][k], weights["c"][k]) for k in weights["a"])
    assert torch.get_num_threads() == threads_before


@pytest.mark.parametrize("optimizer", ["sparse_adam", "adagrad"])
def test_tables_with_an_optimizer_of_their_own_learn(planted, tmp_path, optimizer):
    settings = SETTINGS.model_copy(update={"table_optimizer": optimizer, "epochs": 3})
    settings = settings.model_copy(update={"table_learning_rate": 0.05})
    result = train(make_card(), splits_of(planted[0]), tmp_path / "out", settings)
    best = planted[1]["test"].teacher_normalized_entropy
    assert result.metrics["test"]["click"]["ne"] - best < 0.15 * (1 - best)


def test_small_windows_and_several_evaluations_train_as_well(planted, tmp_path):
    update = {"window_rows": 2_000, "evaluations_per_epoch": 3, "epochs": 2, "patience": 9}
    settings = SETTINGS.model_copy(update=update)
    result = train(make_card(), splits_of(planted[0]), tmp_path / "out", settings)
    assert len(result.metrics["curve"]) == 6
    assert result.metrics["num_rows_seen"] == 24_000
    assert result.metrics["test"]["click"]["ne"] < 0.9


def test_rows_made_ahead_of_the_step_change_no_weight_and_their_wait_is_told(planted, tmp_path):
    update = {"window_rows": 3_000, "epochs": 2, "patience": 9}
    settings = SETTINGS.model_copy(update=update)
    ahead = parse_recipe({"name": "ahead", "passes": [{"train_pipeline": {"depth": 3}}]}, where="")
    for name, recipe in (("0", None), ("3", ahead)):
        splits = splits_of(planted[0])
        result = train(make_card(), splits, tmp_path / name, settings, recipe=recipe)
        assert 0 < result.metrics["steps"]["data_wait_share"] < 1
    first, second = (load_file(tmp_path / n / "checkpoint.safetensors") for n in "03")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_training_stops_when_validation_gets_no_better(planted, tmp_path):
    folder = planted[0]
    shuffled = pd.read_parquet(folder / "validation.parquet")
    shuffled["label"] = np.random.default_rng(0).permutation(shuffled["label"].to_numpy())
    splits = splits_of(folder)
    noise = Splits(splits.train, open_source(shuffled), splits.test, {})
    settings = SETTINGS.model_copy(update={"epochs": 20, "patience": 2})
    result = train(make_card(), noise, tmp_path / "out", settings)
    curve = [point["validation_ne"] for point in result.metrics["curve"]]
    assert len(curve) < 20
    assert int(np.argmin(curve)) == len(curve) - 3


def test_a_module_that_gives_probabilities_is_trained_too(planted, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 1)\n"
        "    def forward(self, dense):\n"
        "        return {'p': torch.sigmoid(self.layer(dense))}\n"
    )
    card = make_card(
        factory="net.py:Net",
        config={},
        inputs=[{"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]}],
        outputs=[{"name": "p", "activation": "probability", "index": "p", "label": "label"}],
    ).model_copy(update={"path": tmp_path / "card.yaml"})
    settings = SETTINGS.model_copy(update={"epochs": 1})
    result = train(card, splits_of(planted[0]), tmp_path / "deep" / "er" / "out", settings)
    moved = load_card(result.card)
    assert moved.factory == "../../../net.py:Net"
    build_module(moved)
    assert 0.5 < result.metrics["test"]["p"]["calibration"] < 2


def test_an_earlier_result_is_kept_unless_told_otherwise(planted, trained):
    result, _ = trained
    before = (result.out / "metrics.json").read_bytes()
    with pytest.raises(OutputExistsError):
        train(make_card(), splits_of(planted[0]), result.out, SETTINGS)
    assert (result.out / "metrics.json").read_bytes() == before


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_explodes_is_told_and_leaves_nothing(planted, tmp_path):
    settings = SETTINGS.model_copy(update={"learning_rate": 1e30})
    with pytest.raises(UsageError, match=r"the loss became .* Lower the learning rate"):
        train(make_card(), splits_of(planted[0]), tmp_path / "out", settings)
    assert list(tmp_path.iterdir()) == []


def test_validation_labels_of_one_class_are_refused(planted, tmp_path):
    one_class = pd.read_parquet(planted[0] / "validation.parquet")
    one_class["label"] = 0
    splits = splits_of(planted[0])
    bad = Splits(splits.train, open_source(one_class), splits.test, {})
    with pytest.raises(DataError, match="must hold labels of both classes"):
        train(make_card(), bad, tmp_path / "out", SETTINGS)


def test_rows_that_training_needs_are_named(planted, tmp_path):
    splits = splits_of(planted[0])
    with pytest.raises(DataError, match="training needs rows for train and validation"):
        train(make_card(), Splits(None, None, splits.test, {}), tmp_path / "out")


def test_inputs_that_forward_does_not_take_are_named(planted, tmp_path):
    inputs = [
        {"name": "dense", "kind": "dense", "columns": ["I1", "I2", "I3", "I4"]},
        {"name": "spares", "kind": "ids", "columns": ["C1", "C2", "C3"], "num_ids": 20},
    ]
    with pytest.raises(CardError, match=r"passes 'spares', .*Did you mean 'sparse'"):
        train(make_card(inputs=inputs), splits_of(planted[0]), tmp_path / "out")
