from __future__ import annotations

import pytest
from torchrec.distributed.planner.shard_estimators import _calculate_shard_io_sizes

from rankopt.sharding.memory import Shard, dense_use, shard_use
from rankopt.sharding.setting import SHARDING_TYPES, Kernel, Setting, ShardingType
from rankopt.sharding.tables import Optimizer, Precision, Table
from rankopt.sharding.topology import Topology

ROWS, COLUMNS, BATCH = 1_000, 32, 128
TABLE = Table("t", "t", ROWS, COLUMNS)


def setting(
    precision: Precision = "fp32",
    optimizer: Optimizer | None = "adagrad",
    load_factor: float | None = None,
) -> Setting:
    return Setting("s", SHARDING_TYPES, ("fused",), precision, optimizer, load_factor)


def shard(kernel: Kernel = "fused", kind: ShardingType = "table_wise") -> Shard:
    return Shard(TABLE, kind, kernel, ROWS, COLUMNS)


@pytest.mark.parametrize(
    ("precision", "optimizer", "weights", "state"),
    [
        ("fp32", "sgd", 4 * ROWS * COLUMNS, 0),
        ("fp32", "adagrad", 4 * ROWS * COLUMNS, 4 * ROWS * COLUMNS),
        ("fp32", "adam", 4 * ROWS * COLUMNS, 8 * ROWS * COLUMNS),
        ("fp32", "row_wise_adagrad", 4 * ROWS * COLUMNS, 4 * ROWS),
        # fbgemm keeps state in fp32 whatever the rows are.
        ("fp16", "adagrad", 2 * ROWS * COLUMNS, 4 * ROWS * COLUMNS),
        # A quantised row has a scale and a bias in fp16; serving keeps no state.
        ("int8", None, ROWS * (COLUMNS + 4), 0),
    ],
)
def test_rows_and_state(
    gpus: Topology, precision: Precision, optimizer: Optimizer | None, weights: int, state: int
) -> None:
    use = shard_use(shard(), setting(precision, optimizer), gpus, BATCH)
    assert (use.hbm.weights, use.hbm.optimizer) == (weights, state)
    assert use.host.total == 0


def test_a_cache_holds_rows_and_its_own_books(gpus: Topology) -> None:
    use = shard_use(shard("fused_uvm_caching"), setting(load_factor=0.25), gpus, BATCH)
    assert use.host.weights == 4 * ROWS * COLUMNS
    assert use.host.optimizer == 4 * ROWS * COLUMNS
    assert use.hbm.weights == ROWS * COLUMNS
    ids = BATCH * 4 * 8
    assert use.hbm.buffers == 4 * ROWS + 16 * ROWS // 4 + ids
    assert use.hbm.optimizer == 0


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_row_wise_state_stays_on_the_device(gpus: Topology, kernel: Kernel) -> None:
    use = shard_use(shard(kernel), setting(optimizer="row_wise_adagrad", load_factor=0.1), gpus, 1)
    assert (use.hbm.optimizer, use.host.optimizer) == (4 * ROWS, 0)


def test_a_dense_kernel_keeps_the_gradient_of_every_row(gpus: Topology) -> None:
    fused = shard_use(shard(kind="data_parallel"), setting(), gpus, BATCH).hbm
    dense = shard_use(shard("dense", "data_parallel"), setting(), gpus, BATCH).hbm
    assert dense.buffers - fused.buffers == 4 * ROWS * COLUMNS


def test_on_cpus_everything_lies_in_host_memory(cpus: Topology) -> None:
    use = shard_use(shard(), setting(), cpus, BATCH)
    assert use.hbm.total == 0
    assert use.host.total > 8 * ROWS * COLUMNS


def test_an_empty_shard_takes_nothing(gpus: Topology) -> None:
    empty = Shard(TABLE, "row_wise", "fused", 0, COLUMNS)
    assert shard_use(empty, setting(), gpus, BATCH).hbm.total == 0


def test_dense_layers_are_trained_with_adam_and_served_bare(gpus: Topology) -> None:
    trained = dense_use(10, setting(), gpus).hbm
    assert (trained.weights, trained.optimizer, trained.buffers) == (40, 80, 80)
    assert dense_use(10, setting("int8", None), gpus).hbm.total == 40


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("length", [0.5, 1.0, 7.0])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("data_parallel", [[ROWS, COLUMNS]] * 4),
        ("table_wise", [[ROWS, COLUMNS]]),
        ("row_wise", [[ROWS // 4, COLUMNS]] * 4),
        ("column_wise", [[ROWS, COLUMNS // 2]] * 2),
        ("table_row_wise", [[ROWS // 2, COLUMNS]] * 2),
    ],
)
def test_inputs_and_outputs_are_torchrecs(
    gpus: Topology, kind: ShardingType, sizes: list[list[int]], length: float, pooled: bool
) -> None:
    inputs, outputs = _calculate_shard_io_sizes(
        sharding_type=kind,
        batch_sizes=[BATCH],
        world_size=gpus.world_size,
        local_world_size=gpus.ranks_per_host,
        input_lengths=[length],
        emb_dim=COLUMNS,
        shard_sizes=sizes,
        input_data_type_size=8,
        output_data_type_size=4,
        num_poolings=[1.0],
        is_pooled=pooled,
    )
    table = Table("t", "t", ROWS, COLUMNS, ids_per_row=length, pooled=pooled)
    for size, expected_in, expected_out in zip(sizes, inputs, outputs, strict=True):
        part = Shard(table, kind, "fused", size[0], size[1])
        use = shard_use(part, setting(), gpus, BATCH).hbm
        assert (use.buffers, use.activations) == (expected_in, expected_out)
