"""Which arithmetic each dense layer gets where the recipe leaves it to a measurement.

The arithmetic of a layer is one for all batch sizes, since a row's score may not depend on its
batch: what is compared is the geometric mean over the recipe's batch sizes.

Shapes: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from rankopt.capture.export import TRACE_ROWS
from rankopt.kernels.dense_choice import ARITHMETICS, Arithmetic, DenseLayer, relative_times
from rankopt.kernels.packing import fits_fp16
from rankopt.passes.base import PassContext
from rankopt.passes.graph import Linear, arguments, fake
from rankopt.review.schema import MeasuredChoice

MARGINS: dict[Arithmetic, float] = {"int8": 0.0, "fp16": 0.05, "fp32": 0.05, "fbgemm": 0.1}
"""Share of its time that an arithmetic must save over what stands before it in `ARITHMETICS`. More
for fbgemm, which takes its layer out of a chain of layers that run as one call."""


def choose_arithmetic(
    linears: Sequence[Linear], activation_bits: int, traced_rows: int, context: PassContext
) -> dict[str, Arithmetic]:
    """Choose an arithmetic for every layer, and say in the context what decided it.

    A layer that an earlier run chose for is not measured again, nor is one that another form of the
    model has already.

    Args:
        linears: the layers; one that is applied several times is measured at its most rows.
        activation_bits: of the int8 kernel.
        traced_rows: B of the rows that the graph was traced on.
        context: knows the batch sizes, and what was chosen before.
    """
    replayed = bool(context.choices)
    by_layer: dict[str, list[Linear]] = {}
    for linear in linears:
        by_layer.setdefault(linear.layer, []).append(linear)
    chosen: dict[str, Arithmetic] = {}
    for layer, applied in by_layer.items():
        allowed = _allowed(applied[0], context)
        known = context.choices.get(layer) or context.chosen.get(layer)
        if known is None and replayed:
            known = MeasuredChoice(chosen="int8")
            context.note(f"{layer}: int8, the earlier run chose nothing for it")
        elif known is None:
            known = _measured(applied, activation_bits, traced_rows, allowed, context.batch_sizes)
            context.note(f"{layer}: {describe(known)}")
        if known.chosen not in allowed:
            known = MeasuredChoice(chosen="fp32")
        context.chosen[layer] = known
        chosen[layer] = cast(Arithmetic, known.chosen)
    return chosen


def decide(times: Mapping[int, Mapping[str, float]], allowed: Sequence[Arithmetic]) -> Arithmetic:
    """Return the fastest over all batch sizes, a later one of `ARITHMETICS` by its margin alone.

    Args:
        times: batch size -> arithmetic -> time of a call, in any unit.
        allowed: what the layer can have; int8 among them.
    """
    best: Arithmetic = "int8"
    for candidate in ARITHMETICS[1:]:
        if candidate not in allowed or any(candidate not in found for found in times.values()):
            continue
        logs = [math.log(found[candidate] / found[best]) for found in times.values()]
        if math.exp(sum(logs) / len(logs)) < 1 - MARGINS[candidate]:
            best = candidate
    return best


def describe(choice: MeasuredChoice) -> str:
    """Write a choice with the ratios that decided it."""
    each = []
    for batch, ratios in choice.ratios.items():
        others = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != choice.chosen]
        each.append(f"at batch {batch} {', '.join(others)}")
    return f"{choice.chosen}; times of the others over its own: {'; '.join(each)}"


def _allowed(linear: Linear, context: PassContext) -> list[Arithmetic]:
    if fits_fp16(linear.weight):
        return list(ARITHMETICS)
    context.note(f"{linear.layer}: not in fp16, a weight exceeds its range")
    return [each for each in ARITHMETICS if each != "fp16"]


def _measured(
    applied: Sequence[Linear],
    activation_bits: int,
    traced_rows: int,
    allowed: Sequence[Arithmetic],
    batch_sizes: Sequence[int],
) -> MeasuredChoice:
    linear = applied[0]
    form = DenseLayer(
        num_inputs=linear.weight.shape[1],
        num_outputs=linear.weight.shape[0],
        has_bias=linear.bias is not None,
        has_slope=linear.slope is not None,
        activation_bits=activation_bits,
    )
    share = max(_traced_rows_of(each) for each in applied) / traced_rows
    times = {batch: relative_times(form, max(1, round(batch * share))) for batch in batch_sizes}
    chosen = decide(times, allowed)
    return MeasuredChoice(
        chosen=chosen,
        ratios={
            batch: {name: round(found[name] / found[chosen], 3) for name in found}
            for batch, found in times.items()
        },
    )


def _traced_rows_of(linear: Linear) -> int:
    """Return how many rows the layer had when the graph was traced: those of lists count too."""
    return math.prod(map(traced_size, fake(arguments(linear.node)[0]).shape[:-1]))


def traced_size(size: int | torch.SymInt) -> int:
    """Return what a dim was when the graph was traced."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else TRACE_ROWS
