"""Compare two checkpoints, however each is cut, or one with its own checksums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rankopt.sharding.integrity import damaged_parts, records_of, steps
from rankopt.sharding.layout import model_tensors
from rankopt.sharding.opening import open_checkpoint
from rankopt.sharding.packed import ReadRows, unpacked_rows
from rankopt.sharding.stored import DamagedPieceError, StoredCheckpoint, StoredTensor

Kind = Literal["damaged", "missing", "shape", "dtype", "values"]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(BaseModel):
    """One thing that is not the same, or not whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    tensor: str
    row_start: int | None = None
    row_stop: int | None = None
    """The row after the last."""
    num_rows: int | None = None
    """How many rows differ in between."""
    largest: float | None = None
    """The largest absolute difference."""
    files: tuple[str, ...] = ()
    """The files that hold these rows, of both checkpoints."""
    message: str


class Verified(BaseModel):
    """What came of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    control: str
    candidate: str | None
    same: bool
    tolerance: float
    num_tensors: int
    num_checked: int
    """Tensors that were compared with checksums of their own."""
    largest: float | None
    """The largest absolute difference that was met, allowed or not."""
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def verify(
    control: str | Path,
    candidate: str | Path | None = None,
    *,
    tolerance: float = 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Verified:
    """Compare every tensor of two checkpoints, and each checkpoint with its checksums.

    Args:
        control: a torch.distributed.checkpoint folder, a `.pt` or a `.safetensors` file.
        candidate: another; None: look at the first alone.
        tolerance: the largest absolute difference of a value that is allowed; 0: bit for bit.
        progress: told which tensor is being read.

    Raises:
        CheckpointError: one of them cannot be opened at all.
    """
    opened = [open_checkpoint(Path(path)) for path in (control, candidate) if path is not None]
    differences: list[Difference] = []
    notes: list[str] = []
    num_checked = 0
    for checkpoint in opened:
        damage, checked = _against_checksums(checkpoint, progress)
        differences += damage
        num_checked += checked
        if not checked:
            notes.append(f"{checkpoint.path} carries no checksums")
    tensors = opened[0].tensors
    largest = None
    if len(opened) == 2:
        found, seen, told = _compare(opened[0], opened[1], tolerance, progress)
        differences += found
        notes += told
        largest = max(seen, default=None)
    return Verified(
        control=str(control),
        candidate=None if candidate is None else str(candidate),
        same=not differences,
        tolerance=tolerance,
        num_tensors=len(tensors),
        num_checked=num_checked,
        largest=largest,
        differences=tuple(differences),
        notes=tuple(dict.fromkeys(notes)),
    )


def _against_checksums(
    checkpoint: StoredCheckpoint, progress: Callable[[str], None]
) -> tuple[list[Difference], int]:
    records = records_of(checkpoint)
    found = [_damaged(error) for error in checkpoint.damage]
    broken = {error.file for error in checkpoint.damage}
    checked = 0
    for key, record in records.items():
        tensor = checkpoint.tensors.get(key)
        if tensor is None:
            message = f"{checkpoint.path}: {key} is missing, though its checksum is there"
            found.append(Difference(kind="damaged", tensor=key, message=message))
            continue
        if any(piece.file in broken for piece in tensor.pieces):
            continue
        progress(f"{checkpoint.path}: {key}")
        found += [_damaged(error) for error in damaged_parts(tensor, record)]
        checked += 1
    return found, checked


def _damaged(error: DamagedPieceError) -> Difference:
    return Difference(
        kind="damaged",
        tensor=error.key,
        row_start=error.rows[0],
        row_stop=error.rows[1],
        files=(str(error.file),),
        message=str(error.problems[0]),
    )


def _compare(
    one: StoredCheckpoint,
    other: StoredCheckpoint,
    tolerance: float,
    progress: Callable[[str], None],
) -> tuple[list[Difference], list[float], list[str]]:
    left, right, notes = _names(one, other)
    found: list[Difference] = []
    seen: list[float] = []
    for name in dict.fromkeys([*left, *right]):
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            where = other.path if b is None else one.path
            message = f"{where}: {name} is missing"
            found.append(Difference(kind="missing", tensor=name, message=message))
            continue
        progress(f"comparing {name}")
        try:
            found += _compare_tensor(name, a, b, tolerance, seen)
        except DamagedPieceError as error:
            damage = _damaged(error)
            if damage not in found:
                found.append(damage)
    return found, seen, notes


def _names(
    one: StoredCheckpoint, other: StoredCheckpoint
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], list[str]]:
    """Name tensors alike, whether the weights are nested under a key or not."""
    named, alone = [], []
    for checkpoint in (one, other):
        model = model_tensors(checkpoint.tensors)
        own = {tensor.key for tensor in model.values()}
        rest = {key: t for key, t in checkpoint.tensors.items() if key not in own}
        named.append({**model, **rest})
        alone.append(not rest)
    notes = []
    if alone[0] != alone[1]:
        without = one if alone[0] else other
        notes.append(f"{without.path} holds weights alone: no optimizer state was compared")
        models = [model_tensors(checkpoint.tensors) for checkpoint in (one, other)]
        return models[0], models[1], notes
    return named[0], named[1], notes


def _compare_tensor(
    name: str, a: StoredTensor, b: StoredTensor, tolerance: float, seen: list[float]
) -> list[Difference]:
    read_a: ReadRows = a.read_rows
    read_b: ReadRows = b.read_rows
    if a.shape != b.shape and tolerance:
        # Rows of bytes on one side: what prepacking makes of a table.
        read_a, read_b = unpacked_rows(a, b), unpacked_rows(b, a)
    elif a.shape != b.shape:
        message = f"{name} is {_times(a.shape)} and {_times(b.shape)}"
        return [Difference(kind="shape", tensor=name, message=message)]
    if a.dtype != b.dtype and not tolerance:
        message = f"{name} is {_word(a.dtype)} and {_word(b.dtype)}; give --tolerance to compare"
        return [Difference(kind="dtype", tensor=name, message=message)]
    spans: list[tuple[int, int, int, float]] = []
    for start, stop in steps(a.num_rows, max(a.num_columns, b.num_columns) * 8):
        rows_a, rows_b = read_a(start, stop), read_b(start, stop)
        if rows_a.shape != rows_b.shape:
            message = f"{name} is {_times(a.shape)} and {_times(b.shape)}"
            return [Difference(kind="shape", tensor=name, message=message)]
        apart = (rows_a.double() - rows_b.double()).abs().nan_to_num(torch.inf)
        same_bits = _same_bits(rows_a, rows_b)
        apart[same_bits] = 0.0
        if apart.numel():
            seen.append(float(apart.max()))
        wrong = apart > tolerance if tolerance else ~same_bits
        for first, last in _runs(wrong.any(dim=1).nonzero().flatten()):
            part = apart[first:last]
            span = start + first, start + last, last - first, float(part.max())
            if spans and spans[-1][1] == span[0]:
                before = spans[-1]
                span = before[0], span[1], before[2] + span[2], max(before[3], span[3])
                spans.pop()
            spans.append(span)
    return [_differs(name, a, b, *span) for span in _joined(spans)]


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != b.dtype:
        return a.double() == b.double()
    if a.is_complex():
        return a == b
    bits = _BITS[a.element_size()]
    return a.contiguous().view(bits) == b.contiguous().view(bits)


def _runs(rows: Tensor) -> Iterator[tuple[int, int]]:
    """Join neighbouring rows: first, and the one after the last."""
    if not len(rows):
        return
    breaks = (rows[1:] - rows[:-1] > 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(rows)]
    for first, last in itertools.pairwise(edges):
        yield int(rows[first]), int(rows[last - 1]) + 1


_MOST_SPANS = 10


def _joined(
    spans: list[tuple[int, int, int, float]],
) -> list[tuple[int, int, int, float]]:
    """Tell scattered rows as one span, so that the list stays readable."""
    if len(spans) <= _MOST_SPANS:
        return spans
    num_rows = sum(span[2] for span in spans)
    return [(spans[0][0], spans[-1][1], num_rows, max(span[3] for span in spans))]


def _differs(
    name: str, a: StoredTensor, b: StoredTensor, start: int, stop: int, num_rows: int, apart: float
) -> Difference:
    files = tuple(
        dict.fromkeys(
            str(piece.file)
            for tensor in (a, b)
            for piece in tensor.pieces
            if piece.row_offset < stop and piece.rows[1] > start
        )
    )
    count = "" if num_rows == stop - start else f"{num_rows:,} of "
    message = (
        f"{name}: {count}rows {_span(start, stop)} differ, by up to {apart:.3g}; "
        f"in {', '.join(files)}"
    )
    return Difference(
        kind="values",
        tensor=name,
        row_start=start,
        row_stop=stop,
        num_rows=num_rows,
        largest=apart if apart < float("inf") else None,
        files=files,
        message=message,
    )


def _span(start: int, stop: int) -> str:
    return f"{start:,} to {stop - 1:,}"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape) or "one number"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
