"""What would make a plan fit that does not: each remedy planned, with its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rankopt.sharding.alternatives import (
    OPTIMIZER_NAMES,
    Choice,
    Request,
    Tried,
    attempt,
    shortage,
)
from rankopt.sharding.planner import Solution
from rankopt.sharding.schema import Remedy
from rankopt.sharding.setting import CACHING_KERNELS, Setting, supported_kernels
from rankopt.sharding.topology import Topology
from rankopt.units import BYTES_PER_GIB, format_bytes

MAX_HOSTS = 256
MORE_HOST_TRIES = 4


def remedies(request: Request, choice: Choice) -> tuple[Remedy, ...]:
    """List the ways out of a plan that does not fit, those that work first."""
    found = [
        *_settings(choice),
        *_row_wise_state(request, choice),
        *_more_hosts(request, choice),
        *_more_host_memory(request, choice),
        *_smaller_batch(request, choice),
    ]
    found.sort(key=lambda remedy: not remedy.fits)
    return tuple(remedy.model_copy(update={"number": i}) for i, remedy in enumerate(found, 1))


def _settings(choice: Choice) -> Iterator[Remedy]:
    """Tell of the settings that were tried: caches, fp16, another optimizer."""
    seen: set[str] = set()
    for item in choice.tried:
        solution = item.solution
        if solution is None or solution.setting == choice.best.setting:
            continue
        what = _kind(item.setting, choice.best.setting)
        if what is None or what in seen:
            continue
        same = [
            other for other in choice.tried if _kind(other.setting, choice.best.setting) == what
        ]
        nearest = min(
            (other.solution for other in same if other.solution is not None),
            key=lambda s: (not s.fits, s.fill(s.fullest)),
        )
        seen.add(what)
        yield _remedy(what, nearest)


def _kind(setting: Setting, failed: Setting) -> str | None:
    """Name what a setting does that the failed one does not."""
    if len(setting.sharding_types) < len(failed.sharding_types):
        return None
    words = []
    if setting.precision != failed.precision:
        words.append(f"{setting.precision} rows")
    if setting.optimizer != failed.optimizer and setting.optimizer is not None:
        words.append(OPTIMIZER_NAMES[setting.optimizer])
    if any(kernel in CACHING_KERNELS for kernel in setting.kernels) and failed.load_factor is None:
        words.append("tables in host memory with a cache on the device")
    return ", ".join(words) or None


def _row_wise_state(request: Request, choice: Choice) -> Iterator[Remedy]:
    """Join the savings: fp16 rows, row-wise Adagrad and host memory at once."""
    if request.optimizer not in {"adagrad", "adam"}:
        return
    caching = any(k in CACHING_KERNELS for k in request.kernels or ())
    kernels = request.kernels or supported_kernels(request.topology.device, "row_wise_adagrad")
    use_cache = request.topology.device == "cuda" and (request.kernels is None or caching)
    setting = replace(
        choice.best.setting,
        name="everything at once",
        kernels=kernels,
        precision="fp16",
        optimizer="row_wise_adagrad",
        load_factor=min(request.load_factors, default=0.05) if use_cache else None,
    )
    what = "fp16 rows, row-wise Adagrad"
    what += " and tables in host memory with a cache" if use_cache else " together"
    yield from _of(what, attempt(request, setting))


def _more_hosts(request: Request, choice: Choice) -> Iterator[Remedy]:
    """Find the fewest hosts on which the nearest setting fits."""
    best, topology = choice.best, request.topology
    at_least = max(topology.num_hosts + 1, math.ceil(topology.num_hosts * _load(best)))
    for num_hosts in range(at_least, min(MAX_HOSTS, at_least + MORE_HOST_TRIES)):
        wider = topology.model_copy(update={"num_hosts": num_hosts})
        item = attempt(request, best.setting, wider)
        if item.fits:
            more = num_hosts - topology.num_hosts
            yield from _of(f"{more} more host{'s' if more > 1 else ''}, {num_hosts} in all", item)
            return


def _load(solution: Solution) -> float:
    """The share of all memory that all ranks need together: fewer hosts cannot do."""
    size = len(solution.ranks)
    host = sum(rank.use.host.total for rank in solution.ranks) / size / solution.topology.host_bytes
    if not solution.topology.hbm_bytes:
        return host
    hbm = sum(rank.use.hbm.total for rank in solution.ranks) / size / solution.topology.hbm_bytes
    return max(host, hbm)


def _more_host_memory(request: Request, choice: Choice) -> Iterator[Remedy]:
    """Say how much memory a host needs for the setting that leans on it most."""
    candidates = [
        item.solution
        for item in choice.tried
        if item.solution is not None
        and item.setting.offered
        and item.setting.changes is None
        and shortage(item.solution)[1] == "host memory"
    ]
    if not candidates:
        return
    solution = min(candidates, key=lambda s: s.fill(s.fullest))
    topology = request.topology
    share = 1 - topology.reserved.host_memory
    needed = solution.fullest.use.host.total * topology.ranks_per_host / share / BYTES_PER_GIB
    wanted = math.ceil(needed * 1.01)
    larger: Topology = topology.model_copy(update={"host_memory_gib": float(wanted)})
    item = attempt(request, solution.setting, larger)
    what = f"hosts with {wanted:,} GiB of memory in place of {topology.host_memory_gib:,.0f} GiB"
    yield from _of(what, item)


def _smaller_batch(request: Request, choice: Choice) -> Iterator[Remedy]:
    """Offer a smaller batch where the batch takes a part worth naming."""
    batch = request.batch_size
    fullest = choice.best.fullest.use
    part = fullest.hbm if choice.best.topology.hbm_bytes else fullest.host
    taken = part.activations + part.buffers
    if taken < 0.05 * part.total or batch < 2:
        return
    while batch > 1:
        batch //= 2
        item = attempt(replace(request, batch_size=batch), choice.best.setting)
        if item.fits or batch <= request.batch_size // 8:
            yield from _of(
                f"a batch of {batch:,} rows a rank in place of {request.batch_size:,}", item
            )
            return


def _of(what: str, item: Tried) -> Iterator[Remedy]:
    if item.solution is not None:
        yield _remedy(what, item.solution)


def _remedy(what: str, solution: Solution) -> Remedy:
    fullest, topology = solution.fullest, solution.topology
    needs = []
    if topology.hbm_bytes:
        needs.append(
            f"{format_bytes(fullest.use.hbm.total)} of {format_bytes(topology.hbm_bytes)} of "
            "device memory"
        )
    if fullest.use.host.total or not topology.hbm_bytes:
        needs.append(
            f"{format_bytes(fullest.use.host.total)} of {format_bytes(topology.host_bytes)} of "
            "host memory"
        )
    factor = solution.setting.load_factor
    cache = f" (load factor {factor:g})" if factor is not None else ""
    verdict = "fits" if solution.fits else "does not fit"
    text = f"{what}{cache}: {verdict}; rank {fullest.rank} needs {' and '.join(needs)}"
    return Remedy(
        number=0,
        what=what,
        fits=solution.fits,
        hbm_bytes=fullest.use.hbm.total if topology.hbm_bytes else None,
        host_bytes=fullest.use.host.total,
        text=text,
    )
