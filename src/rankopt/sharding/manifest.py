"""What a sharded checkpoint says of itself: `shards.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rankopt.errors import CheckpointError, Problem
from rankopt.output import write_json_atomic
from rankopt.problems import problems_of_validation

MANIFEST = "shards.json"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PieceRecord(_Strict):
    """One rectangle of a tensor and the file it lies in."""

    file: str
    row_offset: int
    num_rows: int
    column_offset: int
    num_columns: int
    checksums: tuple[str, ...]
    """Of each block of `block_rows` rows that it touches."""


class TensorRecord(_Strict):
    """One tensor, whole."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str
    """The same however the tensor is cut."""
    pieces: tuple[PieceRecord, ...]


class ShardsManifest(_Strict):
    """The checksums of a checkpoint."""

    format_version: Literal[1] = 1
    checksum: Literal["sum-of-products-2x64"] = "sum-of-products-2x64"
    block_rows: int
    world_size: int
    tensors: tuple[TensorRecord, ...]


def manifest_file(checkpoint: Path) -> Path:
    """Name the file that holds a checkpoint's checksums: inside a folder, beside a file."""
    if checkpoint.is_dir() or not checkpoint.suffix:
        return checkpoint / MANIFEST
    return checkpoint.with_name(f"{checkpoint.name}.{MANIFEST}")


def read_manifest(checkpoint: Path) -> ShardsManifest | None:
    """Read a checkpoint's checksums; None where it carries none.

    Raises:
        CheckpointError: the file is there and is damaged.
    """
    file = manifest_file(checkpoint)
    if not file.is_file():
        return None
    try:
        return ShardsManifest.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        problem = Problem(str(file), "is damaged", str(error), "Write the checkpoint again.")
        raise CheckpointError(problems=[problem]) from error
    except ValidationError as error:
        problems = problems_of_validation(str(file), error, ShardsManifest)
        raise CheckpointError(problems=problems) from error


def write_manifest(manifest: ShardsManifest, file: Path) -> None:
    """Write it whole or not at all."""
    write_json_atomic(file, manifest.model_dump(mode="json"))
