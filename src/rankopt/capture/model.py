"""From a user's module to a graph that the passes can rewrite, by the first way that works.

As it is; else with filters, branches and packed lists traced for every row; else with the refused
submodules left eager; else not at all, and the error names the line. Each way but the first is
checked against the module on made-up rows before anything is built on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.export import ExportedProgram

from rankopt.capture.agreement import verify_capture
from rankopt.capture.branches import depends_on_data, trace_capturing
from rankopt.capture.diagnose import explain, quiet_torch
from rankopt.capture.export import trace
from rankopt.capture.parts import EagerPart
from rankopt.capture.split import export_split
from rankopt.errors import ExportError
from rankopt.kernels.build import load_kernels
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule


@dataclass(frozen=True)
class CapturedModel:
    """A traced module.

    Attributes:
        program: the graph.
        parts: submodules that stay eager and that the graph calls, by id.
        notes: what had to be assumed or left out, one sentence each.
    """

    program: ExportedProgram
    parts: Mapping[str, EagerPart] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def capture_model(card: ModelCard, model: nn.Module) -> CapturedModel:
    """Trace a module.

    Args:
        card: describes the module's inputs and outputs.
        model: with its weights.

    Raises:
        ExportError: nothing worked; names the module, the line and what usually helps.
    """
    serving = ServingModule(card, model.eval())
    refusals: list[Exception] = []
    plain = _as_it_is(serving, card, refusals)
    if plain is not None and not depends_on_data(plain.program):
        return plain
    # A graph whose sizes depend on the data runs, but no pass can batch or fuse around them.
    found = _trace_every_row(serving, card, refusals) or plain
    if found is None:
        found = _leave_parts_eager(serving, card, refusals[0])
    if found is None:
        said = [str(explain(refusals[0], serving, card))]
        said += [str(error) for error in refusals[1:] if isinstance(error, ExportError)]
        raise ExportError("\n".join(said)) from refusals[0]
    return found


def _as_it_is(
    serving: ServingModule, card: ModelCard, refusals: list[Exception]
) -> CapturedModel | None:
    try:
        with quiet_torch():  # which would print the graph up to the line it refuses
            return CapturedModel(trace(serving, card))
    except Exception as error:  # torch.export raises many unrelated types for user code
        refusals.append(error)
        return None


def _trace_every_row(
    serving: ServingModule, card: ModelCard, refusals: list[Exception]
) -> CapturedModel | None:
    load_kernels()  # recurrences become one of its operators
    try:
        program, assumed = trace_capturing(serving, lambda: trace(serving, card))
        if not assumed:
            return None
        notes = verify_capture(program, serving, card, assumed)
    except Exception as error:
        refusals.append(error)
        return None
    return CapturedModel(program, notes=notes)


def _leave_parts_eager(
    serving: ServingModule, card: ModelCard, refusal: Exception
) -> CapturedModel | None:
    split = export_split(serving, card, lambda module: trace(module, card), refusal)
    return None if split is None else CapturedModel(split.program, split.parts, split.notes)
