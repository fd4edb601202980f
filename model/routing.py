"""How many experts a step reads: of all weights, only the routed experts' bytes depend on the tokens.

A row picks ``top_k`` different experts, each with a probability; rows are taken as independent. Which experts are
popular has nothing to do with which rank holds them. So routing belongs to the workload, not to the model:

| Routing | Probability of an expert | Where it is so |
| --- | --- | --- |
| ``uniform`` | the same for all: ``top_k / num_experts`` | random tokens, which benchmarks run |
| ``text`` | Zipf: ``rank ** -0.784``, cut at one | real text |
| a number | not used: so many different experts are read | a workload whose experts were counted |
| a file of counts | as often as it was counted, cut at one | a recorded distribution of experts |

k3opt (GB200, random tokens, 2026-09) counts 16.0, 31.7, 62.3 and 120.3 different experts for 1, 2, 4 and 8 rows, which
is uniform. Real text is more concentrated: 24 rows touched 230 of 896, 35.4 on the busiest of 8 ranks
(https://github.com/xiaguan/kern-k3-pp-prefill, notes/d-mlp.md, GB300, 2026-10-10), where uniform gives 315. An exponent
of 0.784 reproduces both; at 4 rows it gives 54, at 8 rows 98. Uniform is what is taken unless something else is
stated: published steps are measured so, and it reads the most bytes, so that real text is not slower.
"""

from __future__ import annotations

import math
import operator
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from k3sim.errors import UserError

TEXT_EXPONENT = 0.784
MAX_COUNTS_BYTES = 16 << 20

_PLACEMENTS = 200  # of experts on ranks, drawn for a routing with popular ones
_NEGLIGIBLE = 1e-8  # probability; the result is good to about 1e-6 experts


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the tokens of a workload choose experts; ``read_routing`` makes one from what a user writes.

    ``counts``: how often each expert was picked, in any order; empty for uniform. ``distinct``: different experts that
    a step reads in each layer, where that was counted.
    """

    name: str
    counts: tuple[float, ...] = ()
    distinct: float | None = None

    def probabilities(self, num_experts: int, top_k: int) -> tuple[float, ...]:
        """Probability that one row picks each expert; they sum to ``top_k``, none exceeds one.

        Raises UserError for a number of experts that the counts do not have.
        """
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k={top_k} of {num_experts} experts; 1 to {num_experts} is accepted")
        if self.name == "text":
            return _inclusion(tuple(rank**-TEXT_EXPONENT for rank in range(1, num_experts + 1)), top_k)
        if not self.counts:
            return (top_k / num_experts,) * num_experts
        if len(self.counts) != num_experts:
            raise UserError(f"routing {self.name} has {len(self.counts)} counts; the model has {num_experts} experts")
        picked = sum(1 for one in self.counts if one)
        if picked < top_k:
            raise UserError(f"routing {self.name} has picks of {picked} experts; a row picks {top_k}")
        return _inclusion(self.counts, top_k)

    def distinct_experts(self, num_experts: int, top_k: int, num_rows: int) -> float:
        """Mean number of different experts that ``num_rows`` rows read in one layer.

        Raises UserError for a stated number that so many rows cannot pick, and as ``probabilities``.
        """
        if self.distinct is not None:
            most = min(num_experts, num_rows * top_k)
            if not top_k <= self.distinct <= most:
                rows = "1 row picks" if num_rows == 1 else f"{num_rows} rows pick"
                raise UserError(f"routing is {self.name} distinct experts; {rows} {top_k} to {most}")
            return self.distinct
        return math.fsum(1.0 - (1.0 - one) ** num_rows for one in self.probabilities(num_experts, top_k))

    def busiest_rank_experts(self, num_experts: int, top_k: int, num_rows: int, ep: int) -> float:
        """Mean number of different experts on the busiest of ``ep`` ranks that share the experts evenly.

        The picked experts fall on ranks at random, so that their counts follow a multivariate hypergeometric
        law and the mean of the largest is computed exactly for a given number of different experts; between
        whole numbers it is interpolated at the mean number. For one row, where the number is ``top_k``, the
        result is exact. Raises UserError where ``ep`` does not divide the experts, and as ``distinct_experts``.
        """
        if ep < 1 or num_experts % ep:
            raise UserError(f"ep={ep} does not divide {num_experts} experts; give a divisor")
        distinct = self.distinct_experts(num_experts, top_k, num_rows)
        # Rounding errors of the sum of probabilities must not turn a whole number into the one below.
        below = math.floor(distinct + 1e-9)
        low, high = _busiest(num_experts // ep, ep, min(below, num_experts))
        return low + max(0.0, distinct - below) * (high - low)

    def busiest_rank_tokens(self, num_experts: int, top_k: int, num_rows: int, ep: int) -> float:
        """Mean number of (row, expert) pairs on the busiest of ``ep`` ranks that share the experts evenly.

        Rows choose independently, and experts lie on ranks at random: a rank's pairs vary by the rows' choices and by
        which popular experts it has. Exact for one row; otherwise up to 6 % below a simulation row by row, at eight
        rows and more within 3 %.
        Raises UserError as ``busiest_rank_experts``.
        """
        experts = self.busiest_rank_experts(num_experts, top_k, num_rows, ep)
        if ep == 1 or num_rows == 1:
            return experts if ep > 1 else float(num_rows * top_k)
        chances = self.probabilities(num_experts, top_k)
        most = float(num_rows * min(top_k, num_experts // ep))
        return min(most, max(experts, _busiest_tokens(chances, num_rows, ep)))


@lru_cache(maxsize=256)
def _busiest_tokens(chances: tuple[float, ...], num_rows: int, ep: int) -> float:
    """Mean over placements of the largest sum of a rank's experts' tokens, each number taken as normal."""
    num_experts, top_k = len(chances), math.fsum(chances)
    own = math.fsum(one * (1.0 - one) for one in chances) / ep * (1.0 - 1.0 / ep)
    spread = math.sqrt(num_rows * own * ep / (ep - 1))  # the numbers sum to the same always
    if max(chances) - min(chances) < _NEGLIGIBLE:
        return num_rows * top_k / ep + expected_maximum_of_normals(ep) * spread
    draws, total, order = random.Random(num_experts), 0.0, list(chances)
    for _ in range(_PLACEMENTS):
        draws.shuffle(order)
        each = num_experts // ep
        loads = (math.fsum(order[rank * each : (rank + 1) * each]) for rank in range(ep))
        total += max(num_rows * load + draws.gauss(0.0, spread) for load in loads)
    return total / _PLACEMENTS


@lru_cache(maxsize=256)
def expected_maximum_of_normals(count: int) -> float:
    """Expected maximum of ``count`` independent standard normals, by numerical integration."""
    if count <= 1:
        return 0.0
    step, total, x = 0.01, 0.0, -8.0
    while x < 8.0:
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        below = 0.5 * (1.0 + math.erf(x / math.sqrt(2)))
        total += x * count * density * below ** (count - 1) * step
        x += step
    return total


UNIFORM, TEXT = Routing(name="uniform"), Routing(name="text")


def read_routing(text: str) -> Routing:
    """``uniform``, ``text``, a number of different experts, or the path of a JSON file of counts.

    The file holds ``{"expert_counts": [...]}``: a count for each expert, or a list of such lists, one a layer, whose
    counts are added up rank by rank of popularity, as which expert is the popular one differs between layers.

    Raises UserError for anything else.
    """
    for named in (UNIFORM, TEXT):
        if text == named.name:
            return named
    try:
        distinct = float(text)
    except ValueError:
        return _read_counts(text)
    if not 1 <= distinct < math.inf:
        raise UserError(f"routing is {text} distinct experts; accepted: 1 or more")
    return Routing(name=text, distinct=distinct)


def _read_counts(path: str) -> Routing:
    from k3sim.model.documents.document import Accepted, read_json

    if not Path(path).suffix and not Path(path).exists():
        raise UserError(
            f"unknown routing {path!r}; accepted: uniform, text, a number of distinct experts, a file of counts"
        )
    what = 'a JSON object with "expert_counts": the count of each expert, or a list of such lists, one a layer'
    document = read_json(path, Accepted(what=what, kinds=(), most_bytes=MAX_COUNTS_BYTES))
    found = document.value.get("expert_counts")
    layers = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    for number, layer in enumerate(layers):
        if not _are_counts(layer, layers[0]):
            keys = ("expert_counts", number) if layers is found else ("expert_counts",)
            document.fault(keys, "is no list of counts, one an expert, none negative and not all zero")
    document.settle()
    counts = [math.fsum(ranked) for ranked in zip(*(sorted(layer, reverse=True) for layer in layers), strict=True)]
    return Routing(name=path, counts=tuple(counts))


def _are_counts(layer: object, first: object) -> bool:
    return (
        isinstance(layer, list)
        and isinstance(first, list)
        and len(layer) == len(first) > 0
        and all(isinstance(one, (int, float)) and not isinstance(one, bool) and one >= 0 for one in layer)
        and any(layer)
    )


@lru_cache(maxsize=64)
def _inclusion(weights: tuple[float, ...], top_k: int) -> tuple[float, ...]:
    """Probabilities in proportion to ``weights``; who would exceed one is picked by every row, the rest share."""
    ranked = sorted(weights, reverse=True)
    weight_left = math.fsum(ranked)
    certain = 0
    while certain < top_k and (top_k - certain) * ranked[certain] > weight_left:
        weight_left -= ranked[certain]
        certain += 1
    rest = math.fsum(ranked[certain:])
    share = (top_k - certain) / rest if rest else 0.0
    return (1.0,) * certain + tuple(min(1.0, share * weight) for weight in ranked[certain:])


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
