"""The `rankopt` command: its verbs, and the one place where errors become messages and exit codes.

To add a verb, write `rankopt/cli/<verb>.py` with `app`, a `typer.Typer` of one command (or of
several, for `rankopt recipes ls`), and add one line to `VERBS`. The module is imported only when
its verb runs or its help is asked for, and imports the engine inside its functions, so that help
never loads torch. A verb ends with `raise typer.Exit(code)` when its answer is not a plain pass;
it raises a `RankoptError` for everything that is the reader's to mend, and catches none.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
import typer.core
import typer.main

from rankopt._version import __version__
from rankopt.errors import EXIT_INTERRUPTED, EXIT_USAGE, RankoptError

EXIT_INTERNAL = 70
"""sysexits.h's EX_SOFTWARE: away from 0 to 3, which are answers."""
EXIT_BROKEN_PIPE = 141
"""What a shell reports for SIGPIPE: the reader, such as `head`, had enough."""


class Verb(NamedTuple):
    """One line of the command list."""

    name: str
    help: str

    @property
    def module(self) -> str:
        return f"rankopt.cli.{self.name.replace('-', '_')}"


VERBS = (
    Verb("doctor", "Check this machine and its packages; each problem comes with its fix."),
    Verb("recipes", "List, show and check recipes and the kinds of pass they are made of."),
    Verb("card", "Write a first model card by looking at a module."),
    Verb("data", "Report on a card's rows: nulls, ids, drift, labels, and their limits."),
    Verb("train", "Train a model card's module to a checkpoint."),
    Verb("optimize", "Apply a recipe to a trained model; the result is an artifact folder."),
    Verb("ab", "Compare two arms on the same rows: quality, latency, size, cost."),
    Verb("run", "Optimize, compare and review in one go."),
    Verb("verify", "Check an artifact's files and contract in a fresh process."),
    Verb("refresh", "Put new weights into an artifact without compiling again."),
    Verb("diagnose", "Say where the time of one call goes, and what bounds it."),
    Verb("shard", "Plan how tables are spread over hosts and ranks."),
    Verb("predict", "Score a file with an artifact."),
    Verb("bench", "Time the artifact beside other ways to serve the same models."),
)


class LazyGroup(typer.core.TyperGroup):
    """A group that knows its verbs' names and help, and imports a verb when it is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._verbs = {verb.name: verb for verb in VERBS}
        # Stand-ins, so that the list of commands and the search for a near name need no import.
        for verb in VERBS:
            self.add_command(typer.core.TyperCommand(verb.name, help=verb.help), verb.name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the verb that is about to run."""
        if args and args[0] in self._verbs:
            self.add_command(_load(self._verbs[args[0]]), args[0])
        return super().resolve_command(ctx, args)


def _load(verb: Verb) -> Any:
    command = typer.main.get_command(import_module(verb.module).app)
    command.name = verb.name
    # A one-command Typer app offers to install shell completion for itself.
    completion = {"install_completion", "show_completion"}
    command.params = [param for param in command.params if param.name not in completion]
    return command


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rankopt {__version__}")
        raise typer.Exit


@app.callback()
def rankopt(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; the same as RANKOPT_DEBUG=1.")
    ] = False,
) -> None:
    """Make a trained ranking model smaller and faster, and review what that costs in quality.

    Exit codes: 0 pass, 1 fail, 2 bad usage or input, 3 inconclusive.
    """
    if debug:
        # In the environment, so that workers and fresh processes follow it too.
        os.environ["RANKOPT_DEBUG"] = "1"


_arguments: list[str] = []


def command_line() -> str:
    """Write the command that is running, for the report's `reproduce`."""
    return shlex.join(["rankopt", *_arguments])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; the only place that catches everything."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _arguments[:] = arguments
    command = typer.main.get_command(app)
    if not _debug():
        # What torch and torchrec say about their own next release is not for a user of rankopt.
        warnings.simplefilter("ignore", FutureWarning)
        # Said by every checkpoint of a run in one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        code = command.main(arguments, prog_name="rankopt", standalone_mode=False)
    except RankoptError as error:
        _show(str(error))
        return error.exit_code
    except typer.TyperException as error:
        return _show_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        _show("interrupted; nothing was left half written")
        return EXIT_INTERRUPTED
    except SystemExit as error:
        # typer itself turns a closed pipe into exit 1, which here would say `fail`.
        if isinstance(error.__context__, BrokenPipeError):
            return _close_stdout()
        raise
    except BrokenPipeError:
        return _close_stdout()
    except Exception as error:
        _show_internal(error, arguments)
        return EXIT_INTERNAL
    return code if isinstance(code, int) else 0


def _close_stdout() -> int:
    """Send what is left of stdout nowhere, or Python complains once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return EXIT_BROKEN_PIPE


def _show(message: str) -> None:
    if _debug():
        traceback.print_exc()
    prefix = "rankopt: " if "\n" not in message else "rankopt:\n"
    typer.echo(f"{prefix}{message}", err=True)


def _show_usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    if context is not None:
        if not error.format_message():
            return EXIT_USAGE
        typer.echo(context.get_usage(), err=True)
        typer.echo(f"Try '{context.command_path} --help' for help.", err=True)
    _show(error.format_message())
    return EXIT_USAGE


def _show_internal(error: Exception, arguments: Sequence[str]) -> None:
    first_line = (str(error).strip() or "no message").splitlines()[0]
    message = f"{type(error).__name__}: {first_line}"
    if not _debug():
        again = shlex.join(["rankopt", *arguments])
        message += ". This is a fault in rankopt, or a case it does not know; "
        message += f"see where: RANKOPT_DEBUG=1 {again}"
    _show(message)


def _debug() -> bool:
    return os.environ.get("RANKOPT_DEBUG", "0") not in {"", "0"}
