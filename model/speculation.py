"""Speculation: a draft model proposes tokens, the target verifies them all in one step.

Each user then has ``1 + num_drafts`` rows in the target. KDA layers keep one state for each row (vLLM's default: read
S, write S a row), so that the next step begins at the state of the last accepted token without a copy. Attention has
the rows of a user as further query rows, which share the read of its cache. Rows choose their experts independently:
that rows of one user agree more than others is not published.

``dspark`` is the draft that Inferact publishes for Kimi K3 (https://huggingface.co/Inferact/Kimi-K3-DSpark; vLLM's
``dspark_mla.py``): one pass over five layers gives all positions, and a Markov head then walks over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.draft import MAX_DRAFTS, Draft
from k3sim.model.layout import Layout

DRAFT_NAMES = ("dspark",)
DEFAULT_DRAFTS = 7  # in use with Inferact's draft


def find_draft(name: str, architecture: Architecture, layout: Layout, length: str) -> Draft | None:
    """The draft of a model; None for one that drafts nothing, which is the plain step.

    Raises UserError for an unknown name, a length outside 0 to ``MAX_DRAFTS``, a model or a layout that it is not for.
    """
    from k3sim.model.names import check_name

    check_name("speculation", name, DRAFT_NAMES)
    if length == "best":
        raise UserError("draft-length best is found by k3sim timeline for one number of users; give a number here")
    if length and not (length.isascii() and length.isdigit() and int(length) <= MAX_DRAFTS):
        raise UserError(f"draft-length is {length!r}; accepted: 0 to {MAX_DRAFTS}, or best")
    num_drafts = int(length) if length else DEFAULT_DRAFTS
    if not architecture.attn_res_block_size or architecture.hidden_size != 7168:
        raise UserError(f"speculation {name} is a draft of kimi-k3; {architecture.name} has none that is public")
    several = [one for one in ("dcp", "attn_dp", "pp") if getattr(layout, one) > 1]
    if several:
        words = ", ".join(one.replace("_", "-") for one in several)
        raise UserError(f"speculation {name} is modelled in one attention group and stage; accepted: {words} of 1")
    return Draft(num_drafts=num_drafts) if num_drafts else None


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How many drafts are accepted.

    ``shares``: of each position the share of steps in which it and all before it are accepted. ``mean``: tokens a
    step, the target's own token included, where only that was counted.
    """

    name: str
    shares: tuple[float, ...] = ()
    mean: float | None = None
    probability: float | None = None

    def tokens_per_step(self, num_drafts: int) -> float:
        """Mean tokens of a step with ``num_drafts`` drafts: accepted ones, and the target's own.

        Raises UserError for a mean above ``num_drafts + 1``, and a table with fewer positions.
        """
        if self.mean is not None:
            if self.mean > num_drafts + 1:
                raise UserError(
                    f"acceptance is {self.mean:g} tokens a step; {num_drafts} drafts and the target's own token give "
                    f"at most {num_drafts + 1}"
                )
            return self.mean
        if self.probability is not None:
            return math.fsum(self.probability**position for position in range(num_drafts + 1))
        if len(self.shares) < num_drafts:
            raise UserError(f"acceptance has {len(self.shares)} positions; {num_drafts} drafts need as many")
        return 1.0 + math.fsum(self.shares[:num_drafts])


# Share of drafts accepted at each position, Inferact's draft, vLLM on coding prompts, read to about a point off the
# chart of https://vllm.ai/blog/2026-07-27-k3; 1 + their sum is 4.69, printed there as 4.73.
TABLES: Mapping[str, tuple[float, ...]] = {
    "coding": (0.87, 0.72, 0.59, 0.48, 0.41, 0.34, 0.28),
    "mt-bench": (0.67, 0.43, 0.27, 0.18, 0.12, 0.09, 0.07),
    "qa": (0.59, 0.33, 0.18, 0.11, 0.07, 0.05, 0.03),
}


def read_acceptance(text: str) -> Acceptance:
    """Tokens a step (``3.8``), shares by position (``0.9,0.7``), ``geometric:P``, or a table by name.

    Raises UserError for anything else: shares outside 0 to 1 or that rise, tokens below 1.
    """
    if text in TABLES:
        return Acceptance(name=text, shares=TABLES[text])
    accepted = f"tokens a step of 1 or more, shares by position (0.9,0.7), geometric:P, {', '.join(TABLES)}"
    refusal = UserError(f"acceptance is {text!r}; accepted: {accepted}")
    kind, colon, value = text.partition(":")
    try:
        numbers = [float(one) for one in (value if colon else text).split(",")]
    except ValueError:
        raise refusal from None
    falling = all(before >= behind for before, behind in pairwise(numbers))
    shares = falling and all(0.0 <= one <= 1.0 for one in numbers)
    if colon:
        if kind != "geometric" or len(numbers) != 1 or not shares:
            raise refusal
        return Acceptance(name=text, probability=numbers[0])
    if len(numbers) == 1 and "," not in text:
        if not 1.0 <= numbers[0] < math.inf:
            raise refusal
        return Acceptance(name=text, mean=numbers[0])
    if not shares:
        raise refusal
    return Acceptance(name=text, shares=tuple(numbers))
