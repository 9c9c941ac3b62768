"""One of two processes: shard a collection by a plan and compare it with the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from rankopt.jobs.shard_plan import read_plan
from rankopt.sharding.apply import torchrec_plan


def collection() -> EmbeddingBagCollection:
    """Three tables; the factory of the test's card."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=64, num_embeddings=rows, feature_names=[f"f_{name}"]
            )
            for name, rows in (("a", 50), ("b", 11), ("c", 7))
        ]
    )


class Net(torch.nn.Module):
    """A model around it, as a plan's paths need one."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.sparse(features)


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    whole = Net()
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    group = distributed.GroupMember.WORLD
    assert group is not None
    sharded = DistributedModelParallel(
        Net(),
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=torchrec_plan(read_plan(Path(sys.argv[1]))),
    )
    for name, tensor in sharded.state_dict().items():
        if hasattr(tensor, "local_shards"):
            for shard in tensor.local_shards():
                (row, column), (rows, columns) = (
                    shard.metadata.shard_offsets,
                    shard.metadata.shard_sizes,
                )
                shard.tensor.copy_(state[name][row : row + rows, column : column + columns])
        else:
            tensor.copy_(state[name])
    lengths = torch.tensor([1, 2, 0, 3, 1, 1])
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=generator)
    features = KeyedJaggedTensor(keys=["f_a", "f_b", "f_c"], values=values, lengths=lengths)
    # By key: a sharded collection joins the vectors in the order of its ranks.
    got, expected = sharded(features).to_dict(), whole(features).to_dict()
    torch.testing.assert_close(got, expected)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
