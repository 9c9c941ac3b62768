"""What kernels are measured against: fbgemm on the same layers and tables, and the machine's peaks.

Every function returns something to call that does the work once and says how long it took.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from kernel_calls import Dense, Layer, Lookups
from torch import Tensor

from rankopt.diagnose.profile import Clock
from rankopt.diagnose.rows_read import READERS, RowsRead
from rankopt.errors import Problem, UsageError
from rankopt.kernels.lookup import COPY, MEAN, SUM, PlanRow, decode_plan
from rankopt.kernels.packing import unpack_linear_fp32, unpack_linear_int8
from rankopt.tables import TYPE_CODES
from rankopt.units import NS_PER_S

Sample = Callable[[], float]
"""Does something once and returns the ns it took."""

HOST, NOT_POOLED = 3, 2
PEAK_S = 0.001
"""A sample of the peak loop lasts about so long."""
NUM_BAGS = 1024


def timed(runs: Sequence[Callable[[], Any]], clock: Clock) -> Sample:
    """Time the operators that the calls make, one call after the other, going round.

    The way from Python to the operator, which an artifact does not go, is left out: a microsecond
    or two, and four where a lookup takes dozens of tensors.
    """
    following, ops, ns_per_tick = cycle(runs), torch.ops.rankopt, clock.ns_per_tick()

    def sample() -> float:
        run = next(following)
        ops.profile_eager_start(False)
        try:
            run()
        finally:
            ops.profile_eager_stop()
        # The last event is the operator that stopped the recording.
        return float(ops.profile_eager_take()[:-1].sum()) * ns_per_tick

    return sample


def at_peak(layers: Sequence[Layer]) -> Sample:
    """Time layers' operations in a loop of multiply-adds on registers, on all threads."""
    work: dict[str, int] = {}
    for layer in layers:
        kind = "int8" if layer.is_int8 else "fp32"
        work[kind] = work.get(kind, 0) + layer.num_operations
    rounds = {kind: _rounds(kind) for kind in work}

    def sample() -> float:
        spent_s = 0.0
        for kind, operations in work.items():
            spent_s += operations / float(torch.ops.rankopt.peak_compute(kind, rounds[kind]))
        return spent_s * NS_PER_S

    return sample


def _rounds(kind: str) -> int:
    rounds, lasted_s = 500, 0.0
    while lasted_s < PEAK_S:
        rounds *= 2
        begun = time.perf_counter()
        torch.ops.rankopt.peak_compute(kind, rounds)
        lasted_s = time.perf_counter() - begun
    return rounds


def fbgemm_dense(call: Dense | Layer) -> Callable[[], Tensor]:
    """Run the same layers through torch's dynamic int8 linear on fbgemm, ReLU fused."""
    layers = call.layers if isinstance(call, Dense) else (call,)
    steps = [_fbgemm_layer(layer) for layer in layers]
    first = layers[0].x

    def run() -> Tensor:
        x = first
        for step in steps:
            x = step(x)
        return x

    return run


def _fbgemm_layer(given: Layer) -> Callable[[Tensor], Tensor]:
    layer, num_inputs = given.layer, given.x.shape[-1]
    if layer.scale is None:
        weight = unpack_linear_fp32(layer.packed, layer.num_outputs, num_inputs)
    else:
        levels = unpack_linear_int8(layer.packed.reshape(-1), layer.num_outputs, num_inputs)
        weight = levels.float() * layer.scale[:, None]
    scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).double()
    zeros = torch.zeros(layer.num_outputs, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch will drop quantised tensors
        torch.backends.quantized.engine = "fbgemm"
        quantised = torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, layer.bias)
    slope = layer.negative_slope
    if slope is not None and not bool(slope.any()):
        fused = torch.ops.quantized.linear_relu_dynamic
        return lambda x: fused(x, packed, True)
    plain = torch.ops.quantized.linear_dynamic
    if slope is None:
        return lambda x: plain(x, packed, True)
    return lambda x: torch.prelu(plain(x, packed, True), slope)


def rows_of(call: Lookups) -> list[RowsRead]:
    """Say which rows each of the batches reads."""
    read = READERS[call.name]
    found = [read([*given[:2], *given[2]]) for given in call.arguments]
    return [rows for rows in found if rows is not None]


def gathered(rows: Sequence[RowsRead]) -> Sample:
    """Time reading the rows and doing nothing else, batch after batch."""
    following = cycle(rows)
    return lambda: next(following).seconds() * NS_PER_S


def gathered_and_copied(rows: Sequence[RowsRead]) -> Sample:
    """Time reading the rows and writing them, as they are, one after the other."""
    given = [(each, len(each.offsets), int(each.row_bytes.max())) for each in rows]
    following = cycle(given)

    def sample() -> float:
        read, num_rows, width = next(following)
        # Allocated anew, as a lookup does; that is not in the time.
        out = torch.empty(num_rows, width, dtype=torch.uint8)
        run = torch.ops.rankopt.peak_gather_copy
        return float(run(read.storage, read.offsets, read.row_bytes, out)) * NS_PER_S

    return sample


def gathered_and_written(call: Lookups, rows: Sequence[RowsRead]) -> Sample:
    """Time reading the rows and writing as many floats where a lookup writes its results."""
    places = PLACES[call.name]
    given = [
        (read, *places(*arguments)) for read, arguments in zip(rows, call.arguments, strict=True)
    ]
    for read, at, _, _ in given:
        if at.numel() != read.offsets.numel():
            raise UsageError(
                problems=[Problem(call.name, "reads ids that belong to no row of its result")]
            )
    following = cycle(given)

    def sample() -> float:
        read, at, dims, shape = next(following)
        # Allocated anew, as a lookup does; that is not in the time.
        out = torch.empty(shape)
        run = torch.ops.rankopt.peak_gather_write
        return float(run(read.storage, read.offsets, read.row_bytes, at, dims, out)) * NS_PER_S

    return sample


def _places_pooled(
    _: Tensor, plan: Tensor, inputs: Sequence[Tensor], num_rows: int, width: int
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Say where each id's row goes: of a bag the last one's to its place, the others' to -1."""
    places, dims = [], []
    for row in decode_plan(plan):
        if row.mode == COPY:
            continue
        ids, counts, _weights = _bags(row, inputs, num_rows)
        at = torch.full((len(ids),), -1)
        filled = counts > 0
        at[(counts.cumsum(0) - 1)[filled]] = (torch.arange(num_rows) * width + row.out)[filled]
        places.append(at)
        dims.append(torch.full_like(at, row.dim))
    return torch.cat(places), torch.cat(dims), (num_rows, width)


def _places_of_sequences(
    _: Tensor, plan: Tensor, inputs: Sequence[Tensor], width: int
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    count = sum(inputs[row.source].numel() for row in decode_plan(plan))
    return torch.arange(count) * width, torch.full((count,), width), (count, width)


PLACES: dict[str, Callable[..., tuple[Tensor, Tensor, tuple[int, int]]]] = {
    "lookup_rows": _places_pooled,
    "lookup_sequences": _places_of_sequences,
}


def fbgemm_lookups(call: Lookups) -> list[Callable[[], list[Tensor]]]:
    """Look the same ids up in the same tables through fbgemm, ids laid out as it wants them."""
    build = _pooled if call.name == "lookup_rows" else _sequences
    return [build(*given) for given in call.arguments]


def _pooled(
    store: Tensor, plan: Tensor, inputs: Sequence[Tensor], num_rows: int, _: int
) -> Callable[[], list[Tensor]]:
    """Make a call for the sums and one for the means: a call pools in one way."""
    rows = [row for row in decode_plan(plan) if row.mode != COPY]
    means = [row for row in rows if row.mode == MEAN and row.length != 1]
    sums = [row for row in rows if row not in means]
    calls = []
    for mode, chosen in ((SUM, sums), (MEAN, means)):
        if not chosen:
            continue
        lists = [_bags(row, inputs, num_rows) for row in chosen]
        calls.append(_fbgemm(store, chosen, lists, mode))
    return lambda: [run() for run in calls]


def _sequences(
    store: Tensor, plan: Tensor, inputs: Sequence[Tensor], _: int
) -> Callable[[], list[Tensor]]:
    rows = decode_plan(plan)
    lists = []
    for row in rows:
        ids = inputs[row.source].reshape(-1).long()
        # Cut into equal numbers of bags for each table, so that it can share them out to threads.
        edges = torch.linspace(0, len(ids), NUM_BAGS + 1, dtype=torch.float64).long()
        lists.append((ids, edges.diff(), None))
    run = _fbgemm(store, rows, lists, NOT_POOLED)
    return lambda: [run()]


def _bags(
    row: PlanRow, inputs: Sequence[Tensor], num_rows: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a lookup's ids, how many each row has, and their weights."""
    edges = row.edges(inputs, num_rows)
    own = slice(int(edges[0]), int(edges[-1]))
    weights = inputs[row.weights].reshape(-1)[own] if row.weights >= 0 else None
    return row.ids(inputs)[own].long(), edges.diff(), weights


def _fbgemm(
    store: Tensor,
    rows: Sequence[PlanRow],
    lists: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    mode: int,
) -> Callable[[], Tensor]:
    import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)

    dims = torch.tensor([0, *(row.dim for row in rows)]).cumsum(0)
    widest = [
        max((row.dim for row in rows if row.storage == TYPE_CODES[dtype]), default=0)
        for dtype in ("int2", "int4", "int8", "fp16", "fp32")
    ]
    counts = torch.cat([each for _, each, _ in lists])
    weights = None
    if any(each is not None for _, _, each in lists):
        weights = torch.cat([torch.ones(len(i)) if w is None else w for i, _, w in lists])
    arguments = (
        store,
        torch.empty(0, dtype=torch.uint8),
        torch.full((len(rows),), HOST, dtype=torch.int32),
        torch.tensor([row.offset for row in rows]),
        torch.tensor([row.storage for row in rows], dtype=torch.uint8),
        dims.int(),
        int(dims[-1]),
        *widest,
        torch.cat([ids for ids, _, _ in lists]),
        torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        mode,
        weights,
        0,  # results in fp32
        None,
        None,
        1,
    )
    operator = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
    return lambda: operator(*arguments)
