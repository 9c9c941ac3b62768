"""Put the content folders into the wheel; everything else stands in pyproject.toml.

The five folders lie at the top of the checkout, where people read and edit them, and hold no
`__init__.py`, so setuptools does not see them as packages. They are copied to `rankopt/_content`
when a wheel is built. An editable install copies nothing: `content.py` finds the checkout itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONTENT_FOLDERS = ("recipes", "models", "quantize", "export", "benchmarks")
ROOT = Path(__file__).resolve().parent


class BuildWithContent(build_py):  # type: ignore[misc]
    """`build_py`, then the content folders."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "rankopt" / "_content"
        shutil.rmtree(target, ignore_errors=True)
        for folder in CONTENT_FOLDERS:
            if (ROOT / folder).is_dir():
                shutil.copytree(
                    ROOT / folder,
                    target / folder,
                    ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "results"),
                )


setup(cmdclass={"build_py": BuildWithContent})
