"""Writing output whole or not at all: one file, or all files of a run in one folder.

A run that ends early, by a full disk, Ctrl-C or a refusal, leaves what was there before. So everything is written under
a hidden name beside its place and renamed once it is complete: a rename needs no space, and within one file system a
reader sees the old or the new.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from k3sim.errors import UserError


def write_whole_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; a reader sees the old file or the complete new one, never a part.

    Raises UserError where ``path`` cannot be written, and where something else than a file stands there.
    """
    with whole_file(path) as partial:
        partial.write_bytes(content)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden path beside ``path`` that is renamed to it at the end; nothing is left where the body raises.

    Raises UserError for an OSError of the body too, which is taken for one of writing.
    """
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"cannot write {_shown(path)}: something that is no file stands there; give another path")
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        _refuse(path, error)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder whose files are moved into ``folder`` together at the end, those that name others (JSON) last.

    Where the body raises, nothing is left: neither the hidden folder nor one that was made on the way to it. Files of
    ``folder`` that the body does not write again stay. Raises UserError for what cannot be written.
    """
    made: list[Path] = []
    hidden = (folder if folder.exists() else folder.parent) / f".k3sim.{os.getpid()}.partial"
    try:
        try:
            for one in reversed(hidden.parents):
                if not one.exists():
                    one.mkdir()
                    made.append(one)
            hidden.mkdir()
            yield hidden
            _move(hidden, folder)
            made.clear()
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
            for one in reversed(made):
                with suppress(OSError):  # somebody else put something there
                    one.rmdir()
    except OSError as error:
        _refuse(folder, error)


def check_folder(folder: Path) -> None:
    """UserError where ``folder`` cannot be made or written; nothing stays of the trial.

    A run is refused before its work by this, not after it. Permissions do not say all: the superuser has every one.
    """
    for place in (folder, *folder.absolute().parents):
        try:
            mode = os.stat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                raise UserError(
                    f"cannot make the output folder {folder}: {place} is a link to nothing; give --out a folder"
                ) from None
            continue
        except (OSError, ValueError) as error:
            _refuse_folder(folder, error)
        trial = place / f".k3sim.{os.getpid()}.partial"
        try:
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            trial.mkdir()
            trial.rmdir()
        except OSError as error:
            if place == folder and stat.S_ISDIR(mode):
                raise UserError(
                    f"the output folder {folder} cannot be written ({error.strerror}); give --out a folder that can"
                ) from error
            _refuse_folder(folder, error)
        return


def _move(hidden: Path, folder: Path) -> None:
    """All files of ``hidden`` into ``folder``, or ``hidden`` in its place where there is none."""
    if not folder.exists():
        os.rename(hidden, folder)
        return
    files = sorted(hidden.iterdir(), key=lambda one: (one.suffix == ".json", one.name))
    for one in files:
        if (folder / one.name).is_dir():
            raise UserError(f"{folder / one.name} is a folder and stands where a file goes; move it or give --out")
    for one in files:
        os.replace(one, folder / one.name)


def _refuse_folder(folder: Path, error: OSError | ValueError) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) else error
    raise UserError(f"cannot make the output folder {folder}: {reason}; give --out a folder") from error


def _refuse(path: Path, error: OSError) -> NoReturn:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "make room" if full else "give a path in a folder that exists and can be written"
    raise UserError(f"cannot write {_shown(path)}: {error.strerror}; {advice}") from error


def _shown(path: Path) -> str:
    """The path, less a hidden folder that a file is first written to."""
    return path.name if path.parent.name.endswith(".partial") else str(path)
