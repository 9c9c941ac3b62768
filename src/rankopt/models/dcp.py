"""Read a torch.distributed.checkpoint folder on one machine, without a process group.

Tensors come out whole, however many ranks wrote them. The folder's index is a pickle, and PyTorch
reads it as one; here only the names that such an index needs may be looked up in it, so that a
folder from elsewhere cannot run code. Entries that are not tensors are not read at all.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from rankopt.errors import CheckpointError, Problem

_ALLOWED_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_ALLOWED_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A class of the two modules only: what they import (os, io, pickle) is not reachable.
        if (module, name) in _ALLOWED_NAMES:
            return super().find_class(module, name)
        if module in _ALLOWED_MODULES:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class SafeReader(FileSystemReader):
    """PyTorch's reader, its index read by the unpickler above."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as stream:
            metadata: Metadata = _IndexUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise ValueError("no index in it")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_distributed(folder: Path) -> tuple[dict[str, Tensor], str | None]:
    """Read the model's tensors of a checkpoint folder.

    Returns:
        The tensors, and the key they were nested under (`model` of `{"model": ...}`), or None.

    Raises:
        CheckpointError: no index, a damaged or missing shard, an index that holds code, or
            several nested state dicts, none of them under `model`.
    """
    if not (folder / ".metadata").is_file():
        raise _refuse(
            folder,
            "is not a torch.distributed.checkpoint folder: it holds no .metadata",
            hint="Name the folder that holds .metadata and the .distcp files.",
        )
    reader = SafeReader(str(folder))
    metadata = read_index(folder, reader)
    names, group = _model_entries(folder, metadata)
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if key in names and isinstance(entry, TensorStorageMetadata)
    }
    check_shards(folder, metadata)
    try:
        _load_state_dict(
            state_dict=state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True
        )
    # PyTorch wraps whatever a shard's bytes raised, and its wrapper is no Exception.
    except (Exception, CheckpointException) as error:
        raise _refuse(
            folder, "has a shard whose bytes are damaged", hint="Copy or write it again."
        ) from error
    return {name: state[key] for key, name in names.items()}, group


def read_index(folder: Path, reader: SafeReader) -> Metadata:
    """Read a folder's index without running code that it may hold.

    Raises:
        CheckpointError: the index is damaged or holds code.
    """
    try:
        metadata = reader.read_metadata()
    except pickle.UnpicklingError as error:
        name = str(error)
        if "." in name and " " not in name:
            raise _refuse(
                folder / ".metadata", "holds code; reading it would run it", name
            ) from error
        raise _refuse(folder / ".metadata", f"is damaged ({name})") from error
    except OSError:
        raise
    except Exception as error:  # a pickle's bytes can raise anything
        raise _refuse(folder / ".metadata", f"is damaged ({_first_line(error)})") from error
    return metadata


def _model_entries(folder: Path, metadata: Metadata) -> tuple[dict[str, str], str | None]:
    """Map the stored keys of the model's tensors to their names in the state dict."""
    paths = metadata.planner_data or {}
    groups: dict[str | None, dict[str, str]] = defaultdict(dict)
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        path = paths.get(key, (key,))
        if len(path) == 1:
            groups[None][key] = str(path[0])
        elif len(path) == 2 and all(isinstance(part, str) for part in path):
            groups[path[0]][key] = path[1]
    if None in groups:
        return groups[None], None
    if "model" in groups:
        return groups["model"], "model"
    if len(groups) != 1:
        raise _refuse(
            folder,
            "must hold one mapping of tensors",
            sorted(map(str, groups)) or "none",
            "Save the model's state dict alone, or under one key.",
        )
    return next((names, group) for group, names in groups.items())


def check_shards(folder: Path, metadata: Metadata) -> None:
    """Find missing and shortened shards before PyTorch meets them in its reading threads.

    Raises:
        CheckpointError: every such shard is named.
    """
    needed: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        end = stored.offset + stored.length
        needed[stored.relative_path] = max(end, needed.get(stored.relative_path, 0))
    problems = []
    for name, size_bytes in sorted(needed.items()):
        shard = folder / name
        if not shard.is_file():
            problems.append(Problem(str(shard), "is missing, though .metadata names it"))
        elif shard.stat().st_size < size_bytes:
            problems.append(
                Problem(
                    str(shard),
                    f"is truncated: .metadata expects at least {size_bytes:,} bytes",
                    f"{shard.stat().st_size:,} bytes",
                )
            )
    if problems:
        raise CheckpointError(problems=problems)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _refuse(
    path: Path, what: str, got: object | None = None, hint: str | None = None
) -> CheckpointError:
    return CheckpointError(problems=[Problem(str(path), what, got, hint)])
