"""What must be equal for a killed run to go on, and how what differs is named.

Compared by content, not by path, so that a run may go on in another place. The machine, the number
of threads and the versions of libraries are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankopt.errors import Problem


def differences(where: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """Name everything in which a run differs from the one that was begun."""
    before, after = dict(_leaves(then)), dict(_leaves(now))
    return [
        Problem(
            name,
            f"must be {_shown(before.get(name))}, as in the run that {where} holds",
            _shown(after.get(name)),
            "Give what the run began with, or begin anew with --overwrite and without --resume.",
        )
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)
