"""Where a training step goes, against steps whose phases take known times and do known work."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import threading
import time

import numpy as np
import pytest
import torch
from torch import distributed, nn

from rankopt.data.rows import Rows
from rankopt.diagnose.machine import known_peaks
from rankopt.diagnose.schema import MachinePeaks, Peak, ReadPeak
from rankopt.environment import collect_environment
from rankopt.models.card import ModelCard
from rankopt.models.layers import EmbeddingBags
from rankopt.models.serving import ServingModule
from rankopt.passes.train_accumulate import TrainAccumulate
from rankopt.passes.train_checkpoint_activations import TrainCheckpointActivations
from rankopt.passes.train_compile import TrainCompile
from rankopt.passes.train_fuse_embeddings import TrainFuseEmbeddings
from rankopt.train.breakdown.communication import exposed_segments, united, without
from rankopt.train.breakdown.phase_clock import PhaseClock, Segment
from rankopt.train.breakdown.phases import PHASES, StepBreakdown, breakdown_lines, typical
from rankopt.train.breakdown.step_breakdown import StepWatch
from rankopt.train.settings import TrainSettings
from rankopt.train.setup import apply_passes, plain_setup
from rankopt.train.step import Step

MS = 1_000_000
B, D, NUM_IDS = 64, 8, 50


class Naps:
    """Sleeps, and how long they really took: a busy machine wakes nobody in time."""

    def __init__(self):
        self.taken = []

    def nap(self, phase, seconds):
        began = time.perf_counter_ns()
        time.sleep(seconds)
        self.taken.append((phase, time.perf_counter_ns() - began))


NAPS = Naps()


class Sleeper(nn.Module):
    """Hands its input on after a while, and its gradient too."""

    def forward(self, x):
        NAPS.nap("forward", 0.03)
        if x.requires_grad:
            x.register_hook(lambda gradient: NAPS.nap("backward", 0.05))
        return x


class SleepyTable(nn.Embedding):
    def forward(self, ids):
        NAPS.nap("lookup", 0.02)
        return super().forward(ids)


class SleepyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = SleepyTable(NUM_IDS, D)
        self.right = SleepyTable(NUM_IDS, D)
        self.middle = Sleeper()
        self.top = nn.Linear(2 * D, 1)

    def forward(self, dense, sparse):
        x = torch.cat([self.left(sparse[:, 0]), self.right(sparse[:, 1])], dim=1)
        return self.top(self.middle(x)).squeeze(1)


class BagNet(nn.Module):
    """Two pooled tables and an MLP, with all there is to disturb: a batch norm and a dropout."""

    def __init__(self, hidden=16):
        super().__init__()
        self.tables = EmbeddingBags([NUM_IDS, NUM_IDS], D)
        self.top = nn.Sequential(
            nn.Linear(2 * D + 4, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.1), nn.ReLU(),
            nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, dense, sparse):
        return self.top(torch.cat([self.tables(sparse).flatten(1), dense], dim=1)).squeeze(1)


def make_card(**rest):
    columns = {"dense": ["I1", "I2", "I3", "I4"], "sparse": ["C1", "C2"]}
    raw = {
        "name": "planted",
        "factory": "rankopt.models.deepfm:DeepFM",
        "inputs": [
            {"name": "dense", "kind": "dense", "columns": columns["dense"]},
            {"name": "sparse", "kind": "ids", "columns": columns["sparse"], "num_ids": NUM_IDS},
        ],
        "outputs": [{"name": "click", "label": "label"}],
    }
    return ModelCard.model_validate(raw | rest)


def make_step(module, *passes, optimizer="adagrad"):
    card = make_card()
    settings = TrainSettings(batch_size=B, table_optimizer=optimizer, num_threads=1)
    serving = ServingModule(card, module).train()
    setup = plain_setup(card, settings, collect_environment(), serving)
    return Step(apply_passes(setup, passes)[0])


def make_batches(count, num_rows=B):
    random = np.random.default_rng(0)
    for _ in range(count):
        features = {
            "dense": torch.from_numpy(random.normal(size=(num_rows, 4)).astype(np.float32)),
            "sparse": torch.from_numpy(random.integers(0, NUM_IDS, (num_rows, 2))),
        }
        labels = {"label": random.integers(0, 2, num_rows).astype(float)}
        yield Rows(features, labels, None, num_rows)


def run(step, count, *, wait_s=0.0, **options):
    watch = StepWatch(step, **options)

    def slowly():
        for batch in make_batches(count):
            NAPS.nap("data_wait", wait_s)
            yield batch

    values = [watch.step(batch)[0] for batch in watch.waiting(slowly())]
    return watch, values


def delayed(optimizer, phase, seconds):
    plain = optimizer.step

    def step(closure=None):
        NAPS.nap(phase, seconds)
        return plain(closure)

    optimizer.step = step


def naps_per_step(phases, count):
    """Return the mean nap of each phase over the last steps; what a phase must at least hold."""
    means = {}
    for phase, per_step in phases.items():
        own = [ns for name, ns in NAPS.taken if name == phase]
        means[phase] = sum(own[-count * per_step :]) / count
    return means


def test_sleeps_are_found_in_their_phases():
    torch.manual_seed(0)
    step = make_step(SleepyNet())
    dense, tables = step.optimizers
    delayed(dense, "optimizer_dense", 0.015)
    delayed(tables, "optimizer_tables", 0.025)
    began = time.perf_counter_ns()
    watch, _ = run(step, 8, wait_s=0.01, every=1)
    with watch.checkpointing():
        NAPS.nap("checkpoint", 0.08)
    total_ns = time.perf_counter_ns() - began
    found = watch.summary()
    assert found.num_sampled == 5  # the first three warm up
    assert [row.phase for row in found.phases] == list(PHASES)
    assert sum(row.mean_ns for row in found.phases) == pytest.approx(found.wall_ns)
    assert sum(row.share for row in found.phases) == pytest.approx(1)
    assert found.wall_ns * 5 < total_ns
    # Phases do not overlap, so one that lacked its own nap would be the only sign of another that
    # has it: each holds at least its naps, and all of them together little more.
    phases = {
        "data_wait": 1, "lookup": 2, "forward": 1, "backward": 1, "optimizer_dense": 1,
        "optimizer_tables": 1,
    }  # fmt: skip
    naps = naps_per_step(phases, 5) | {"checkpoint": NAPS.taken[-1][1] / 8}
    for phase, mean_ns in naps.items():
        assert found.mean_ns(phase) >= mean_ns, phase
    awake_ns = found.wall_ns - sum(naps.values())
    for phase in PHASES:
        assert found.mean_ns(phase) <= naps.get(phase, 0) + awake_ns + 1, phase
    assert found.mean_ns("communication") == found.mean_ns("input_distribution") == 0
    table = "\n".join(breakdown_lines(found))
    assert "dense forward" in table
    assert "exposed" not in table  # what did not occur has no line


def test_micro_batches_add_up_in_one_step():
    step = make_step(SleepyNet(), TrainAccumulate(parts=2))
    watch, _ = run(step, 5, every=1)
    found = watch.summary()
    phases = {"lookup": 4, "forward": 2, "backward": 2}
    for phase, mean_ns in naps_per_step(phases, found.num_sampled).items():
        assert found.mean_ns(phase) >= mean_ns, phase
    assert found.mean_ns("backward") >= 100 * MS
    assert found.dense.flops == B * 3 * 2 * (2 * D)  # weight and input gradient beside the forward


@pytest.mark.parametrize("passes", [(), (TrainFuseEmbeddings(),)], ids=["plain", "fused"])
def test_flops_and_bytes_of_a_known_model_are_exact(passes):
    step = make_step(BagNet(), *passes)
    watch, _ = run(step, 6, every=1)
    found = watch.summary()
    # The dense inputs need no gradient, but the looked up ones beside them do, so the first layer
    # computes the gradient of all its inputs.
    layers = (2 * D + 4) * 16 + 16
    assert found.dense.flops == B * 2 * layers * 3
    assert found.dense.recomputed_flops == 0
    assert found.dense.num_rows == B
    counted = list(make_batches(4))[3].features["sparse"]
    distinct = sum(len(set(column.tolist())) for column in counted.unbind(1))
    row = 4 * D
    assert found.sparse.num_ids == 2 * B
    assert found.sparse.num_distinct_ids == distinct
    assert found.sparse.lookup_bytes == 2 * B * (8 + row + row)  # ids, rows, result
    # Adagrad's state is as wide as the row; both are read and written.
    assert found.sparse.update_bytes == 2 * B * (8 + row) + distinct * 2 * (row + row)
    assert found.sparse.bytes_per_s == pytest.approx(
        (found.sparse.lookup_bytes + found.sparse.update_bytes)
        / (found.sparse.lookup_ns + found.sparse.update_ns) * 1e9
    )  # fmt: skip
    assert found.dense.mfu is None
    assert "--peaks" in found.dense.reason


def make_peaks(isa="avx2", fp32=5e9):
    def peak(per_s):
        return Peak(per_s=per_s, median_per_s=per_s, lowest_per_s=per_s, num_samples=1)

    return MachinePeaks(
        fingerprint="planted", cpu_model=None, isa=isa, num_threads=1, made_at="2026",
        int8=peak(9e9), fp32=peak(fp32), bf16=None,
        reads=tuple(
            ReadPeak(working_set_bytes=size, peak=peak(rate))
            for size, rate in ((1 << 12, 4e9), (1 << 20, 2e9))
        ),
        gathers=(),
    )  # fmt: skip


def test_speed_is_held_against_the_machines_peaks():
    watch, _ = run(make_step(BagNet()), 5, every=1)
    found = watch.summary(make_peaks())
    dense, sparse = found.dense, found.sparse
    assert dense.time_ns == found.mean_ns("forward") + found.mean_ns("backward")
    assert dense.flops_per_s == pytest.approx(dense.flops / dense.time_ns * 1e9)
    assert dense.mfu == pytest.approx(dense.flops_per_s / 5e9)
    # Two tables of 50 rows of 32 bytes, and Adagrad's state, take more than 4 KiB.
    assert sparse.peak_per_s == 2e9
    assert sparse.utilization == pytest.approx(sparse.bytes_per_s / 2e9)
    assert dense.reason is None
    assert sparse.reason is None
    table = "\n".join(breakdown_lines(found))
    assert "of the fp32 peak of 5" in table
    assert "of 1.86 GiB/s of memory" in table


def test_under_autocast_the_peak_is_that_of_bf16():
    step = make_step(BagNet())
    step.setup = dataclasses.replace(step.setup, autocast=torch.bfloat16)
    watch, _ = run(step, 5, every=1)
    dense = watch.summary(make_peaks()).dense
    assert dense.flops == B * 2 * ((2 * D + 4) * 16 + 16) * 3
    assert dense.peak == "bf16"
    assert dense.mfu is None
    assert "no bf16" in dense.reason


def test_known_peaks_are_those_of_the_cache_and_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("RANKOPT_CACHE", str(tmp_path))
    assert known_peaks(1) is None
    fingerprint = collect_environment().fingerprint()
    (tmp_path / "peaks").mkdir()
    for isa, rate in (("avx2", 5e9), ("scalar", 1e9)):
        file = tmp_path / "peaks" / f"{fingerprint}-1-{isa}.json"
        file.write_text(make_peaks(isa, rate).model_dump_json())
    assert known_peaks(1).isa == "avx2"
    assert known_peaks(2) is None


def test_what_activation_checkpointing_repeats_is_no_useful_work():
    step = make_step(BagNet(), TrainCheckpointActivations())
    watch, _ = run(step, 5, every=1)
    dense = watch.summary().dense
    layers = (2 * D + 4) * 16 + 16
    assert dense.flops == B * 2 * layers * 3
    assert dense.recomputed_flops > 0


def test_one_optimizer_over_everything_is_a_phase_of_its_own():
    watch, _ = run(make_step(BagNet(), optimizer="adam"), 5, every=1)
    found = watch.summary()
    assert found.mean_ns("optimizer_both") > 0
    assert found.mean_ns("optimizer_dense") == found.mean_ns("optimizer_tables") == 0
    assert found.sparse.update_bytes is None
    assert "no optimizer of their own" in found.sparse.reason


@pytest.mark.parametrize("fused", [False, True])
def test_watching_changes_no_weight_and_no_random_number(fused):
    passes = [TrainFuseEmbeddings()] if fused else []
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        step = make_step(BagNet(), *passes)
        if watched:
            _, values = run(step, 7, every=1)
        else:
            values = [step(batch) for batch in make_batches(7)]
        results.append((values, step.setup.module.state_dict(), torch.rand(1)))
    plain, watched = results
    assert plain[0] == watched[0]
    assert all(torch.equal(plain[1][name], watched[1][name]) for name in plain[1])
    assert torch.equal(plain[2], watched[2])


def test_lookups_of_a_compiled_model_are_told_apart():
    step = make_step(SleepyNet(), TrainCompile(backend="aot_eager"))
    watch, _ = run(step, 6, every=1)
    found = watch.summary()
    for phase, mean_ns in naps_per_step({"lookup": 2, "forward": 1}, 3).items():
        assert found.mean_ns(phase) >= mean_ns, phase
    assert found.dense.flops == B * 3 * 2 * (2 * D)


def test_short_runs_and_odd_batches_say_that_nothing_was_watched():
    step = make_step(BagNet())
    watch = StepWatch(step)
    for batch in [*make_batches(1), *make_batches(6, num_rows=B // 2)]:
        watch.step(batch)
    found = watch.summary()
    assert (found.num_sampled, found.wall_ns) == (0, None)
    assert "7 steps" in found.notes[0]
    assert "7 steps" in breakdown_lines(found)[0]
    assert StepBreakdown.model_validate(found.model_dump(mode="json")) == found


def test_profiled_steps_lie_the_further_apart_the_more_they_cost():
    watch = StepWatch(make_step(BagNet()), profiles=True, every=2)
    gaps = []
    for cost_ns in (0, 0.4 * MS, 1.1 * MS):
        watch._plain_ns, watch._sampled_ns, watch._spent_ns = [10 * MS], [0], 0.0
        watch._space_out(10 * MS + cost_ns)
        gaps.append(watch._gap)
    assert gaps == [2, 8, 32]  # half a percent of a step is 50 us


def test_the_typical_run_is_the_median_one():
    runs = [StepBreakdown(num_sampled=1, wall_ns=float(ns)) for ns in (5, 1, 3)]
    assert typical(runs).wall_ns == 3
    assert typical([StepBreakdown(num_sampled=0)]) is None


def test_phases_inside_others_stop_the_outer_clock_and_other_threads_do_not_count():
    clock = PhaseClock()
    assert not clock.enter("lookup")  # nothing is watched
    clock.start()
    clock.turn_to("forward")
    assert clock.enter("lookup")
    told = []
    thread = threading.Thread(target=lambda: told.append(clock.enter("checkpoint")))
    thread.start()
    thread.join()
    clock.leave()
    clock.turn_to("backward")
    segments = clock.stop()
    assert told == [False]
    assert [s.phase for s in segments] == ["other", "forward", "lookup", "forward", "backward"]
    assert all(a.stop_ns == b.start_ns for a, b in itertools.pairwise(segments))


class Peer(threading.Thread):
    """The other rank of a group of two, which comes to each all-reduce late."""

    def __init__(self, store, late_s, count):
        super().__init__(daemon=True)
        self.store, self.late_s, self.count = store, late_s, count
        self.asked = threading.Semaphore(0)

    def run(self):
        group = _group(self.store, 1)
        for _ in range(self.count):
            self.asked.acquire()
            time.sleep(self.late_s)
            group.allreduce([torch.ones(4)]).wait()


def _group(store, rank):
    return distributed.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))


class TalkingNet(nn.Module):
    """Begins an all-reduce, computes for a while, and waits for it."""

    def __init__(self, group, peer, compute_s):
        super().__init__()
        self.group, self.peer, self.compute_s = group, peer, compute_s
        self.top = nn.Linear(4, 1)
        self.matrix = torch.ones(256, 256)
        self.waits_ns = []

    def forward(self, dense, sparse):
        self.peer.asked.release()
        work = self.group.allreduce([torch.ones(4)])
        until = time.perf_counter() + self.compute_s
        while time.perf_counter() < until:
            self.matrix @ self.matrix
        began = time.perf_counter_ns()
        work.wait()
        self.waits_ns.append(time.perf_counter_ns() - began)
        return self.top(dense).squeeze(1)


LATE_S = 0.1


@pytest.mark.parametrize("compute_s", [0.0, 0.05, 0.15])
def test_a_slow_collective_counts_where_no_work_hides_it(compute_s):
    store = distributed.HashStore()
    peer = Peer(store, LATE_S, count=7)  # six steps, and one batch counted beside them
    peer.start()
    net = TalkingNet(_group(store, 0), peer, compute_s)
    watch = StepWatch(make_step(net), profiles=True, every=1)
    sampled = []
    for batch in make_batches(6):
        before = watch.summary().num_sampled
        watch.step(batch)
        sampled += [net.waits_ns[-1]] * (watch.summary().num_sampled - before)
    found = watch.summary()
    peer.join()
    assert found.measured_with == "profiler"
    assert found.num_sampled == len(sampled) >= 1
    # What was waited for is exposed, what was computed meanwhile is not. Operators and waits take
    # turns on the clock of a busy machine, so the bounds are not sharp.
    waited_ns = sum(sampled) / len(sampled)
    slack_ns = 0.3 * LATE_S * 1e9
    assert found.mean_ns("communication") == pytest.approx(waited_ns, abs=slack_ns)
    assert found.mean_ns("forward") >= compute_s * 1e9 - slack_ns
    assert sum(row.mean_ns for row in found.phases) == pytest.approx(found.wall_ns)


class Event:
    def __init__(self, name, start, end):
        self._all = name, start, end

    def name(self):
        return self._all[0]

    def start_ns(self):
        return self._all[1]

    def end_ns(self):
        return self._all[2]


def test_exposed_time_is_taken_from_the_phases_it_lies_in():
    us = 1000
    segments = [Segment("forward", 0, 1000 * us), Segment("backward", 1000 * us, 3000 * us)]
    events = [
        Event("anchor", 70 * us, 80 * us),  # 70 us of the profile are 0 of the clock
        Event("gloo:all_to_all", 570 * us, 1370 * us),
        Event("nccl:all_reduce", 1270 * us, 2070 * us),
        Event("aten::mm", 870 * us, 1070 * us),
        Event("aten::mm", 1120 * us, 1170 * us),  # a pause of 50 us is no wait
        Event("AddmmBackward0", 0, 9000 * us),  # may be nothing but a wait
    ]
    found = exposed_segments(segments, events, "anchor", 0)
    sums = {}
    for phase, start, stop in found:
        sums[phase] = sums.get(phase, 0) + (stop - start) // us
    # Collectives run from 500 to 2000, operators from 800 to 1100.
    assert sums == {"forward": 700, "communication": 1200, "backward": 1100}


def test_intervals():
    assert united([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert united([(0, 2), (3, 4)], pause_ns=1) == [(0, 4)]
    assert without([(0, 10), (20, 30)], [(2, 3), (9, 22), (25, 40)]) == [
        (0, 2), (3, 9), (22, 25)
    ]  # fmt: skip
    assert without([(0, 5)], []) == [(0, 5)]
