"""`rankopt card`: a first model card, written by looking at the module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rankopt.cli.console import AsJson, Checkpoint, Overwrite, Progress, print_json

app = typer.Typer(no_args_is_help=True)

Factory = Annotated[
    str, typer.Argument(help="What makes the module: package.module:function or file.py:function.")
]
Config = Annotated[
    list[str] | None,
    typer.Option("--config", help="KEY=VALUE for the factory, repeated; or a YAML file of them."),
]
Data = Annotated[
    Path | None, typer.Option("--data", help="Rows, to match columns with: a file or a folder.")
]
Batch = Annotated[
    Path | None,
    typer.Option("--batch", help="One batch as torch.save wrote it: shows shapes and the call."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="The card's file; printed to stdout without it.")
]


@app.callback()
def card() -> None:
    """Write model cards."""


@app.command("init")
def init(
    factory: Factory,
    checkpoint: Checkpoint = None,
    config: Config = None,
    data: Data = None,
    batch: Batch = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Look at a module, and at one batch, and write a first card; say what could not be told."""
    given = _read_config(config or [])
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.jobs.card_init import init_card

        first = init_card(
            factory,
            checkpoint=checkpoint,
            config=given,
            data=data,
            batch=batch,
            out=out,
            overwrite=overwrite,
            progress=progress.step,
        )
    if as_json:
        print_json(
            {
                "card": str(out) if out is not None else None,
                "text": first.text,
                "complete": not first.missing,
                "could_not_tell": list(first.doubts),
                "missing": list(first.missing),
                "notes": list(first.notes),
            }
        )
        return
    if out is None:
        typer.echo(first.text, nl=False)
    # With the card itself on stdout, what else there is to say must not get into the file.
    for title, lines in (
        ("could not tell", first.doubts),
        ("still missing", first.missing),
        ("noticed", first.notes),
    ):
        if lines:
            typer.echo(f"{title}:", err=out is None)
            for line in lines:
                typer.echo(f"  {line}", err=out is None)
    if out is not None:
        state = "to be completed by hand" if first.missing else "complete; check what it guessed"
        typer.echo(f"card: {out} ({state})")


def _read_config(words: list[str]) -> dict[str, Any]:
    import yaml

    from rankopt.errors import Problem, UsageError

    config: dict[str, Any] = {}
    problems = []
    for word in words:
        key, equals, value = word.partition("=")
        try:
            if equals:
                read: Any = {key: yaml.safe_load(value)}
            else:
                read = yaml.safe_load(Path(word).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            first = str(error).splitlines()[0]
            problems.append(Problem(f"--config {word}", f"is neither KEY=VALUE nor YAML: {first}"))
            continue
        if not isinstance(read, dict) or not all(isinstance(name, str) and name for name in read):
            problems.append(Problem(f"--config {word}", "must hold names and values"))
            continue
        config |= read
    if problems:
        raise UsageError(problems=problems)
    return config
