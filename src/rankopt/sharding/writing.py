"""Write a checkpoint a few rows at a time: a folder of shards, or one file.

Room for every tensor is made first, as a hole in its file; then rows are written to their place,
in whatever order they come.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rankopt.sharding.checksums import BLOCK_ROWS, Checksum, checksum
from rankopt.sharding.layout import Cut, TargetTensor, model_tensors
from rankopt.sharding.manifest import PieceRecord, ShardsManifest, TensorRecord
from rankopt.sharding.stored import (
    SAFETENSORS_DTYPES,
    Key,
    StoredObject,
    bytes_of,
    fake_load,
    flatten,
    values_at,
)


@dataclass
class Place:
    """Where one rectangle goes, and the checksums of what has been written of it."""

    file: Path
    start: int
    cut: Cut
    blocks: dict[int, Checksum] = field(default_factory=dict)

    def write(self, values: Tensor, row_offset: int) -> None:
        """Write rows of the whole tensor, as far as they are of this rectangle."""
        cut = self.cut
        first = max(row_offset, cut.row_offset)
        last = min(row_offset + len(values), cut.row_offset + cut.num_rows)
        if first >= last or not cut.num_columns:
            return
        columns = slice(cut.column_offset, cut.column_offset + cut.num_columns)
        part = values[first - row_offset : last - row_offset, columns].contiguous()
        block = first // BLOCK_ROWS
        added = checksum(part, first, cut.column_offset)
        self.blocks[block] = self.blocks.get(block, Checksum()) + added
        with self.file.open("r+b") as stream:
            stream.seek(self.start + (first - cut.row_offset) * part[0].nbytes)
            stream.write(bytes_of(part))

    def record(self, name: str) -> PieceRecord:
        cut = self.cut
        return PieceRecord(
            file=name,
            row_offset=cut.row_offset,
            num_rows=cut.num_rows,
            column_offset=cut.column_offset,
            num_columns=cut.num_columns,
            checksums=tuple(str(self.blocks[block]) for block in sorted(self.blocks)),
        )


class Writer(Protocol):
    """A checkpoint that is being written."""

    notes: list[str]

    def places(self, key: str) -> Sequence[Place]:
        """Say where the parts of a tensor go."""
        ...

    def finish(self) -> None:
        """Write the index, and see that everything is on the disk."""
        ...


def manifest_of(
    tensors: Sequence[TargetTensor], writer: Writer, world_size: int, names: Mapping[Path, str]
) -> ShardsManifest:
    """List the checksums of what was written.

    Args:
        tensors: what was written.
        writer: how.
        world_size: for how many ranks.
        names: of files that will be called something else than now.
    """
    records = []
    for tensor in tensors:
        places = writer.places(tensor.key)
        total = sum((s for place in places for s in place.blocks.values()), Checksum())
        records.append(
            TensorRecord(
                key=tensor.key,
                shape=tensor.shape,
                dtype=str(tensor.dtype).removeprefix("torch."),
                checksum=str(total),
                pieces=tuple(
                    place.record(names.get(place.file, place.file.name)) for place in places
                ),
            )
        )
    return ShardsManifest(block_rows=BLOCK_ROWS, world_size=world_size, tensors=tuple(records))


class FolderWriter:
    """Writes a torch.distributed.checkpoint folder, one file a shard of a tensor."""

    def __init__(
        self, folder: Path, tensors: Sequence[TargetTensor], objects: Mapping[str, StoredObject]
    ) -> None:
        self.notes: list[str] = []
        self._folder = folder
        self._places: dict[str, list[Place]] = {}
        self._index: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._paths = {tensor.key: tensor.path for tensor in tensors}
        self._counts: dict[int, int] = {}
        with _room(folder, max(_nbytes(t, cut) for t in tensors for cut in t.cuts)) as room:
            for tensor in tensors:
                self._add(tensor, room)
        for key, item in objects.items():
            file = self._new_file(0)
            file.write_bytes(item.content)
            self._index[key] = BytesStorageMetadata()
            self._stored[MetadataIndex(key)] = _StorageInfo(file.name, 0, len(item.content))
            self._paths[key] = item.path

    def places(self, key: str) -> Sequence[Place]:
        return self._places[key]

    def finish(self) -> None:
        metadata = Metadata(
            state_dict_metadata=self._index,
            planner_data=self._paths,
            storage_data=self._stored,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        with (self._folder / ".metadata").open("wb") as stream:
            pickle.dump(metadata, stream)
        _sync(self._folder.iterdir())

    def _add(self, tensor: TargetTensor, room: Path) -> None:
        chunks = []
        self._places[tensor.key] = []
        for index, cut in enumerate(tensor.cuts):
            offsets, sizes = _rectangle(tensor, cut)
            file = self._new_file(cut.rank)
            empty = _hole(room, sizes, tensor.dtype)
            with torch.serialization.skip_data():
                torch.save(empty, file)
            self._places[tensor.key].append(Place(file, values_at(fake_load(str(file))), cut))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            where = MetadataIndex(tensor.key, torch.Size(offsets), index)
            self._stored[where] = _StorageInfo(file.name, 0, file.stat().st_size)
        self._index[tensor.key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
        )

    def _new_file(self, rank: int) -> Path:
        number = self._counts.get(rank, 0)
        self._counts[rank] = number + 1
        return self._folder / f"__{rank}_{number}.distcp"


class TorchWriter:
    """Writes one `.pt` file, nested as the checkpoint was."""

    def __init__(
        self, file: Path, tensors: Sequence[TargetTensor], objects: Mapping[str, StoredObject]
    ) -> None:
        self.notes: list[str] = []
        self._file = file
        content: dict[Any, Any] = {}
        with _room(file.parent, max(tensor.size_bytes for tensor in tensors)) as room:
            for tensor in tensors:
                _put(content, tensor.path, _hole(room, tensor.shape, tensor.dtype))
            for key, item in objects.items():
                try:
                    _put(content, item.path, torch.load(io.BytesIO(item.content)))
                except pickle.UnpicklingError:
                    self.notes.append(f"{key}: holds code, and was left out")
            with torch.serialization.skip_data():
                torch.save(content, file)
        found = dict(flatten(fake_load(str(file))))
        self._places = {
            tensor.key: [Place(file, values_at(found[tensor.path]), tensor.cuts[0])]
            for tensor in tensors
        }

    def places(self, key: str) -> Sequence[Place]:
        return self._places[key]

    def finish(self) -> None:
        _sync([self._file])


class SafetensorsWriter:
    """Writes the weights to one `.safetensors` file and everything else to one beside it."""

    def __init__(
        self,
        file: Path,
        tensors: Sequence[TargetTensor],
        objects: Mapping[str, StoredObject],
        beside: Path,
    ) -> None:
        self.notes: list[str] = []
        self._files = [file]
        self._places: dict[str, list[Place]] = {}
        weights = model_tensors({t.key: t.stored[0] for t in tensors})
        keys = {stored.key: name for name, stored in weights.items()}
        model = {keys[t.key]: t for t in tensors if t.key in keys}
        others = {t.key: t for t in tensors if t.key not in keys}
        self._write(file, model, {})
        if others or objects:
            self._files.append(beside)
            self._write(beside, others, objects)

    def places(self, key: str) -> Sequence[Place]:
        return self._places[key]

    def finish(self) -> None:
        _sync(self._files)

    def _write(
        self,
        file: Path,
        tensors: Mapping[str, TargetTensor],
        objects: Mapping[str, StoredObject],
    ) -> None:
        words = {dtype: word for word, dtype in SAFETENSORS_DTYPES.items()}
        saved = {
            key: (item.path, base64.b64encode(item.content).decode())
            for key, item in objects.items()
        }
        paths = {name: tensor.path for name, tensor in tensors.items()}
        extra = {"rankopt.paths": json.dumps(paths), "rankopt.objects": json.dumps(saved)}
        header: dict[str, Any] = {"__metadata__": extra}
        start = 0
        # The widest values first, so that each tensor begins at a multiple of its own width.
        ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
        for name, tensor in ordered:
            end = start + tensor.size_bytes
            header[name] = {
                "dtype": words[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + start)
        for name, tensor in tensors.items():
            begin = 8 + len(text) + header[name]["data_offsets"][0]
            self._places[tensor.key] = [Place(file, begin, tensor.cuts[0])]


@contextlib.contextmanager
def _room(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Give a file that is one hole: tensors mapped to it take no memory, however large."""
    file = folder / f".room-{os.getpid()}"
    try:
        with file.open("wb") as stream:
            stream.truncate(max(8, size_bytes))
        yield file
    finally:
        file.unlink(missing_ok=True)


def _hole(room: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    return torch.from_file(str(room), shared=True, size=size.numel(), dtype=dtype).view(size)


def _nbytes(tensor: TargetTensor, cut: Cut) -> int:
    return cut.num_rows * cut.num_columns * tensor.dtype.itemsize


def _rectangle(tensor: TargetTensor, cut: Cut) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Write a cut as offsets and sizes in the tensor's own dimensions."""
    shape = tensor.shape
    if not shape:
        return (), ()
    if len(shape) == 2:
        return (cut.row_offset, cut.column_offset), (cut.num_rows, cut.num_columns)
    return (cut.row_offset, *(0 for _ in shape[1:])), (cut.num_rows, *shape[1:])


def _put(content: dict[Any, Any], path: Key, value: Any) -> None:
    for key in path[:-1]:
        content = content.setdefault(key, {})
    content[path[-1]] = value


def _sync(files: Any) -> None:
    """Wait until files are on the disk: a rename must not come before their contents."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
