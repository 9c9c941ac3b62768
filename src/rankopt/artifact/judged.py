"""judged/ISA.json: quality of an artifact as `rankopt verify --data` found it with other kernels.

The manifest names the instruction set with which an artifact was built and its passes were judged.
A judgement with another one lies beside it, so that the manifest's hash still tells artifacts
apart; it carries that hash, and counts for no other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankopt.artifact.manifest import MANIFEST, Manifest
from rankopt.hashes import sha256_file
from rankopt.output import write_json_atomic
from rankopt.review.schema import MetricParity, Report, Verdict

JUDGED = "judged"


class Judgement(BaseModel):
    """One file: quality against the eager control on labelled rows, by the recipe's gates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    isa: str
    """Instruction set of the kernels."""
    manifest_sha256: str
    verdict: Verdict
    reasons: tuple[str, ...] = Field(min_length=1)
    """One sentence per gate, the worst first."""
    quality: dict[str, MetricParity]
    data: dict[str, Any]
    """Where the rows came from, and how many there were."""
    cpu_model: str | None
    reproduce: str
    made_at: str


class UnjudgedWarning(UserWarning):
    """An artifact runs with kernels with which its quality was not judged, or did not hold."""


def write_judgement(folder: Path, isa: str, report: Report) -> Judgement:
    """Stamp what a comparison with the eager control found; an earlier one is replaced.

    Raises:
        EnvironmentProblem: the folder cannot be written.
    """
    judgement = Judgement(
        isa=isa,
        manifest_sha256=sha256_file(folder / MANIFEST),
        verdict=report.verdict,
        reasons=tuple(report.reasons),
        quality=report.quality,
        data=report.data,
        cpu_model=report.environment.get("cpu_model"),
        reproduce=report.reproduce,
        made_at=report.made_at,
    )
    write_json_atomic(_file(folder, isa), judgement.model_dump(mode="json"))
    return judgement


def read_judgement(folder: Path, isa: str) -> Judgement | None:
    """Return the judgement with an instruction set; None without one of these very weights.

    A damaged file counts as none: what it said cannot be told, and the artifact itself is whole.
    """
    try:
        found = Judgement.model_validate_json(_file(folder, isa).read_bytes())
    except (OSError, ValidationError):
        return None
    return found if found.manifest_sha256 == sha256_file(folder / MANIFEST) else None


def quality_with(folder: Path, manifest: Manifest, isa: str) -> tuple[Verdict, str | None]:
    """Say what is known of an artifact's quality with an instruction set.

    Returns:
        The verdict, inconclusive where nobody has judged; and why it is no pass.
    """
    found = read_judgement(folder, isa)
    if found is not None and found.verdict != "pass":
        how = "failed" if found.verdict == "fail" else "stayed undecided"
        why = f"its quality {how} when judged with {isa} kernels, {found.made_at}: "
        return found.verdict, why + found.reasons[0]
    if found is None and isa != manifest.judged_isa:
        return "inconclusive", (
            f"built and judged with {manifest.judged_isa} kernels, running with {isa}: judge its "
            f"quality here with `rankopt verify {folder} --data PATH`"
        )
    return "pass", None


def _file(folder: Path, isa: str) -> Path:
    return folder / JUDGED / f"{isa}.json"
