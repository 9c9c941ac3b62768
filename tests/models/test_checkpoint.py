from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankopt.errors import CheckpointError
from rankopt.models.checkpoint import load_state_dict, read_checkpoint, save_checkpoint


class CallsSystem:
    """Unpickling it would make the file whose path it was given."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 1))


def same(state, module):
    expected = module.state_dict()
    return set(state) == set(expected) and all(
        torch.equal(state[name], value) for name, value in expected.items()
    )


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    return message


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.safetensors"])
def test_what_is_saved_comes_back(tmp_path, module, name):
    save_checkpoint(module.state_dict(), tmp_path / name)
    assert same(load_state_dict(tmp_path / name), module)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_tied_and_sliced_weights_are_saved_whole(tmp_path):
    table = torch.arange(12.0).reshape(4, 3)
    save_checkpoint({"a": table, "b": table, "c": table[1:2]}, tmp_path / "a.safetensors")
    state = load_state_dict(tmp_path / "a.safetensors")
    assert torch.equal(state["a"], table)
    assert torch.equal(state["b"], table)
    assert torch.equal(state["c"], table[1:2])


def test_saving_needs_a_known_suffix(tmp_path, module):
    with pytest.raises(CheckpointError, match=r"must end in \.safetensors, \.pt or \.pth"):
        save_checkpoint(module.state_dict(), tmp_path / "a.npz")


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_one_nested_state_dict_is_read_and_told(tmp_path, module, key):
    optimizer = torch.optim.Adam(module.parameters())
    content = {key: module.state_dict(), "epoch": 3, "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "a.pt")
    read = read_checkpoint(tmp_path / "a.pt")
    assert same(read.state, module)
    assert read.notes == (f"a.pt: read the weights under its key {key!r}",)


def test_two_nested_state_dicts_are_refused(tmp_path, module):
    torch.save({"model": module.state_dict(), "ema": module.state_dict()}, tmp_path / "a.pt")
    assert "one mapping of tensors; got ['model', 'ema']" in refusal(tmp_path / "a.pt")


def test_a_whole_module_is_refused_with_what_to_do(tmp_path, module):
    torch.save(module, tmp_path / "a.pt")
    message = refusal(tmp_path / "a.pt")
    assert "holds Python objects" in message
    assert "torch.save(model.state_dict()" in message


def test_code_in_a_pickle_does_not_run(tmp_path):
    trace = tmp_path / "ran"
    torch.save({"w": torch.ones(2), "x": CallsSystem(trace)}, tmp_path / "a.pt")
    assert "holds Python objects" in refusal(tmp_path / "a.pt")
    assert not trace.exists()


def test_torchscript_is_refused_with_what_to_do(tmp_path, module):
    torch.jit.script(nn.Linear(2, 1)).save(tmp_path / "a.pt")
    assert "is a TorchScript archive" in refusal(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@settings(deadline=None, max_examples=20)
@given(share=st.floats(0, 0.98))
def test_a_truncated_file_is_refused(tmp_path_factory, name, share):
    file = tmp_path_factory.mktemp("truncated") / name
    save_checkpoint({"w": torch.arange(500.0)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    message = refusal(file)
    assert "truncated" in message or "is empty (0 bytes)" in message


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@settings(deadline=None, max_examples=40)
@given(content=st.binary(min_size=1, max_size=200))
def test_any_bytes_end_in_a_checkpoint_error(tmp_path_factory, name, content):
    file = tmp_path_factory.mktemp("bytes") / name
    file.write_bytes(content)
    refusal(file)


@pytest.mark.parametrize(("name", "what"), [("a.npz", "must be a .pt"), ("a.txt", "must be a .pt")])
def test_other_formats_are_refused(tmp_path, name, what):
    (tmp_path / name).write_bytes(b"anything")
    assert what in refusal(tmp_path / name)


def test_a_missing_file_names_its_neighbours(tmp_path, module):
    save_checkpoint(module.state_dict(), tmp_path / "epoch_10.pt")
    message = refusal(tmp_path / "epoch_1.pt")
    assert "does not exist" in message
    assert "'epoch_10.pt'" in message


@pytest.mark.parametrize("content", [[1, 2], 3, {}, {"epoch": 3}])
def test_a_file_without_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    refusal(tmp_path / "a.pt")


def test_entries_that_are_no_tensors_are_named(tmp_path, module):
    torch.save({**module.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    assert "a.pt: epoch: must be a plain tensor; got 'int'" in refusal(tmp_path / "a.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_nan_is_refused_with_the_tensor_and_the_count(tmp_path, dtype):
    bad = torch.ones(3, 4)
    bad[1, 2] = float("nan")
    torch.save({"good": torch.ones(2), "bad": bad.to(dtype)}, tmp_path / "a.pt")
    message = refusal(tmp_path / "a.pt")
    assert "a.pt: bad: must hold finite numbers only" in message
    assert "1 NaN and 0 infinite of 12 values" in message
    assert "good" not in message


def test_infinity_is_refused(tmp_path):
    torch.save({"w": torch.tensor([1.0, float("-inf")])}, tmp_path / "a.pt")
    assert "0 NaN and 1 infinite of 2 values" in refusal(tmp_path / "a.pt")


@pytest.fixture
def folder(tmp_path, module):
    dcp.save({"model": module.state_dict(), "step": 3}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def test_a_distributed_checkpoint_is_read_without_a_process_group(folder, module):
    read = read_checkpoint(folder)
    assert same(read.state, module)
    assert read.notes == ("dcp: read the weights under its key 'model'",)


def test_optimizer_state_beside_the_model_is_not_read(tmp_path, module):
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    content = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(content, checkpoint_id=tmp_path / "dcp")
    assert same(load_state_dict(tmp_path / "dcp"), module)


def test_a_flat_distributed_checkpoint_is_read(tmp_path, module):
    dcp.save(module.state_dict(), checkpoint_id=tmp_path / "dcp")
    assert same(load_state_dict(tmp_path / "dcp"), module)


def test_a_folder_without_an_index_is_refused(tmp_path):
    assert "holds no .metadata" in refusal(tmp_path)


def test_a_missing_and_a_truncated_shard_are_named(folder):
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert f"{shard.name}: is truncated" in refusal(folder)
    shard.unlink()
    assert f"{shard.name}: is missing" in refusal(folder)


def test_a_damaged_shard_is_refused(folder):
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    assert "damaged" in refusal(folder)


def test_code_in_an_index_does_not_run(folder, tmp_path):
    trace = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(CallsSystem(trace)))
    assert "holds code; reading it would run it; got 'posix.system'" in refusal(folder)
    assert not trace.exists()


@settings(deadline=None, max_examples=40)
@given(content=st.binary(max_size=100))
def test_any_index_ends_in_a_checkpoint_error(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("index")
    (folder / ".metadata").write_bytes(content)
    refusal(folder)
