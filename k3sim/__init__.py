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
from k3sim.options import Options

if TYPE_CHECKING:
    import pandas

    from k3sim.report import Report

__version__ = "0.1.0"
__all__ = ["Options", "UserError", "__version__", "predict", "timeline"]


def predict(**options: Any) -> Report:
    """Predict one decode step; ``options`` are the fields of ``Options``.

    Raises UserError for what cannot be honoured, TypeError for an option that does not exist.
    """
    return predict_options(Options(**options))


def predict_options(options: Options) -> Report:
    """``predict`` for options that are already an object."""
    from k3sim.ask import ask
    from k3sim.model.paths import SWITCHES, find_path
    from k3sim.report import Report
    from k3sim.sim.predict import ladder, leave_one_out
    from k3sim.sim.predict import predict as predict_path

    question, path = ask(options)
    kernel_set = options.kernels
    steps = ladder(question.expected(), kernel_set)
    fused = find_path("fused", kernel_set=kernel_set)
    known = {step.path.switches: step for _, step in steps} if question.folded else {}
    stock = known.get(frozenset()) or predict_path(question, find_path("stock", kernel_set=kernel_set))
    full = known.get(frozenset(SWITCHES)) or predict_path(question, fused)
    megakernel = predict_path(question, find_path("megakernel"))
    if path.name == "megakernel":
        main = megakernel
    elif path.switches == frozenset(SWITCHES):
        main = full
    elif path.name == "stock":
        main = stock
    else:
        main = predict_path(question, path)
    return Report(
        main=main,
        stock=stock,
        fused=full,
        megakernel=megakernel,
        ladder=tuple(steps),
        leave_one_out=tuple(leave_one_out(question.expected(), kernel_set)),
        command=options.command(),
    )


def timeline(**options: Any) -> pandas.DataFrame:
    """The kernels of one predicted step as a DataFrame, in microseconds; ``options`` as for ``predict``.

    ``frame.attrs`` holds the summary: step_us, tokens_per_second_per_user, floor_us, hbm_busy_fraction, waits_us.
    """
    from k3sim.report import summary

    report = predict(**options)
    frame = report.frame()
    frame.attrs.update(summary(report.main))
    return frame
