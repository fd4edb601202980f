"""Curves of ``k3sim timeline``, over lists of users and contexts, and the largest of them that holds a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from k3sim.commands import output, terminal
from k3sim.commands.progress import progress
from k3sim.errors import UserError

if TYPE_CHECKING:
    from k3sim.curve_report import Curve
    from k3sim.sim.largest import Largest
    from k3sim.sim.options import Options

TIMES_US = {"us": 1.0, "ms": 1e3, "s": 1e6}


def run_curve(
    options: Options,
    concurrencies: Sequence[int],
    contexts: Sequence[int],
    *,
    num_draws: int,
    jobs: int | None,
    out: str,
    json_output: bool,
) -> None:
    """Predict a curve on several processes, write its files and print it."""
    from k3sim.calibrate.compare.jobs import run_jobs
    from k3sim.commands.curve_page import page_of, published_gains
    from k3sim.commands.options import writable_folder
    from k3sim.curve_report import Curve
    from k3sim.sim.curve import PATHS, all_cliffs, at, tasks
    from k3sim.sim.question import ask

    paths = list(dict.fromkeys((options.path, *PATHS)))
    work = tasks(options, concurrencies, contexts, paths, num_draws)
    folder = writable_folder(out)
    first = ask(at(options, options.path, max(concurrencies), max(contexts)))
    output.warn([one for one in first.warnings if not one.startswith("memory is ignored")])
    with progress("predicting") as told:
        told.doing(f"{len(work)} points")
        points = tuple(run_jobs(work, jobs=jobs, on_done=told))
        told.doing("where a step changes suddenly")
        searches = [
            partial(all_cliffs, options, path, concurrencies, context)
            for path in paths
            for context in contexts
            if len(concurrencies) > 1
        ]
        cliffs = tuple(chain.from_iterable(run_jobs(searches, jobs=jobs, on_done=told))) if searches else ()
        curve = Curve(options=options, points=points, cliffs=cliffs, published=published_gains(options))
        told.doing("writing the files")
        files = curve.write(folder, page_of(curve))
    if json_output:
        output.print_json(curve.to_dict(files))
    else:
        print_curve(curve, files)


def print_curve(curve: Curve, files: Mapping[str, str]) -> None:
    """A line a place, with every path's step; then the sudden changes."""
    from k3sim.sim.question import ask

    console, question = terminal.console(), ask(curve.options)
    console.print(
        f"{question.architecture.name} on {terminal.num_gpus(question.layout.num_gpus)} of {question.machine.title}, "
        f"{question.layout.tag}"
    )
    console.print()
    paths = [path for path, points in curve.by_place.items() if any(one.step_us for one in points.values())]
    gains = [path for path in paths if path != "stock"]
    main = next(iter(curve.by_place))
    heads = ["users", "context", *(f"{path} us" for path in paths), *(f"{path} gain" for path in gains)]
    table = terminal.table(*heads, "tok/s/user", "tok/s/GPU", "memory GB", "room for", "fits", left=0)
    for place in curve.places:
        of_main = curve.by_place[main][place].to_dict()
        cells = [f"{place[0]:,}", f"{place[1]:,}"]
        cells += [_number(curve.by_place[path][place].step_us, ",.0f") for path in paths]
        cells += [_number(curve.gain(path, place), ".2f", "x") for path in gains]
        cells += [_number(of_main["tokens_per_s_per_user"], ",.1f"), _number(of_main["tokens_per_s_per_gpu"], ",.1f")]
        cells += [f"{of_main['memory_bytes'] / 1e9:,.1f}", f"{of_main['users_that_fit']:,}"]
        cells += ["yes" if of_main["fits"] else "no"]
        table.add_row(*cells)
    terminal.print_table(table)
    for path, why in dict.fromkeys((one.path, one.refused) for one in curve.points if one.refused):
        users = [one.concurrency for one in curve.points if (one.path, one.refused) == (path, why)]
        console.print(f"\n{path} has no step at {users[0]}{' and more' if len(users) > 1 else ''} users: {why}")
    if curve.cliffs:
        console.print("\nwhere a step jumps by more than 5 %, or falls, from one user to the next:")
        for one in curve.cliffs:
            console.print(f"  {one}", soft_wrap=True)
    output.print_files(files)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def time_of(tpot: str | None, per_second: float | None) -> float | None:
    """Microseconds that ``--for-tpot`` or ``--for-tokens-per-second`` ask for; None where neither is given.

    Raises UserError for both, for a time without its unit, and for what is not above zero.
    """
    if tpot is not None and per_second is not None:
        raise UserError("--for-tpot and --for-tokens-per-second ask for the same; give one")
    if per_second is not None:
        if not 0 < per_second < 1e9:
            raise UserError(f"--for-tokens-per-second {per_second:g}: accepted: a number above 0, for one user")
        return 1e6 / per_second
    if tpot is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", tpot.strip(), re.ASCII)
    if found is None or not 0 < float(found[1]) * TIMES_US[found[2]] < 1e12:
        raise UserError(f"--for-tpot {tpot[:40]!r}: accepted: a time with its unit, as in 20ms, 500us or 0.02s")
    return float(found[1]) * TIMES_US[found[2]]


def answer_of(options: Options, over: str, most_us: float) -> Largest:
    """The largest concurrency or context that holds a time. Raises UserError where none does."""
    from k3sim.sim.largest import largest

    if over not in ("concurrency", "context"):
        raise UserError(f"--over {over!r}; accepted: concurrency, context")
    with progress(f"looking for the largest {over}"):
        return largest(options, over, most_us)


def sentence_of(found: Largest) -> str:
    """The answer in words."""
    unit = "users" if found.over == "concurrency" else "tokens of context"
    memory = "" if found.fits is None else f"; memory holds {found.fits:,}"
    steady = "" if found.is_monotone else "; the step does not grow throughout, and this is the largest that holds"
    more = " (as far as was looked)" if found.value == found.limit else ""
    return (
        f"up to {found.value:,} {unit}{more} keep {found.most_us / 1e3:,.3f} ms a token: the step takes "
        f"{found.step_us / 1e3:,.3f} ms{memory}{steady}"
    )


def with_answer(document: dict[str, Any], found: Largest | None) -> dict[str, Any]:
    """A document of a step with the inverse question that led to it."""
    return document if found is None else {**document, "largest": found.to_dict()}
