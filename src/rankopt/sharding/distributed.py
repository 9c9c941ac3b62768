"""Shard a module over the ranks of a process group, as a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed, nn
from torchrec import EmbeddingBagCollection, KeyedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import LazyAwaitable, ModuleSharder, ShardingEnv

from rankopt.errors import EnvironmentProblem, Problem, UsageError
from rankopt.sharding.apply import torchrec_plan
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.setting import Communication

FusedOptimizer = Literal["sgd", "row_wise_adagrad", "adagrad"]
_FUSED = {
    "sgd": EmbOptimType.EXACT_SGD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}
_BY_ROWS = {"row_wise", "table_row_wise"}
_SENT_AS = {"fp16": CommType.FP16, "bf16": CommType.BF16}


def shard_module(
    module: nn.Module,
    plan: ShardPlan,
    *,
    optimizer: FusedOptimizer | None = None,
    learning_rate: float = 0.01,
    eps: float | None = None,
    communication: Communication | None = None,
    device: torch.device | None = None,
) -> DistributedModelParallel:
    """Shard the torchrec collections of a module; every other weight is on all ranks.

    Args:
        module: the model, whole; its tables are cut, not copied.
        plan: of `rankopt shard plan --out`, for as many ranks as there are.
        optimizer: of the tables, fused with their backward pass; None: the plan's.
        learning_rate: of the tables.
        eps: what Adagrad adds to the root of its sum; None: fbgemm's 1e-8.
        communication: what pooled vectors and their gradients are sent as; None: the plan's. fp16
            and bf16 halve the exchange and round each vector once on its way.
        device: None: the CPU, or the current GPU where the plan is of GPUs.

    Raises:
        EnvironmentProblem: no process group is set up.
        UsageError: the plan is of another number of ranks, does not fit, or is of other modules.
    """
    if not distributed.is_initialized():
        hint = "Start under torchrun and call torch.distributed.init_process_group('gloo') first."
        problem = Problem("torch.distributed", "has no process group", hint=hint)
        raise EnvironmentProblem(problems=[problem])
    if distributed.get_world_size() != plan.world_size:
        what = f"must be {plan.world_size}, as the plan has"
        problem = Problem("world size", what, distributed.get_world_size())
        raise UsageError(problems=[problem])
    if device is None:
        device = torch.device(plan.topology["device"])
    group = distributed.GroupMember.WORLD
    _check_hosts(plan)
    _check_rows(plan, device)
    _check_pooling(module, plan)
    orders = _orders(module)
    sharded = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=torchrec_plan(plan),
        sharders=_sharders(
            optimizer or plan.optimizer,
            learning_rate,
            eps,
            communication or plan.communication,
        ),
    )
    _mend_mean_pooling(sharded)
    _mend_order(sharded.module, orders)
    return sharded


def _check_hosts(plan: ShardPlan) -> None:
    """Refuse a table that is cut over a host of the plan where hosts have other ranks here."""
    ranks_here = get_local_size(plan.world_size)
    what = f"must be cut into {ranks_here} parts, one for each rank of a host here"
    hint = "Plan with a topology of the hosts that there are, or with other --sharding-types."
    problems = [
        Problem(f"plan of {table.name}: table_row_wise", what, len(table.shards), hint)
        for table in plan.tables
        if table.sharding_type == "table_row_wise" and len(table.shards) != ranks_here
    ]
    if problems:
        raise UsageError(problems=problems)


def _check_rows(plan: ShardPlan, device: torch.device) -> None:
    """Refuse ranks that hold no row of a table: on CPUs fbgemm takes such a lookup for a GPU's."""
    if device.type != "cpu":
        return
    what = "leaves a rank without a row, which fbgemm cannot look up on CPUs"
    hint = "Shard the table in another way: it has too few rows for so many ranks."
    problems = [
        Problem(f"plan of {table.name}: {table.sharding_type}", what, hint=hint)
        for table in plan.tables
        if any(shard.num_rows == 0 for shard in table.shards)
    ]
    if problems:
        raise UsageError(problems=problems)


def _check_pooling(module: nn.Module, plan: ShardPlan) -> None:
    """Refuse what torchrec pools otherwise where a table with mean pooling is cut by rows.

    Its output is divided after the ranks' sums, for each feature: a feature that another table
    reads too is divided there as well, and where ids carry weights torchrec 1.8 divides by the sum
    of the weights, but by the number of ids where the table is cut in any other way.
    """
    kinds = {(table.path, table.key): table.sharding_type for table in plan.tables}
    problems = []
    for path, child in module.named_modules():
        if not isinstance(child, EmbeddingBagCollection):
            continue
        divided: set[str] = set()
        whole: set[str] = set()
        for config in child.embedding_bag_configs():
            by_rows = kinds.get((path, config.name)) in _BY_ROWS
            side = divided if by_rows and config.pooling == PoolingType.MEAN else whole
            side.update(config.feature_names)
        if divided and child.is_weighted():
            what = (
                "pools by mean with weights, whose result depends on the cut where rows are split"
            )
            hint = "Plan it with --sharding-types table_wise,column_wise,data_parallel."
            features = ", ".join(sorted(divided))
            problems.append(Problem(f"{path}: {features}", what, hint=hint))
        if divided & whole:
            what = "is read by a row-wise table with mean pooling and by another table"
            hint = "Give one of the tables a feature of its own, or shard both alike."
            features = ", ".join(sorted(divided & whole))
            problems.append(Problem(f"{path}: {features}", what, hint=hint))
    if problems:
        raise UsageError(problems=problems)


def _mend_mean_pooling(sharded: nn.Module) -> None:
    """Keep torchrec from dividing every table by its lengths because one is cut by rows.

    Where a row-wise table pools by mean, torchrec 1.8 divides the whole collection's output by bag
    lengths afterwards and spares only row-wise tables that sum. Tables that are cut otherwise have
    pooled already: listed among those that sum, they are left alone.
    """
    for child in sharded.modules():
        if not isinstance(child, ShardedEmbeddingBagCollection):
            continue
        by_rows = child._pooling_type_to_rs_features
        divided = set(by_rows.get(PoolingType.MEAN.value, []))
        if not divided:
            continue
        spared = by_rows[PoolingType.SUM.value]
        features = [
            feature
            for sharding in child._embedding_shardings
            for feature in sharding.feature_names()
        ]
        spared.extend(name for name in features if name not in divided and name not in spared)


def _orders(module: nn.Module) -> dict[str, list[str]]:
    """Return the order in which each collection joins its vectors, by the collection's path."""
    return {
        path: list(child._embedding_names)
        for path, child in module.named_modules()
        if isinstance(child, EmbeddingBagCollection)
    }


def _mend_order(module: nn.Module, orders: Mapping[str, list[str]]) -> None:
    """Have sharded collections join their vectors in the order of the unsharded ones.

    torchrec joins them as they come from the ranks. A model that reads `values()` as a whole would
    have its dense layers see them in an order of the plan's, and its weights would mean something
    else without the plan. Collections that give a mapping are read by key.
    """
    for path, child in module.named_modules():
        if not isinstance(child, ShardedEmbeddingBagCollection):
            continue
        wanted = orders[path]
        if child._embedding_names != wanted:
            child.register_forward_hook(partial(_in_order, wanted))


def _in_order(keys: list[str], module: nn.Module, given: Any, result: Any) -> KeyedTensor:
    vectors = (result.wait() if isinstance(result, LazyAwaitable) else result).to_dict()
    return KeyedTensor.from_tensor_list(keys, [vectors[key] for key in keys], 1, 1)


def _sharders(
    optimizer: str | None,
    learning_rate: float,
    eps: float | None,
    communication: Communication,
) -> list[ModuleSharder[Any]]:
    fused: dict[str, Any] = {"learning_rate": learning_rate}
    if eps is not None:
        fused["eps"] = eps
    if optimizer in _FUSED:
        fused["optimizer"] = _FUSED[optimizer]
    elif optimizer is not None:
        what = f"must be among {', '.join(_FUSED)} to be fused here"
        raise UsageError(problems=[Problem("optimizer", what, optimizer)])
    codecs = None
    if communication != "fp32":
        sent_as = _SENT_AS[communication]
        config = QCommsConfig(forward_precision=sent_as, backward_precision=sent_as)
        codecs = get_qcomm_codecs_registry(config)
    return [
        sharder(fused_params=fused, qcomm_codecs_registry=codecs)
        for sharder in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)
    ]
