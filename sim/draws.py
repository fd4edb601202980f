"""How many machines an interval may draw. Apart from the draws, so that a command's help can say it without them."""

from __future__ import annotations

from k3sim.errors import UserError

NUM_DRAWS = 40
#: From seed to seed the ends of an interval of 1,000 draws differ by 0.5 % of the step (of 40 draws: by 2 to 5 %;
#: default question, 2026-12-01). The values' own intervals are not known that well: more would only take longer.
MAX_DRAWS = 1000


def check_draws(num_draws: int) -> None:
    """Raises UserError for fewer draws than two, and for more than ``MAX_DRAWS``."""
    if not 2 <= num_draws <= MAX_DRAWS:
        why = "; with more the interval moves by less than 1 % of the step" if num_draws > MAX_DRAWS else ""
        raise UserError(f"draws is {num_draws}; accepted: 2 to {MAX_DRAWS}{why}")
