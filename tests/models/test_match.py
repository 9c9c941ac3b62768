from __future__ import annotations

import pytest
import torch
from torch import nn

from rankopt.errors import CheckpointError
from rankopt.models.match import match_state_dict


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def refusal(module, state):
    with pytest.raises(CheckpointError) as caught:
        match_state_dict(module, state, "w.pt")
    return str(caught.value)


def test_equal_keys_match_without_a_note(module):
    matched = match_state_dict(module, module.state_dict(), "w.pt")
    assert list(matched.state) == list(module.state_dict())
    assert matched.notes == ()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrapper_on_all_keys_is_taken_off_and_told(module, prefix):
    state = {prefix + name: value for name, value in module.state_dict().items()}
    matched = match_state_dict(module, state, "w.pt")
    assert list(matched.state) == list(module.state_dict())
    assert len(matched.notes) == prefix.count(".")
    assert "off all 4 keys" in matched.notes[0]


def test_a_wrapper_on_some_keys_is_not_taken_off(module):
    state = {"module." + name: value for name, value in module.state_dict().items()}
    state["1.bias"] = state.pop("module.1.bias")
    message = refusal(module, state)
    assert "lacks 3 of the model's keys: 0.weight [4, 3], 0.bias [4], 1.weight [1, 4]" in message
    assert "3 would match without the prefix 'module.'" in message


def test_a_module_with_that_name_keeps_it():
    module = nn.ModuleDict({"module": nn.Linear(2, 1)})
    matched = match_state_dict(module, module.state_dict(), "w.pt")
    assert list(matched.state) == ["module.weight", "module.bias"]
    assert matched.notes == ()


def test_another_prefix_is_named_and_the_fix_works(module):
    state = {"net.tower." + name: value for name, value in module.state_dict().items()}
    message = refusal(module, state)
    assert "4 would match without the prefix 'net.tower.'" in message
    fix = message.split("Save them so: ")[1].split("}.")[0] + "}"
    fixed = eval(fix, {"state": state})
    match_state_dict(module, fixed, "w.pt")


def test_a_prefix_that_the_checkpoint_lacks_is_named_and_the_fix_works(module):
    outer = nn.ModuleDict({"net": module})
    state = module.state_dict()
    message = refusal(outer, state)
    assert "4 would match with the prefix 'net.' in front" in message
    fix = message.split("Save them so: ")[1].split("}.")[0] + "}"
    match_state_dict(outer, eval(fix, {"state": state}), "w.pt")


def test_shapes_that_differ_are_all_named(module):
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    message = refusal(other, module.state_dict())
    assert "w.pt: 0.weight: must have the shape [5, 3]" in message
    assert "got [4, 3]" in message
    assert "w.pt: 1.weight: must have the shape [1, 5]" in message
    assert "1.bias" not in message


def test_a_long_difference_is_cut(module):
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)])
    state = {f"other.{name}x": value for name, value in deep.state_dict().items()}
    message = refusal(deep, state)
    assert "lacks 60 of the model's keys" in message
    assert "and 52 more" in message
    assert len(message) < 2000


def test_another_float_type_is_read_and_told(module):
    state = {name: value.half() for name, value in module.state_dict().items()}
    matched = match_state_dict(module, state, "w.pt")
    assert matched.notes == ("w.pt: read 4 tensor(s) stored as float16 as float32",)


def test_integers_in_place_of_floats_are_refused(module):
    state = module.state_dict() | {"1.bias": torch.tensor([1])}
    assert "w.pt: 1.bias: must be torch.float32; got 'torch.int64'" in refusal(module, state)
