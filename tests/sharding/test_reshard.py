"""Checkpoints are cut anew, and every value is where it was."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from rankopt.errors import CheckpointError, EnvironmentProblem, OutputExistsError, UsageError
from rankopt.models.checkpoint import load_state_dict
from rankopt.sharding.checksums import BLOCK_ROWS
from rankopt.sharding.layout import _Merged
from rankopt.sharding.opening import open_checkpoint
from rankopt.sharding.reshard import reshard
from rankopt.sharding.setting import ShardingType
from rankopt.sharding.verify import verify
from sharding import small_net

LONG = "e.embedding_bags.long.weight"
ROWS = BLOCK_ROWS * 2 + 5


def content() -> dict[str, Any]:
    """Tables, dense weights, scalars, odd dtypes, optimizer state and plain values."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model": {
            LONG: draw(ROWS, 4),
            "e.embedding_bags.short.weight": draw(3, 7),
            "dense.weight": draw(600, 500),
            "half": draw(70, 9).to(torch.bfloat16),
            "deep": draw(3, 4, 5),
            "count": torch.tensor(3),
            "flags": torch.tensor([True, False, True]),
            "nothing": torch.empty(0, 4),
        },
        "optimizer": {
            "state": {
                LONG: {"long.momentum1": draw(ROWS)},
                "e.embedding_bags.short.weight": {"short.exp_avg": draw(3, 7)},
            },
            "param_groups": [{"lr": 0.1, "params": [1, 2]}],
        },
        "step": 17,
    }


def assert_same(one: Any, other: Any, at: str = "") -> None:
    if isinstance(one, dict):
        assert list(one) == list(other), at
        for key, value in one.items():
            assert_same(value, other[key], f"{at}/{key}")
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype, at
        assert torch.equal(one, other), at
    else:
        assert one == other, at


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "one.pt"
    torch.save(content(), file)
    return file


def test_one_four_three_one_returns_every_tensor_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    four = reshard(saved, tmp_path / "four", 4)
    three = reshard(four.out, tmp_path / "three", 3)
    back = reshard(three.out, tmp_path / "back.pt", 1)
    assert_same(torch.load(back.out), content())
    assert four.checksums == three.checksums == back.checksums
    assert not four.checked
    assert three.checked
    sizes = [rank.size_bytes for rank in four.ranks]
    assert max(sizes) - min(sizes) < 600 * 500 * 4
    assert verify(saved, four.out).same


def test_safetensors_carry_the_optimizer_beside_the_weights(saved: Path, tmp_path: Path) -> None:
    one = reshard(saved, tmp_path / "one.safetensors", 1)
    assert any("one.optimizer.safetensors" in note for note in one.notes)
    weights = load_state_dict(tmp_path / "one.safetensors")
    assert_same({name: weights[name] for name in content()["model"]}, content()["model"])
    assert len(weights) == len(content()["model"])
    two = reshard(one.out, tmp_path / "two", 2)
    back = reshard(two.out, tmp_path / "back.pt", 1)
    assert back.checksums == one.checksums
    assert verify(saved, back.out).same


def test_torch_reads_what_is_written(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "three", 3)
    assert_same(load_state_dict(tmp_path / "three"), content()["model"])
    expected = content()
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in expected["model"].items()},
        "optimizer": {
            "state": {
                weight: {name: torch.zeros_like(value) for name, value in states.items()}
                for weight, states in expected["optimizer"]["state"].items()
            },
            "param_groups": [],
        },
        "step": 0,
    }
    dcp.load(state, checkpoint_id=str(tmp_path / "three"), no_dist=True)
    assert_same(state, expected)


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    turned = torch.arange(48.0).reshape(8, 6).T
    state = {"model": {"turned": turned, "e.embedding_bags.t.weight": torch.randn(100, 4)}}
    dcp.save(state, checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    done = reshard(tmp_path / "torch", tmp_path / "one.pt", 1)
    assert not done.checked
    assert_same(torch.load(done.out), state)


def test_a_flat_state_dict_stays_flat(tmp_path: Path) -> None:
    state = {"t.weight": torch.randn(70_000, 8), "b": torch.randn(3)}
    torch.save(state, tmp_path / "flat.pt")
    done = reshard(tmp_path / "flat.pt", tmp_path / "two", 2)
    assert [rank.num_shards for rank in done.ranks] == [2, 1]
    assert_same(torch.load(reshard(done.out, tmp_path / "back.pt", 1).out), state)


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    state = {"embedding_bags.t.weight": torch.randn(3, 2)}
    torch.save(state, tmp_path / "flat.pt")
    done = reshard(tmp_path / "flat.pt", tmp_path / "eight", 8)
    assert [rank.num_shards for rank in done.ranks] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert_same(torch.load(reshard(done.out, tmp_path / "back.pt", 1).out), state)


ALL_KINDS: tuple[ShardingType, ...] = (
    "table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel",
)  # fmt: skip


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_plan_places_every_table(tmp_path: Path, kind: ShardingType) -> None:
    model = small_net.net()
    states = {
        name: {f"{name.split('.')[-2]}.momentum1": torch.rand(len(value))}
        for name, value in model.state_dict().items()
        if "embedding_bags" in name
    }
    whole = {"model": model.state_dict(), "optimizer": {"state": states}}
    torch.save(whole, tmp_path / "one.pt")
    plan = small_net.plan(2, 2, dict.fromkeys(small_net.ROWS, kind))
    done = reshard(tmp_path / "one.pt", tmp_path / "four", 4, plan=plan)
    placed = {
        (shard.rank, shard.row_offset, shard.column_offset)
        for shard in plan.tables[0].shards
        if shard.num_rows
    }
    pieces = (
        open_checkpoint(tmp_path / "four").tensors["model.sparse.embedding_bags.a.weight"].pieces
    )
    found = {(int(p.file.name.split("_")[2]), p.row_offset, p.column_offset) for p in pieces}
    assert found == placed if kind != "data_parallel" else len(found) == 1
    back = reshard(done.out, tmp_path / "back.pt", 1)
    assert_same(torch.load(back.out), whole)


def test_row_wise_state_follows_the_columns(tmp_path: Path) -> None:
    """One value a row and part of the columns, as torchrec keeps it."""
    model = small_net.net()
    name, num_rows = "sparse.embedding_bags.c.weight", small_net.ROWS["c"]
    state = {"optimizer": {"state": {name: {"c.momentum1": torch.rand(num_rows)}}}}
    torch.save({"model": model.state_dict(), **state}, tmp_path / "one.pt")
    kinds: dict[str, ShardingType] = dict.fromkeys(small_net.ROWS, "column_wise")
    two = reshard(tmp_path / "one.pt", tmp_path / "two", 2, plan=small_net.plan(1, 2, kinds))
    assert any("each of the 2 parts" in note for note in two.notes)
    key = f"optimizer.state.{name}.c.momentum1"
    wide = open_checkpoint(tmp_path / "two").tensors[key]
    assert wide.shape == (2 * num_rows,)
    parts = wide.read_rows(0, 2 * num_rows).flatten()
    assert torch.equal(parts[:num_rows], parts[num_rows:])
    # The same columns over other ranks: copied as they are. Whole rows: the mean of the parts.
    three = reshard(two.out, tmp_path / "three", 3, plan=small_net.plan(1, 3, kinds))
    assert three.checksums[key] == two.checksums[key]
    assert not three.notes
    whole = torch.load(reshard(three.out, tmp_path / "back.pt", 1).out)
    assert torch.equal(
        whole["optimizer"]["state"][name]["c.momentum1"],
        state["optimizer"]["state"][name]["c.momentum1"],
    )


def test_parts_that_differ_are_averaged_by_width(tmp_path: Path) -> None:

    torch.save({"m": torch.tensor([1.0, 2.0, 5.0, 6.0])}, tmp_path / "m.pt")
    stored = open_checkpoint(tmp_path / "m.pt").tensors["m"]
    merged = _Merged(stored, 2, (3, 1)).read_rows(0, 2)
    assert torch.equal(merged, torch.tensor([[2.0], [3.0]]))


def test_wrong_requests_are_told_at_once(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)at least 1.*must be a folder's name"):
        reshard(saved, tmp_path / "x.zip", 0)
    with pytest.raises(UsageError, match="one file is for"):
        reshard(saved, tmp_path / "x.pt", 2)
    with pytest.raises(UsageError, match="itself"):
        reshard(saved, saved, 1)
    plan = small_net.plan(1, 2, small_net.KINDS)
    with pytest.raises(UsageError, match=r"(?s)must be 2.*a: is not in the checkpoint"):
        reshard(saved, tmp_path / "x", 3, plan=plan)
    with pytest.raises(CheckpointError, match="does not exist"):
        reshard(tmp_path / "no.pt", tmp_path / "x", 3)
    with pytest.raises(UsageError, match="does not fit"):
        reshard(saved, tmp_path / "x", 2, plan=plan.model_copy(update={"fits": False}))
    assert not (tmp_path / "x").exists()


def test_an_earlier_result_is_kept_until_the_new_one_is_whole(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "two"
    first = reshard(saved, out, 2)
    with pytest.raises(OutputExistsError, match="--overwrite"):
        reshard(saved, out, 3)
    from rankopt.sharding import writing

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.Place, "write", full)
    with pytest.raises(EnvironmentProblem, match="full"):
        reshard(saved, out, 3, overwrite=True)
    monkeypatch.undo()
    assert verify(out).same
    assert {path.name for path in tmp_path.iterdir()} == {"one.pt", "two"}
    assert reshard(saved, out, 3, overwrite=True).checksums == first.checksums
    assert verify(saved, out).same
    assert {path.name.split("_")[2] for path in out.glob("*.distcp")} == {"0", "1", "2"}


def test_damage_is_found_while_resharding(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "two", 2)
    shard = tmp_path / "two" / "__1_0.distcp"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    shard.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: model.e.embedding_bags.long"):
        reshard(tmp_path / "two", tmp_path / "back.pt", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"one.pt", "two"}


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    torch.save({"t": torch.zeros(2), "x": Runs()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="run code"):
        reshard(tmp_path / "evil.pt", tmp_path / "x", 2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Half of this small size above the baseline at most; 4 GiB are the script's default."""
    script = Path(__file__).parents[2] / "scripts" / "reshard_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), "--gib", "0.375", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["same"]
    for step in result["steps"]:
        assert step["above_baseline_bytes"] < result["checkpoint_bytes"] / 2
