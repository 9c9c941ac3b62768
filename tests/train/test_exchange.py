"""What ranks say to each other, as far as one process can tell, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankopt.cli.main import main
from rankopt.environment import collect_environment
from rankopt.errors import UsageError
from rankopt.recipe import parse_recipe
from rankopt.train.distributed.exchange import NoExchange, make_exchange, refuse_batch_statistics
from rankopt.train.distributed.ranks import Ranks, _pack, _unpack

SHARD: dict[str, Any] = {"train_shard": {"topology": "2-cpu-hosts"}}


def test_tensors_travel_as_bytes_whatever_their_types_and_shapes() -> None:
    tensors = [
        torch.arange(7),
        torch.empty(0, dtype=torch.int64),
        torch.tensor(3),
        torch.randn(2, 3).t(),
        torch.randn(5).bfloat16(),
        torch.randn(0, 4),
        torch.randn(3, dtype=torch.float64),
    ]
    packed = _pack(tensors)
    assert packed.dtype == torch.uint8
    # Others may have sent more, so that the end is padding.
    found = _unpack(torch.cat([packed, torch.zeros(24, dtype=torch.uint8)]))
    assert len(found) == len(tensors)
    for got, sent in zip(found, tensors, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_one_process_has_nobody_to_talk_to() -> None:
    ranks = Ranks.alone()
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    exchange = make_exchange(ranks, net, [])
    assert isinstance(exchange, NoExchange)
    assert exchange(0.5) == 0.5
    assert ranks.sum([1.0, 2.0]) == [1.0, 2.0]
    assert not ranks.any(False)
    assert ranks.broadcast("a") == "a"
    assert ranks.first_then_others(lambda: 3) == 3


def test_batch_statistics_are_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2), nn.BatchNorm1d(2))
    with pytest.raises(UsageError) as caught:
        refuse_batch_statistics(net)
    assert [problem.where for problem in caught.value.problems] == ["1", "3"]
    refuse_batch_statistics(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def problems_of(*passes: dict[str, Any]) -> list[str]:
    recipe = parse_recipe({"name": "x", "passes": list(passes)}, where="x.yaml")
    return [str(problem) for problem in recipe.check(collect_environment(), None)]


@pytest.mark.parametrize(
    "other", ["train_fuse_embeddings", "train_accumulate", "train_dedup_ids", "train_compile"]
)
def test_passes_that_sharded_tables_do_not_go_with_are_refused(other: str) -> None:
    assert len(problems_of({other: {}}, SHARD)) == 1
    assert len(problems_of(SHARD, {other: {}})) == 1
    assert not problems_of(SHARD, {"train_dense_optimizer": {}}, {"train_pipeline": {}})


def test_sharding_wants_one_plan_that_is_there(tmp_path: Path) -> None:
    [neither] = problems_of({"train_shard": {}})
    assert "must name either a topology or a plan" in neither
    [missing] = problems_of({"train_shard": {"plan": str(tmp_path / "plan.json")}})
    assert "plan: is no file" in missing
    [unknown] = problems_of({"train_shard": {"topology": "2-cpu-host"}})
    assert "2-cpu-hosts" in unknown


def test_flags_that_need_workers_are_refused_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "dlrm-synthetic", "--out", str(tmp_path / "out")]
    assert main([*command, "--max-restarts", "1"]) == 2
    assert "need --num-workers" in capsys.readouterr().err
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main([*command, "--num-workers", "2"]) == 2
    assert "under torchrun, leave it out" in capsys.readouterr().err
