"""The Python API: `optimize` a model, `compare` two arms, or `run` both and review the result.

Each call is also a verb of the command line, and writes the same files.
"""

from __future__ import annotations

from rankopt.jobs.compare import compare
from rankopt.jobs.optimize import optimize
from rankopt.jobs.run import run

__all__ = ["compare", "optimize", "run"]
