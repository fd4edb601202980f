"""``python -m k3sim.calibrate.ablation [--only RULE] [--json]``: what each rule of the model earns.

Errors in per cent with all rules, then without each, and in brackets how much better or worse than with all the median
(kernels, published steps: the mean) is without it. A rule whose row changes nothing, or for the better, is one to take
out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from k3sim.calibrate.ablation.table import COLUMNS, Ablated, ablate, find_rules
from k3sim.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k3sim.calibrate.ablation", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="RULE", help="this rule (repeatable)")
    parser.add_argument("--jobs", type=int, help="processes that work at once; all cores by default")
    parser.add_argument("--json", action="store_true", help="as JSON, with every case")
    given = parser.parse_args(arguments)
    try:
        base, *without = ablate(find_rules(given.only), jobs=given.jobs)
    except UserError as refusal:
        parser.error(str(refusal))
    print(json.dumps([row_of(one, base) for one in (base, *without)], indent=2) if given.json else table(base, without))
    return 0


def row_of(one: Ablated, base: Ablated) -> dict[str, object]:
    """A row as JSON. Errors are fractions of what was measured; ``rule`` is "" with all rules."""
    return {
        "rule": one.name,
        "place": "" if one.rule is None else one.rule.place,
        "says": "" if one.rule is None else one.rule.says,
        "summary": one.summary(),
        "largest_change": one.moved(base),
        "errors": one.errors,
    }


def table(base: Ablated, without: Sequence[Ablated]) -> str:
    """Median, mean and worst error of each column in per cent, a rule a line."""
    width = max(len("all rules"), *(len(one.name) for one in without))
    head = f"{'without':{width}}" + "".join(f"  {column:>22}" for column in COLUMNS)
    units = f"{'':{width}}" + f"  {'median   mean   worst':>22}" * len(COLUMNS)
    first = f"{'all rules':{width}}" + _cells(base.summary())
    lines = [f"{one.name:{width}}" + _cells(one.summary(), one.moved(base)) for one in without]
    return "\n".join([head, units, first, *lines, "", "=: no prediction of the column changes by 0.01 %"])


def _cells(summary: Mapping[str, Mapping[str, float]], moved: Mapping[str, float] | None = None) -> str:
    cells = []
    for column in COLUMNS:
        one = summary[column]
        text = f"{100 * one['median']:6.2f} {100 * one['mean']:+6.2f} {100 * one['worst']:+7.2f}"
        cells.append("=" if moved is not None and moved[column] < 1e-4 else text)
    return "".join(f"  {text:>22}" for text in cells)


if __name__ == "__main__":
    sys.exit(main())
