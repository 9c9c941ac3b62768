"""Choose among variants of a call by timing them on this machine, once.

A choice is kept in the cache under the machine's fingerprint, the library of kernels and what the
caller calls it, so another CPU, another build or another shape measures again. Every setting is an
argument of the call that is timed: nothing is set for the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rankopt.environment import collect_environment
from rankopt.kernels.build import cache_dir, load_kernels

MIN_ROUNDS = 7
MARGIN = 0.03
"""Share of its time that a variant must save to be preferred to the first."""


class Choice(BaseModel):
    """What was chosen, and the times that decided it.

    Attributes:
        key: what was asked.
        chosen: the variant's name.
        median_ns: median time of one call of each variant.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    chosen: str
    median_ns: dict[str, float]


def fastest(
    key: str,
    variants: Mapping[str, Callable[[], object]],
    *,
    num_rounds: int = 41,
    budget_ns: int | None = None,
) -> Choice:
    """Time the variants in turns and choose the fastest; the first one where none is clearly so.

    Args:
        key: names the question: operator, shapes, threads, instruction set.
        variants: by name, calls that give the same result; the first is the one to fall back to.
        num_rounds: how often each is called; one round before them is thrown away.
        budget_ns: fewer rounds, but no fewer than `MIN_ROUNDS`, once they have taken this long.

    Returns:
        The choice: measured now, or by an earlier call with the same key and variants.

    Raises:
        ValueError: there are no variants.
    """
    if not variants:
        raise ValueError(f"there are no variants to choose from for {key!r}")
    file = _file(key)
    kept = _read(file, key, variants)
    if kept is not None:
        return kept
    times: dict[str, list[int]] = {name: [] for name in variants}
    started_ns = time.perf_counter_ns() if budget_ns is not None else 0
    for done in range(num_rounds + 1):
        enough = budget_ns is not None and done > MIN_ROUNDS
        if enough and time.perf_counter_ns() - started_ns > (budget_ns or 0):
            break
        for name, call in variants.items():
            begin = time.perf_counter_ns()
            call()
            times[name].append(time.perf_counter_ns() - begin)
    median_ns = {name: statistics.median(found[1:]) for name, found in times.items()}
    first = next(iter(variants))
    best = min(median_ns, key=lambda name: median_ns[name])
    clear = median_ns[best] < (1 - MARGIN) * median_ns[first]
    choice = Choice(key=key, chosen=best if clear else first, median_ns=median_ns)
    _write(file, choice)
    return choice


def _file(key: str) -> Path:
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return cache_dir() / "autotune" / _fingerprint() / load_kernels().parent.name / f"{name}.json"


@cache
def _fingerprint() -> str:
    return collect_environment().fingerprint()


def _read(file: Path, key: str, variants: Mapping[str, object]) -> Choice | None:
    try:
        choice = Choice.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return choice if choice.key == key and choice.median_ns.keys() == variants.keys() else None


def _write(file: Path, choice: Choice) -> None:
    """Keep a choice; without a cache that can be written it is measured again next time."""
    text = json.dumps(choice.model_dump(), indent=2) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as scratch:
            scratch.write(text)
        os.replace(scratch.name, file)
    except OSError:
        return
