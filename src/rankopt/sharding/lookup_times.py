"""What the lookups and the update of a shard take where the topology carries measured costs.

Shapes: B rows of a rank's batch, W ranks, L ids of a row, D columns of a shard.
"""

from __future__ import annotations

from rankopt.sharding.memory import Shard
from rankopt.sharding.setting import CACHING_KERNELS, UVM_KERNELS, Setting
from rankopt.sharding.topology import Topology


def lookup_times(
    shard: Shard, setting: Setting, topology: Topology, batch_size: int
) -> tuple[float, float] | None:
    """Return the time of a step's lookups and of their update in ns.

    None where the topology has no measurement, or none of that optimizer or of rows in host memory
    that a GPU reads.
    """
    costs = topology.measured_lookups
    if costs is None or shard.kernel in UVM_KERNELS | CACHING_KERNELS:
        return None
    if shard.num_rows == 0 or shard.num_columns == 0:
        return 0.0, 0.0
    num_ids, num_vectors = _work(shard, topology, batch_size)
    lookup_ns = costs.lookup_ns(shard.num_columns, num_ids, num_vectors)
    if setting.optimizer is None:
        return lookup_ns, 0.0
    if shard.kernel == "dense":
        # The backward pass adds gradients up in place, as SGD does, into one as large as the table.
        added_ns = costs.update_ns(shard.num_columns, "sgd", num_ids, num_vectors)
        whole_ns = costs.copied_ns(setting.optimizer, shard.num_rows * shard.num_columns)
        known = added_ns is not None and whole_ns is not None
        return (lookup_ns, (added_ns or 0.0) + (whole_ns or 0.0)) if known else None
    update_ns = costs.update_ns(shard.num_columns, setting.optimizer, num_ids, num_vectors)
    return None if update_ns is None else (lookup_ns, update_ns)


def _work(shard: Shard, topology: Topology, batch_size: int) -> tuple[float, float]:
    """Count the ids that a rank reads in a step, and the vectors that it makes of them."""
    table, world_size = shard.table, topology.world_size
    # A rank works for the batches of all ranks; where rows are split, for its share of the ids.
    batches = 1 if shard.sharding_type == "data_parallel" else world_size
    holders = {"row_wise": world_size, "table_row_wise": topology.ranks_per_host}
    num_ids = batch_size * batches * table.ids_per_row / holders.get(shard.sharding_type, 1)
    # Of a bag that is split by rows every holder makes a part.
    return num_ids, batch_size * batches if table.pooled else num_ids
