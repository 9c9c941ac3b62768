from __future__ import annotations

import os
import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from rankopt.cli import main as cli_main
from rankopt.cli.console import Progress, print_table
from rankopt.cli.main import EXIT_INTERNAL, EXIT_INTERRUPTED, VERBS, Verb
from rankopt.errors import DataError, Problem

HEAVY = ("torch", "pandas", "ray", "scipy", "pyarrow", "plotly", "torchrec", "fbgemm_gpu", "numpy")
VERB_NAMES = [verb.name for verb in VERBS]


def run_fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    return subprocess.run(
        [sys.executable, "-m", "rankopt", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.mark.parametrize("arguments", [[], *([name] for name in VERB_NAMES)], ids=str)
def test_help_takes_under_half_a_second(arguments: list[str]) -> None:
    # CPU time, not wall time: help does not wait for anything, and the suite shares its cores with
    # Ray's workers, which at a load of 8 made the same 0.17 s of work take 0.8 s.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_fresh(*arguments, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "Usage: rankopt" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("name", VERB_NAMES)
def test_help_imports_nothing_heavy(name: str) -> None:
    code = (
        "import sys; from rankopt.cli.main import main; code = main([sys.argv[1], '--help']);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_the_list_of_verbs_imports_no_verb() -> None:
    code = (
        "import sys; from rankopt.cli.main import main; main(['--help']);"
        "print([m for m in sys.modules if m.startswith('rankopt.cli.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "['rankopt.cli.main']"
    for verb in VERBS:
        assert verb.name in done.stdout


def test_version(cli: Any) -> None:
    from rankopt import __version__

    result = cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"rankopt {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docto"], "Did you mean 'doctor'?"),
        (["doctor", "--jsno"], "--json"),
        (["doctor", "extra"], "extra"),
    ],
)
def test_wrong_usage_exits_2_with_the_near_name(
    cli: Any, arguments: list[str], message: str
) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plant a verb `planted` that raises what the test gives."""

    def plant(error: BaseException) -> None:
        app = typer.Typer()

        @app.command()
        def planted_verb() -> None:
            raise error

        name = "rankopt.cli.planted"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(app=app))  # type: ignore[arg-type]
        monkeypatch.setattr(cli_main, "VERBS", (*VERBS, Verb("planted", "Raise.")))

    return plant


def test_a_readers_error_is_a_message_without_a_traceback(cli: Any, planted: Any) -> None:
    problems = [Problem("rows.csv", "must have column 'age'", hint="Did you mean 'ages'?")]
    planted(DataError(problems=problems))
    result = cli("planted")
    assert result.exit_code == 2
    assert result.stderr == f"rankopt: {problems[0]}\n"


def test_several_problems_stand_on_lines_of_their_own(cli: Any, planted: Any) -> None:
    planted(DataError(problems=[Problem("a", "is wrong"), Problem("b", "is wrong")]))
    assert cli("planted").stderr == "rankopt:\na: is wrong.\nb: is wrong.\n"


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_a_verdict_is_the_exit_code(cli: Any, planted: Any, code: int) -> None:
    planted(typer.Exit(code))
    assert cli("planted").exit_code == code


def test_an_unexpected_error_is_short_and_says_how_to_see_more(cli: Any, planted: Any) -> None:
    planted(KeyError("weights"))
    result = cli("planted")
    assert result.exit_code == EXIT_INTERNAL
    assert EXIT_INTERNAL not in {0, 1, 2, 3}
    assert "KeyError: 'weights'" in result.stderr
    assert "RANKOPT_DEBUG=1 rankopt planted" in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(cli: Any, planted: Any) -> None:
    planted(KeyError("weights"))
    result = cli("--debug", "planted")
    assert result.exit_code == EXIT_INTERNAL
    assert "Traceback" in result.stderr


def test_an_interrupt_exits_130(cli: Any, planted: Any) -> None:
    planted(KeyboardInterrupt())
    assert cli("planted").exit_code == EXIT_INTERRUPTED


def test_a_closed_pipe_is_no_verdict() -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "rankopt", "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait() not in {0, 1, 2, 3}
    assert "Traceback" not in errors


def test_progress_in_a_pipe_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.step("loading rows")
        progress.update("1 of 2")
        progress.step("training")
        progress.note("validation NE 0.9")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "loading rows ..."
    assert lines[1].startswith("loading rows: ")
    assert lines[2:4] == ["training ...", "validation NE 0.9"]
    assert "\x1b" not in captured.err


def test_progress_does_not_call_a_failed_step_done(capsys: pytest.CaptureFixture[str]) -> None:
    def divide() -> None:
        with Progress() as progress:
            progress.step("dividing")
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    assert capsys.readouterr().err == "dividing ...\n"


def test_quiet_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=True) as progress:
        progress.step("loading rows")
        progress.note("a line")
    assert capsys.readouterr().err == ""


def test_a_table_in_a_pipe_is_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("1", "[red]x"), ("2", "")])
    assert capsys.readouterr().out == "1  [red]x\n2\n"
