"""What a card allows its data to be: `data.limits`. Light to import, since every card reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rankopt.units import parse_fraction


def _share(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_fraction(value)
    except ValueError:
        raise ValueError(f"must be a share such as 1% or 0.01; got {value!r}") from None


Share = Annotated[float, BeforeValidator(_share), Field(ge=0, le=1)]
Index = Annotated[float, Field(gt=0)]
Range = tuple[Share, Share]


class DataLimits(BaseModel):
    """Limits that stop a run: of every column, or by the column's name.

    Example:
        ```yaml
        data:
          limits:
            max_null_rate: {I1: 50%, C1: 1%}
            max_unseen_ids: 5%
            max_psi: 0.2
            label_rate: [1%, 10%]
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_null_rate: Share | dict[str, Share] | None = None
    """Rows in which the column is missing, over rows."""
    max_out_of_range: Share | dict[str, Share] | None = None
    """Ids outside of [0, num_ids), over ids; before `out_of_range` maps them."""
    max_unseen_ids: Share | dict[str, Share] | None = None
    """Ids that the reference never holds, over ids: each occurrence counts."""
    max_psi: Index | dict[str, Index] | None = None
    """Population stability index against the reference."""
    label_rate: Range | dict[str, Range] | None = None
    """Lowest and highest share of ones, of every label or by its column."""

    @model_validator(mode="after")
    def _in_order(self) -> DataLimits:
        for name, (low, high) in self.label_ranges([""]).items():
            if low > high:
                place = f"label_rate.{name}" if name else "label_rate"
                raise ValueError(f"{place} must be [low, high]; got [{low}, {high}]")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Name the columns that have a limit of their own."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return tuple(dict.fromkeys(c for value in values if isinstance(value, dict) for c in value))

    def of(self, limit: str, column: str) -> float | None:
        """Return a column's limit; None where it has none."""
        value = getattr(self, limit)
        return value.get(column) if isinstance(value, Mapping) else value

    def label_ranges(self, labels: Any) -> dict[str, tuple[float, float]]:
        """Return lowest and highest rate by label."""
        if self.label_rate is None:
            return {}
        if isinstance(self.label_rate, dict):
            return dict(self.label_rate)
        return dict.fromkeys(labels, self.label_rate)
