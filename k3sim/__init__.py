"""k3sim: where a Kimi K3 decode step waits, and what would remove it.

    >>> import k3sim
    >>> report = k3sim.predict(machine="gb300", tp=16, concurrency=1)
    >>> round(report.main.step_us) > 0
    True
    >>> stages = k3sim.timeline(path="stock")   # a pandas DataFrame, one row a kernel

``predict`` answers with everything (paths, waits, switches, files), ``timeline`` with the table of kernels, ``curve``
with the steps of all paths over users and context.
Options have the names of the command line; see ``k3sim.Options``.
"""

from __future__ import annotations

import os

from k3sim.errors import UserError
from k3sim.version import VERSION as __version__

# Not of ``typing``, whose import is a third of the time in which Ctrl-C would still find nobody (``cli.py``).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import pandas

    from k3sim.curve_report import Curve
    from k3sim.report import Report
    from k3sim.sim.options import Options

__all__ = ["Options", "UserError", "__version__", "curve", "predict", "timeline"]

# The rooms install under this folder and stand beside it in a checkout. From the root of one, Python finds this folder
# before the package that is installed, and then the rooms are those of the checkout too.
_CHECKOUT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not os.path.isdir(os.path.join(__path__[0], "sim")) and os.path.isdir(os.path.join(_CHECKOUT, "sim", "machines")):
    __path__.append(_CHECKOUT)


def __getattr__(name: str) -> Any:
    """``Options`` once it is asked for: a command that is interrupted while it starts has nothing imported yet."""
    if name == "Options":
        from k3sim.sim.options import Options

        return Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def predict(**options: Any) -> Report:
    """Predict one decode step; ``options`` are the fields of ``Options``.

    Raises UserError for what cannot be honoured, TypeError for an option that does not exist.
    """
    from k3sim.report import report_of
    from k3sim.sim.options import Options

    return report_of(Options(**options))


def timeline(**options: Any) -> pandas.DataFrame:
    """The kernels of one predicted step as a DataFrame, in microseconds; ``options`` as for ``predict``.

    Raises UserError where pandas is missing (``pip install 'k3sim[notebooks]'``). ``frame.attrs`` holds
    the summary: step_us, tokens_per_second_per_user, floor_us, hbm_busy_fraction, waits_us.
    """
    from k3sim.report import summary

    report = predict(**options)
    frame = report.frame()
    frame.attrs.update(summary(report.main))
    return frame


def curve(
    concurrency: Sequence[int] = (1,), context: Sequence[int] = (8192,), *, num_draws: int = 0, **options: Any
) -> Curve:
    """Every path's step over users and context: points, sudden changes with their kernels; ``frame()`` is a DataFrame.

    ``num_draws``: machines to draw for intervals, 0 for none; ``options`` as for ``predict``. Raises UserError for what
    no point could answer; one that a path has no kernels for says so in itself.
    """
    from k3sim.curve_report import Curve
    from k3sim.sim.curve import PATHS, all_cliffs, tasks
    from k3sim.sim.options import Options

    users, asked = sorted(set(concurrency)), Options(**options)
    paths = list(dict.fromkeys((asked.path, *PATHS)))
    points = tuple(task() for task in tasks(asked, users, context, paths, num_draws))
    searched = [(path, one) for path in paths for one in context if len(users) > 1]
    cliffs = tuple(cliff for path, one in searched for cliff in all_cliffs(asked, path, users, one))
    return Curve(options=asked, points=points, cliffs=cliffs)
