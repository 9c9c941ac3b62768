"""Weights beside the library: aligned, typed, mapped, and whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from rankopt.artifact.constants import ALIGNMENT, map_constants, write_constants


def test_tensors_of_every_type_come_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        "float": torch.randn(3, 5, generator=generator),
        "half": torch.randn(7, generator=generator).half(),
        "brain": torch.randn(2, 3, generator=generator).bfloat16(),
        "bytes": torch.randint(0, 256, (65,), generator=generator, dtype=torch.uint8),
        "levels": torch.randint(-127, 128, (9, 3), generator=generator, dtype=torch.int8),
        "longs": torch.tensor([2**40, -1]),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, dtype=torch.uint8),
        "strided": torch.randn(6, 4, generator=generator).t(),
        "model.top.weight": torch.randn(4, generator=generator),
    }
    file = tmp_path / "weights" / "constants.bin"
    entries = write_constants(values, file)
    mapped = map_constants(entries, file)
    assert set(mapped) == set(values)
    for name, value in values.items():
        assert mapped[name].dtype == value.dtype
        assert mapped[name].shape == value.shape
        assert torch.equal(mapped[name], value), name
    raw = file.read_bytes()
    for entry in entries:
        assert entry.offset % ALIGNMENT == 0
        part = raw[entry.offset : entry.offset + entry.size_bytes]
        assert hashlib.sha256(part).hexdigest() == entry.sha256
        assert mapped[entry.name].data_ptr() % ALIGNMENT == 0 or not entry.size_bytes


def test_a_model_without_weights_can_be_mapped(tmp_path: Path) -> None:
    file = tmp_path / "constants.bin"
    assert map_constants(write_constants({}, file), file) == {}


def test_constants_are_mapped_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "constants.bin"
    entries = write_constants({"table": torch.ones(4096, 64)}, file)
    table = map_constants(entries, file)["table"]
    maps = Path("/proc/self/maps")
    if maps.is_file():
        assert str(file) in maps.read_text(encoding="utf-8")
    assert float(table.sum()) == 4096 * 64


def test_writing_to_mapped_weights_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "constants.bin"
    entries = write_constants({"table": torch.ones(100)}, file)
    before = file.read_bytes()
    map_constants(entries, file)["table"].zero_()
    assert file.read_bytes() == before
