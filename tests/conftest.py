"""What every test may use: the command line in this process, and where the checkout is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch or ray: the suite shares two cores with Ray's workers, and a test
# must not call home.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

CHECKOUT = Path(__file__).resolve().parent.parent

# A deadline per example measures the neighbours on a shared machine, not the code.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@dataclass(frozen=True)
class CliResult:
    """What a command line answered."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def checkout() -> Path:
    return CHECKOUT


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CliResult]:
    """Run `rankopt ARGS` in this process, as the installed command does."""
    # Set and not removed, so that a `--debug` in one test is undone after it.
    monkeypatch.setenv("RANKOPT_DEBUG", "0")

    def run(*arguments: str | Path) -> CliResult:
        from rankopt.cli.main import main

        capsys.readouterr()
        exit_code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return CliResult(exit_code, captured.out, captured.err)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
