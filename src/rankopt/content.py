"""Find recipes, model cards, schemes, targets and plans, wherever rankopt is installed.

They are looked for in this order: the path as given, the checkout that this module lies in, the
copy inside the wheel (`rankopt/_content`). A name is the file's path inside its folder, with or
without `.yaml`: `serve-int8`, `topologies/8xh100`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rankopt.errors import Problem, RankoptError, UsageError, nearest

KINDS = ("benchmarks", "export", "models", "quantize", "recipes")
SUFFIXES = (".yaml", ".yml")

_PACKAGE = Path(__file__).resolve().parent


def checkout_root() -> Path | None:
    """Return the checkout this package is run from, or None when it is an installed wheel."""
    root = _PACKAGE.parent.parent
    is_checkout = _PACKAGE.parent.name == "src" and (root / "pyproject.toml").is_file()
    return root if is_checkout else None


def content_roots() -> tuple[Path, ...]:
    """List the folders that may hold the content folders, the checkout before the wheel."""
    checkout = checkout_root()
    wheel = _PACKAGE / "_content"
    roots = (checkout, wheel) if checkout else (wheel,)
    return tuple(root for root in roots if root.is_dir())


def list_content(kind: str) -> list[Path]:
    """List every YAML file of a kind, sorted by name; a name in the checkout hides the wheel's.

    Args:
        kind: a content folder or a folder inside one: `recipes`, `benchmarks/topologies`.

    Raises:
        UsageError: there is no such kind.
    """
    return list(_named(kind).values())


def content_name(path: Path) -> str:
    """Return the name that `find` accepts for a file that `list_content` returned."""
    for root in content_roots():
        if path.is_relative_to(root):
            return "/".join(path.relative_to(root).with_suffix("").parts[1:])
    return str(path)


def find(kind: str, name_or_path: str | Path, *, error: type[RankoptError] = UsageError) -> Path:
    """Return the file that a name or a path stands for.

    Args:
        kind: a content folder or a folder inside one: `recipes`, `benchmarks/topologies`.
        name_or_path: a path, or a name with or without `.yaml` and the leading folder.
        error: the class to raise, such as RecipeError.

    Raises:
        RankoptError: nothing of that name exists; names the nearest and where it looked.
    """
    given = Path(name_or_path).expanduser()
    if given.is_file():
        return given
    names = _named(kind)
    wanted = given.as_posix().removeprefix(f"{kind}/")
    for suffix in SUFFIXES:
        wanted = wanted.removesuffix(suffix)
    if wanted in names:
        return names[wanted]
    if given.is_dir():
        inside = sorted(path.name for path in given.iterdir() if path.suffix in SUFFIXES)
        hint = f"It is a folder; it holds {', '.join(inside)}." if inside else "It is a folder."
        raise error(problems=[Problem(str(given), "must be a YAML file", hint=hint)])
    places = [str(given.absolute().parent), *(str(root / kind) for root in content_roots())]
    problem = Problem(
        str(name_or_path),
        f"must be a file or the name of one in {kind}/",
        hint=f"{nearest(wanted, names)} Looked in {', '.join(dict.fromkeys(places))}.",
    )
    raise error(problems=[problem])


def read_yaml(file: Path, error: type[RankoptError]) -> Any:
    """Return what a YAML file holds.

    Args:
        file: as `find` returned it.
        error: the class to raise, such as RecipeError.

    Raises:
        RankoptError: the file is not readable YAML.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise error(f"{file}: is not readable YAML: {problem}") from problem


def _named(kind: str) -> dict[str, Path]:
    if kind.split("/")[0] not in KINDS:
        raise UsageError(
            problems=[Problem(f"content kind {kind!r}", "is unknown", hint=nearest(kind, KINDS))]
        )
    found: dict[str, Path] = {}
    # The wheel first, so that a file of the same name in the checkout takes its place.
    for root in reversed(content_roots()):
        folder = root / kind
        for path in folder.rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                found[path.relative_to(folder).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))
