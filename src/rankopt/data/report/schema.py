"""data.json: what each split of a card's rows holds, as frozen values.

Rates are shares of 1; None means that it was not measured or has no meaning for the column.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rankopt.data.report.limits import DataLimits

Role = Literal["dense", "id", "ids", "weights"]
"""A real number, one id, a list of ids, or the weights of such a list."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bucket(_Frozen):
    """Values that count as one in the population stability index.

    `num_reference` and `num_values` are counts. Of ids, the reference's are those of the half of
    its rows by which the buckets were not made.
    """

    label: str
    num_reference: int
    num_values: int


class Drift(_Frozen):
    """How far a column is from the reference.

    Attributes:
        psi: population stability index.
        noise: what it is expected to be with these counts where nothing differs, rows counted as
            independent.
    """

    psi: float
    noise: float
    buckets: tuple[Bucket, ...]


class ColumnReport(_Frozen):
    """One column of one split.

    Attributes:
        num_null: rows in which it is missing; of a list, rows without a list or with a missing id.
        num_invalid: values that are no number, or not finite.
        num_values: numbers or ids that were read, out of range ones included.
        num_out_of_range: ids outside of [0, num_ids).
        cardinality: different ids, as the card maps them; estimated where `exact` is False.
        coverage: cardinality over num_ids: the share of the table's rows that are read.
        unseen_rate: ids that the reference never holds, over ids.
        unseen_ids_rate: different ids that the reference never holds, over different ids.
        median: and other quantiles are within 1 % of the value.
        mean_length: of lists, as they are in the data.
        empty_rate: lists without an id, over lists.
        cut_rate: lists longer than max_length, over lists.
    """

    column: str
    role: Role
    num_null: int
    null_rate: float
    num_invalid: int
    num_values: int
    num_out_of_range: int | None = None
    out_of_range_rate: float | None = None
    num_ids: int | None = None
    cardinality: int | None = None
    coverage: float | None = None
    exact: bool | None = None
    unseen_rate: float | None = None
    unseen_ids_rate: float | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p1: float | None = None
    median: float | None = None
    p99: float | None = None
    max: float | None = None
    mean_length: float | None = None
    empty_rate: float | None = None
    cut_rate: float | None = None
    drift: Drift | None = None


class LabelRate(_Frozen):
    """Share of ones of a label, with its 95 % interval (Wilson's), rows counted as independent.

    Attributes:
        block: a day, or rows by number; None for the whole split.
        num_rows: rows that have the label.
    """

    label: str
    block: str | None
    num_rows: int
    num_positive: int
    rate: float | None
    ci_low: float | None
    ci_high: float | None


class RequestReport(_Frozen):
    """How many rows the requests of a split have.

    Attributes:
        exact: False where requests were sampled by a hash of their key, and counts of them are
            estimates.
    """

    key: str
    num_null: int
    num_requests: int
    exact: bool
    mean: float | None
    p50: int | None
    p90: int | None
    p99: int | None
    max: int | None


class SplitReport(_Frozen):
    """One split of the rows."""

    name: str
    source: str
    num_rows: int
    columns: tuple[ColumnReport, ...]
    labels: tuple[LabelRate, ...]
    label_blocks: tuple[LabelRate, ...]
    requests: RequestReport | None

    def column(self, name: str) -> ColumnReport:
        """Return the first report of a column.

        Raises:
            KeyError: there is none.
        """
        for report in self.columns:
            if report.column == name:
                return report
        raise KeyError(name)


class Breach(_Frozen):
    """A limit of the card that a split does not keep.

    Attributes:
        limit: its place under data.limits.
        column: the column or label.
        got: what was found.
        allowed: what the card allows, as it reads.
    """

    split: str
    limit: str
    column: str
    what: str
    got: str
    allowed: str


class DataReport(_Frozen):
    """What the rows of a card hold."""

    made_at: str
    model: str
    verdict: Literal["pass", "fail", "inconclusive"] | None
    """None where the card sets no limit; inconclusive where one could not be judged."""
    reference: str | None
    splits: tuple[SplitReport, ...]
    limits: DataLimits | None
    breaches: tuple[Breach, ...]
    not_judged: tuple[str, ...]
    """Limits that nothing could be held against, each with the reason."""
    notes: tuple[str, ...]
    environment: dict[str, Any]
    reproduce: str

    def split(self, name: str) -> SplitReport:
        """Return the report of a split.

        Raises:
            KeyError: there is none.
        """
        for report in self.splits:
            if report.name == name:
                return report
        raise KeyError(name)
