from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from rankopt.errors import EnvironmentProblem, UsageError
from rankopt.sharding.distributed import shard_module
from sharding import small_net


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class AllWeighted(small_net.SmallNet):
    """Its tables pool by mean, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = EmbeddingBagCollection(
            is_weighted=True,
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=small_net.DIM,
                    num_embeddings=small_net.ROWS[name],
                    feature_names=[f"f_{name}"],
                    pooling=PoolingType.MEAN,
                )
                for name in small_net.WEIGHTED
            ],
        )


@pytest.mark.usefixtures("alone")
def test_means_with_weights_are_refused_where_rows_are_split() -> None:
    plan = small_net.plan(1, 1, small_net.KINDS)
    with pytest.raises(UsageError) as caught:
        shard_module(AllWeighted(), plan)
    (problem,) = caught.value.problems
    # Of tables that are cut by rows alone.
    assert problem.where == "weighted: f_q, f_r"
    assert "--sharding-types" in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_a_rank_without_a_row_is_refused_on_cpus() -> None:
    plan = small_net.plan(1, 1, small_net.KINDS)
    first, *others = plan.tables
    shards = (*first.shards, first.shards[0].model_copy(update={"num_rows": 0}))
    short = first.model_copy(update={"shards": shards})
    with pytest.raises(UsageError, match="plan of a: row_wise: leaves a rank without a row"):
        shard_module(small_net.SmallNet(), plan.model_copy(update={"tables": (short, *others)}))


@pytest.mark.usefixtures("alone")
def test_a_plan_of_other_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="must be 2, as the plan has; got 1"):
        shard_module(small_net.SmallNet(), small_net.plan(1, 2, small_net.KINDS))


def test_without_a_process_group_nothing_is_sharded() -> None:
    with pytest.raises(EnvironmentProblem, match="init_process_group"):
        shard_module(nn.Linear(1, 1), small_net.plan(1, 1, small_net.KINDS))
