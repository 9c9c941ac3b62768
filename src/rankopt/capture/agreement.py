"""Run a traced graph against the model it came from, before anything is built on it.

`rankopt.capture.branches` traces filters and branches on assumptions that most ranking models keep
and that no analysis proves. Rows made up within the input contract are run through both: no list
empty, all of them, some; one row alone and several. They are run with the model's own weights, and
with redrawn ones, since fresh or well-regularised weights can hide a wrong branch below rounding.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call

from rankopt.artifact.contract import contract_of, random_features
from rankopt.bench.plan import raised
from rankopt.capture.branches import Capture
from rankopt.capture.conditions import Place, Watching
from rankopt.errors import ExportError
from rankopt.models.card import ModelCard

BATCHES = (1, 2, 7)
"""One row alone meets the branches that a batch hides: all of its lists are empty, or none."""
SEED = 20_260_131
TOLERANCE = 1e-4
"""Share of the largest output (or of 1) by which float32 in another order may differ."""
MOST_REDRAWN = 1 << 24
"""Numbers in a weight that is redrawn; larger tables stay as they are, to save memory."""

Weights = Mapping[str, Tensor]


@dataclass
class _Tally:
    """What the rows showed.

    Attributes:
        num_batches: batches that were tried.
        num_rows: rows on which both agreed.
        num_other: of them, those in batches where a branch went the other way, by its line.
        refused: errors of the model itself, with how many batches met them.
    """

    num_batches: int = 0
    num_rows: int = 0
    num_other: dict[Place, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


def verify_capture(
    program: ExportedProgram, module: nn.Module, card: ModelCard, capture: Capture
) -> tuple[str, ...]:
    """Check that a captured graph scores as the model does.

    Args:
        program: the captured graph.
        module: the `ServingModule` it was traced from, in eval mode, with the same weights.
        card: describes the inputs.
        capture: the assumptions.

    Returns:
        What was assumed and on how many rows it held, one sentence each.

    Raises:
        ExportError: the scores differ, or the model or the graph runs on no row.
    """
    graph = program.module(check_guards=False)
    tally = _Tally()
    with torch.no_grad():
        for weights in ({}, _redrawn(module)):
            for inputs in _batches(card):
                _run_both(graph, module, card, capture, weights, inputs, tally)
    if not tally.num_rows:
        raise ExportError(
            f"{card.where}: the model runs on none of the rows made up for its inputs: "
            + "; ".join(tally.refused)
        )
    return tuple(_notes(capture, tally))


def _batches(card: ModelCard) -> Iterator[tuple[Tensor, ...]]:
    contract = contract_of(card)
    longest = [length for entry in contract for length in entry.longest]
    longest += [item.stop - item.start for entry in contract for item in entry.lists]
    half_empty = 1.0 / (max(longest, default=1) + 1)
    for batch in raised(BATCHES, card.min_batch):
        for index, fill in enumerate((0.0, half_empty, 0.1, 0.5, 1.0)):
            generator = torch.Generator().manual_seed(SEED + 10 * batch + index)
            features = random_features(contract, batch, generator, fill=fill)
            yield tuple(features[name] for name in card.tensor_names)


def _redrawn(module: nn.Module) -> dict[str, Tensor]:
    """Add noise as large as a fresh weight to every parameter; tied ones stay tied."""
    generator = torch.Generator().manual_seed(SEED)
    drawn: dict[int, Tensor] = {}
    named = dict(module.named_parameters(remove_duplicate=False))
    for parameter in named.values():
        if not parameter.is_floating_point() or parameter.numel() > MOST_REDRAWN:
            continue
        if id(parameter) not in drawn:
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            drawn[id(parameter)] = parameter.detach() + (noise * scale).to(parameter.dtype)
    return {name: drawn[id(value)] for name, value in named.items() if id(value) in drawn}


def _run_both(
    graph: nn.Module,
    module: nn.Module,
    card: ModelCard,
    capture: Capture,
    weights: Weights,
    inputs: tuple[Tensor, ...],
    tally: _Tally,
) -> None:
    tally.num_batches += 1
    watching = Watching()
    try:
        with watching:
            # Copies, since the model may write into its inputs.
            expected = _run(module, weights, tuple(value.clone() for value in inputs))
    except Exception as error:  # the user's code, on rows it may never have met
        reason = f"{type(error).__name__}: {error}"
        tally.refused[reason] = tally.refused.get(reason, 0) + 1
        return
    num_rows = len(expected[0])
    other = {
        place
        for place, values in watching.branches.items()
        if (not capture.branches.get(place, True)) in values
    }
    try:
        results = _run(graph, weights, inputs)
    except Exception as error:
        raise ExportError(
            f"{card.where}: {_suspects(capture, other)}, and then the graph fails on rows that the "
            f"model scores: {type(error).__name__}: {error}\n{_NEXT_STEP}"
        ) from error
    for output, result, score in zip(card.outputs, results, expected, strict=True):
        allowed = TOLERANCE * max(1.0, float(score.abs().nan_to_num(nan=0.0, posinf=0.0).max()))
        differs = ~torch.isclose(result, score, rtol=0.0, atol=allowed, equal_nan=True)
        if bool(differs.any()):
            largest = float((result - score)[differs].abs().max())
            raise ExportError(
                f"{card.where}: {_suspects(capture, other)}, and then output {output.name} "
                f"differs from the model's by {largest:.2g} on {int(differs.sum())} of {num_rows} "
                f"rows.\n{_NEXT_STEP}"
            )
    tally.num_rows += num_rows
    for place in other:
        tally.num_other[place] = tally.num_other.get(place, 0) + num_rows


_NEXT_STEP = (
    "Compute every row and choose with torch.where(mask, new, old), so that no row depends on "
    "which others pass the filter."
)


def _run(module: nn.Module, weights: Weights, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not weights:
        return tuple(module(*inputs))
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    chosen = {name: value for name, value in weights.items() if name in held}
    return tuple(functional_call(module, chosen, inputs, tie_weights=False))


def _suspects(capture: Capture, other: set[Place]) -> str:
    """Name what can be behind a difference: branches that went elsewhere, else filters."""
    branches = set(capture.branches) & other
    if not (branches or capture.filters or capture.recurrences):
        branches = set(capture.branches)
    if branches:
        return "; ".join(
            f"{place} is taken as {_way(capture, place)}" for place in _sorted(branches)
        )
    if capture.filters:
        return f"{', '.join(map(str, _sorted(capture.filters)))}: computed on every row"
    return f"{', '.join(map(str, _sorted(capture.recurrences)))}: run on padded rows"


def _notes(capture: Capture, tally: _Tally) -> Iterator[str]:
    equal = f"equal to the eager model on {tally.num_rows} rows"
    for place in _sorted(capture.branches):
        num_other, other = tally.num_other.get(place, 0), not capture.branches[place]
        note = f"{place} is taken as {_way(capture, place)}"
        if other:
            note += ", since the model raises an error where it is true"
        yield f"{note}; {equal}, of them {num_other or 'none'} with it {str(other).lower()}"
    if capture.filters:
        yield f"row filters ({_lines(capture.filters)}) are computed on every row; {equal}"
    if capture.recurrences:
        yield f"packed lists ({_lines(capture.recurrences)}) are run on padded rows; {equal}"
    for reason, times in tally.refused.items():
        yield f"the eager model itself fails on {times} of {tally.num_batches} batches ({reason})"


def _way(capture: Capture, place: Place) -> str:
    return f"always {str(capture.branches[place]).lower()}"


def _lines(places: Iterable[Place]) -> str:
    return ", ".join(f"{Path(place.file).name}:{place.line}" for place in _sorted(places))


def _sorted(places: Iterable[Place]) -> list[Place]:
    return sorted(places, key=lambda place: (place.file, place.line))
