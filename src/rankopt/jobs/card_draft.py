"""A model card that is being written: what is known, what could not be told, and its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from rankopt.models.card import ModelCard

_WIDTH = 96
_ORDER = ("name", "kind", "argument", "key", "columns", "column", "num_ids", "max_length")
"""Keys that come first on a line, in this order; the others follow as they were added."""


class Entry(dict[str, Any]):
    """A mapping of a card, and what could not be told about it.

    Attributes:
        doubts: written behind its line as `# could not tell: ...`.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        self.doubts: list[str] = []

    def doubt(self, reason: str) -> Entry:
        """Add something that could not be told; returns the entry itself."""
        self.doubts.append(reason)
        return self


def written(fields: Entry) -> str:
    """Write a card as YAML, each doubt on the line it is about."""
    lines: list[str] = []
    for key, value in fields.items():
        if _is_list_of_entries(value):
            lines.append(f"{key}:")
            for item in value:
                lines += _item(item, "  ")
        elif isinstance(value, Entry):
            lines.append(f"{key}: {_flow(value)}{_comment(value.doubts)}")
        else:
            lines.append(f"{key}: {_flow(value)}")
    lines += [f"# could not tell: {reason}" for reason in fields.doubts]
    return "\n".join(lines) + "\n"


def all_doubts(fields: Entry) -> list[str]:
    """List every doubt with the field it is about, such as `outputs[0]: the label's column`."""
    return [f"{where}: {reason}" if where else reason for where, reason in _walk("", fields)]


def draft_card(fields: Mapping[str, Any]) -> ModelCard:
    """Read a draft with stand-ins for what is still missing, so that the module can be called."""
    inputs = [_completed(item) for item in fields["inputs"]]
    outputs = [{"label": "label", **item} for item in fields.get("outputs") or [{"name": "score"}]]
    return ModelCard.model_validate(
        {**_plain(fields), "inputs": inputs, "outputs": outputs, "data": {}}
    )


def _completed(item: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = dict(_plain(item))
    if plain["kind"] in ("ids", "ragged_ids"):
        plain.setdefault("num_ids", 1)
    for feature in plain.get("features", ()):
        feature.setdefault("num_ids", 1)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()  # numpy's numbers, which libraries keep as they were given
    return value


def _walk(where: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Entry):
        yield from ((where, reason) for reason in value.doubts)
        for key, item in value.items():
            yield from _walk(f"{where}.{key}" if where else key, item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{where}[{index}]", item)


def _is_list_of_entries(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Entry)


def _item(item: Entry, indent: str) -> list[str]:
    """Write one item of a list: on one line, or its own items below it."""
    nested = {key: value for key, value in item.items() if _is_list_of_entries(value)}
    keys = sorted(item, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    scalars = {key: item[key] for key in keys if key not in nested}
    if not nested:
        return [f"{indent}- {_flow(scalars, indent)}{_comment(item.doubts)}"]
    lines = [f"{indent}  {key}: {_flow(value)}" for key, value in scalars.items()]
    lines[0] = f"{indent}- {lines[0].lstrip()}{_comment(item.doubts)}"
    for key, value in nested.items():
        lines.append(f"{indent}  {key}:")
        for inner in value:
            lines += _item(inner, f"{indent}    ")
    return lines


def _flow(value: Any, indent: str = "") -> str:
    text = yaml.safe_dump(
        _plain(value), default_flow_style=True, sort_keys=False, width=_WIDTH, allow_unicode=True
    )
    # A bare scalar ends with a document marker; what runs over a line is indented below its key.
    lines = text.removesuffix("\n").removesuffix("\n...").split("\n")
    return f"\n{indent}    ".join(line.strip(" ") for line in lines)


def _comment(doubts: Sequence[str]) -> str:
    return f"  # could not tell: {'; '.join(doubts)}" if doubts else ""
