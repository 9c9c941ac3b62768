"""Open a checkpoint of any of three forms without loading it.

A torch.distributed.checkpoint folder, a `.pt` and a `.safetensors` file are opened alike; no code
that they may hold is run.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from rankopt.errors import CheckpointError, Problem
from rankopt.models.dcp import SafeReader, read_index
from rankopt.output import recover_folder
from rankopt.sharding.manifest import read_manifest
from rankopt.sharding.stored import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_SUFFIX,
    TORCH_SUFFIXES,
    DamagedPieceError,
    Piece,
    StoredCheckpoint,
    StoredObject,
    StoredTensor,
    fake_load,
    flatten,
    in_rows,
    optimizer_file,
    saved_bytes,
    values_at,
)


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Open a checkpoint without loading it.

    Raises:
        CheckpointError: it does not exist, is of another format, or its index is damaged.
    """
    if not path.exists():
        # A save that was killed between its two renames left the last checkpoint beside.
        recover_folder(path)
    if not path.exists():
        raise _refuse(path, "does not exist")
    manifest = read_manifest(path)
    missing: list[DamagedPieceError] = []
    try:
        if path.is_dir():
            tensors, objects, missing = _open_folder(path)
        elif path.suffix == SAFETENSORS_SUFFIX:
            tensors, objects = _open_safetensors(path)
        elif path.suffix in TORCH_SUFFIXES:
            tensors, objects = _open_torch(path)
        else:
            what = "must be a torch.distributed.checkpoint folder, a .pt or a .safetensors file"
            raise _refuse(path, what, path.suffix or "no suffix")
    except OSError as error:
        raise _refuse(path, f"cannot be read: {error.strerror or error}") from error
    if not tensors:
        raise _refuse(path, "holds no tensor")
    return StoredCheckpoint(path, tensors, objects, manifest, (*_damage(tensors), *missing))


def _open_folder(
    folder: Path,
) -> tuple[dict[str, StoredTensor], dict[str, StoredObject], list[DamagedPieceError]]:
    if not (folder / ".metadata").is_file():
        what = "is not a torch.distributed.checkpoint folder: it holds no .metadata"
        raise _refuse(folder, what, hint="Was its save cut short? An earlier one may be beside it.")
    index = read_index(folder, SafeReader(str(folder)))
    stored = index.storage_data or {}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    missing: list[DamagedPieceError] = []
    for key, entry in index.state_dict_metadata.items():
        path = tuple((index.planner_data or {}).get(key, (key,)))
        if isinstance(entry, TensorStorageMetadata):
            shape = tuple(entry.size)
            pieces = [_folder_piece(folder, key, shape, chunk, stored) for chunk in entry.chunks]
            tensors[key] = StoredTensor(key, path, shape, entry.properties.dtype, tuple(pieces))
            _check_cover(folder, tensors[key])
        else:
            info = stored[MetadataIndex(key)]
            file = folder / info.relative_path
            content = b""
            if file.is_file():
                with file.open("rb") as stream:
                    stream.seek(info.offset)
                    content = stream.read(info.length)
            if len(content) < info.length:
                missing.append(DamagedPieceError(file, key, (0, 0), "is missing or truncated"))
            objects[key] = StoredObject(path, content)
    return tensors, objects, missing


def _folder_piece(
    folder: Path, key: str, shape: tuple[int, ...], chunk: Any, stored: Mapping[Any, Any]
) -> Piece:
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    info = stored.get(MetadataIndex(key, chunk.offsets))
    if info is None:
        raise _refuse(folder / ".metadata", f"does not say where {key} at {offsets} lies")
    if info.transform_descriptors:
        what = f"{key} is compressed ({', '.join(info.transform_descriptors)})"
        raise _refuse(folder / info.relative_path, what, hint="Save it without extensions.")
    if offsets[2:] != (0,) * len(offsets[2:]) or (len(shape) > 2 and sizes[1:] != shape[1:]):
        raise _refuse(folder, f"{key} of {len(shape)} dimensions must be cut along the first")
    return Piece(
        file=folder / info.relative_path,
        start=info.offset,
        num_bytes=info.length,
        archived=True,
        row_offset=offsets[0] if offsets else 0,
        num_rows=sizes[0] if sizes else 1,
        column_offset=offsets[1] if len(offsets) > 1 else 0,
        num_columns=math.prod(sizes[1:]),
    )


def _check_cover(folder: Path, tensor: StoredTensor) -> None:
    covered = sum(piece.num_rows * piece.num_columns for piece in tensor.pieces)
    if covered != math.prod(tensor.shape):
        what = f"the parts of {tensor.key} do not make up the whole"
        raise _refuse(folder / ".metadata", what, f"{covered:,} of {math.prod(tensor.shape):,}")


def _open_torch(file: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredObject]]:
    if not zipfile.is_zipfile(file):
        raise _refuse(file, "is truncated, or is no file of torch.save", hint="Write it again.")
    try:
        content = fake_load(str(file))
    except pickle.UnpicklingError as error:
        what = "holds Python objects, not only weights; reading them would run code from the file"
        raise _refuse(file, what) from error
    except OSError:
        raise
    except Exception as error:  # bytes that are no archive raise anything
        raise _refuse(file, "is damaged", hint="Copy or write it again.") from error
    if not isinstance(content, Mapping):
        raise _refuse(file, "must hold a state dict", type(content).__name__)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for path, value in flatten(content):
        key = ".".join(map(str, path))
        if not isinstance(value, Tensor):
            objects[key] = StoredObject(path, saved_bytes(value))
            continue
        if not in_rows(value):
            hint = "Save it contiguous."
            raise _refuse(file, f"{key} must lie row by row", tuple(value.stride()), hint)
        shape = tuple(value.shape)
        piece = Piece(
            file, values_at(value), value.nbytes, False, 0, shape[0] if shape else 1, 0,
            math.prod(shape[1:]),
        )  # fmt: skip
        tensors[key] = StoredTensor(key, path, shape, value.dtype, (piece,))
    return tensors, objects


def _open_safetensors(file: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredObject]]:
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for part in (file, optimizer_file(file)):
        if part != file and not part.is_file():
            continue
        header, begin = _safetensors_header(part)
        extra = header.pop("__metadata__", {})
        paths = json.loads(extra.get("rankopt.paths", "{}"))
        for name, entry in header.items():
            path = tuple(paths.get(name, (name,)))
            key, shape = ".".join(map(str, path)), tuple(entry["shape"])
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            if dtype is None:
                raise _refuse(part, f"{name} has a dtype that is not known", entry["dtype"])
            first, last = entry["data_offsets"]
            piece = Piece(
                part, begin + first, last - first, False, 0, shape[0] if shape else 1, 0,
                math.prod(shape[1:]),
            )  # fmt: skip
            tensors[key] = StoredTensor(key, path, shape, dtype, (piece,))
        for key, (path, text) in json.loads(extra.get("rankopt.objects", "{}")).items():
            objects[key] = StoredObject(tuple(path), base64.b64decode(text))
    return tensors, objects


def _safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if 0 < length < file.stat().st_size else b""
    try:
        header = json.loads(text)
    except (ValueError, UnicodeDecodeError) as error:
        raise _refuse(file, "is truncated or is not a safetensors file") from error
    if not isinstance(header, dict):
        raise _refuse(file, "is not a safetensors file")
    return header, 8 + length


def _damage(tensors: Mapping[str, StoredTensor]) -> tuple[DamagedPieceError, ...]:
    """Find files that are missing or too short, without reading them."""
    sizes: dict[Path, int] = {}
    found = []
    for tensor in tensors.values():
        for piece in tensor.pieces:
            if piece.file not in sizes:
                is_file = piece.file.is_file()
                sizes[piece.file] = piece.file.stat().st_size if is_file else -1
            size, needed = sizes[piece.file], piece.start + piece.num_bytes
            if size < needed:
                short = f"the file is truncated: {size:,} bytes of at least {needed:,}"
                what = "the file is missing" if size < 0 else short
                found.append(DamagedPieceError(piece.file, tensor.key, piece.rows, what))
    return tuple(found)


def _refuse(
    path: Path, what: str, got: object | None = None, hint: str | None = None
) -> CheckpointError:
    return CheckpointError(problems=[Problem(str(path), what, got, hint)])
