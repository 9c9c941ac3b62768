"""Write a first model card by looking at a module, and say what looking could not tell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from torch import Tensor, nn

from rankopt.capture.preflight import check_module
from rankopt.errors import CardError
from rankopt.jobs.card_batch import Form, Leaf, is_jagged, read_batch, running_form
from rankopt.jobs.card_data import (
    DataLook,
    data_entry,
    longest_list,
    look_at_data,
    mark_request_level,
    match_columns,
    match_labels,
)
from rankopt.jobs.card_draft import Entry, all_doubts, written
from rankopt.jobs.card_guess import guessed_inputs, inputs_run, list_lengths, size_ids
from rankopt.jobs.card_look import keyed_inputs, kjt_input, packed_input, required_parameters
from rankopt.jobs.card_outputs import drafted_outputs, fill_quirks, unknown_output
from rankopt.jobs.inputs import Progress, quiet
from rankopt.models.build import build_model
from rankopt.models.card import ModelCard
from rankopt.output import staged_file
from rankopt.problems import problems_of_validation


@dataclass(frozen=True)
class FirstCard:
    """What `card init` wrote.

    Attributes:
        text: the card as YAML, with a comment wherever something could not be told.
        doubts: the same comments, each with its field.
        missing: fields without which the card cannot be read, and what disagrees with the module.
        notes: what the check of the finished card against the module found odd.
    """

    text: str
    doubts: tuple[str, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def init_card(
    factory: str,
    *,
    checkpoint: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    batch: str | Path | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = quiet,
) -> FirstCard:
    """Write a first card for a module.

    Args:
        factory: `package.module:function` or `file.py:function`, seen from the current folder.
        checkpoint: trained weights; with them, scores tell more.
        config: keyword arguments of the factory.
        data: a file of rows, or a folder of splits.
        batch: what `torch.save` made of one batch.
        out: the card's file; nothing is written when None.
        overwrite: replace a card that `out` holds.
        progress: told one line per step.

    Raises:
        CardError: the factory cannot be called.
        CheckpointError: the checkpoint does not fit.
        DataError, InputError: `data` or `batch` cannot be read, or the module does not run on it.
        OutputExistsError: `out` exists and `overwrite` is False.
    """
    folder = Path(out).expanduser().resolve().parent if out is not None else Path.cwd()
    if out is None:
        return _draft(factory, checkpoint, config or {}, data, batch, folder, None, progress)
    with staged_file(Path(out), overwrite=overwrite) as partial:
        name = Path(out).stem
        first = _draft(factory, checkpoint, config or {}, data, batch, folder, name, progress)
        partial.write_text(first.text, encoding="utf-8")
    return first


def _draft(
    factory: str,
    checkpoint: str | Path | None,
    config: Mapping[str, Any],
    data: str | Path | None,
    batch: str | Path | None,
    folder: Path,
    name: str | None,
    progress: Progress,
) -> FirstCard:
    look = look_at_data(Path(data)) if data is not None else None
    given = read_batch(Path(batch)) if batch is not None else None
    progress("building the module")
    stand_in = _stand_in(factory, config, name)
    module = build_model(stand_in, checkpoint, allow_random=True).module
    fields = Entry(
        name=name or type(module).__name__.lower(), factory=_from_folder(factory, folder)
    )
    if config:
        fields["config"] = dict(config)
    progress("looking at its inputs")
    form = running_form(module, given, Path(batch)) if batch is not None else None
    runs = _fill_inputs(fields, module, form, look)
    progress("looking at its scores")
    fields["outputs"] = drafted_outputs(fields, module) if runs else [unknown_output()]
    if runs:
        fill_quirks(fields, module)
    _fill_files(fields, checkpoint, look, folder)
    return _finished(fields, module, folder)


def _stand_in(factory: str, config: Mapping[str, Any], name: str | None) -> ModelCard:
    """Make a card that says no more than how to build the module."""
    raw = {
        "name": name or "card",
        "factory": factory,
        "config": dict(config),
        "inputs": [{"name": "x", "kind": "dense", "columns": ["x"]}],
        "outputs": [{"label": "label"}],
    }
    try:
        return ModelCard.model_validate(raw)
    except ValidationError as error:
        problems = problems_of_validation("card", error, ModelCard)
        raise CardError(problems=problems) from error


def _from_folder(factory: str, folder: Path) -> str:
    """Name a file as it is seen from the card's folder."""
    target, _, function = factory.rpartition(":")
    if not target.endswith(".py") or folder == Path.cwd():
        return factory
    return f"{os.path.relpath(Path(target).resolve(), folder)}:{function}"


def _fill_inputs(
    fields: Entry, module: nn.Module, form: Form | None, look: DataLook | None
) -> bool:
    """Find the inputs; False when nothing that was tried runs."""
    found = _declared(module, form) or _guessed(module, form)
    if found is None:
        fields["inputs"] = [
            Entry(name=name).doubt("its kind, columns and num_ids; give one batch with --batch")
            for name in required_parameters(module) or ["input"]
        ]
        return False
    call, inputs = found
    if call != "keywords":
        fields["call"] = call
    fields["inputs"] = inputs
    size_ids(module, fields)
    if look is not None:
        match_columns(fields, look)
        _lengths_of_data(fields, module, look)
    return True


def _declared(module: nn.Module, form: Form | None) -> tuple[str, list[Entry]] | None:
    """Take what the module's own attributes say, if it runs so."""
    packed = packed_input(module)
    if packed is not None and inputs_run(module, [packed], "keywords"):
        return "keywords", [packed]
    keyed = keyed_inputs(module)
    if keyed is not None:
        for leaf in form.leaves if form is not None else ():
            _refine(keyed, leaf)
        if inputs_run(module, keyed, "dict") or _try_lengths(module, keyed):
            return "dict", keyed
    return None


def _try_lengths(module: nn.Module, inputs: list[Entry]) -> bool:
    """Find the length that a module built for one length takes."""
    open_lists = [entry for entry in inputs if "max_length" in entry.doubts]
    for length in list_lengths(module) if open_lists else ():
        for entry in open_lists:
            entry["max_length"] = length
        if inputs_run(module, inputs, "dict"):
            return True
    return False


def _guessed(module: nn.Module, form: Form | None) -> tuple[str, list[Entry]] | None:
    jagged = kjt_input(module)
    if form is not None:
        leaves, call = form.leaves, form.call
    else:
        leaves, call = tuple(Leaf(name) for name in required_parameters(module)), "keywords"
    known = [] if jagged is None else [jagged]
    for leaf in leaves:
        if jagged is not None and is_jagged(leaf.value):
            _refine_jagged(jagged, leaf)
    inputs = guessed_inputs(module, leaves, call, known)
    return None if inputs is None else (call, inputs)


def _refine(inputs: list[Entry], leaf: Leaf) -> None:
    """Take from a batch what a feature's description leaves open: lengths, dtypes, padding."""
    entry = next((e for e in inputs if e.get("argument", e["name"]) == leaf.path), None)
    value = leaf.value
    if entry is None or not isinstance(value, Tensor):
        return
    if entry["kind"] == "ids" and value.dim() == 2:
        entry["keep_width"] = True
    if entry["kind"] == "ragged_ids" and value.dim() == 2:
        entry["max_length"] = value.shape[1]
        entry.doubts.clear()
        padding = value == entry.get("padding_id", 0)
        at_start, at_end = bool(padding[:, 0].any()), bool(padding[:, -1].any())
        if at_start and not at_end:
            entry["pad_side"] = "start"
        elif at_start == at_end:
            entry.doubt("pad_side, on which the padding stands; the batch does not show it")


def _refine_jagged(entry: Entry, leaf: Leaf) -> None:
    """Order features as a batch does, and take its longest lists."""
    keys = leaf.value.keys()
    by_key = {feature["key"]: feature for feature in entry["features"]}
    longest = leaf.value.lengths().view(len(keys), -1).max(1).values.tolist()
    entry["argument"] = leaf.path
    entry["features"] = [by_key[key] for key in keys if key in by_key]
    entry.doubts = [reason for reason in entry.doubts if not reason.startswith("max_length")]
    entry.doubt("max_length of each feature; the batch's longest is taken")
    for key, length in zip(keys, longest, strict=True):
        if key in by_key and length > 1:
            by_key[key]["max_length"] = int(length)


def _lengths_of_data(fields: Entry, module: nn.Module, look: DataLook) -> None:
    """Take the longest lists of the data where the module leaves the length open."""
    for item in fields["inputs"]:
        lists = item["features"] if item["kind"] == "kjt" else [item]
        for entry in lists:
            longest = longest_list(look, entry["column"]) if "column" in entry else None
            open_length = any(d.startswith("max_length") for d in (*item.doubts, *entry.doubts))
            if longest is None or not open_length:
                continue
            before = dict(entry)
            entry["max_length"] = longest
            if not inputs_run(module, fields["inputs"], fields.get("call", "keywords")):
                entry.clear()
                entry.update(before)


def _fill_files(
    fields: Entry, checkpoint: str | Path | None, look: DataLook | None, folder: Path
) -> None:
    if checkpoint is not None:
        fields["checkpoint"] = os.path.relpath(Path(checkpoint).resolve(), folder)
    if look is not None:
        fields["data"] = data_entry(look, folder)
        match_labels(fields, look)
        mark_request_level(fields, look)
        return
    fields.doubt("data: name the rows, or give --data")
    for output in fields["outputs"]:
        output["label"] = output["name"] if len(fields["outputs"]) > 1 else "label"
        output.doubt("the label's column")


def _finished(fields: Entry, module: nn.Module, folder: Path) -> FirstCard:
    text = written(fields)
    missing: list[str] = []
    notes: tuple[str, ...] = ()
    try:
        card = ModelCard.model_validate(yaml.safe_load(text))
        notes = check_module(card, module)
    except ValidationError as error:
        problems = problems_of_validation("card", error, ModelCard)
        # That a list has no valid item left says nothing beside what is wrong with its items.
        inner = any(problem.where.startswith("card: inputs[") for problem in problems)
        missing = [str(p) for p in problems if not (inner and p.where == "card: inputs")]
    except CardError as error:
        missing = [str(problem) for problem in error.problems]
    return FirstCard(text, tuple(all_doubts(fields)), tuple(missing), notes)
