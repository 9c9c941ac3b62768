"""Hashes of files and folders, remembered while a file has not changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankopt import hashes
from rankopt.hashes import FileRecord, sha256_file, sha256_files, sha256_path


def test_a_folder_is_known_by_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "x").write_text("1")
    (tmp_path / "a" / "inner" / "y").write_text("2")
    before = sha256_path(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert sha256_path(tmp_path / "b") == before
    (tmp_path / "b" / "inner" / "y").rename(tmp_path / "b" / "inner" / "z")
    assert sha256_path(tmp_path / "b") != before


def test_a_record_tells_gone_from_changed(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("1")
    record = FileRecord.of(file)
    assert record.problem("here", "Do.") is None
    file.write_text("2")
    assert f"here: {file} has changed" in str(record.problem("here", "Do."))
    file.unlink()
    assert str(record.problem("here", "Do.")) == f"here: {file} is gone. Do."


def test_large_files_are_read_again_only_when_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashes, "_REMEMBERED_BYTES", 0)
    reads: list[Path] = []

    def read(path: Path) -> str:
        reads.append(path)
        return sha256_file(path)

    monkeypatch.setattr(hashes, "sha256_file", read)
    file = tmp_path / "rows"
    file.write_text("1")
    fresh = sha256_files([file])
    assert sha256_files([file]) == fresh
    assert len(reads) == 2  # changed a moment ago: it may change again unseen
    os.utime(file, ns=(0, 10**9))
    assert sha256_files([file]) == sha256_files([file]) == fresh
    assert len(reads) == 3
    file.write_text("2")
    os.utime(file, ns=(0, 2 * 10**9))
    assert sha256_files([file]) != fresh
    assert len(reads) == 4
