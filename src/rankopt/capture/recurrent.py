"""Recurrences over packed lists, traced as recurrences over padded ones.

`pack_padded_sequence` lays lists out by their lengths, so every shape behind it depends on data and
torch.export refuses it. While a capture runs, it returns a stand-in instead: the padded rows, time
after time, and whole batches as the number of rows at each step. `nn.GRU` and `nn.LSTM` on a
stand-in become `rankopt::gru` and `rankopt::lstm`; a cell written by hand that walks over
`batch_sizes` runs all rows at every step; `pad_packed_sequence` takes out again what lies past a
row's length.

Shapes: B rows, T steps, H hidden units.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from rankopt.errors import ExportError
from rankopt.kernels.build import load_kernels

ROWS = 1_073_676_287
"""Stands for B where a plain number is needed: `int(batch_sizes[0])` of a symbolic B would freeze
the batch. A large prime, so that no other number of a model is a multiple of it."""

_capturing = threading.local()


class StepCounts(list[int]):
    """The `batch_sizes` of a stand-in: `ROWS` at each of T steps, and what it was packed from.

    Attributes:
        lengths: int64 [B].
        num_rows: B, symbolic.
    """

    device = torch.device("cpu")

    def __init__(self, num_steps: int, lengths: Tensor, num_rows: Any) -> None:
        super().__init__([ROWS] * num_steps)
        self.lengths = lengths
        self.num_rows = num_rows
        self._padded: list[tuple[Tensor, Tensor]] = []

    def size(self, dim: int = 0) -> int:
        """Return T, as a tensor of batch sizes would."""
        del dim
        return len(self)

    def tolist(self) -> list[int]:
        """Return the counts, as a tensor of batch sizes would."""
        return list(self)

    def pack(self, padded: Tensor) -> PackedSequence:
        """Lay [B, T, ...] out step by step, [T * B, ...]."""
        data = padded.transpose(0, 1).flatten(0, 1)
        self._padded.append((data, padded))
        return PackedSequence(data, self)  # type: ignore[arg-type]

    def unpack(self, data: Tensor) -> Tensor:
        """Return the [B, T, ...] that `data` was laid out from, or lay it out again."""
        for packed, padded in self._padded:
            if packed is data:
                return padded
        return data.reshape(len(self), self.num_rows, *data.shape[1:]).transpose(0, 1)


def counts_of(value: object) -> StepCounts | None:
    """Return the counts of a stand-in; None for anything else."""
    counts: object = value.batch_sizes if isinstance(value, PackedSequence) else None
    return counts if isinstance(counts, StepCounts) else None


def with_rows(value: Any, num_rows: Any) -> Any:
    """Put B where a multiple of `ROWS` stands, in sizes, slices and lists of them."""
    if type(value) is int:
        return value // ROWS * num_rows if value and value % ROWS == 0 else value
    if type(value) is slice:
        parts = (value.start, value.stop, value.step)
        return slice(*(with_rows(part, num_rows) for part in parts))
    if type(value) in (tuple, list, torch.Size):
        kind = tuple if type(value) is torch.Size else type(value)
        return kind(with_rows(part, num_rows) for part in value)
    return value


@contextmanager
def padded_recurrences(on_pack: Callable[[StepCounts], None]) -> Iterator[None]:
    """Trace packed lists as padded ones, in this thread, while the block runs.

    Args:
        on_pack: told of every stand-in; its numbers of rows need `with_rows`.
    """
    load_kernels()
    pack, unpack = rnn.pack_padded_sequence, rnn.pad_packed_sequence

    def pack_padded(
        input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
    ) -> PackedSequence:
        if not _is_capturing():
            return pack(input, lengths, batch_first, enforce_sorted)
        packed, counts = _pack(input, lengths, batch_first)
        on_pack(counts)
        return packed

    def pad_packed(
        sequence: PackedSequence,
        batch_first: bool = False,
        padding_value: float = 0.0,
        total_length: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        counts = counts_of(sequence)
        if counts is None:
            return unpack(sequence, batch_first, padding_value, total_length)
        return _unpack(sequence.data, counts, batch_first, padding_value, total_length)

    forwards: Mapping[type[nn.Module], Callable[..., Any]] = {
        nn.GRU: _recur,
        nn.LSTM: _recur,
        nn.RNN: _refuse,
    }
    before = _is_capturing()
    _capturing.value = True
    try:
        with _replaced({pack: pack_padded, unpack: pad_packed}), _forwards(forwards):
            yield
    finally:
        _capturing.value = before


def _is_capturing() -> bool:
    return getattr(_capturing, "value", False)


def _pack(input: Tensor, lengths: Any, batch_first: bool) -> tuple[PackedSequence, StepCounts]:
    padded = input if batch_first else input.transpose(0, 1)
    if not isinstance(lengths, Tensor):
        raise ExportError(
            "pack_padded_sequence was given lengths as a Python list, which a trace would freeze; "
            "give them as a tensor."
        )
    num_steps = padded.shape[1]
    if not isinstance(num_steps, int):
        raise ExportError(
            f"pack_padded_sequence was given {num_steps} steps, a number that depends on data; "
            "pad the lists to a fixed length."
        )
    counts = StepCounts(num_steps, lengths.to(torch.int64), padded.shape[0])
    return counts.pack(padded), counts


def _unpack(
    data: Tensor, counts: StepCounts, batch_first: bool, fill: float, total_length: int | None
) -> tuple[Tensor, Tensor]:
    padded = counts.unpack(data)
    past = torch.arange(len(counts)) >= counts.lengths[:, None]
    past = past.view(*past.shape, *[1] * (padded.dim() - 2))
    padded = torch.where(past, fill, padded)
    if total_length is not None and total_length > len(counts):
        rest = padded.new_full(
            (counts.num_rows, total_length - len(counts), *padded.shape[2:]), fill
        )
        padded = torch.cat([padded, rest], dim=1)
    return padded if batch_first else padded.transpose(0, 1), counts.lengths


def _recur(
    original: Callable[..., Any], layer: nn.GRU | nn.LSTM, input: Any, hx: Any = None
) -> Any:
    counts = counts_of(input)
    if counts is None:
        return original(layer, input, hx)
    name = type(layer).__name__
    if layer.training and layer.dropout:
        raise ExportError(f"nn.{name} drops values at random: call eval() on the model.")
    if layer.proj_size:
        raise ExportError(f"nn.{name} with proj_size over packed lists is not captured.")
    operator = torch.ops.rankopt.lstm if isinstance(layer, nn.LSTM) else torch.ops.rankopt.gru
    num_states = 2 if isinstance(layer, nn.LSTM) else 1
    given = (None,) * num_states if hx is None else hx if isinstance(hx, tuple) else (hx,)
    x = counts.unpack(input.data)
    ends: list[list[Tensor]] = [[] for _ in given]
    for index in range(layer.num_layers):
        results = []
        for direction in range(2 if layer.bidirectional else 1):
            suffix = f"l{index}" + ("_reverse" if direction else "")
            names = [f"weight_ih_{suffix}", f"weight_hh_{suffix}"]
            names += [f"bias_ih_{suffix}", f"bias_hh_{suffix}"]
            weights = [getattr(layer, name, None) for name in names]
            begin = [None if state is None else state[len(ends[0])] for state in given]
            result, *states = operator(x, counts.lengths, *weights, *begin, bool(direction))
            results.append(result)
            for end, state in zip(ends, states, strict=True):
                end.append(state)
        x = torch.cat(results, dim=-1) if len(results) > 1 else results[0]
    last = tuple(torch.stack(states) for states in ends)
    return counts.pack(x), last if num_states > 1 else last[0]


def _refuse(original: Callable[..., Any], layer: nn.Module, input: Any, hx: Any = None) -> Any:
    if counts_of(input) is None:
        return original(layer, input, hx)
    raise ExportError(
        f"nn.{type(layer).__name__} over packed lists is not captured, nn.GRU and nn.LSTM are. "
        "Give the layer the padded rows instead, and pick each row's last step by its length."
    )


@contextmanager
def _replaced(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Swap functions wherever a module holds them: `from ... import f` made its own reference."""
    by_id = {id(function): new for function, new in replacements.items()}
    held: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None) or {}
        held += [(names, key, value) for key, value in list(names.items()) if id(value) in by_id]
    try:
        for names, key, value in held:
            names[key] = by_id[id(value)]
        yield
    finally:
        for names, key, value in held:
            names[key] = value


@contextmanager
def _forwards(forwards: Mapping[type[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    before = {kind: kind.forward for kind in forwards}

    def bound(kind: type[nn.Module], new: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: nn.Module, input: Any, hx: Any = None) -> Any:
            return new(before[kind], layer, input, hx)

        return forward

    try:
        for kind, new in forwards.items():
            kind.forward = bound(kind, new)
        yield
    finally:
        for kind, old in before.items():
            kind.forward = old
