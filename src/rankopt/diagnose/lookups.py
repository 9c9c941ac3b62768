"""Measure what reading and updating rows costs, on every rank at once.

fbgemm's own calls, as sharded tables make them: one for several tables, with one id a row and with
several, whose difference tells what an id costs and what a vector does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, distributed
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from rankopt.sharding.lookups import UPDATED_BY, UpdatedBy
from rankopt.sharding.stand_in import draw_ids

DIMS = (16, 64, 128)
QUICK_DIMS = (32, 128)
NUM_TABLES = 4
NUM_ROWS = 50_000
BATCH_SIZE = 2048
IDS_PER_ROW = (1, 8)
ZIPF = 1.05
WARM_UP_CALLS = 2
COPIED_VALUES = 1 << 23
"""32 MiB: what a step allocates is then fresh memory, as for a whole table. Of 1 Mi values a step
of Adagrad took 2.6 ns each at best, of 8 Mi and more 21 to 24, on a busy 2-core CPU."""
COPIED_SAMPLES = 5
LARGE_BYTES = 128 << 20
_FUSED = {
    "sgd": EmbOptimType.EXACT_SGD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}


def measure_lookups(device: torch.device, num_samples: int, *, quick: bool) -> dict[str, Any]:
    """Measure on this rank, in step with the others; the same figures come out on all of them.

    Args:
        device: of this rank.
        num_samples: of each figure.
        quick: fewer widths.
    """
    generator = torch.Generator().manual_seed(distributed.get_rank())
    rows = [_row_cost(dim, device, num_samples, generator) for dim in _dims(quick)]
    found: dict[str, Any] = {
        "num_rows": NUM_ROWS,
        "zipf": ZIPF,
        "num_samples": num_samples,
        "rows": rows,
        "copied_value_ns": {kind: _copied(kind, device, num_samples) for kind in UPDATED_BY},
        "host_memory_bytes_per_s": _copy_rate(torch.device("cpu"), num_samples),
    }
    if device.type == "cuda":
        found["hbm_bytes_per_s"] = _copy_rate(device, num_samples)
        found["host_to_device_bytes_per_s"] = _upload_rate(device, num_samples)
    return found


def _dims(quick: bool) -> tuple[int, ...]:
    return QUICK_DIMS if quick else DIMS


def _row_cost(
    dim: int, device: torch.device, num_samples: int, generator: torch.Generator
) -> dict[str, Any]:
    lookup: dict[str, float] = {}
    update: dict[UpdatedBy, dict[str, float]] = {}
    for kind in UPDATED_BY:
        tables = _tables(dim, kind, device)
        times = [_times(tables, num_ids, device, num_samples, generator) for num_ids in IDS_PER_ROW]
        lookup = _fit([forward for forward, _ in times])
        update[kind] = _fit([backward for _, backward in times])
    return {"dim": dim, "lookup": lookup, "update": update}


def _tables(
    dim: int, kind: UpdatedBy, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    on_device = device.type == "cuda"
    where = EmbeddingLocation.DEVICE if on_device else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_device else ComputeDevice.CPU
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_ROWS, dim, where, compute)] * NUM_TABLES,
        optimizer=_FUSED[kind],
        learning_rate=0.01,
        device=device,
    )


def _times(
    tables: SplitTableBatchedEmbeddingBagsCodegen,
    ids_per_row: int,
    device: torch.device,
    num_samples: int,
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return the middle time of a lookup and of its update, over calls with ids of their own."""
    num_vectors = NUM_TABLES * BATCH_SIZE
    offsets = torch.arange(num_vectors + 1, device=device) * ids_per_row
    forward, backward = [], []
    for _ in range(WARM_UP_CALLS + num_samples):
        ids = draw_ids(NUM_ROWS, num_vectors * ids_per_row, ZIPF, generator).to(device)
        found: list[Tensor] = []

        def look_up(ids: Tensor = ids, found: list[Tensor] = found) -> None:
            found.append(tables(ids, offsets))

        def update(found: list[Tensor] = found) -> None:
            torch.autograd.backward(found, [torch.ones_like(found[0])])

        forward.append(_slowest_ns(look_up, device))
        backward.append(_slowest_ns(update, device))
    return statistics.median(forward[WARM_UP_CALLS:]), statistics.median(backward[WARM_UP_CALLS:])


def _fit(times: list[float]) -> dict[str, float]:
    """Split two times into what an id costs and what a vector does, neither below nothing."""
    num_vectors = NUM_TABLES * BATCH_SIZE
    few, many = IDS_PER_ROW
    id_ns = max(0.0, (times[1] - times[0]) / (num_vectors * (many - few)))
    vector_ns = max(0.0, times[0] / num_vectors - few * id_ns)
    return {"id_ns": round(id_ns, 4), "vector_ns": round(vector_ns, 4)}


def _copied(kind: UpdatedBy, device: torch.device, num_samples: int) -> float:
    """Time an optimizer's step over a whole table, an fp32 value, its gradient written first."""
    parameter = torch.nn.Parameter(torch.ones(COPIED_VALUES // 64, 64, device=device))
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD([parameter], lr=0.01)
    elif kind == "adagrad":
        optimizer = torch.optim.Adagrad([parameter], lr=0.01)
    else:
        optimizer = RowWiseAdagrad([parameter], lr=0.01)

    def step() -> None:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    return _middle_ns(step, device, min(num_samples, COPIED_SAMPLES)) / COPIED_VALUES


def _copy_rate(device: torch.device, num_samples: int) -> float:
    source = torch.ones(LARGE_BYTES // 4, device=device)
    target = torch.empty_like(source)
    taken_ns = _middle_ns(lambda: target.copy_(source), device, num_samples)
    return 2 * LARGE_BYTES / taken_ns * 1e9


def _upload_rate(device: torch.device, num_samples: int) -> float:
    source = torch.ones(LARGE_BYTES // 4).pin_memory()
    target = torch.empty(LARGE_BYTES // 4, device=device)
    taken_ns = _middle_ns(lambda: target.copy_(source), device, num_samples)
    return LARGE_BYTES / taken_ns * 1e9


def _middle_ns(call: Callable[[], object], device: torch.device, num_samples: int) -> float:
    times = [_slowest_ns(call, device) for _ in range(WARM_UP_CALLS + num_samples)]
    return statistics.median(times[WARM_UP_CALLS:])


def _slowest_ns(call: Callable[[], object], device: torch.device) -> float:
    _synchronise(device)
    distributed.barrier()
    began = time.perf_counter_ns()
    call()
    _synchronise(device)
    taken = torch.tensor([float(time.perf_counter_ns() - began)], device=device)
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    return float(taken.item())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
