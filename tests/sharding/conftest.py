"""Small topologies and models that the sharding tests share."""

from __future__ import annotations

import pytest

from rankopt.sharding.tables import ModelTables, Table
from rankopt.sharding.topology import Bandwidths, Reserved, Topology
from sharding.planted import model_of


@pytest.fixture
def gpus() -> Topology:
    """Two hosts of two GPUs of 1 GiB."""
    return Topology(
        device="cuda",
        num_hosts=2,
        ranks_per_host=2,
        hbm_gib=1,
        host_memory_gib=16,
        bandwidth_gb_per_s=Bandwidths(
            hbm=2000, host_memory=50, host_to_device=25, intra_host=300, inter_host=25
        ),
        reserved=Reserved(hbm=0.1, host_memory=0.1),
        name="2x2",
    )


@pytest.fixture
def cpus() -> Topology:
    """Two hosts of one process and 1 GiB."""
    return Topology(
        device="cpu",
        num_hosts=2,
        ranks_per_host=1,
        host_memory_gib=1,
        bandwidth_gb_per_s=Bandwidths(host_memory=50, intra_host=6, inter_host=3),
        name="2-cpus",
    )


@pytest.fixture
def model() -> ModelTables:
    """Six tables of very different sizes, one of them a sequence, one weighted."""
    return model_of(
        Table("user", "user", num_rows=300_001, dim=64),
        Table("item", "item", num_rows=100_000, dim=64, ids_per_row=20.0, pooled=False),
        Table("tags", "tags", num_rows=50_000, dim=128, ids_per_row=3.5, weighted=True),
        Table("city", "city", num_rows=3_000, dim=32),
        Table("day", "day", num_rows=7, dim=16),
        Table("one", "one", num_rows=1, dim=4),
    )
