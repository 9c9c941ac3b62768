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

MAX_HALVINGS = 4
MIN_BATCH_SHARE = 0.05
MAX_RANKS = 64
"""Searching over more takes minutes."""


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
    setting, topology = choice.best.setting, request.topology

    def over(num_hosts: int) -> Tried:
        return attempt(request, setting, topology.model_copy(update={"num_hosts": num_hosts}))

    too_few, enough = _bounds(choice.best)
    if enough * topology.ranks_per_host > MAX_RANKS:
        yield _too_many_to_plan(choice.best, enough)
        return
    found = over(enough)
    if not found.fits:
        too_few, enough = enough, enough * 2
        found = over(enough)
    if not found.fits:
        yield from _too_large_to_split(_hosts(enough, topology), found)
        return
    while enough - too_few > 1:
        between = (enough + too_few) // 2
        item = over(between)
        if item.fits:
            enough, found = between, item
        else:
            too_few = between
    yield from _of(_hosts(enough, topology), found)


def _hosts(number: int, topology: Topology) -> str:
    more = number - topology.num_hosts
    return f"{more} more host{'s' if more > 1 else ''}, {number} in all"


def _bounds(solution: Solution) -> tuple[int, int]:
    """Return a number of hosts that cannot do, and one that does where tables split evenly.

    The leanest placement has each table in the memory that it can be moved to; all memories
    together are what a plan at best fills.
    """
    topology, ranks = solution.topology, len(solution.ranks)
    hbm = sum(rank.use.hbm.total for rank in solution.ranks)
    host = sum(rank.use.host.total for rank in solution.ranks)
    loads = [host / (ranks * topology.host_bytes)]
    if topology.hbm_bytes:
        loads.append(hbm / (ranks * topology.hbm_bytes))
    stored = sum(part.use.hbm.weights + part.use.host.weights for part in solution.shards)
    together = stored / (ranks * (topology.hbm_bytes + topology.host_bytes))
    too_few = max(topology.num_hosts, math.floor(topology.num_hosts * together * 0.9))
    return too_few, max(too_few + 1, math.ceil(topology.num_hosts * max(loads)))


def _too_many_to_plan(best: Solution, num_hosts: int) -> Remedy:
    what = _hosts(num_hosts, best.topology)
    text = f"{what}: about what its bytes need, split evenly; too many ranks to plan from here"
    return Remedy(number=0, what=what, fits=False, text=text)


def _too_large_to_split(what: str, item: Tried) -> Iterator[Remedy]:
    """Name the shard that no number of hosts makes small enough, where it is one."""
    for remedy in _of(what, item):
        shards = item.solution.shards if item.solution is not None else ()
        largest = max(shards, key=lambda s: s.use.hbm.total + s.use.host.total)
        size = format_bytes(largest.use.hbm.total + largest.use.host.total)
        more = f"; the largest shard, of table {largest.shard.table.name}, is {size} by itself"
        yield remedy.model_copy(update={"text": remedy.text + more})


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
    """Offer the largest smaller batch that fits, where the batch takes a part worth naming."""
    batch = request.batch_size
    fullest = choice.best.fullest.use
    part = fullest.hbm if choice.best.topology.hbm_bytes else fullest.host
    if part.activations + part.buffers < MIN_BATCH_SHARE * part.total:
        return
    for _ in range(MAX_HALVINGS):
        batch //= 2
        if batch < 1:
            return
        item = attempt(replace(request, batch_size=batch), choice.best.setting)
        if item.fits:
            what = f"a batch of {batch:,} rows a rank in place of {request.batch_size:,}"
            yield from _of(what, item)
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
