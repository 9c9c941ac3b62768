"""Report on a card's rows and write what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.data.report.run import report_on
from rankopt.data.report.schema import DataReport
from rankopt.data.report.write import write_data_report
from rankopt.jobs.inputs import Progress, quiet
from rankopt.models.card import ModelCard, load_card
from rankopt.output import staged_output

if TYPE_CHECKING:
    from rankopt.jobs.inputs import Data


def data_report(
    card: ModelCard | str | Path,
    out: str | Path,
    *,
    data: Data | None = None,
    reference: str | None = None,
    overwrite: bool = False,
    reproduce: str | None = None,
    progress: Progress = quiet,
) -> DataReport:
    """Report on a card's rows: nulls, ids, drift, labels, requests, and the card's limits.

    Args:
        card: what the columns mean.
        out: where to write data.json, data.md and data.html.
        data: rows in place of the card's: a folder of splits, or one source.
        reference: what the rows are compared with: a split, or a path; None: the train split.
        overwrite: replace a result that `out` holds.
        reproduce: the command to write into the report.
        progress: told one line per step.

    Raises:
        InputError, UsageError: an input is wrong.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    loaded = card if isinstance(card, ModelCard) else load_card(card)
    with staged_output(Path(out), overwrite=overwrite) as stage:
        report = report_on(loaded, data, reference, reproduce=reproduce, progress=progress)
        progress("writing the report")
        write_data_report(report, stage)
    return report
