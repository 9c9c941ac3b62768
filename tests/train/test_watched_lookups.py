"""Lookups of torchrec's collections, whole and sharded, told from the dense part."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from rankopt.sharding.distributed import shard_module
from rankopt.train.breakdown.phase_clock import PhaseClock
from rankopt.train.breakdown.watched_lookups import watch_lookups
from sharding import small_net


@pytest.fixture
def lone_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def phases_of(clock, module, inputs):
    clock.start()
    clock.turn_to("forward")
    loss = module(*inputs).sum()
    clock.turn_to("backward")
    loss.backward()
    times = {}
    for phase, start, stop in clock.stop():
        times[phase] = times.get(phase, 0) + stop - start
    return times


def test_a_whole_collection_is_one_lookup_and_its_reads_are_counted():
    net = small_net.net()
    for bag in net.weighted.embedding_bags.values():
        bag.mode = "sum"  # PyTorch's own bags have no mean with weights
    clock = PhaseClock()
    lookups = watch_lookups(net, clock)
    inputs = small_net.rows(0, small_net.NUM_ROWS)
    times = phases_of(clock, net, inputs)
    assert set(times) == {"other", "forward", "lookup", "backward"}
    assert times["lookup"] > 0
    before = [table.grad.clone() for table in lookups.tables]
    with lookups.noting():
        net(*inputs).sum().backward()
    assert all(
        torch.equal(table.grad, old) for table, old in zip(lookups.tables, before, strict=True)
    )
    assert len(lookups.reads) == len(small_net.ROWS)
    plain, weighted = inputs
    num_ids = len(plain.values()) + len(weighted.values())
    assert sum(len(ids) for read in lookups.reads for ids in read.ids) == num_ids
    results = sum(read.result_bytes for read in lookups.reads)
    assert results == len(small_net.ROWS) * small_net.NUM_ROWS * small_net.DIM * 4
    indices = sum(read.index_bytes for read in lookups.reads)
    # Ids, an offset per bag (one more may close the last), and the weights of the weighted.
    bare = num_ids * 8 + len(weighted.values()) * 4
    bags = len(small_net.ROWS) * small_net.NUM_ROWS
    assert bare + bags * 8 <= indices <= bare + (bags + len(small_net.ROWS)) * 8


def test_a_sharded_collection_distributes_its_input_and_looks_up(lone_rank):
    plan = small_net.plan(1, 1, dict.fromkeys(small_net.ROWS, "table_wise"))
    sharded = shard_module(small_net.net(), plan)
    clock = PhaseClock()
    lookups = watch_lookups(sharded, clock)
    assert len(lookups.sharded) == 2
    inputs = small_net.rows(0, small_net.NUM_ROWS)
    times = phases_of(clock, sharded, inputs)
    assert set(times) == {"other", "forward", "input_distribution", "lookup", "backward"}
    assert min(times["input_distribution"], times["lookup"]) > 0
    # What is counted beside the run must not reach the update inside fbgemm's backward.
    before = {name: value.clone() for name, value in _tables(sharded).items()}
    with lookups.noting():
        loss = sharded(*inputs).sum()
        torch.autograd.grad(loss, lookups.cuts)
    assert lookups.reads == []
    after = _tables(sharded)
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)
    sharded(*inputs).sum().backward()
    assert not all(torch.equal(before[name], value) for name, value in _tables(sharded).items())


def _tables(sharded):
    return {
        name: shard.tensor
        for name, value in sharded.state_dict().items()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    }
