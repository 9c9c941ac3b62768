"""A checkpoint as rectangles of rows in files, read a few rows at a time.

Three forms are opened alike: a torch.distributed.checkpoint folder, a `.pt` and a `.safetensors`
file. Nothing is loaded when one is opened: PyTorch's archives keep a tensor's values as plain bytes
at a known place, so rows are read from there.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from rankopt.errors import CheckpointError, Problem
from rankopt.sharding.manifest import ShardsManifest

TORCH_SUFFIXES = (".pt", ".pth")
SAFETENSORS_SUFFIX = ".safetensors"
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
Key = tuple[Any, ...]
"""Where a value stands in the nested state dict: `("model", "top.weight")`."""


class DamagedPieceError(CheckpointError):
    """Part of a tensor cannot be read, or is not what its checksum says.

    Attributes:
        file: the file that is damaged.
        key: the tensor.
        rows: first row and the one after the last; equal for what is no tensor.
        what: what is wrong.
    """

    def __init__(self, file: Path, key: str, rows: tuple[int, int], what: str) -> None:
        self.file, self.key, self.rows, self.what = file, key, rows, what
        span = f", rows {rows[0]:,} to {rows[1] - 1:,}" if rows[1] > rows[0] else ""
        where = f"{file}: {key}{span}"
        hint = "Copy or write the checkpoint again."
        super().__init__(problems=[Problem(where, what, hint=hint)])


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, as it lies in a file.

    Attributes:
        file: where.
        start: the first byte, of the values or of the archive that holds them.
        num_bytes: of the values or of the archive.
        archived: whether it is an archive of torch.save.
    """

    file: Path
    start: int
    num_bytes: int
    archived: bool
    row_offset: int
    num_rows: int
    column_offset: int
    num_columns: int

    @property
    def rows(self) -> tuple[int, int]:
        return self.row_offset, self.row_offset + self.num_rows

    @property
    def columns(self) -> tuple[int, int]:
        return self.column_offset, self.column_offset + self.num_columns


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; as a matrix of `num_rows` and `num_columns`."""

    key: str
    path: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    places: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    """Where the values of the pieces begin, as far as it was looked up."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Read whole rows from whatever pieces hold them.

        Raises:
            DamagedPieceError: a file is missing, too short, or no longer an archive.
        """
        rows = torch.empty(stop - start, self.num_columns, dtype=self.dtype)
        for index, piece in enumerate(self.pieces):
            first, last = max(start, piece.row_offset), min(stop, piece.rows[1])
            if first < last:
                part = self.read_piece(index, first, last)
                rows[first - start : last - start, slice(*piece.columns)] = part
        return rows

    def read_piece(self, index: int, start: int, stop: int) -> Tensor:
        """Read rows of one piece; `start` and `stop` count from the tensor's first row.

        Raises:
            DamagedPieceError: the file is missing, too short, or no longer an archive.
        """
        piece = self.pieces[index]
        values = torch.empty(stop - start, piece.num_columns, dtype=self.dtype)
        if not values.numel():
            return values
        try:
            with piece.file.open("rb") as stream:
                place = self._place(index, stream)
                if place < 0:
                    return self._load(piece, stream)[start - piece.row_offset :][: stop - start]
                row_bytes = piece.num_columns * self.dtype.itemsize
                stream.seek(place + (start - piece.row_offset) * row_bytes)
                if stream.readinto(bytes_of(values)) != values.nbytes:
                    raise EOFError
        except FileNotFoundError as error:
            raise self._damaged(piece, "the file is missing") from error
        except EOFError as error:
            raise self._damaged(piece, "the file is truncated") from error
        return values

    def _place(self, index: int, stream: io.BufferedReader) -> int:
        """Find the first byte of a piece's values; -1 where they do not lie row by row."""
        piece = self.pieces[index]
        if not piece.archived:
            return piece.start
        if index not in self.places:
            view = _create_file_view(stream, piece.start, piece.num_bytes)
            try:
                found = fake_load(view)
                same = found.numel() == piece.num_rows * piece.num_columns
                if not same or found.dtype != self.dtype:
                    raise self._damaged(piece, f"holds {found.dtype} of {tuple(found.shape)}")
                self.places[index] = piece.start + values_at(found) if in_rows(found) else -1
            except (CheckpointError, OSError):
                raise
            except Exception as error:  # bytes that are no archive raise anything
                raise self._damaged(piece, "the bytes are no longer an archive") from error
        return self.places[index]

    def _load(self, piece: Piece, stream: io.BufferedReader) -> Tensor:
        view: Any = _create_file_view(stream, piece.start, piece.num_bytes)
        found: Tensor = torch.load(view, map_location="cpu", weights_only=True)
        return found.reshape(piece.num_rows, piece.num_columns)

    def _damaged(self, piece: Piece, what: str) -> DamagedPieceError:
        return DamagedPieceError(piece.file, self.key, piece.rows, what)


@dataclass(frozen=True)
class StoredObject:
    """What is not a tensor, as the bytes that torch.save wrote of it."""

    path: Key
    content: bytes


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was opened.

    Attributes:
        path: where it lies.
        tensors: by key.
        objects: what else it holds, such as the number of steps, by key.
        manifest: its checksums, where it carries them.
        damage: missing and shortened files.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    manifest: ShardsManifest | None
    damage: tuple[DamagedPieceError, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def fake_load(file: Any) -> Any:
    """Read an archive's index: tensors come without values, but know where these lie."""
    with FakeTensorMode():
        return torch.load(file, map_location="cpu", weights_only=True)


def values_at(tensor: Tensor) -> int:
    """Tell where the values of a tensor of `fake_load` begin in its archive."""
    storage: Any = tensor.untyped_storage()
    return int(storage._checkpoint_offset) + int(tensor.storage_offset()) * tensor.itemsize


def bytes_of(values: Tensor) -> memoryview:
    """Give a contiguous tensor's values as bytes, to be read or written in place."""
    flat: Any = values.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def in_rows(tensor: Tensor) -> bool:
    """Tell whether a tensor's values lie row after row."""
    return tensor.is_contiguous()


def flatten(content: Any, path: Key = ()) -> list[tuple[Key, Any]]:
    """List the leaves of nested mappings; a list stays whole."""
    if not isinstance(content, Mapping) or (path and not content):
        return [(path, content)]
    return [leaf for key, value in content.items() for leaf in flatten(value, (*path, key))]


def saved_bytes(value: Any) -> bytes:
    """Write a value as torch.save does."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def optimizer_file(file: Path) -> Path:
    """Name what lies beside a `.safetensors` file of weights: everything else."""
    return file.with_name(f"{file.stem}.optimizer{file.suffix}")
