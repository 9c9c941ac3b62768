"""One rank of a measurement; torchrun starts it.

    torchrun ... -m rankopt.sharding.measure_worker FOLDER

FOLDER holds `task.json`; each rank leaves `rank-N.json`. Every plan is set up once, and the plans
then take turns, so that whatever the machine did meanwhile hit them alike. A step is timed as a
whole, as training runs it, and again in its parts with the ranks lined up before each of them: an
exchange is then not charged with waiting for the slower rank.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rankopt.sharding.distributed import shard_module
from rankopt.sharding.measure_task import MeasureTask, PartTimes, RankFile, RankPlan
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.stand_in import batches, groups, plan_of_stand_in, stand_in
from rankopt.train.meter import peak_memory_bytes, reset_peak_memory

WARM_UP_STEPS = 2
NUM_BATCHES = 4
"""Batches that the steps go through in turn."""
LEARNING_RATE = 0.01
_COLLECTIONS = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)

Features = dict[str, KeyedJaggedTensor]


def main() -> None:
    """Measure every plan of the task."""
    folder = Path(sys.argv[1])
    task = MeasureTask.model_validate_json((folder / "task.json").read_bytes())
    rank = int(os.environ["RANK"])
    # The plan's hosts may be processes of one machine: torchrec asks these who shares a host.
    os.environ["LOCAL_WORLD_SIZE"] = str(task.ranks_per_host)
    os.environ["LOCAL_RANK"] = str(rank % task.ranks_per_host)
    torch.set_num_threads(1)
    is_cuda = task.backend == "nccl"
    device = torch.device("cuda", rank % task.ranks_per_host) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group(task.backend)
    try:
        found = _measure(task, rank, device)
        file = folder / f"rank-{rank}.json"
        file.write_text(found.model_dump_json(), encoding="utf-8")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _measure(task: MeasureTask, rank: int, device: torch.device) -> RankFile:
    generator = torch.Generator().manual_seed(task.seed * 10_007 + rank)
    tables = [line.table() for line in task.tables]
    drawn = itertools.islice(batches(tables, task.batch_size, task.zipf, generator), NUM_BATCHES)
    inputs = [{path: jagged.to(device) for path, jagged in one.items()} for one in drawn]
    dense = torch.ones(max(1, task.dense_parameters), device=device)
    runs = []
    for name, plan in task.plans.items():
        _say(rank, f"setting up {name}")
        runs.append(PlanRun(name, plan, task, dense, inputs, device))
    for block in range(task.num_blocks):
        _say(rank, f"block {block + 1} of {task.num_blocks}")
        # Another order in every block, the same on all ranks.
        for run in runs[block % len(runs) :] + runs[: block % len(runs)]:
            run.measure(task.steps_per_block)
    return RankFile(rank=rank, plans={run.name: run.result() for run in runs})


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


class PlanRun:
    """One plan, set up on this rank."""

    def __init__(
        self,
        name: str,
        plan: ShardPlan,
        task: MeasureTask,
        dense: Tensor,
        inputs: Sequence[Features],
        device: torch.device,
    ) -> None:
        """Allocate this rank's parts and take the first steps.

        Args:
            name: of the plan.
            plan: of the model's tables.
            task: what else is asked for.
            dense: as many values as the dense layers have.
            inputs: batches, taken in turn.
            device: of this rank.
        """
        self.name = name
        self._device = device
        self._dense = dense if task.dense_parameters else None
        self._inputs = itertools.cycle(inputs)
        self._blocks: list[list[PartTimes]] = []
        tables = [line.table() for line in task.tables]
        self._paths = [group.path for group in groups(tables)]
        _settle(device)
        before = _in_use(device)
        self._sharded = shard_module(
            stand_in(tables),
            plan_of_stand_in(plan, tables),
            learning_rate=LEARNING_RATE,
            device=torch.device(device.type),
        )
        inner: Any = self._sharded.module
        self._collections: dict[str, Any] = {path: getattr(inner, path) for path in self._paths}
        self._copies = [
            lookup
            for collection in self._collections.values()
            for lookup in collection._lookups
            if isinstance(lookup, DistributedDataParallel)
        ]
        self._copied = [p for lookup in self._copies for p in lookup.parameters()]
        self._optimizer = _optimizer(self._copied, plan.optimizer)
        for _ in range(WARM_UP_STEPS):
            self._step(next(self._inputs))
        self._peak_bytes = max(0, _peak(device) - before)
        self._weights_bytes = self._local_bytes(self._sharded.state_dict())
        self._optimizer_bytes = self._local_bytes(self._states())
        for _ in range(WARM_UP_STEPS):
            self._in_parts(next(self._inputs))

    def measure(self, num_steps: int) -> None:
        """Time one block of steps, each whole and then in parts."""
        block = []
        for _ in range(num_steps):
            features = next(self._inputs)
            step_ns = self._timed(partial(self._step, features))
            times = self._in_parts(features)
            block.append(PartTimes(step_ns=step_ns, **times))
        self._blocks.append(block)

    def result(self) -> RankPlan:
        return RankPlan(
            weights_bytes=self._weights_bytes,
            optimizer_bytes=self._optimizer_bytes,
            peak_bytes=self._peak_bytes,
            blocks=self._blocks,
        )

    def _timed(self, call: Callable[[], object]) -> float:
        _synchronise(self._device)
        distributed.barrier()
        began = time.perf_counter_ns()
        call()
        _synchronise(self._device)
        return float(time.perf_counter_ns() - began)

    def _step(self, features: Features) -> None:
        vectors: list[Tensor] = []
        for path, collection in self._collections.items():
            vectors += _vectors(collection(features[path]))
        torch.autograd.backward(vectors, [torch.ones_like(vector) for vector in vectors])
        self._reduce_dense()
        self._update_copies()

    def _in_parts(self, features: Features) -> dict[str, float]:
        """Run a step with every part by itself; gradients are cut off at the exchange."""
        contexts = {path: c.create_context() for path, c in self._collections.items()}
        found: dict[str, Any] = {}

        def exchange_ids() -> None:
            for path, collection in self._collections.items():
                arriving = collection.input_dist(contexts[path], features[path])
                found[path] = arriving.wait().wait()

        def look_up() -> None:
            for path, collection in self._collections.items():
                found[path] = collection.compute(contexts[path], found[path])

        def exchange_vectors() -> None:
            for path, collection in self._collections.items():
                cut = [part.detach().requires_grad_() for part in found[path]]
                leaving = collection.output_dist(contexts[path], cut)
                found[f"{path} cut"], found[f"{path} out"] = cut, _vectors(leaving)

        def exchange_gradients() -> None:
            for path in self._paths:
                vectors = found[f"{path} out"]
                torch.autograd.backward(vectors, [torch.ones_like(v) for v in vectors])

        def update() -> None:
            for path in self._paths:
                pairs = [
                    (part, cut.grad)
                    for part, cut in zip(found[path], found[f"{path} cut"], strict=True)
                    if part.requires_grad and cut.grad is not None
                ]
                if pairs:
                    torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
            self._update_copies()

        with ExitStack() as apart:
            for lookup in self._copies:
                apart.enter_context(lookup.no_sync())
            times = {
                "ids_ns": self._timed(exchange_ids),
                "lookup_ns": self._timed(look_up),
                "vectors_ns": self._timed(exchange_vectors),
                "gradients_ns": self._timed(exchange_gradients),
                "update_ns": self._timed(update),
            }
        times["all_reduce_ns"] = self._timed(self._reduce_all) if self._reduces else 0.0
        return times

    @property
    def _reduces(self) -> bool:
        return distributed.get_world_size() > 1 and bool(self._copied or self._dense is not None)

    def _reduce_dense(self) -> None:
        if self._dense is not None and distributed.get_world_size() > 1:
            distributed.all_reduce(self._dense, op=distributed.ReduceOp.MAX)

    def _reduce_all(self) -> None:
        self._reduce_dense()
        for parameter in self._copied:
            distributed.all_reduce(parameter.data, op=distributed.ReduceOp.MAX)

    def _update_copies(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def _states(self) -> dict[str, Any]:
        own = self._sharded.fused_optimizer.state_dict()["state"]
        states = {f"{key}.{name}": value for key, s in own.items() for name, value in s.items()}
        if self._optimizer is not None:
            for index, state in enumerate(self._optimizer.state.values()):
                states |= {f"copy {index}.{name}": value for name, value in state.items()}
        return states

    def _local_bytes(self, state: dict[str, Any]) -> int:
        total = 0
        for value in state.values():
            parts = [value]
            if hasattr(value, "local_shards"):
                parts = [shard.tensor for shard in value.local_shards()]
            elif hasattr(value, "_local_tensor"):
                parts = [value._local_tensor]
            # A count of steps is no state of a row.
            total += sum(p.numel() * p.element_size() for p in parts if _is_array(p))
        return total


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 1


def _vectors(output: Any) -> list[Tensor]:
    """Return what a collection gives, waiting for it: one tensor of bags, or one a sequence."""
    if hasattr(output, "wait"):
        output = output.wait()
    if isinstance(output, dict):
        return [jagged.values() for jagged in output.values()]
    return [output.values()]


def _optimizer(parameters: list[nn.Parameter], kind: str | None) -> torch.optim.Optimizer | None:
    """Make what updates tables of which every rank has a copy: nothing is fused with those."""
    if not parameters:
        return None
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    if kind == "row_wise_adagrad":
        by_rows: torch.optim.Optimizer = RowWiseAdagrad(parameters, lr=LEARNING_RATE)
        return by_rows
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=LEARNING_RATE)
    return torch.optim.Adagrad(parameters, lr=LEARNING_RATE)


def _settle(device: torch.device) -> None:
    """Hand back what is free, so that memory is counted from what is in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return
    reset_peak_memory()


def _in_use(device: torch.device) -> int:
    # The peak has just been set to what is in use.
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return peak_memory_bytes()


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_bytes()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
