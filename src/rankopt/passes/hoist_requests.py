"""hoist_requests: what all candidates of a request share is computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rankopt.artifact.contract import contract_of
from rankopt.bundle import ModelBundle, OperationCount
from rankopt.capture.requests import (
    REQUEST_INDEX,
    export_requests,
    random_requests,
    request_level,
)
from rankopt.environment import Environment
from rankopt.errors import ExportError, Problem
from rankopt.kernels.build import load_kernels
from rankopt.models.card import ModelCard
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.hoisting.compute import RULES
from rankopt.passes.hoisting.count import operations_left
from rankopt.passes.hoisting.interpret import hoist_graph
from rankopt.passes.hoisting.values import HoistError

CHECKED_REQUESTS = ((1,), (5,), (3, 1, 4), (2, 0, 7), (33, 30))
"""Candidates of each request in the calls that both forms must agree on."""
CHECKED_FILLS = (0.0, 0.3, 1.0)
TOLERANCE = 1e-4
"""Largest difference of a score, over the larger of 1 and the scores' spread."""


class HoistRequests(Pass):
    """Give the artifact a second form, in which request-level inputs come once for each request.

    Inputs that the card marks `request_level` then have R rows, the others B rows, and
    `request_index` names each candidate's request. Whatever depends on request-level inputs alone
    is computed R times. Linear layers over both are split, W [u; a] = Wu u + Wa a; so are dot
    products of fields and the first product of cross layers. Of an attention layer the history's
    share is computed once; a candidate that is the last token of a causal sequence attends to keys
    and values that were computed once in every layer.

    Scores are those of the plain form up to rounding, which is checked here on made-up requests.
    Passes behind this one rewrite both forms, so put it before those that pick other arithmetic.

    Example:
        ```yaml
        - hoist_requests: {request_size: 500}
        ```
    """

    kind: ClassVar[str] = "hoist_requests"
    purpose: ClassVar[Purpose] = "requests"
    forbids: ClassVar[frozenset[str]] = frozenset(
        {
            "artifact",
            "hoisted_requests",
            "low_precision_dense",
            "fused_embeddings",
            "quantized_embeddings",
        }
    )
    provides: ClassVar[frozenset[str]] = frozenset({"hoisted_requests"})

    request_size: int = Field(default=500, ge=1)
    """Candidates of a request: what the pass is timed with, and what operations are counted for."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """List what in the card leaves nothing to hoist."""
        return [] if card is None else card_problems(card)

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Write the second form, and check it against the first."""
        if bundle.form == "requests":
            return bundle
        refusal = self._refusal(bundle)
        if refusal is not None:
            context.note(refusal)
            return bundle
        load_kernels()
        card = bundle.card
        try:
            graph, notes = hoist_graph(
                lambda: bundle.program.module(check_guards=False), contract_of(card), RULES
            )
            program = export_requests(graph, card)
        except (HoistError, ExportError) as stop:
            context.note(f"not hoisted: {stop}")
            return bundle
        for note in notes:
            context.note(note)
        hoisted = replace(bundle, program=program, form="requests", requests=None)
        difference = largest_difference(bundle, hoisted)
        if not difference <= TOLERANCE:
            context.note(
                f"not hoisted: scores would differ by {difference:.3g}, more than rounding does; "
                "rows of this model depend on each other"
            )
            return bundle
        left, before = operations_left(bundle, hoisted, self.request_size)
        count = OperationCount(self.request_size, left, before)
        context.note(
            f"{left:,} of {before:,} multiply-adds are left for a request of {self.request_size} "
            f"candidates; scores differ by at most {difference:.2g}"
        )
        provided = bundle.provided | self.provides
        return replace(
            bundle,
            requests=replace(hoisted, provided=provided, operations=count),
            provided=provided,
        )

    def _refusal(self, bundle: ModelBundle) -> str | None:
        """Say what rules hoisting out; None where nothing does."""
        card = bundle.card
        problems = [problem.what for problem in card_problems(card)]
        if problems:
            return f"not hoisted: {problems[0]}"
        if bundle.parts:
            return "not hoisted: a part stays eager, and what it does with rows is not known"
        if REQUEST_INDEX in card.tensor_names:
            return (
                f"not hoisted: an input is called {REQUEST_INDEX}, which names the candidates' map"
            )
        if card.min_batch > 1:
            return f"not hoisted: the module scores no fewer than {card.min_batch} rows at once"
        return None


def card_problems(card: ModelCard) -> list[Problem]:
    """List what in a card leaves nothing to hoist."""
    marked = request_level(card)
    if marked and len(marked) < len(card.inputs):
        return []
    what = "needs inputs that are request_level and inputs that are not"
    hint = "Mark what all candidates of a request share, such as the user's history."
    return [Problem("", what, ", ".join(marked) or "none is request_level", hint)]


def largest_difference(plain: ModelBundle, hoisted: ModelBundle) -> float:
    """Return how far scores of the two forms lie apart, over the larger of 1 and their spread.

    The candidates of several requests come one request after the other.
    """
    contract = contract_of(plain.card)
    # Unlifted once: that takes longer than scoring.
    graphs = [
        (each.input_names, each.program.module(check_guards=False)) for each in (plain, hoisted)
    ]
    largest = 0.0
    for number, sizes in enumerate(CHECKED_REQUESTS):
        for fill in CHECKED_FILLS:
            generator = torch.Generator().manual_seed(number)
            rows, requests = random_requests(contract, sizes, generator, fill=fill)
            with torch.no_grad():
                expected, scores = (
                    graph(*[given[name] for name in names])
                    for given, (names, graph) in zip((rows, requests), graphs, strict=True)
                )
            for known, score in zip(expected, scores, strict=True):
                largest = max(largest, _apart(known, score))
    return largest


def _apart(known: Tensor, score: Tensor) -> float:
    """Return the largest difference of two scores, over the larger of 1 and their spread."""
    if bool((known.isnan() != score.isnan()).any()):
        return float("inf")
    apart = (score.double() - known.double()).abs()
    apart = apart.masked_fill((score == known) | score.isnan(), 0.0)
    spread = float(known.nan_to_num().double().std()) if len(known) > 1 else 0.0
    return float(apart.max()) / max(1.0, spread)
