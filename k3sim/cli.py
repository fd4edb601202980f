"""The command line: the commands put together, and how a run ends.

Exit status: 0 ok, 1 a kernel that fails its check, 2 bad input (one line on standard error), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from k3sim.errors import UserError
from k3sim.version import VERSION

#: In the order of the help; each is a module of ``k3sim/commands`` that holds a command, or a group, of its name.
COMMANDS = (
    "timeline",
    "compare",
    "paths",
    "machines",
    "report",
    "decode",
    "validate",
    "claims",
    "sensitivity",
    "calibrate",
    "kernels",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"k3sim {VERSION}\n")
        raise typer.Exit


def options_of_every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Predict where a Kimi K3 decode step waits, and what would remove it."""


def build_app(names: Iterable[str]) -> typer.Typer:
    """The command line with some of the commands: importing and describing all of them takes a tenth of a second."""
    app = typer.Typer(
        name="k3sim",
        epilog="Example: k3sim timeline --concurrency 1",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(options_of_every_command)
    for name in names:
        module = import_module(f"k3sim.commands.{name}")
        command = getattr(module, name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=command.info.help)
        else:
            # The first line of its help, and whole: what stands in the list of commands would be cut.
            short_help = (command.__doc__ or "").partition("\n")[0]
            app.command(name, short_help=short_help, epilog=f"Example: {module.EXAMPLE}")(command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a mistake in the input is one line on standard error and exit status 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app = build_app(given[:1] if given[:1] and given[0] in COMMANDS else COMMANDS)
        status = app(args=given or ["--help"], standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except typer.Abort:
        raise SystemExit(130) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        if hasattr(error, "format_message"):  # usage errors of the command-line library
            _fail(f"{error.format_message()}{_given(error)}; see 'k3sim --help'")
        raise
    raise SystemExit(status if isinstance(status, int) else 0)


def _given(error: Exception) -> str:
    """What was given where the library's message only says what is accepted."""
    rejection: Any = error.__cause__
    if not hasattr(rejection, "errors"):
        return ""
    return f" (given: {rejection.errors()[0]['input']!r})"


def _fail(message: str) -> None:
    line = " ".join(message.split())
    sys.stderr.write(f"k3sim: {line}\n")
    raise SystemExit(2) from None
