"""k3sim: where a Kimi K3 decode step waits, and what would remove it.

    >>> import k3sim
    >>> report = k3sim.predict(machine="gb300", tp=16, concurrency=1)
    >>> round(report.main.step_us) > 0
    True
    >>> stages = k3sim.timeline(path="stock")   # a pandas DataFrame, one row a kernel

``predict`` answers with everything (paths, waits, switches, files), ``timeline`` with the table of kernels.
Options have the names of the command line; see ``k3sim.Options``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.version import VERSION as __version__

try:
    from k3sim.sim.question import Options
except ModuleNotFoundError as error:
    if error.name != "k3sim.sim":
        raise
    # The rooms stand beside this folder in a checkout, and under it only where the package is installed.
    raise ImportError(
        "k3sim was found as a folder of a checkout, which hides the installed package: "
        "run Python from another folder, or install the checkout with 'pip install --editable .'"
    ) from None

if TYPE_CHECKING:
    import pandas

    from k3sim.report import Report

__all__ = ["Options", "UserError", "__version__", "predict", "timeline"]


def predict(**options: Any) -> Report:
    """Predict one decode step; ``options`` are the fields of ``Options``.

    Raises UserError for what cannot be honoured, TypeError for an option that does not exist.
    """
    from k3sim.report import report_of

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
