from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rankopt.data.cache import cache_folder, cached_folder, new_folder
from rankopt.errors import EnvironmentProblem, OutputExistsError


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_makes_once(cache: Path) -> None:
    calls: list[Path] = []

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "x").write_text("made")

    first = cached_folder("kind", {"a": 1, "b": 2}, make)
    assert first == cached_folder("kind", {"b": 2, "a": 1}, make)
    assert len(calls) == 1
    assert (first / "x").read_text() == "made"
    assert cached_folder("kind", {"a": 2}, make) != first
    assert leftovers(cache) == []


def test_a_failure_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cached_folder("kind", {}, fail)
    assert list((cache / "kind").iterdir()) == []


def test_the_first_of_two_wins(cache: Path) -> None:
    def make_first(folder: Path) -> None:
        (folder / "x").write_text("first")

    def make_second(folder: Path) -> None:
        cached_folder("kind", {}, make_first)
        (folder / "x").write_text("second")

    assert (cached_folder("kind", {}, make_second) / "x").read_text() == "first"
    assert leftovers(cache) == []


def test_a_full_disk_says_what_to_do(cache: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(EnvironmentProblem, match=r"No space left.*RANKOPT_CACHE"):
        cached_folder("kind", {}, fill)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANKOPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        cached_folder("kind", {}, lambda folder: None)


def test_a_full_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result").touch()
    with pytest.raises(OutputExistsError, match="already exists"), new_folder(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "result"]


def test_the_default_lies_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANKOPT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "rankopt"
