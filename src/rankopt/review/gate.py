"""What a gate is: configuration as it stands in YAML, and the findings it draws from a report.

A gate never passes on what was not measured, and decides by an interval, not by a point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rankopt.errors import Problem
from rankopt.review.schema import Report, Verdict
from rankopt.units import parse_fraction

_SEVERITY: Mapping[Verdict, int] = {"pass": 0, "inconclusive": 1, "fail": 2}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Join verdicts: fail before inconclusive before pass; nothing at all is inconclusive."""
    return max(verdicts, key=_SEVERITY.__getitem__, default="inconclusive")


def at_least(low: float | None, high: float | None, limit: float) -> Verdict:
    """Judge that a value is at least `limit` from its interval; no interval is inconclusive."""
    if low is None or high is None:
        return "inconclusive"
    if low >= limit:
        return "pass"
    return "fail" if high < limit else "inconclusive"


def at_most(low: float | None, high: float | None, limit: float) -> Verdict:
    """Judge that a value is at most `limit` from its interval; no interval is inconclusive."""
    if low is None or high is None:
        return "inconclusive"
    if high <= limit:
        return "pass"
    return "fail" if low > limit else "inconclusive"


def relation(verdict: Verdict, *, met: str, missed: str) -> str:
    """Pick the words that join an interval to its limit."""
    if verdict == "pass":
        return met
    return missed if verdict == "fail" else "and the interval straddles the limit of"


@dataclass(frozen=True)
class Finding:
    """One answer of one gate.

    Attributes:
        gate: where the limit stands in the recipe, without the leading `gates.`.
        verdict: pass, fail or inconclusive.
        reason: one sentence with the value, its interval, the limit and the sample count.
        row: the entry of the report that carries this verdict too: the field and its key or index.
    """

    gate: str
    verdict: Verdict
    reason: str
    row: tuple[str, str | int] | None = None


@dataclass(frozen=True)
class Scope:
    """What an A/B is going to measure, for checks before any work.

    Attributes:
        where: the file the gates stand in.
        batch_sizes: those of the plan.
        baseline_arms: labels of the further arms of the plan.
        price_given: whether the user gave an hourly price.
        outputs: names of the model's outputs; empty where the card is not known yet.
    """

    where: str = "recipe"
    batch_sizes: tuple[int, ...] = ()
    baseline_arms: tuple[str, ...] = field(default=())
    price_given: bool = False
    outputs: tuple[str, ...] = ()

    def batch_size_problems(self, path: str, batch_size: int) -> list[Problem]:
        """Refuse a batch size that the plan does not measure."""
        if batch_size in self.batch_sizes:
            return []
        measured = ", ".join(str(size) for size in self.batch_sizes) or "none"
        return [
            Problem(
                f"{self.where}: {path}.batch_size",
                f"must be a batch size that the plan measures ({measured})",
                batch_size,
                "Add it to the plan's batch_sizes, or drop the gate.",
            )
        ]


class Gate(BaseModel, ABC):
    """One entry of a recipe's `gates:`; unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    many: ClassVar[bool] = False
    """True when the recipe holds a list of them."""

    def check(self, path: str, scope: Scope) -> list[Problem]:
        """List what makes this gate impossible to decide, before anything is run."""
        return []

    @abstractmethod
    def judge(self, path: str, draft: Report) -> list[Finding]:
        """Draw this gate's findings from measured values.

        Args:
            path: where the gate stands, such as `latency[0]`.
            draft: a report whose verdict is not filled yet.
        """


def _fraction(value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        return parse_fraction(value)
    except ValueError:
        raise ValueError(f"must be a share such as 0.1% or 0.001; got {value!r}") from None


Margin = Annotated[float, BeforeValidator(_fraction), Field(gt=0, lt=1)]
"""A share, `0.1%` or `0.001`; above 0, so that equal arms can pass."""
Ratio = Annotated[float, Field(strict=True, gt=0)]
Count = Annotated[int, Field(strict=True, gt=0)]
