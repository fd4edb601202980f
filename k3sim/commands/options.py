"""Options that several commands share, and the checks of where they write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, get_annotations, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from k3sim.errors import UserError
from k3sim.sim.draws import MAX_DRAWS
from k3sim.sim.export.whole_file import check_folder
from k3sim.sim.numbers import numbers_of
from k3sim.sim.options import OPTIONS, Option, Options

Out = Annotated[str, typer.Option(help="Folder for the files.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")]
Draws = Annotated[int, typer.Option(help=f"Machines to draw for the intervals, 2 to {MAX_DRAWS}.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Jobs = Annotated[int | None, typer.Option(help="Processes that work at once; by default one for each core.")]


def shared_option(word: str, *, is_list: bool = False) -> Any:
    """The annotation from which the command-line library makes one of the options of ``Options``."""
    option: Option = OPTIONS[word]
    kind: Any = list[str] if option.kind is tuple else str if is_list else option.kind
    kind = kind if option.default not in (None, ()) else kind | None
    flags = f"--{word}/--no-{word}" if option.kind is bool else f"--{word}"
    more = " Also a list or range: 1,2,4 or 1:1024:x2." if is_list else ""
    return Annotated[kind, typer.Option(flags, help=f"{option.help}{more}")]


def takes_options(
    command: Callable[..., None], leave_out: Sequence[str] = (), lists: Sequence[str] = ()
) -> Callable[..., None]:
    """Give a command the options of ``Options``, less those left out; it gets them as one ``Options``.

    ``lists``: words of whole numbers that may be lists or ranges; the command gets them as ``lists``, by word, and the
    first of each in the options.
    """
    taken = {word: option for word, option in OPTIONS.items() if word not in leave_out}
    # Not typing.get_type_hints, which before Python 3.11 hides the annotation of a parameter whose default is None.
    hints = get_annotations(command, eval_str=True)
    own = [one.replace(annotation=hints[one.name]) for one in signature(command).parameters.values()]
    shared = [
        # The command-line library gives a repeatable option that is not there as None.
        Parameter(
            option.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=None if option.default == () else str(option.default) if word in lists else option.default,
            annotation=shared_option(word, is_list=word in lists),
        )
        for word, option in taken.items()
    ]

    def parsed(**given: Any) -> None:
        values = {option.name: given.pop(option.name) for option in taken.values()}
        for option in taken.values():
            if option.kind is tuple:
                values[option.name] = tuple(values[option.name] or ())
        if lists:
            numbers = {word: numbers_of(word, values[taken[word].name]) for word in lists}
            values |= {taken[word].name: found[0] for word, found in numbers.items()}
            given["lists"] = numbers
        command(options=Options(**values), **given)

    position = next(index for index, one in enumerate(own) if one.name == "options")
    parameters = [*own[:position], *shared, *(one for one in own[position + 1 :] if one.name != "lists")]
    functools.update_wrapper(parsed, command)
    parsed.__annotations__ = {one.name: one.annotation for one in parameters}
    parsed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return parsed


def writable_folder(folder: str | Path) -> Path:
    """The output folder, which is made once its files are written; UserError where that would not be possible."""
    if not str(folder).strip():
        raise UserError("the name of the output folder is empty; give --out a folder")
    check_folder(Path(folder))
    return Path(folder)


def html_file(name: str | None) -> Path | None:
    """Where ``--html`` writes a page. Raises UserError for another name, and for a folder that is not there."""
    if name is None:
        return None
    page = Path(name)
    if page.suffix.lower() != ".html":
        raise UserError(f"html is {name!r}; accepted: a path that ends in .html")
    if not page.absolute().parent.is_dir():
        raise UserError(f"html: the folder {page.parent} does not exist")
    return page
