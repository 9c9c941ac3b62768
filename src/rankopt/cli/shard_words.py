"""What the verbs that plan have in common: arguments, and how their words are read."""

from __future__ import annotations

from typing import Annotated, Any

import typer

CARD = Annotated[
    str,
    typer.Argument(
        metavar="CARD", help="A model card, or a file that lists tables: a path or a name."
    ),
]
TOPOLOGY = Annotated[
    str, typer.Option("--topology", help="A path, or a name in benchmarks/topologies.")
]
SHARDING_TYPES = Annotated[
    str | None,
    typer.Option("--sharding-types", help="Choose from these alone: table_wise,row_wise,..."),
]
IDS_PER_ROW = Annotated[
    list[str] | None,
    typer.Option("--ids-per-row", help="TABLE=MEAN lookups of a row, repeated."),
]


def read_options(
    *,
    optimizer: str | None,
    sharding_types: str | None,
    communication: str,
    ids_per_row: list[str] | None,
    precision: str | None = None,
    kernels: str | None = None,
    load_factors: str | None = None,
) -> dict[str, Any]:
    """Read the words of the command line; every wrong one is told at once.

    Options that a verb does not have are left out of the answer.

    Raises:
        UsageError: a word is not known, or is no number.
    """
    from typing import get_args

    from rankopt.errors import Problem, UsageError, nearest
    from rankopt.sharding.setting import KERNELS, Communication
    from rankopt.sharding.setting import SHARDING_TYPES as KINDS
    from rankopt.sharding.tables import Optimizer, Precision

    problems: list[Problem] = []

    def among(flag: str, words: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
        problems.extend(
            Problem(flag, f"must be among {', '.join(known)}", word, nearest(word, known))
            for word in words
            if word not in known
        )
        return tuple(dict.fromkeys(words))

    def number(flag: str, word: str) -> float:
        try:
            return float(word)
        except ValueError:
            problems.append(Problem(flag, "must be a number", word))
            return 0.0

    if optimizer is not None:
        among("--optimizer", [optimizer], get_args(Optimizer))
    if precision is not None:
        among("--precision", [precision], get_args(Precision))
    among("--communication", [communication], get_args(Communication))
    lookups = {}
    for word in ids_per_row or []:
        name, equals, value = word.partition("=")
        mean = number("--ids-per-row", value) if equals else 0.0
        if not 0 < mean < float("inf"):
            problems.append(Problem("--ids-per-row", "must be TABLE=MEAN, the mean above 0", word))
        lookups[name] = mean
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "communication": communication,
        "sharding_types": among("--sharding-types", _words(sharding_types), KINDS),
        "ids_per_row": lookups,
    }
    if precision is not None:
        options["precision"] = precision
    if kernels is not None:
        options["kernels"] = among("--kernels", _words(kernels), KERNELS)
    if load_factors is not None:
        words = _words(load_factors)
        options["load_factors"] = tuple(number("--load-factors", word) for word in words)
    if problems:
        raise UsageError(problems=problems)
    return options


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
