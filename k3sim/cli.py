"""How a run of the command line begins and ends.

Exit status: 0 ok, 1 a kernel that fails its check, 2 bad input or output that cannot be written (one line on standard
error), 130 interrupted; 141 where the reader of a pipe left, and 128 and the number of a signal that ended the run, as
shells have it.

Next to nothing is imported before ``main`` has begun, and from then on Ctrl-C finds somebody.
"""

from __future__ import annotations

import gc
import signal
import sys

from k3sim.errors import UserError
from k3sim.streams import OutputLost, settle_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

#: In the order of the help; each is a module of ``k3sim/commands`` that holds a command, or a group, of its name.
COMMANDS = (
    "timeline",
    "sweep",
    "compare",
    "paths",
    "models",
    "machines",
    "report",
    "explain",
    "decode",
    "validate",
    "claims",
    "sensitivity",
    "calibrate",
    "kernels",
)
KEEPING = ("timeline",)  # commands of which nearly all that they make is in use until they end
INTERRUPTED = 130
READER_LEFT = 141  # 128 + SIGPIPE
MOST_SAID = 2400  # characters of a refusal: a config of another family has many reasons
LONGEST_WORD = 160


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a mistake in the input is one line on standard error and exit status 2."""
    alone = arguments is None  # a process of its own
    if alone:
        gc.disable()  # loading makes no garbage worth looking for
    try:
        settle_streams()
        if arguments is None:
            _end_by_signals()
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except OutputLost as lost:
        if lost.reader_left:
            raise SystemExit(READER_LEFT) from None
        _fail(str(lost))
    except KeyboardInterrupt:
        if arguments is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one finds nothing more to stop
        sys.stderr.write("k3sim: interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except UserError as error:
        _fail(str(error))
    except MemoryError:
        _fail("not enough memory")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")
    finally:
        _flush_what_is_left()
        if alone:
            gc.freeze()  # or the interpreter looks through all of it once more as it ends
    raise SystemExit(status)


def _flush_what_is_left() -> None:
    """Of a run that failed. The interpreter would do it too, and tell a loss in its own way."""
    try:
        sys.stdout.flush()
    except OutputLost:
        return


def _run(given: Sequence[str]) -> int:
    """The exit status of a command. Raises UserError for one that cannot be honoured."""
    for one in given:
        if not _is_text(one):
            raise UserError(
                f"argument {one!a} is no text of the locale's encoding ({sys.getfilesystemencoding()}); accepted: "
                "UTF-8, in a UTF-8 locale such as LC_ALL=C.UTF-8"
            )
    import typer

    from k3sim.app import build_app

    app = build_app(given[:1] if given[:1] and given[0] in COMMANDS else COMMANDS)
    if not gc.isenabled() and not set(given[:1]) & set(KEEPING):
        gc.freeze()
        gc.enable()
    try:
        status = app(args=list(given) or ["--help"], standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.Exit as error:
        status = error.exit_code
    except Exception as error:
        if hasattr(error, "format_message"):  # usage errors of the command-line library
            raise UserError(f"{error.format_message()}{_given(error)}; see 'k3sim --help'") from None
        raise
    if status == INTERRUPTED:  # which the library makes of Ctrl-C without a word
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _is_text(argument: str) -> bool:
    """Whether it can be written again as UTF-8, into the files of a run; a path of other bytes cannot."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in argument


def _end_by_signals() -> None:
    """Let a request to end, or a closed terminal, unwind the run, so that nothing half-made stays."""
    for one in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is signal.SIG_DFL:  # nohup stays nohup
            signal.signal(one, _end)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _given(error: Exception) -> str:
    """What was given where the library's message only says what is accepted."""
    rejection: Any = error.__cause__
    if not hasattr(rejection, "errors"):
        return ""
    return f" (given: {rejection.errors()[0]['input']!r})"


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"k3sim: {one_line(message)}\n")
    raise SystemExit(2) from None


def one_line(message: str) -> str:
    """A message that a terminal shows in a few lines: long words and its middle are cut, ends stay."""
    words = [one if len(one) <= LONGEST_WORD else _without_middle(one, LONGEST_WORD) for one in message.split()]
    return _without_middle(" ".join(words), MOST_SAID)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = (most - 3) // 3
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"
