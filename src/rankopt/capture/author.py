"""Tell the code of a model's author from the machinery around it: torch, rankopt, Python itself."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_RANKOPT = f"{Path(__file__).parent.parent}{os.sep}"
_REFERENCE = f"{Path(__file__).parent.parent / 'models'}{os.sep}"
_SERVING = f"{_REFERENCE}serving.py"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}{os.sep}"


def is_authors(file: str) -> bool:
    """Tell whether a frame's file is the author's; the reference architectures count as such."""
    if file.startswith((_TORCH, "<")):
        return False
    if file.startswith(_RANKOPT):
        return file.startswith(_REFERENCE) and file != _SERVING
    return not file.startswith(_STDLIB) or "site-packages" in file


def author_line(error: BaseException) -> str | None:
    """Return the innermost line of the author's code that an error passed, and its text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_authors(frame.filename):
            return f"{frame.filename}:{frame.lineno}" + (f": `{frame.line}`" if frame.line else "")
    return None


def raised_by_author(error: BaseException) -> bool:
    """Tell whether the author's own code raised an error, and not torch on its behalf."""
    trail = error.__traceback__
    while trail is not None and trail.tb_next is not None:
        trail = trail.tb_next
    return trail is not None and is_authors(trail.tb_frame.f_code.co_filename)
