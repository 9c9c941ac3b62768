"""Apply a pass to every form of a model: a bundle may hold one graph for rows, one for requests."""

from __future__ import annotations

from dataclasses import replace

from rankopt.bundle import ModelBundle
from rankopt.errors import SelectorError
from rankopt.passes.base import Pass, PassContext

REQUESTS = "with request_index: "
"""Begins the notes on the other form."""


def apply_to_forms(step: Pass, bundle: ModelBundle, context: PassContext) -> ModelBundle:
    """Apply a pass to a bundle, and to the form that it holds beside its own.

    Returns:
        The same object where the pass had nothing to do in either.
    """
    after = step.apply(bundle, context)
    other = after.requests
    if other is None or other is not bundle.requests:
        return after
    # Shared weights are stored once, so a layer is chosen for once.
    inner = replace(context, notes=[], plain=after)
    try:
        changed = step.apply(other, inner)
    except SelectorError as error:
        # A layer that the selector names may be split there.
        context.note(f"{REQUESTS}{error}")
        return after
    known = set(context.notes)
    for note in inner.notes:
        if note not in known:
            context.note(REQUESTS + note)
    return after if changed is other else replace(after, requests=changed)
