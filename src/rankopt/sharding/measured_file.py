"""Files that `rankopt diagnose --collectives` writes and a topology names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rankopt.errors import InputError, Problem
from rankopt.problems import problems_of_validation


class MeasuredFile(BaseModel):
    """What all of them say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file_name: ClassVar[str]
    """What `diagnose` calls it."""

    made_at: str
    device: Literal["cpu", "cuda"]


Found = TypeVar("Found", bound=MeasuredFile)


def read_measured(file: Path, kind: type[Found], device: str) -> Found:
    """Read a measurement for a topology of that device.

    Raises:
        InputError: the file is missing, is not such a measurement, or is of another device.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        hint = "Measure them: rankopt diagnose --collectives --out DIR."
        problem = Problem(str(file), f"must be a readable {kind.file_name}", str(error), hint)
        raise InputError(problems=[problem]) from error
    try:
        found = kind.model_validate(raw)
    except ValidationError as error:
        raise InputError(problems=problems_of_validation(str(file), error, kind)) from error
    if found.device != device:
        problem = Problem(f"{file}: device", f"must be the topology's, {device}", found.device)
        raise InputError(problems=[problem])
    return found
