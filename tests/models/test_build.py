from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from rankopt.errors import CardError, CheckpointError
from rankopt.models.build import (
    build_model,
    build_module,
    check_forward_signature,
    make_module,
    resolve_factory,
)
from rankopt.models.card import ModelCard
from rankopt.models.checkpoint import save_checkpoint

FACTORY = """
from torch import nn
from neighbour import WIDTH

not_callable = 3

def tower(hidden, *, bias=True):
    if hidden < 1:
        raise ValueError(f"hidden must be positive; got {hidden}")
    return nn.Sequential(nn.Linear(WIDTH, hidden, bias=bias), nn.Linear(hidden, 1))

def tower_as_list(hidden):
    return [hidden]

class Towers:
    @classmethod
    def make(cls, **config):
        return tower(**config)
"""


@pytest.fixture
def make_card(tmp_path):
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "neighbour.py").write_text("WIDTH = 2\n")

    def make(factory="net.py:tower", config=None, **rest):
        raw = {
            "name": "tower",
            "factory": factory,
            "config": {"hidden": 4} if config is None else config,
            "inputs": [{"name": "input", "kind": "dense", "columns": ["a", "b"]}],
            "outputs": [{"label": "y"}],
        }
        card = ModelCard.model_validate(raw | rest)
        return card.model_copy(update={"path": tmp_path / "card.yaml"})

    yield make
    sys.modules.pop("neighbour", None)


def refusal(card):
    with pytest.raises(CardError) as caught:
        make_module(card)
    assert card.where in str(caught.value)
    return str(caught.value)


def test_a_file_beside_the_card_is_loaded_with_its_neighbours(make_card):
    before = list(sys.path)
    assert isinstance(make_module(make_card()), nn.Sequential)
    assert sys.path == before


def test_a_changed_file_is_loaded_again(make_card, tmp_path):
    first = resolve_factory(make_card())
    assert resolve_factory(make_card()) is first
    (tmp_path / "net.py").write_text(FACTORY + "\n# changed\n")
    assert resolve_factory(make_card()) is not first


def test_a_package_and_a_class_method_are_found(make_card):
    config = {"num_ids": [5, 6], "embedding_dim": 4}
    assert type(make_module(make_card("rankopt.models.dlrm:DLRM", config))).__name__ == "DLRM"
    assert isinstance(make_module(make_card("net.py:Towers.make")), nn.Sequential)


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("nett.py:tower", "nett.py does not exist"),
        ("nett.py:tower", "Did you mean 'net.py'"),
        ("net.py:towr", "net.py has no 'towr'. Did you mean 'tower'"),
        ("net.py:Towers.mke", "has no 'mke'"),
        ("net.py:not_callable", "must name a function or a class; got 'int'"),
        ("net.py:tower_as_list", "must return a torch.nn.Module; got 'list'"),
        ("no_such_package.net:tower", "no module 'no_such_package' is installed"),
        ("rankopt.models.dlrmm:DLRM", "no module 'rankopt.models.dlrmm' is installed"),
    ],
)
def test_what_is_not_there_is_named(make_card, factory, expected):
    assert expected in refusal(make_card(factory))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_dependency\n", "No module named 'no_such_dependency'"),
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(make_card, tmp_path, text, expected):
    (tmp_path / "broken.py").write_text(text)
    message = refusal(make_card("broken.py:f"))
    assert "importing broken.py raised" in message
    assert expected in message


def test_the_line_that_raised_is_named(make_card, tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    assert f"{tmp_path / 'broken.py'}:2" in refusal(make_card("broken.py:f"))


def test_config_keywords_are_checked_all_at_once(make_card):
    message = refusal(make_card(config={"hiden": 4, "bais": False}))
    assert "config.hiden: the factory takes no such keyword. Did you mean 'hidden'" in message
    assert "config.bais: the factory takes no such keyword. Did you mean 'bias'" in message
    assert "config.hidden: is required by the factory" in message


def test_a_factory_that_raises_is_the_cards_problem(make_card):
    message = refusal(make_card(config={"hidden": 0}))
    assert "the factory raised ValueError: hidden must be positive; got 0" in message
    assert "net.py:9" in message


def test_weights_come_from_the_card_or_the_call(make_card, tmp_path):
    module = make_module(make_card())
    save_checkpoint(module.state_dict(), tmp_path / "w.safetensors")
    for card, checkpoint in [
        (make_card(checkpoint="w.safetensors"), None),
        (make_card(), tmp_path / "w.safetensors"),
        (make_card(checkpoint="absent.pt"), tmp_path / "w.safetensors"),
    ]:
        built = build_module(card, checkpoint)
        assert not built.training
        assert torch.equal(built[0].weight, module[0].weight)


def test_without_a_checkpoint_random_weights_must_be_asked_for(make_card):
    with pytest.raises(CardError, match="checkpoint: is required"):
        build_module(make_card())
    assert build_model(make_card(), allow_random=True).checkpoint is None


def test_notes_tell_what_was_unwrapped(make_card, tmp_path):
    state = {f"module.{k}": v for k, v in make_module(make_card()).state_dict().items()}
    torch.save({"model": state}, tmp_path / "w.pt")
    notes = build_model(make_card(), tmp_path / "w.pt").notes
    assert len(notes) == 2
    assert "key 'model'" in notes[0]
    assert "'module.'" in notes[1]


def test_a_checkpoint_of_another_model_is_refused(make_card, tmp_path):
    save_checkpoint(make_module(make_card()).state_dict(), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        build_module(make_card(config={"hidden": 5}), tmp_path / "w.pt")


class TakesMany(nn.Module):
    def forward(self, dense, history_values, history_lengths, bag, scale=1.0):
        return dense


INPUTS = [
    {"name": "dense", "kind": "dense", "columns": ["a"]},
    {"name": "history", "kind": "ragged_ids", "column": "h", "num_ids": 5, "max_length": 3},
    {
        "name": "tags",
        "argument": "bag",
        "kind": "ragged_ids",
        "column": "t",
        "num_ids": 5,
        "max_length": 3,
        "layout": "padded",
    },
]


def signature_problems(make_card, module, inputs, **rest):
    return [str(p) for p in check_forward_signature(make_card(inputs=inputs, **rest), module)]


def test_inputs_that_fill_forward_are_accepted(make_card):
    assert signature_problems(make_card, TakesMany(), INPUTS) == []


def test_parameters_that_do_not_fit_are_named(make_card):
    inputs = [INPUTS[0], INPUTS[1] | {"layout": "values_offsets"}]
    problems = signature_problems(make_card, TakesMany(), inputs)
    assert len(problems) == 3
    assert (
        "inputs[1] (history): passes 'history_offsets', which forward does not take" in problems[0]
    )
    assert "nothing passes 'history_lengths'" in problems[1]
    assert "nothing passes 'bag'" in problems[2]


def test_one_parameter_filled_twice_is_named(make_card):
    inputs = [*INPUTS, {"name": "more", "argument": "dense", "kind": "dense", "columns": ["b"]}]
    (problem,) = signature_problems(make_card, TakesMany(), inputs)
    assert "passes 'dense', which dense passes already" in problem


def test_keywords_of_any_name_are_accepted(make_card):
    class TakesAny(nn.Module):
        def forward(self, **features):
            return features

    assert signature_problems(make_card, TakesAny(), INPUTS) == []


def test_a_dict_call_needs_one_parameter(make_card):
    class TakesOne(nn.Module):
        def forward(self, features):
            return features

    assert signature_problems(make_card, TakesOne(), INPUTS, call="dict") == []
    (problem,) = signature_problems(make_card, TakesMany(), INPUTS, call="dict")
    assert "'dict' needs a forward that takes one mapping" in problem
