"""What comes out of a module, found by calling it with the inputs drafted so far."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from rankopt.capture.call import ModuleCall
from rankopt.capture.columns import made_up_rows
from rankopt.capture.preflight import OUTPUT_ROWS, refuses_empty, refuses_rows
from rankopt.capture.scores import ends_with_sigmoid, tasks_of
from rankopt.jobs.card_draft import Entry, draft_card


def drafted_outputs(fields: Entry, module: nn.Module) -> list[Entry]:
    """Run the module and describe each score per row that it returns."""
    result = _result(ModuleCall(draft_card(fields), module))
    tasks: list[Any] = list(tasks_of(result, OUTPUT_ROWS)) or [None]
    if tasks == [None] and not isinstance(result, Tensor):
        what = f"which part of the {type(result).__name__} it returns is a score"
        return [unknown_output().doubt(what)]
    outputs = [Entry(name=name) for name in _task_names(module, tasks)]
    for output, index in zip(outputs, tasks, strict=True):
        if index is not None:
            output["index"] = index
        output["activation"] = _activation(output, _score(result, index))
    if len(tasks) > 1 and not isinstance(result, Tensor):
        outputs[0].doubt("whether all of these are scores to judge")
    return outputs


def _result(call: ModuleCall) -> Any:
    """Run the module on varied rows, or on the plain ones that it is known to take."""
    rows, plain = made_up_rows(call.card, OUTPUT_ROWS), made_up_rows(call.card, OUTPUT_ROWS, 1)
    # A logarithm may complain about negative numbers, and .numpy() about what needs a gradient.
    for run in (call.raw_with_history, call.raw):
        for features in (rows, plain):
            with contextlib.suppress(Exception):
                return run(features)
    return call.raw(plain)


def unknown_output() -> Entry:
    """Describe the score of a module that could not be called."""
    return Entry(name="score", activation="logit").doubt("activation: logit or probability")


def _score(result: Any, index: Any) -> Tensor:
    if index is not None:
        result = result[:, index] if isinstance(result, Tensor) else result[index]
    score: Tensor = result
    return score


def _task_names(module: nn.Module, tasks: list[Any]) -> list[str]:
    if len(tasks) == 1:
        return [tasks[0] if isinstance(tasks[0], str) and tasks[0].isidentifier() else "score"]
    named = getattr(module, "task_names", ())
    if isinstance(named, list | tuple) and len(named) == len(tasks):
        return [str(name) for name in named]
    return [
        task if isinstance(task, str) and task.isidentifier() else f"task_{task}" for task in tasks
    ]


def _activation(output: Entry, score: Tensor) -> str:
    by_sigmoid = ends_with_sigmoid(score)
    if by_sigmoid is not None:
        return "probability" if by_sigmoid else "logit"
    values = score.detach()
    inside = bool(((values >= 0) & (values <= 1)).all())
    output.doubt("activation; it goes by the range of the scores")
    return "probability" if inside else "logit"


def fill_quirks(fields: Entry, module: nn.Module) -> None:
    """Note what the module's own code cannot take: an empty list, a single row."""
    lengths = [
        column
        for item in fields["inputs"]
        if item["kind"] == "packed"
        for column in item["columns"]
        if "length_of" in column
    ]
    if lengths and not _takes_empty_lists(fields, module):
        for column in lengths:
            column["at_least"] = 1
        if not _takes_empty_lists(fields, module):
            for column in lengths:
                del column["at_least"]
    card = draft_card(fields)
    if refuses_rows(ModuleCall(card, module), 1) is not None:
        outputs = fields.pop("outputs")
        fields["min_batch"] = 2
        fields["outputs"] = outputs


def _takes_empty_lists(fields: Entry, module: nn.Module) -> bool:
    return refuses_empty(ModuleCall(draft_card(fields), module)) is None
