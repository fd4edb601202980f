"""``python -m k3sim.calibrate.ablation [--only RULE] [--all] [--json]``: what each rule of the model earns.

Median of the size of errors, mean error and worst error in per cent, with all rules and then without each. A rule whose
row is that of all rules, or better, earns nothing: it is one to take out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from k3sim.calibrate.ablation.table import COLUMNS, Ablated, ablate, find_rules
from k3sim.errors import UserError

ALL_RULES = "all rules"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k3sim.calibrate.ablation", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="RULE", help="this rule (repeatable)")
    parser.add_argument("--all", action="store_true", help="every stored step, not a sample of a third")
    parser.add_argument("--jobs", type=int, help="processes that work at once; all cores by default")
    parser.add_argument("--json", action="store_true", help="as JSON, with every case")
    given = parser.parse_args(arguments)
    try:
        rules = find_rules(given.only)
        found = ablate(rules, every_step=given.all, jobs=given.jobs)
        base = next(found)
    except UserError as refusal:
        parser.error(str(refusal))
    if given.json:
        print(json.dumps([row_of(base, base), *(row_of(one, base) for one in found)], indent=2))
        return 0
    width = max(len(ALL_RULES), *(len(one.name) for one in rules))
    print(f"{'without':{width}}" + "".join(f"  {column:>22}" for column in COLUMNS))
    print(f"{'':{width}}" + f"  {'median   mean   worst':>22}" * len(COLUMNS))
    print(f"{ALL_RULES:{width}}" + _cells(base.summary()), flush=True)
    for one in found:
        print(f"{one.name:{width}}" + _cells(one.summary(), one.moved(base)), flush=True)
    print("\n=: no prediction of the column changes by 0.01 %")
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


def _cells(summary: Mapping[str, Mapping[str, float]], moved: Mapping[str, float] | None = None) -> str:
    cells = []
    for column in COLUMNS:
        one = summary[column]
        text = f"{100 * one['median']:6.2f} {100 * one['mean']:+6.2f} {100 * one['worst']:+7.2f}"
        cells.append("=" if moved is not None and moved[column] < 1e-4 else text)
    return "".join(f"  {text:>22}" for text in cells)


if __name__ == "__main__":
    sys.exit(main())
