"""Hand a written plan to torchrec's DistributedModelParallel."""

from __future__ import annotations

from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from rankopt.errors import Problem, UsageError
from rankopt.sharding.schema import ShardPlan, TablePlan


def torchrec_plan(plan: ShardPlan) -> ShardingPlan:
    """Write a plan in torchrec's terms, for `DistributedModelParallel(module, plan=...)`.

    Raises:
        UsageError: the plan does not fit, or a table is not in a torchrec collection.
    """
    problems = []
    if not plan.fits:
        problems.append(Problem(f"plan of {plan.model}", "does not fit", plan.reason))
    loose = [table.path for table in plan.tables if table.key is None]
    if loose:
        shown = ", ".join(loose[:5]) + (" and others" if len(loose) > 5 else "")
        what = "must hold its tables in torchrec's collections to be sharded by torchrec"
        problems.append(Problem(f"model {plan.model}", what, shown))
    if problems:
        raise UsageError(problems=problems)
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for table in plan.tables:
        module = modules.setdefault(table.path, EmbeddingModuleShardingPlan())
        module[table.key] = _sharding(table, plan)
    return ShardingPlan(dict(modules))


def _sharding(table: TablePlan, plan: ShardPlan) -> ParameterSharding:
    cache = table.cache_load_factor
    return ParameterSharding(
        sharding_type=table.sharding_type,
        compute_kernel=table.compute_kernel,
        ranks=[shard.rank for shard in table.shards],
        sharding_spec=None if table.sharding_type == "data_parallel" else _spec(table, plan),
        cache_params=None if cache is None else CacheParams(load_factor=cache),
    )


def _spec(table: TablePlan, plan: ShardPlan) -> EnumerableShardingSpec:
    device, local_size = plan.topology["device"], plan.topology["ranks_per_host"]
    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[shard.row_offset, shard.column_offset],
                shard_sizes=[shard.num_rows, shard.num_columns],
                placement=placement(device, shard.rank, local_size),
            )
            for shard in table.shards
        ]
    )
