"""The commands put together as one application of the command-line library."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from k3sim.version import VERSION


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"k3sim {VERSION}")
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
