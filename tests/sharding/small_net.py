"""A model of small tables, and a plan for it that cuts them in every way.

Five ways to shard, sum and mean pooling, with and without weights: each combination is a table,
but for means with weights that are cut by rows, which `shard_module` refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from rankopt.sharding.schema import ShardPlan, TablePlan, TableShard
from rankopt.sharding.setting import Kernel, ShardingType
from rankopt.sharding.topology import Bandwidths, Topology

DIM = 16
PLAIN = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")
WEIGHTED = ("k", "l", "m", "n", "o", "p", "q", "r")
MEAN = {*"bcdfj", *"kmo"}
NUM_ROWS = 12
KINDS: dict[str, ShardingType] = {
    "a": "row_wise", "b": "table_wise", "c": "column_wise", "d": "table_row_wise",
    "e": "data_parallel", "f": "row_wise", "g": "table_wise", "h": "column_wise",
    "i": "table_row_wise", "j": "data_parallel", "k": "table_wise", "l": "table_wise",
    "m": "column_wise", "n": "column_wise", "o": "data_parallel", "p": "data_parallel",
    "q": "row_wise", "r": "table_row_wise",
}  # fmt: skip
ROWS = {name: 13 + 13 * order % 47 for order, name in enumerate((*PLAIN, *WEIGHTED))}


class SmallNet(nn.Module):
    """Sum and mean pooling, with and without weights, and a dense layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = _collection(PLAIN)
        self.weighted = _collection(WEIGHTED, is_weighted=True)
        self.top = nn.Linear(DIM * len(ROWS), 1)

    def forward(self, plain: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> Tensor:
        found = {**self.sparse(plain).to_dict(), **self.weighted(weighted).to_dict()}
        pooled = torch.cat([found[f"f_{name}"] for name in ROWS], dim=1)
        return torch.as_tensor(self.top(pooled)).squeeze(1)


def _collection(names: tuple[str, ...], is_weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        is_weighted=is_weighted,
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=ROWS[name],
                feature_names=[f"f_{name}"],
                pooling=PoolingType.MEAN if name in MEAN else PoolingType.SUM,
            )
            for name in names
        ],
    )


def net() -> SmallNet:
    """Return the model with its planted weights."""
    torch.manual_seed(3)
    return SmallNet()


def expected(state: dict[str, Tensor]) -> Tensor:
    """Score all rows in fp64 from the weights."""
    joined = torch.cat(list(pooled(state).values()), dim=1)
    return joined @ state["top.weight"].double()[0] + state["top.bias"].double()


def pooled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pool the bags of all rows in fp64, by table; means divide by the number of ids."""
    found = {}
    for path, names, jagged in _collections():
        bags = jagged.to_dict()
        for name in names:
            bag = bags[f"f_{name}"]
            vectors = state[f"{path}.embedding_bags.{name}.weight"].double()[bag.values()]
            if name in WEIGHTED:
                vectors = vectors * bag.weights().double().unsqueeze(1)
            owner = torch.repeat_interleave(torch.arange(NUM_ROWS), bag.lengths())
            total = torch.zeros(NUM_ROWS, DIM, dtype=torch.float64).index_add(0, owner, vectors)
            if name in MEAN:
                total = total / bag.lengths().clamp(min=1).unsqueeze(1)
            found[name] = total
    return found


def unsharded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pool with torchrec's collections as they are; torch's bags refuse means with weights."""
    found = {}
    for path, names, jagged in _collections():
        own = tuple(name for name in names if path == "sparse" or name not in MEAN)
        bags = _collection(own, is_weighted=path == "weighted")
        keys = [f"embedding_bags.{name}.weight" for name in own]
        bags.load_state_dict({key: state[f"{path}.{key}"] for key in keys})
        with torch.no_grad():
            vectors = bags(jagged).to_dict()
        found |= {name: vectors[f"f_{name}"] for name in own}
    return found


def _collections() -> tuple[tuple[str, tuple[str, ...], KeyedJaggedTensor], ...]:
    plain, weighted = rows(0, NUM_ROWS)
    return ("sparse", PLAIN, plain), ("weighted", WEIGHTED, weighted)


def rows(start: int, stop: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Return some of `NUM_ROWS` rows; bags of 0 to 4 ids, the same however they are cut."""
    return _jagged(PLAIN, start, stop), _jagged(WEIGHTED, start, stop, weights=True)


def _jagged(
    names: tuple[str, ...], start: int, stop: int, weights: bool = False
) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(5)
    lengths, ids, scale = [], [], []
    for name in names:
        own = torch.randint(0, 5, (NUM_ROWS,), generator=generator)
        values = torch.randint(0, ROWS[name], (int(own.sum()),), generator=generator)
        factors = torch.rand(len(values), generator=generator)
        first, last = int(own[:start].sum()), int(own[:stop].sum())
        lengths.append(own[start:stop])
        ids.append(values[first:last])
        scale.append(factors[first:last])
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in names],
        values=torch.cat(ids),
        lengths=torch.cat(lengths),
        weights=torch.cat(scale) if weights else None,
    )


def plan(num_hosts: int, ranks_per_host: int, kinds: dict[str, ShardingType]) -> ShardPlan:
    """Cut each table in its own way over the ranks."""
    topology = Topology(
        device="cpu",
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        host_memory_gib=1,
        bandwidth_gb_per_s=Bandwidths(host_memory=50, intra_host=6, inter_host=3),
    )
    return ShardPlan(
        model="small", source="small_net", purpose="training", fits=True, chosen="by hand",
        reason="a test", batch_size=NUM_ROWS, precision="fp32", optimizer="row_wise_adagrad",
        communication="fp32", load_factor=None, num_tables=len(ROWS),
        table_bytes=sum(ROWS.values()) * DIM * 4, dense_parameters=0,
        world_size=topology.world_size, topology_name="by hand",
        topology=topology.model_dump(mode="json"), step_ns=None, all_to_all_ns=None,
        tables=tuple(_table(name, kinds[name], topology) for name in ROWS),
        ranks=(), alternatives=(),
    )  # fmt: skip


def _table(name: str, kind: ShardingType, topology: Topology) -> TablePlan:
    num_rows, world_size = ROWS[name], topology.world_size
    order = list(ROWS).index(name)
    shards = []
    if kind == "table_wise":
        shards = [(order % world_size, 0, 0, num_rows, DIM)]
    elif kind == "data_parallel":
        shards = [(rank, 0, 0, num_rows, DIM) for rank in range(world_size)]
    elif kind == "column_wise":
        parts = 2 if world_size > 1 else 1
        width = DIM // parts
        ranks = [(order + part) % world_size for part in range(parts)]
        shards = [(rank, 0, i * width, num_rows, width) for i, rank in enumerate(ranks)]
    else:
        size = topology.ranks_per_host
        last = (topology.num_hosts - 1) * size
        ranks = list(range(world_size)) if kind == "row_wise" else [last + i for i in range(size)]
        block = -(-num_rows // len(ranks))
        for i, rank in enumerate(ranks):
            start = min(i * block, num_rows)
            shards.append((rank, start, 0, min(block, num_rows - start), DIM))
    kernel: Kernel = "dense" if kind == "data_parallel" else "fused"
    return TablePlan(
        name=name, path="sparse" if name in PLAIN else "weighted", key=name, num_rows=num_rows,
        dim=DIM, ids_per_row=2.0, pooled=True, size_bytes=num_rows * DIM * 4, sharding_type=kind,
        compute_kernel=kernel, cache_load_factor=None,
        shards=tuple(
            TableShard(
                rank=rank, row_offset=row, column_offset=column, num_rows=count,
                num_columns=width, hbm_bytes=0, host_bytes=0,
            )
            for rank, row, column, count, width in shards
        ),
    )  # fmt: skip
