"""Saves are whole or not at all, go on in the background, and are loaded by any number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rankopt.errors import CheckpointError
from rankopt.models.checkpoint import load_state_dict
from rankopt.sharding.checkpoint import ShardedCheckpoint, training_state
from rankopt.sharding.manifest import read_manifest
from rankopt.sharding.reshard import reshard
from rankopt.sharding.serving import serve_shards
from rankopt.sharding.verify import verify
from sharding import small_net

SCRIPT = Path(__file__).with_name("run_checkpoint.py")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adagrad(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint = ShardedCheckpoint(tmp_path / "run")
    checkpoint.save(training_state(net, optimizer, step=7, seed="a"))
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    state = checkpoint.load(training_state(other, None, step=0, seed=""))
    assert (state["step"], state["seed"]) == (7, "a")
    for name, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert set(load_state_dict(tmp_path / "run")) == set(net.state_dict())
    done = verify(tmp_path / "run")
    assert done.same
    assert done.num_checked == done.num_tensors > 4


def test_a_save_in_the_background_keeps_what_was_then(tmp_path: Path) -> None:
    table = torch.nn.Embedding(1000, 8)
    before = table.weight.detach().clone()
    checkpoint = ShardedCheckpoint(tmp_path / "run")
    pending = checkpoint.save_async(training_state(table))
    with torch.no_grad():
        table.weight.zero_()
    pending.wait()
    assert pending.done()
    assert torch.equal(load_state_dict(tmp_path / "run")["weight"], before)
    checkpoint.save(training_state(table))
    assert not load_state_dict(tmp_path / "run")["weight"].any()


KILLED = """
import os, signal, sys, torch
from rankopt.sharding import checkpoint
from rankopt.sharding.checkpoint import ShardedCheckpoint
moment, folder, how = sys.argv[1:]
owner, name = {
    "writing": (checkpoint._AtomicWriter, "_write_data"),
    "index": (checkpoint, "write_manifest"),
    "rename": (os, "rename"),
}[moment]
if moment == "rename":
    from pathlib import Path
    owner, name = Path, "rename"
    real = Path.rename
    count = []
    def rename(self, target):
        # After the old checkpoint was moved aside and before the new one is in its place.
        if ".partial-save" in self.name and ".metadata" not in str(target):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, target)
    Path.rename = rename
else:
    setattr(owner, name, lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
saved = ShardedCheckpoint(folder)
getattr(saved, how)({"model": {"w": torch.full((50_000, 4), 2.0)}})
saved.wait()
"""


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("moment", ["writing", "index", "rename"])
def test_a_killed_save_leaves_the_last_checkpoint(tmp_path: Path, moment: str, how: str) -> None:
    folder = tmp_path / "run"
    state = {"model": {"w": torch.full((50_000, 4), 1.0)}}
    ShardedCheckpoint(folder).save(state)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, moment, str(folder), how],
        check=False,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = {"model": {"w": torch.zeros(50_000, 4)}}
    ShardedCheckpoint(folder).load(found)
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert verify(folder).same
    ShardedCheckpoint(folder).save({"model": {"w": torch.full((50_000, 4), 3.0)}})
    assert float(load_state_dict(folder)["w"].mean()) == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_written_or_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    checkpoint = ShardedCheckpoint(folder)
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        checkpoint.load({"model": {"w": torch.zeros(2)}})
    checkpoint.save({"model": {"w": torch.ones(4, 2)}})
    with pytest.raises(CheckpointError, match="cannot be read into this state"):
        checkpoint.load({"model": {"v": torch.zeros(4, 2)}})
    with pytest.raises(CheckpointError, match="shard reshard"):
        checkpoint.load({"model": {"w": torch.zeros(8, 2)}})

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("torch.save", fails)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        checkpoint.save({"model": {"w": torch.zeros(4, 2)}})
    pending = checkpoint.save_async({"model": {"w": torch.zeros(4, 2)}})
    with pytest.raises(CheckpointError, match="the disk is gone"):
        pending.wait()
    monkeypatch.undo()
    assert torch.equal(load_state_dict(folder)["w"], torch.ones(4, 2))
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.load({"model": {"w": torch.zeros(4, 2)}})


def test_values_that_hold_code_are_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    folder = tmp_path / "run"
    ShardedCheckpoint(folder).save({"model": {"w": torch.ones(2)}, "step": Runs()})
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShardedCheckpoint(folder).load({"model": {"w": torch.zeros(2)}, "step": 0})
    assert not (tmp_path / "ran").exists()


def run_ranks(folder: Path, num_hosts: int, ranks_per_host: int) -> dict[str, list[torch.Tensor]]:
    """Start the ranks on a folder; scores by what pooled vectors were sent as."""
    ranks = num_hosts * ranks_per_host
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), str(SCRIPT), str(folder), str(ranks_per_host),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    scores = [torch.load(folder / f"scores-{rank}.pt") for rank in range(ranks)]
    return {sent_as: [one[sent_as] for one in scores] for sent_as in scores[0]}


@pytest.mark.slow
def test_ranks_agree_with_the_whole_model(tmp_path: Path) -> None:
    """World sizes 1 to 4, each started from a checkpoint that the one before it saved.

    Each of five ways to shard with sum and with mean pooling, with and without weights (small_net
    names the exception); hosts of two ranks where there are four; the exchange in fp32, fp16 and
    bf16; served as int8.
    """
    net = small_net.net()
    inputs = small_net.rows(0, small_net.NUM_ROWS)
    source = tmp_path / "one.pt"
    torch.save({"model": net.state_dict()}, source)
    whole = small_net.plan(1, 1, small_net.KINDS)
    has_optimizer = False
    for num_hosts, ranks_per_host in ((1, 1), (2, 2), (1, 3), (1, 2)):
        ranks = num_hosts * ranks_per_host
        folder = tmp_path / f"ranks-{ranks}"
        folder.mkdir()
        plan = small_net.plan(num_hosts, ranks_per_host, small_net.KINDS)
        (folder / "plan.json").write_text(plan.model_dump_json())
        if has_optimizer:
            (folder / "optimizer").touch()
        reshard(source, folder / "start", ranks, plan=plan)
        scores = run_ranks(folder, num_hosts, ranks_per_host)

        weights = load_state_dict(source)
        expected = small_net.expected(weights).float()
        pooled = small_net.pooled(weights)
        for name, vectors in small_net.unsharded(weights).items():
            torch.testing.assert_close(vectors, pooled[name].float(), atol=1e-6, rtol=1e-5)
        with torch.no_grad():
            alone = serve_shards(small_net.SmallNet(), source, whole)(*inputs)
        for sent_as, tolerance in (("fp32", 1e-5), ("fp16", 1e-3), ("bf16", 1e-2)):
            got = torch.cat(scores[sent_as])
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        if ranks > 1:
            assert not torch.equal(torch.cat(scores["bf16"]), torch.cat(scores["fp32"]))
        for served in scores["int8"]:
            torch.testing.assert_close(served, alone, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(served, expected, atol=0.02, rtol=0.02)

        # What was saved in the background is what was saved before the step went on.
        assert verify(folder / "after", folder / "async").same
        manifest = read_manifest(folder / "after")
        assert manifest is not None
        assert manifest.world_size == ranks
        assert any("momentum1" in record.key for record in manifest.tensors)
        if has_optimizer:
            # Only loaded and saved again: the tables and their state are those of the start.
            again = verify(folder / "start", folder / "after")
            assert again.same, again.differences
        source, has_optimizer = folder / "after", True
