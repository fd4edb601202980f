"""How many experts a step reads: the routed experts' weights are the only ones whose bytes depend on the
tokens.

A row picks ``top_k`` different experts. Under uniform routing each expert is picked with probability
``top_k / num_experts``; with ``skew`` the probabilities follow a Zipf law, ``rank ** -skew``, cut at one.
Rows are taken as independent. Which experts are popular has nothing to do with which rank holds them.

Real text is more concentrated than uniform: 24 rows touched 230 of 896 experts where uniform gives 314
(https://github.com/xiaguan/kern-k3-pp-prefill, notes/d-mlp.md, GB300, 2026-10).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from k3sim.errors import UserError

MAX_SKEW = 4.0

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
    below = min(math.floor(distinct + 1e-9), num_experts)
    low = _busiest(num_experts // ep, ep, below)
    if distinct - below < 1e-9:
        return low
    high = _busiest(num_experts // ep, ep, below + 1)
    return low + (distinct - below) * (high - low)


@lru_cache(maxsize=2048)
def _busiest(slots: int, ranks: int, picked: int) -> float:
    """Mean largest count when ``picked`` of ``ranks * slots`` experts are drawn without replacement.

    Counts of independent Binomial(slots, q) ranks, given their sum, follow the same law for any q; q =
    picked / all puts the weight of the sum where it is wanted.
    """
    if picked == 0 or ranks == 1:
        return float(picked)
    if picked == slots * ranks:
        return float(slots)
    q = picked / (slots * ranks)
    counts = [_binomial(slots, q, count) for count in range(slots + 1)]
    everything = _binomial(slots * ranks, q, picked)
    least = math.ceil(picked / ranks)
    mean = float(least)
    for largest in range(least, min(slots, picked)):
        more = 1.0 - _probability_of_sum(counts[: largest + 1], ranks, picked) / everything
        mean += more
        if more < _NEGLIGIBLE:
            break
    return mean


def _binomial(trials: int, q: float, successes: int) -> float:
    log_ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(log_ways + successes * math.log(q) + (trials - successes) * math.log1p(-q))


def _probability_of_sum(counts: list[float], ranks: int, total: int) -> float:
    """Probability that ``ranks`` independent counts, each with these probabilities, sum to ``total``.

    Halves are convolved with negligible tails dropped; of the last product only one term is needed.
    """
    powers: dict[int, tuple[int, list[float]]] = {1: _without_tails(0, counts)}

    def power(num: int) -> tuple[int, list[float]]:
        if num not in powers:
            powers[num] = _convolve(power(num // 2), power(num - num // 2))
        return powers[num]

    first_offset, first = power(ranks // 2)
    second_offset, second = power(ranks - ranks // 2)
    last = total - first_offset - second_offset
    return math.fsum(
        value * second[last - index] for index, value in enumerate(first) if 0 <= last - index < len(second)
    )


def _convolve(first: tuple[int, list[float]], second: tuple[int, list[float]]) -> tuple[int, list[float]]:
    product = [0.0] * (len(first[1]) + len(second[1]) - 1)
    for index, value in enumerate(first[1]):
        for other, factor in enumerate(second[1], index):
            product[other] += value * factor
    return _without_tails(first[0] + second[0], product)


def _without_tails(offset: int, values: list[float]) -> tuple[int, list[float]]:
    kept = [index for index, value in enumerate(values) if value > _NEGLIGIBLE]
    return offset + kept[0], values[kept[0] : kept[-1] + 1]


def _check_skew(skew: float) -> None:
    if not isinstance(skew, (int, float)) or isinstance(skew, bool) or not 0 <= skew <= MAX_SKEW:
        raise UserError(f"skew={skew!r}; a number from 0 (uniform) to {MAX_SKEW:g} is accepted")
