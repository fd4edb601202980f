"""How many experts a step reads: of all weights, only the routed experts' bytes depend on the tokens.

A row picks ``top_k`` different experts. Under uniform routing each expert is picked with probability
``top_k / num_experts``; with ``skew`` the probabilities follow a Zipf law, ``rank ** -skew``, cut at one.
Rows are taken as independent. Which experts are popular has nothing to do with which rank holds them.

Real text is more concentrated than uniform: 24 rows touched 230 of 896 experts, 35.4 on the busiest of 8
ranks (https://github.com/xiaguan/kern-k3-pp-prefill, notes/d-mlp.md, GB300, 2026-10-10), where uniform gives
315. A skew of 0.784 reproduces both; at 4 rows it gives 54 experts instead of 62, at 8 rows 98 not 120.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import lru_cache

from k3sim.errors import UserError

MAX_SKEW = 4.0
REAL_TEXT_SKEW = 0.784  # what a prediction takes unless it is told otherwise; see above

_NEGLIGIBLE = 1e-8  # probability; the result is good to about 1e-6 experts


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose experts: ``skew`` is the exponent of a Zipf-like popularity, 0 is uniform.

    Raises:
        UserError: skew is not a number from 0 to 4.
    """

    skew: float = 0.0

    def __post_init__(self) -> None:
        _check_skew(self.skew)


@lru_cache(maxsize=64)
def inclusion_probabilities(num_experts: int, top_k: int, skew: float) -> tuple[float, ...]:
    """Probability that one row picks each expert, most popular first; they sum to ``top_k``, none exceeds
    one.

    An expert whose share would exceed one is picked by every row and the rest share what remains.

    Raises:
        UserError: skew is not a number from 0 to 4, or top_k is not within 1..num_experts.
    """
    _check_skew(skew)
    if not 1 <= top_k <= num_experts:
        raise UserError(f"top_k={top_k} of {num_experts} experts; 1 to {num_experts} is accepted")
    weights = [rank**-skew for rank in range(1, num_experts + 1)]
    weight_left = math.fsum(weights)
    certain = 0
    while certain < top_k and (top_k - certain) * weights[certain] > weight_left:
        weight_left -= weights[certain]
        certain += 1
    share = (top_k - certain) / math.fsum(weights[certain:]) if certain < num_experts else 0.0
    return (1.0,) * certain + tuple(min(1.0, share * weight) for weight in weights[certain:])


def expected_distinct_experts(num_experts: int, top_k: int, num_rows: int, skew: float = 0.0) -> float:
    """Mean number of different experts that ``num_rows`` independent rows pick in one layer.

    Raises:
        UserError: as ``inclusion_probabilities``.
    """
    probabilities = inclusion_probabilities(num_experts, top_k, skew)
    return math.fsum(1.0 - (1.0 - probability) ** num_rows for probability in probabilities)


@lru_cache(maxsize=1024)
def expected_busiest_rank_experts(
    num_experts: int, top_k: int, num_rows: int, ep: int, skew: float = 0.0
) -> float:
    """Mean number of different experts on the busiest of ``ep`` ranks that share the experts evenly.

    The picked experts fall on ranks at random, so that their counts follow a multivariate hypergeometric
    law and the mean of the largest is computed exactly for a given number of different experts; between
    whole numbers it is interpolated at the mean number. For one row, where the number is ``top_k``, the
    result is exact.

    Raises:
        UserError: ep does not divide num_experts, or as ``inclusion_probabilities``.
    """
    if ep < 1 or num_experts % ep:
        raise UserError(f"ep={ep} does not divide {num_experts} experts; give a divisor")
    distinct = expected_distinct_experts(num_experts, top_k, num_rows, skew)
    # Rounding errors of the sum of probabilities must not turn a whole number into the one below.
    below = math.floor(distinct + 1e-9)
    low, high = _busiest(num_experts // ep, ep, min(below, num_experts))
    return low + max(0.0, distinct - below) * (high - low)


@lru_cache(maxsize=2048)
def _busiest(slots: int, ranks: int, picked: int) -> tuple[float, float]:
    """Mean largest count when ``picked`` of ``ranks * slots`` experts are drawn, and when one more is.

    Counts of independent Binomial(slots, q) ranks, given their sum, follow the law of drawing without
    replacement for any q; one between the two sums serves both.
    """
    if picked == slots * ranks:
        return float(slots), float(slots)
    if ranks == 1:
        return float(picked), float(picked + 1)
    q = (picked + 0.5) / (slots * ranks)
    counts = [_binomial(slots, q, count) for count in range(slots + 1)]
    everything = [_binomial(slots * ranks, q, total) for total in (picked, picked + 1)]
    least = math.ceil(picked / ranks)
    means = [float(least), float(least)]
    for largest in range(least, slots):
        within = _probabilities_of_sum(counts[: largest + 1], ranks, picked)
        more = [1.0 - part / whole for part, whole in zip(within, everything, strict=True)]
        means = [mean + excess for mean, excess in zip(means, more, strict=True)]
        if max(more) < _NEGLIGIBLE:
            break
    return means[0], means[1]


def _binomial(trials: int, q: float, successes: int) -> float:
    log_ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(log_ways + successes * math.log(q) + (trials - successes) * math.log1p(-q))


def _probabilities_of_sum(counts: list[float], ranks: int, total: int) -> tuple[float, float]:
    """Probability that ``ranks`` independent counts, each with these odds, sum to ``total``, and to one more.

    Halves are convolved with negligible tails dropped; of the last product only two terms are needed.
    """
    powers: dict[int, tuple[int, list[float]]] = {1: _without_tails(0, counts)}

    def power(num: int) -> tuple[int, list[float]]:
        if num not in powers:
            powers[num] = _convolve(power(num // 2), power(num - num // 2))
        return powers[num]

    first_offset, first = power(ranks // 2)
    second_offset, second = power(ranks - ranks // 2)
    term = total - first_offset - second_offset
    backwards = second[::-1]
    return _product_term(first, backwards, term), _product_term(first, backwards, term + 1)


def _convolve(first: tuple[int, list[float]], second: tuple[int, list[float]]) -> tuple[int, list[float]]:
    backwards = second[1][::-1]
    num_terms = len(first[1]) + len(backwards) - 1
    product = [_product_term(first[1], backwards, term) for term in range(num_terms)]
    return _without_tails(first[0] + second[0], product)


def _product_term(first: list[float], second_backwards: list[float], term: int) -> float:
    """Coefficient ``term`` of a product of two polynomials, the second given from its highest power down."""
    skipped = len(second_backwards) - 1 - term
    if skipped >= 0:
        return float(sum(map(operator.mul, first, second_backwards[skipped:])))
    return float(sum(map(operator.mul, first[-skipped:], second_backwards)))


def _without_tails(offset: int, values: list[float]) -> tuple[int, list[float]]:
    kept = [index for index, value in enumerate(values) if value > _NEGLIGIBLE]
    return offset + kept[0], values[kept[0] : kept[-1] + 1]


def _check_skew(skew: float) -> None:
    if not isinstance(skew, (int, float)) or isinstance(skew, bool) or not 0 <= skew <= MAX_SKEW:
        raise UserError(f"skew={skew!r}; a number from 0 (uniform) to {MAX_SKEW:g} is accepted")
