"""Check a card against the module it names, before anything is exported or compiled.

A card is written by hand about code that somebody else wrote. What it gets wrong shows in eager
PyTorch on a few rows, in milliseconds: a column at another column's place reads past the end of a
table, a task is not among what the module returns, a logit is called a probability. Everything
found is listed at once, each with the card's field.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from rankopt.capture.author import author_line
from rankopt.capture.call import (
    NUM_ROWS,
    ModuleCall,
    explain_failure,
    is_out_of_range,
    largest_fit,
    table_named,
)
from rankopt.capture.columns import Column, columns_of, made_up_rows
from rankopt.capture.scores import ends_with_sigmoid, tasks_of
from rankopt.errors import CardError, Problem
from rankopt.models.card import ModelCard, Output, PackedInput
from rankopt.quality.rows import PROBABILITY_SLACK

OUTPUT_ROWS = 64
"""Rows on which an activation is judged when no real ones are given."""
_CEILINGS = (4, 2, 1)
"""Small ids to call a module with first; a table may hold fewer rows than any guess."""
_MOST_NAMED = 8


@dataclass
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_module(
    card: ModelCard, module: nn.Module, features: Mapping[str, Tensor] | None = None
) -> tuple[str, ...]:
    """Call a module on a few rows and compare what happens with what its card says.

    Args:
        card: says what goes in and what comes out.
        module: in eval mode. It is called some times per column, on a few rows, and never copied.
        features: flat features of real rows, on which activations are judged; made-up ones when
            None.

    Returns:
        Notes: what is odd and may still be right.

    Raises:
        CardError: everything in which card and module disagree, each with the card's field.
    """
    call = ModuleCall(card, module)
    rows, result = _first_call(call)
    found = _Findings()
    _check_columns(call, rows, result, found)
    _check_layout(call, found)
    if features is not None or not found.problems:
        rows, result = _call_for_outputs(call, features, found) or (rows, result)
    _check_outputs(call, rows, result, found)
    if not found.problems:
        _try_odd_rows(call, found)
    if found.problems:
        raise CardError(problems=found.problems)
    return tuple(found.notes)


def _first_call(call: ModuleCall) -> tuple[Mapping[str, Tensor], Any]:
    """Call the module with small ids, which fit any table."""
    for ceiling in _CEILINGS:
        rows = made_up_rows(call.card, max(NUM_ROWS, call.card.min_batch), ceiling)
        try:
            return rows, call.raw(rows)
        except Exception as error:  # the module's own code may raise anything
            failed = error
    raise CardError(problems=explain_failure(call, rows, failed)) from failed


def _check_columns(
    call: ModuleCall, rows: Mapping[str, Tensor], result: Any, found: _Findings
) -> None:
    """Set each column to its largest value and to others: it must fit, and should matter."""
    before = list(_tensors(result))
    unread = []
    for column in columns_of(call.card):
        matters = False
        for value in column.probes:
            try:
                after = call.raw(column.fill(rows, value))
            except Exception as error:
                # With small ids all was well, so it is this column's value that does not fit.
                first = value == column.probes[0]
                if first and (column.num_ids is not None or is_out_of_range(error)):
                    found.problems.append(_misfit(call, rows, column, value, error))
                    matters = True
                    break
                continue
            matters = matters or _differ(before, list(_tensors(after)))
            # Only the first value may be refused; the others just look for an effect.
            if matters:
                break
        if not matters:
            unread.append(column)
    if unread and len(unread) == len(columns_of(call.card)):
        found.notes.append("no column changes any score; is this module trained?")
    elif unread:
        found.notes.append(_unread_note(unread))


def _misfit(
    call: ModuleCall,
    rows: Mapping[str, Tensor],
    column: Column,
    value: float,
    error: Exception,
) -> Problem:
    table = table_named(error, call.module)
    table = f"the table that the module reads them from ({table})" if table else "the module"
    where = f"{call.card.where}: {column.where}"
    order = "Columns may be in the wrong order"
    if column.num_ids is None and column.max_length is None:
        what = f"{column.name!r}: its real numbers are used as ids of {table}"
        return Problem(where, what, hint=f"{order}, or it needs num_ids.")
    largest = largest_fit(call, rows, column, int(value))
    what = f"{column.name!r}: ids up to {int(value)} do not fit {table}"
    if column.max_length is not None:
        what = f"{column.name!r}: lengths up to {int(value)} are used as ids of {table}"
    hint = f"The largest that fits is {largest}. {order}, or num_ids is not this table's."
    line = None if is_out_of_range(error) else author_line(error)
    if line:
        hint += f" The module raised {type(error).__name__} at {line}."
    return Problem(where, what, hint=hint)


def _unread_note(unread: Sequence[Column]) -> str:
    named = ", ".join(f"{column.where} ({column.name})" for column in unread[:_MOST_NAMED])
    if len(unread) > _MOST_NAMED:
        named += f" and {len(unread) - _MOST_NAMED} more"
    return f"changing it changes no score, so the module may not read it: {named}"


def _check_layout(call: ModuleCall, found: _Findings) -> None:
    """Compare a packed matrix with the layout that the module itself declares.

    DeepCTR-Torch's models hold `feature_index`: {name: (first place, one past the last)}. Two
    tables of one size can be mixed up without any id being out of range; their names cannot.
    """
    declared = getattr(call.module, "feature_index", None)
    packed = [(i, x) for i, x in enumerate(call.card.inputs) if isinstance(x, PackedInput)]
    if not is_layout(declared) or len(packed) != 1:
        return
    ((index, item),) = packed
    told = {problem.where for problem in found.problems}
    width = max((int(stop) for _, stop in declared.values()), default=item.num_places)
    if width > item.num_places:
        # Slicing past the end of a matrix gives an empty tensor, and no error.
        found.problems.append(
            Problem(
                f"{call.card.where}: inputs[{index}].columns",
                f"must take {width} places, as many as the module's feature_index has",
                item.num_places,
            )
        )
    for position, (part, start) in enumerate(zip(item.columns, item.starts(), strict=True)):
        where = f"{call.card.where}: inputs[{index}].columns[{position}]"
        places = declared.get(str(part.name))
        if places is None or tuple(places) == (start, start + part.width) or where in told:
            continue
        found.problems.append(
            Problem(
                where,
                f"{part.name!r} must stand at {_span(*places)}, where the module's feature_index "
                "has it",
                _span(start, start + part.width),
            )
        )


def is_layout(declared: object) -> TypeGuard[Mapping[str, tuple[int, int]]]:
    """Tell whether an attribute is a layout: {name: (first place, one past the last)}."""
    return isinstance(declared, Mapping) and all(
        isinstance(places, tuple | list)
        and len(places) == 2
        and all(isinstance(place, int) for place in places)
        for places in declared.values()
    )


def _span(start: int, stop: int) -> str:
    return f"place {start}" if stop == start + 1 else f"places {start} to {stop - 1}"


def _call_for_outputs(
    call: ModuleCall, features: Mapping[str, Tensor] | None, found: _Findings
) -> tuple[Mapping[str, Tensor], Any] | None:
    rows = features if features is not None else made_up_rows(call.card, OUTPUT_ROWS)
    with contextlib.suppress(Exception):  # such as .numpy() on what needs a gradient
        return rows, call.raw_with_history(rows)
    try:
        return rows, call.raw(rows)
    except Exception as error:
        # Ids that do not fit are told already, and better.
        if not found.problems:
            found.problems += explain_failure(call, rows, error)
        return None


def _check_outputs(
    call: ModuleCall, rows: Mapping[str, Tensor], result: Any, found: _Findings
) -> None:
    for index, output in enumerate(call.card.outputs):
        try:
            score = call.pick(result, index, rows)
        except CardError as error:
            found.problems += error.problems
            continue
        where = f"{call.card.where}: outputs[{index}]"
        found.problems += _form(where, score, _num_rows(call.card, rows))
        if score.is_floating_point():
            _check_activation(where, output, score, found)
    _note_unused(call, result, _num_rows(call.card, rows), found)


def _form(where: str, score: Tensor, num_rows: int) -> list[Problem]:
    problems = []
    if not score.is_floating_point():
        got = str(score.dtype).removeprefix("torch.")
        problems.append(Problem(where, "must be floating-point scores", got))
    if score.shape[0] != num_rows:
        what = f"must be one score per row ({num_rows} rows)"
        problems.append(Problem(where, what, list(score.shape)))
    return problems


def _check_activation(where: str, output: Output, score: Tensor, found: _Findings) -> None:
    values = score.detach()
    short = where.rpartition(": ")[2]
    if bool(values.isnan().any()):
        found.notes.append(f"{short} ({output.name}): {int(values.isnan().sum())} scores are NaN")
        values = values[~values.isnan()]
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    inside = low >= -PROBABILITY_SLACK and high <= 1 + PROBABILITY_SLACK
    if output.activation == "probability" and not inside:
        what = "'probability' needs scores in [0, 1]"
        hint = "This looks like a logit: set activation: logit."
        got = f"{low:.4g} to {high:.4g}"
        found.problems.append(Problem(f"{where}.activation", what, got, hint))
    elif output.activation == "logit" and inside and low < high:
        by_sigmoid = ends_with_sigmoid(score)
        if by_sigmoid is not False:
            why = "come out of a sigmoid" if by_sigmoid else "lie in [0, 1]"
            found.notes.append(
                f"{short}.activation: all {len(values)} scores of {output.name!r} {why}; if they "
                "are probabilities, set activation: probability"
            )


def _note_unused(call: ModuleCall, result: Any, num_rows: int, found: _Findings) -> None:
    """Tell of tasks that the module returns and the card does not name."""
    tasks = tasks_of(result, num_rows)
    named: set[int | str | None] = {output.index for output in call.card.outputs}
    # -1 names the last column as well as its number does.
    named |= {len(tasks) + index for index in named if isinstance(index, int) and index < 0}
    unused = [task for task in tasks if task not in named]
    if len(tasks) > 1 and unused:
        indices = ", ".join(map(repr, unused))
        found.notes.append(
            f"outputs: the module returns {len(tasks)} scores per row and the card names "
            f"{len(call.card.outputs)}; not used: index {indices}"
        )


def _try_odd_rows(call: ModuleCall, found: _Findings) -> None:
    """Try one row alone and a row without any id in its lists; libraries' own code may refuse."""
    if call.card.min_batch == 1:
        refusal = refuses_rows(call, 1)
        if refusal is not None:
            found.problems.append(
                Problem(
                    f"{call.card.where}: min_batch",
                    f"must be 2: the model's own code cannot score one row{_because(refusal)}",
                    1,
                    "Set min_batch: 2 in the card.",
                )
            )
    refusal = refuses_empty(call)
    if refusal is not None:
        found.notes.append(f"the model's own code cannot take an empty list{_because(refusal)}")


def refuses_rows(call: ModuleCall, num_rows: int) -> Exception | None:
    """Return what a module raises on so few rows; None when it scores them."""
    rows = made_up_rows(call.card, num_rows)
    try:
        result = call.raw(rows)
        for index in range(len(call.card.outputs)):
            call.pick(result, index, rows)
    except Exception as error:
        return error
    return None


def refuses_empty(call: ModuleCall) -> Exception | None:
    """Return what a module raises on empty lists, beside others or alone; None when it scores."""
    num_rows = max(NUM_ROWS, call.card.min_batch)
    for num_empty in (1, num_rows):
        try:
            call.raw(made_up_rows(call.card, num_rows, num_empty=num_empty))
        except Exception as error:
            return error
    return None


def _because(error: Exception) -> str:
    line = author_line(error)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f": {first}" + (f" ({line})" if line else "")


def _num_rows(card: ModelCard, features: Mapping[str, Tensor]) -> int:
    item = card.inputs[0]
    if item.kind == "kjt":
        return len(features[f"{item.name}.lengths"]) // len(item.features)
    name = f"{item.name}.lengths" if item.kind == "ragged_ids" else item.name
    return len(features[name])


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, Sequence) and not isinstance(result, str):
        for value in result:
            yield from _tensors(value)
    elif is_dataclass(result):
        for part in fields(result):
            yield from _tensors(getattr(result, part.name))


def _differ(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return len(before) != len(after) or any(
        old.shape != new.shape or not torch.equal(old.nan_to_num(), new.nan_to_num())
        for old, new in zip(before, after, strict=True)
    )
