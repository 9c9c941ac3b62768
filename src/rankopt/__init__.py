"""Turn a trained ranking model into a smaller, faster artifact, and say what that costs in quality.

The names below are the Python API. Each is imported when it is first asked for, so that
`import rankopt` and the command line's help load neither torch nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankopt._version import __version__
from rankopt.errors import RankoptError

if TYPE_CHECKING:
    from rankopt.api import compare, optimize
    from rankopt.models.card import load_card
    from rankopt.recipe import load_recipe
    from rankopt.review.report import review
    from rankopt.runtime import load_artifact

__all__ = [
    "RankoptError",
    "__version__",
    "compare",
    "load_artifact",
    "load_card",
    "load_recipe",
    "optimize",
    "review",
]

_LAZY = {
    "compare": "rankopt.api",
    "load_artifact": "rankopt.runtime",
    "load_card": "rankopt.models.card",
    "load_recipe": "rankopt.recipe",
    "optimize": "rankopt.api",
    "review": "rankopt.review",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LAZY[name])
    # `rankopt.review` is a package that can be called: importing any module in it binds the
    # package to this name, so the name has to be the package either way.
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
