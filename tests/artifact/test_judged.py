"""Quality is known with the kernels it was judged with: what loading and verifying say else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from artifact.workshop import built, copy_of, edit_manifest
from rankopt.artifact.judged import (
    UnjudgedWarning,
    quality_with,
    read_judgement,
    write_judgement,
)
from rankopt.artifact.manifest import MANIFEST, damaged_files, read_manifest
from rankopt.artifact.verify import verify_artifact
from rankopt.kernels.ops import current_isa
from rankopt.review.schema import Cost, Report, Size, Verdict
from rankopt.runtime import load_artifact

pytestmark = pytest.mark.skipif(current_isa() == "scalar", reason="needs two instruction sets")


def report(verdict: Verdict, reason: str = "NE changed by 3 %.") -> Report:
    return Report(
        verdict=verdict,
        reasons=[reason],
        quality={},
        latency=[],
        size=Size(control_bytes=1, candidate_bytes=1, control_code_bytes=1, candidate_code_bytes=1),
        cost=Cost(),
        passes=[],
        model="dlrm",
        environment={"cpu_model": "one of a kind"},
        reproduce="rankopt verify",
        made_at="2026-01-01T00:00:00+00:00",
    )


def load_with(isa: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = f"from rankopt import load_artifact; load_artifact({str(folder)!r})"
    environment = os.environ | {"RANKOPT_ISA": isa}
    return subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_loading_with_other_kernels_warns_of_both_and_names_the_command(tmp_path: Path) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    done = load_with("scalar", folder)
    assert done.returncode == 0, done.stderr
    assert (
        f"UnjudgedWarning: {folder}: built and judged with {current_isa()} kernels, running with "
        f"scalar: judge its quality here with `rankopt verify {folder} --data PATH`"
    ) in done.stderr
    write_judgement(folder, "scalar", report("pass"))
    done = load_with("scalar", folder)
    assert (done.returncode, "UnjudgedWarning" in done.stderr) == (0, False), done.stderr


def test_an_instruction_set_that_is_none_is_an_error_with_those_there_are(tmp_path: Path) -> None:
    done = load_with("mmx", built("dlrm-native").folder)
    assert "EnvironmentProblem: RANKOPT_ISA: not an instruction set of this CPU" in done.stderr
    assert "Allowed here: auto, scalar" in done.stderr


def test_loading_with_the_kernels_it_was_judged_with_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_artifact(built("dlrm-native").folder)


def test_verifying_with_other_kernels_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKOPT_ISA", "scalar")
    found = verify_artifact(built("dlrm-native").folder)
    assert (found.isa, found.judged_isa) == ("scalar", current_isa())
    # Its int8 kernels give the same bits with every instruction set.
    assert found.passed
    assert found.verdict == "inconclusive"
    assert "--data PATH" in found.notes[0]


@pytest.mark.parametrize(("verdict", "how"), [("fail", "failed"), ("inconclusive", "undecided")])
def test_quality_that_did_not_hold_is_told_whatever_was_judged_before(
    verdict: Verdict, how: str, tmp_path: Path
) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    isa = current_isa()
    assert quality_with(folder, read_manifest(folder), isa) == ("pass", None)
    write_judgement(folder, isa, report(verdict))
    found, why = quality_with(folder, read_manifest(folder), isa)
    assert found == verdict
    assert why is not None
    assert how in why
    assert "NE changed by 3 %." in why
    with pytest.warns(UnjudgedWarning, match=how):
        load_artifact(folder)


def test_a_judgement_leaves_the_artifact_whole_and_counts_for_its_weights_alone(
    tmp_path: Path,
) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    before = (folder / MANIFEST).read_bytes()
    written = write_judgement(folder, "scalar", report("pass"))
    assert read_judgement(folder, "scalar") == written
    assert read_judgement(folder, "avx2") is None
    assert (folder / MANIFEST).read_bytes() == before
    assert damaged_files(folder, read_manifest(folder)) == []
    assert [path.name for path in (folder / "judged").iterdir()] == ["scalar.json"]
    edit_manifest(folder, made_at="another day")
    assert read_judgement(folder, "scalar") is None


@pytest.mark.parametrize("text", ["", "{", "{}", json.dumps({"verdict": "pass"})])
def test_a_damaged_judgement_counts_as_none(text: str, tmp_path: Path) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    write_judgement(folder, "scalar", report("pass"))
    (folder / "judged" / "scalar.json").write_text(text)
    assert quality_with(folder, read_manifest(folder), "scalar")[0] == "inconclusive"
