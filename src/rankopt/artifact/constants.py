"""Weights beside the compiled library: one file, mapped into memory, shared between processes.

Tensors lie at multiples of 64 bytes, so that vector loads of a row never straddle more cache lines
than they must. (safetensors aligns to 8, which is why it is not used here.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rankopt.artifact.manifest import ConstantEntry

ALIGNMENT = 64


def write_constants(constants: Mapping[str, Tensor], file: Path) -> tuple[ConstantEntry, ...]:
    """Write tensors behind each other and say where each one lies; equal bytes lie once."""
    entries: list[ConstantEntry] = []
    places: dict[str, int] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        for name, value in sorted(constants.items()):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest = hashlib.sha256(data).hexdigest()
            is_new = digest not in places
            if is_new:
                stream.write(bytes(-stream.tell() % ALIGNMENT))
                places[digest] = stream.tell()
            entries.append(
                ConstantEntry(
                    name=name,
                    dtype=str(value.dtype).removeprefix("torch."),
                    shape=tuple(value.shape),
                    offset=places[digest],
                    size_bytes=data.nbytes,
                    sha256=digest,
                )
            )
            if is_new:
                stream.write(data)
        if stream.tell() == 0:
            stream.write(bytes(ALIGNMENT))  # an empty file cannot be mapped
    return tuple(entries)


def stored_bytes(entries: Sequence[ConstantEntry]) -> int:
    """Count the bytes of constants, those that lie in one place once."""
    return sum({entry.offset: entry.size_bytes for entry in entries if entry.size_bytes}.values())


def map_constants(entries: Sequence[ConstantEntry], file: Path) -> dict[str, Tensor]:
    """Map the file and cut it into its tensors; nothing is read until it is used."""
    size = file.stat().st_size
    mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    return {
        entry.name: mapped[entry.offset : entry.offset + entry.size_bytes]
        .view(getattr(torch, entry.dtype))
        .view(entry.shape)
        for entry in entries
    }
