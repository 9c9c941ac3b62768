"""A choice is measured once, kept for the machine, and never decided by noise."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rankopt.kernels import autotune, interaction_threads
from rankopt.kernels.autotune import fastest
from rankopt.kernels.build import load_kernels


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_kernels()
    monkeypatch.setattr(autotune, "cache_dir", lambda: tmp_path)
    return tmp_path


def sleeper(duration_s: float, calls: list[float]) -> Callable[[], None]:
    def call() -> None:
        calls.append(duration_s)
        time.sleep(duration_s)

    return call


def test_the_fastest_is_chosen_and_kept() -> None:
    calls: list[float] = []
    variants = {"slow": sleeper(0.004, calls), "fast": sleeper(0.0005, calls)}
    choice = fastest("k", variants, num_rounds=3)
    assert choice.chosen == "fast"
    assert choice.median_ns["fast"] < choice.median_ns["slow"]
    assert calls == [0.004, 0.0005] * 4
    assert fastest("k", variants, num_rounds=3) == choice
    assert len(calls) == 8


def test_another_key_and_other_variants_are_measured_anew() -> None:
    calls: list[float] = []
    fastest("k", {"a": sleeper(0, calls)}, num_rounds=1)
    fastest("l", {"a": sleeper(0, calls)}, num_rounds=1)
    assert len(calls) == 4
    fastest("k", {"a": sleeper(0, calls), "b": sleeper(0, calls)}, num_rounds=1)
    assert len(calls) == 8


def test_the_first_wins_where_none_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 0, 0, 0, 0, 1000, 1000, 1980])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    variants: dict[str, Callable[[], object]] = {"first": lambda: None, "second": lambda: None}
    assert fastest("k", variants, num_rounds=1).chosen == "first"


def test_a_damaged_file_and_a_cache_that_cannot_be_written_only_cost_time(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []
    fastest("k", {"a": sleeper(0, calls)}, num_rounds=1)
    (file,) = own_cache.rglob("*.json")
    file.write_text("{")
    fastest("k", {"a": sleeper(0, calls)}, num_rounds=1)
    assert len(calls) == 4
    blocked = own_cache / "file"
    blocked.write_text("")
    monkeypatch.setattr(autotune, "cache_dir", lambda: blocked)
    assert fastest("k", {"a": sleeper(0, calls)}, num_rounds=1).chosen == "a"


def test_no_variants_are_an_error() -> None:
    with pytest.raises(ValueError, match="no variants"):
        fastest("k", {})


def test_one_thread_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert interaction_threads.fewest_rows_per_thread("dot", 27, 16) == 0


@pytest.mark.parametrize("form", ["dot", "sum"])
def test_rows_per_thread_are_a_share_of_a_batch(form: str) -> None:
    torch.set_num_threads(2)
    rows = interaction_threads.fewest_rows_per_thread(form, 9, 16)
    assert rows in {8, 16, 32, 64, 128, 256, 512}
    assert interaction_threads.fewest_rows_per_thread(form, 9, 16) == rows
