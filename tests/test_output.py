from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from rankopt import output
from rankopt.errors import EnvironmentProblem, OutputExistsError, UsageError
from rankopt.output import check_free_space, staged_file, staged_output, write_json_atomic

DEAD_PID = 2**22 + 1  # above the kernel's largest pid


def write_result(out: Path, text: str, *, overwrite: bool = False) -> None:
    with staged_output(out, overwrite=overwrite) as folder:
        (folder / "report.json").write_text(text)


def write_half(out: Path, *, keep_partial: bool = False) -> None:
    with staged_output(out, overwrite=True, keep_partial=keep_partial) as folder:
        (folder / "report.json").write_text("half")
        _ = 1 / 0


def write_half_file(out: Path) -> None:
    with staged_file(out, overwrite=True) as partial:
        partial.write_text("half")
        _ = 1 / 0


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_result_appears_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    with staged_output(out, overwrite=False) as folder:
        (folder / "report.json").write_text("{}")
        assert not out.exists()
        assert folder.parent == out.parent
    assert (out / "report.json").read_text() == "{}"
    assert names(out.parent) == ["run"]


def test_an_existing_result_is_refused_and_untouched(tmp_path: Path) -> None:
    write_result(tmp_path / "run", "old")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        write_result(tmp_path / "run", "new")
    assert (tmp_path / "run" / "report.json").read_text() == "old"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_result(tmp_path / "run", "new")
    assert (tmp_path / "run" / "report.json").read_text() == "new"


def test_overwrite_replaces_what_was_written_and_keeps_what_was_not(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    (out / "training").mkdir(parents=True)
    (out / "training" / "card.yaml").write_text("name: x")
    with staged_output(out, overwrite=True) as folder:
        (folder / "report.json").write_text("first")
        (folder / "stale.html").write_text("first")
    write_result(out, "second", overwrite=True)
    assert (out / "report.json").read_text() == "second"
    assert not (out / "stale.html").exists()
    assert (out / "training" / "card.yaml").read_text() == "name: x"
    assert names(tmp_path) == ["demo"]


def test_an_error_leaves_the_earlier_result(tmp_path: Path) -> None:
    write_result(tmp_path / "run", "old")
    with pytest.raises(ZeroDivisionError):
        write_half(tmp_path / "run")
    assert (tmp_path / "run" / "report.json").read_text() == "old"
    assert names(tmp_path) == ["run"]


def test_a_kill_leaves_no_half_result_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    write_result(tmp_path / "run", "old")
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from rankopt.output import staged_output\n"
        "with staged_output(Path(sys.argv[1]), overwrite=True) as folder:\n"
        "    (folder / 'report.json').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "report.json").read_text() == "old"
    assert len(names(tmp_path)) == 2
    write_result(tmp_path / "run", "new", overwrite=True)
    assert (tmp_path / "run" / "report.json").read_text() == "new"
    assert names(tmp_path) == ["run"]


def test_a_live_process_keeps_its_partial(tmp_path: Path) -> None:
    other = tmp_path / f"run.partial-{os.getppid()}"
    other.mkdir()
    write_result(tmp_path / "run", "new")
    assert other.is_dir()


def test_resume_takes_up_what_an_ended_run_left(tmp_path: Path) -> None:
    left = tmp_path / f"run.partial-{DEAD_PID}"
    left.mkdir()
    (left / "block-0.json").write_text("{}")
    with staged_output(tmp_path / "run", overwrite=False, resume=True) as folder:
        assert names(folder) == ["block-0.json"]
    assert (tmp_path / "run" / "block-0.json").exists()


def test_resume_after_an_error_in_this_process(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_half(tmp_path / "run", keep_partial=True)
    with staged_output(tmp_path / "run", overwrite=False, resume=True) as folder:
        assert names(folder) == ["report.json"]


@pytest.mark.parametrize("new_exists", [True, False])
def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path, new_exists: bool) -> None:
    out = tmp_path / "run"
    write_result(out, "old")
    (out / "notes.txt").write_text("mine")
    out.rename(tmp_path / f"run.replaced-{DEAD_PID}")
    if new_exists:
        write_result_without_recovery(out)
    with pytest.raises(OutputExistsError):
        write_result(out, "newer")
    assert (out / "report.json").read_text() == ("new" if new_exists else "old")
    assert (out / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == ["run"]


def write_result_without_recovery(out: Path) -> None:
    out.mkdir()
    (out / "report.json").write_text("new")


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="must be a folder"):
        write_result(tmp_path / "run", "new", overwrite=True)


def test_the_working_folder_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "inner")
    for out in (Path(), Path("..")):
        with pytest.raises(UsageError, match="Give a folder of its own"):
            write_result(out, "new", overwrite=True)
    assert names(tmp_path / "work") == ["inner"]


def test_too_little_space_is_said_before_any_work(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentProblem, match=r"must have .* GiB free; got"),
        staged_output(tmp_path / "run", overwrite=False, needed_bytes=1 << 60),
    ):
        pytest.fail("the block must not start")
    assert names(tmp_path) == []
    check_free_space(tmp_path, 1)


def test_a_full_disk_is_a_problem_with_a_next_step(tmp_path: Path) -> None:
    write_result(tmp_path / "run", "old")
    with (
        pytest.raises(EnvironmentProblem, match=r"the disk is full.*--out on another disk"),
        staged_output(tmp_path / "run", overwrite=True),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "run" / "report.json").read_text() == "old"


def test_a_full_disk_is_seen_behind_a_runtime_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage(100, 100, 0))
    with (
        pytest.raises(EnvironmentProblem, match="the disk is full"),
        staged_output(tmp_path / "run", overwrite=False),
    ):
        raise RuntimeError("PytorchStreamWriter failed writing file")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="shape"),
        staged_output(tmp_path / "run", overwrite=False),
    ):
        raise RuntimeError("shape mismatch")
    denied = PermissionError(errno.EACCES, "Permission denied", "/elsewhere/model.pt")
    with pytest.raises(PermissionError), staged_output(tmp_path / "run", overwrite=False):
        raise denied


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "scores.parquet"
    with staged_file(out, overwrite=False) as partial:
        assert partial.suffix == ".parquet"
        partial.write_text("first")
    with pytest.raises(OutputExistsError), staged_file(out, overwrite=False):
        pytest.fail("the block must not start")
    with pytest.raises(ZeroDivisionError):
        write_half_file(out)
    assert out.read_text() == "first"
    assert names(tmp_path) == ["scores.parquet"]
    with pytest.raises(UsageError, match="it is a folder"), staged_file(tmp_path, overwrite=True):
        pytest.fail("the block must not start")


def test_json_never_holds_nan(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json_atomic(path, {"p99_ns": None, "name": "é"})
    assert json.loads(path.read_text()) == {"p99_ns": None, "name": "é"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"p99_ns": float("nan")})
    assert json.loads(path.read_text()) == {"p99_ns": None, "name": "é"}
