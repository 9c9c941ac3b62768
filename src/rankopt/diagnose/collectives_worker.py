"""One process of the measurement; torchrun starts it.

On several hosts run it yourself, with the same arguments on each:
`torchrun --nnodes 2 --nproc-per-node 8 ... -m rankopt.diagnose.collectives_worker --out F`.
Rank 0 then writes a whole `collectives.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from rankopt.diagnose.lookups import measure_lookups
from rankopt.sharding.collectives import COLLECTIVES, Collective

WARM_UP_CALLS = 3
SAMPLE_NS = 2_000_000
"""A sample repeats a short call until it takes about so long: a barrier is no part of it then."""
MAX_CALLS = 200
DEFAULT_SIZES = "4096,65536,1048576,4194304,16777216,67108864"


def main() -> None:
    """Measure every collective at every size; rank 0 writes the result."""
    options = _options()
    backend = options.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    distributed.init_process_group(backend)
    try:
        num_hosts = distributed.get_world_size() // local_size
        measured = [
            {
                "collective": collective,
                "within_host": num_hosts == 1,
                "messages": [
                    _measure(collective, size, options.num_samples, device)
                    for size in _rounded(options.sizes, distributed.get_world_size())
                ],
            }
            for collective in COLLECTIVES
        ]
        lookups = None
        if options.lookups:
            lookups = measure_lookups(device, options.num_samples, quick=options.quick)
        if distributed.get_rank() == 0:
            if lookups is not None:
                text = json.dumps(lookups, indent=2) + "\n"
                Path(options.lookups).write_text(text, encoding="utf-8")
            value: Any = measured
            if num_hosts > 1:
                value = _whole_file(measured, backend, num_hosts)
            Path(options.out).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--out", required=True)
    parser.add_argument("--sizes", default=DEFAULT_SIZES)
    parser.add_argument("--num-samples", type=int, default=15)
    parser.add_argument("--lookups", help="Also measure lookups, into this file.")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def _whole_file(measured: list[Any], backend: str, num_hosts: int) -> dict[str, Any]:
    return {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cuda" if backend == "nccl" else "cpu",
        "backend": backend,
        "world_size": distributed.get_world_size(),
        "num_hosts": num_hosts,
        "collectives": measured,
        "reproduce": "torchrun ... -m rankopt.diagnose.collectives_worker",
    }


def _rounded(sizes: str, world_size: int) -> list[int]:
    """Round sizes to whole fp32 values a rank: an all-to-all sends equal parts."""
    unit = 4 * world_size
    return sorted({max(unit, int(size) // unit * unit) for size in sizes.split(",")})


def _measure(
    collective: Collective, size_bytes: int, num_samples: int, device: torch.device
) -> dict[str, Any]:
    call = _call(collective, size_bytes, device)
    # The shortest: one call that met a neighbour's burst would leave a sample with too few.
    once_ns = min(_slowest(_timed(call, 1, device), device) for _ in range(WARM_UP_CALLS))
    num_calls = int(max(1, min(MAX_CALLS, SAMPLE_NS / max(once_ns, 1.0))))
    times = [_slowest(_timed(call, num_calls, device), device) for _ in range(num_samples)]
    return {
        "size_bytes": size_bytes,
        "p50_ns": statistics.median(times),
        "lowest_ns": min(times),
        "highest_ns": max(times),
        "num_samples": num_samples,
    }


def _call(collective: Collective, size_bytes: int, device: torch.device) -> Callable[[], None]:
    sent = torch.ones(size_bytes // 4, device=device)
    if collective == "all_reduce":
        # The sum grows with every call; of zeros it stays.
        sent.zero_()
        return lambda: _all_reduce(sent)
    received = torch.empty_like(sent)
    return lambda: _all_to_all(received, sent)


def _all_reduce(values: Tensor) -> None:
    distributed.all_reduce(values)


def _all_to_all(received: Tensor, sent: Tensor) -> None:
    distributed.all_to_all_single(received, sent)


def _timed(call: Callable[[], None], num_calls: int, device: torch.device) -> float:
    """Time one call, as the mean of some that follow each other, from a common start."""
    _synchronise(device)
    distributed.barrier()
    started_ns = time.perf_counter_ns()
    for _ in range(num_calls):
        call()
    _synchronise(device)
    return (time.perf_counter_ns() - started_ns) / num_calls


def _slowest(own_ns: float, device: torch.device) -> float:
    """Take the time of the slowest rank: every rank waits for it."""
    value = torch.tensor([own_ns], dtype=torch.float64, device=device)
    distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
    return float(value.item())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
