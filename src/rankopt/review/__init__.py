"""The launch review: gates, cost and the report. Calling the package writes a report.

`rankopt.review(report, out)` is public API, and importing any module in here binds the package to
that name; so the package itself takes the call.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankopt.review.schema import Report


class _CallablePackage(ModuleType):
    def __call__(self, report: Report | str | Path, out: str | Path) -> Path:
        """Write report.json, report.md and report.html; see `rankopt.review.report.review`."""
        from rankopt.review.report import review

        return review(report, out)


sys.modules[__name__].__class__ = _CallablePackage
