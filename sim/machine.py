"""A machine as the simulator sees it: hardware primitives of one GPU and of the NVLink domain it stands in.

A profile is a JSON data file (``sim/machines/*.json``, or the user's own) in which every value carries its
unit, kind, source, date and interval. Only primitives are allowed: no duration here belongs to one kernel of
a model, and none comes from an end-to-end decode figure, so a predicted step is a prediction.
``docs/machines.md`` says how a value was chosen where sources conflict.

Files are checked with plain code: loading a profile is on the start-up path of every command.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.sim.skew import expected_maximum_of_normals

SCHEMA_VERSION = 1
KINDS = ("datasheet", "measured", "fitted", "inferred")

#: Points of a curve: (bytes in flight per SM with all SMs active, bytes per second of the whole GPU).
Curve = tuple[tuple[float, float], ...]

_SHIPPED = Path(__file__).parent / "machines"


def _unit(unit: str, *, zero: bool = False) -> dict[str, Any]:
    """Metadata of a profile field: its unit, and whether zero is a value it can have."""
    return {"unit": unit, "zero": zero}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a value comes from and how far it may be off.

    ``low`` and ``high`` bound the value in its own unit; for a curve they are factors on all its points.
    ``date`` is "YYYY-MM" of the source, or None where it states none.
    """

    unit: str
    kind: str  # one of KINDS
    source: str
    date: str | None
    low: float
    high: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware primitives of one GPU and its NVLink domain, in SI units.

    This table is the only list of a profile's fields: name, type, unit, and where zero is allowed. Durations
    may be zero (a what-if without that cost); sizes and rates may not.
    """

    name: str
    title: str
    provenance: Mapping[str, Provenance] = field(hash=False, repr=False)

    # Streaming multiprocessors
    num_sms: int = field(metadata=_unit("SM"))
    sm_clock_hz: float = field(metadata=_unit("Hz"))
    smem_bytes_per_sm: int = field(metadata=_unit("B"))
    max_smem_bytes_per_block: int = field(metadata=_unit("B"))
    threads_per_sm: int = field(metadata=_unit("thread"))

    # HBM: capacity, nominal rate, ceiling that a read-only stream reaches, idle pointer chase, rate against
    # bytes in flight, and the most that one SM draws
    hbm_capacity_bytes: int = field(metadata=_unit("B"))
    hbm_datasheet_bytes_per_s: float = field(metadata=_unit("B/s"))
    hbm_read_bytes_per_s: float = field(metadata=_unit("B/s"))
    hbm_latency_s: float = field(metadata=_unit("s", zero=True))
    hbm_in_flight_curve: Curve = field(metadata=_unit("B/SM, B/s"))
    hbm_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    # What a grid on more than half of the SMs and not on all loses at most: blocks that share a pair of SMs end last
    hbm_uneven_loss: float = field(metadata=_unit("1", zero=True))
    # Bytes moved where as many are written as are read, and what one SM brings into L2 by bulk prefetches
    hbm_copy_bytes_per_s: float = field(metadata=_unit("B/s"))
    prefetch_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))

    # L2: size, size for data that every SM reads, rate to all SMs and to one SM, latency to either partition and
    # under load
    l2_capacity_bytes: int = field(metadata=_unit("B"))
    l2_effective_bytes: int = field(metadata=_unit("B"))
    l2_read_bytes_per_s: float = field(metadata=_unit("B/s"))
    l2_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    # What an SM loads of an input that all others load at the same moment: by whole rows; and as operands of tensor
    # cores lie, in pieces of 64 bytes, with what L2 hands out of them in all
    l2_input_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    l2_fragment_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    l2_fragment_bytes_per_s: float = field(metadata=_unit("B/s"))
    l2_near_latency_s: float = field(metadata=_unit("s", zero=True))
    l2_far_latency_s: float = field(metadata=_unit("s", zero=True))
    l2_loaded_latency_s: float = field(metadata=_unit("s", zero=True))  # while HBM streams at its ceiling
    # Share of HBM's rate from which on an L2 hit queues. Where more is asked for than keeps HBM busy: the share of the
    # queue's time that a hit waits, and the time of a queue that costs nothing
    l2_queueing_utilisation: float = field(metadata=_unit("1"))
    l2_queue_share: float = field(metadata=_unit("1", zero=True))
    l2_free_queue_s: float = field(metadata=_unit("s", zero=True))

    # Launch. Without PDL the first instruction of the next graph node comes completion_flush + launch_latency
    # after the last of its predecessor; a PDL kernel that already waits resumes completion_flush after it.
    launch_latency_s: float = field(metadata=_unit("s", zero=True))
    completion_flush_s: float = field(metadata=_unit("s", zero=True))
    # A PDL kernel's first instruction comes early_launch after the last block of its predecessor has triggered; where
    # its SMs are taken, block_refill after the end of the block that makes room. Of several nodes behind one, each
    # starts fork later than the one before it.
    early_launch_s: float = field(metadata=_unit("s", zero=True))
    block_refill_s: float = field(metadata=_unit("s", zero=True))
    fork_s: float = field(metadata=_unit("s", zero=True))
    # Inside: parameters and constants of every launch; stragglers and stores at the end of every kernel, whose code is
    # fetched or held.
    kernel_entry_s: float = field(metadata=_unit("s", zero=True))
    block_tail_s: float = field(metadata=_unit("s", zero=True))
    held_block_tail_s: float = field(metadata=_unit("s", zero=True))
    block_dispatch_s: float = field(metadata=_unit("s", zero=True))  # for each block of a grid
    # From one instruction of a warp to the next in straight code, which its SM holds, or fetches
    instruction_s: float = field(metadata=_unit("s", zero=True))
    cold_instruction_s: float = field(metadata=_unit("s", zero=True))
    host_launch_s: float = field(metadata=_unit("s", zero=True))  # CPU time of one launch call
    host_graph_launch_s: float = field(metadata=_unit("s", zero=True))  # CPU time of one graph launch call

    # Synchronisation: a sum over one warp; a tree reduction over one block; arrive and wait of a cluster; all blocks of
    # a grid; the last block of a grid, from its arrival to what all others stored; blocks that hand over
    # to another through a counter in L2; fixed cost of a block that uses tensor cores
    warp_sum_s: float = field(metadata=_unit("s", zero=True))
    block_reduction_s: float = field(metadata=_unit("s", zero=True))
    cluster_sync_s: float = field(metadata=_unit("s", zero=True))
    grid_barrier_s: float = field(metadata=_unit("s", zero=True))
    last_block_s: float = field(metadata=_unit("s", zero=True))
    counter_handoff_s: float = field(metadata=_unit("s", zero=True))
    tensor_core_setup_s: float = field(metadata=_unit("s", zero=True))
    # From one mma.sync of a warp to the next that adds to its sums
    product_chain_s: float = field(metadata=_unit("s", zero=True))

    # Arithmetic, dense; zero where the chip lacks the format
    fp32_fma_per_clock_per_sm: float = field(metadata=_unit("FMA/clock/SM"))
    bf16_flops: float = field(metadata=_unit("FLOP/s"))
    fp8_flops: float = field(metadata=_unit("FLOP/s", zero=True))
    fp4_flops: float = field(metadata=_unit("FLOP/s", zero=True))
    # At few rows the rate at which FP4 weights enter the tensor core (where there is no FP4: are decoded) bounds.
    fp4_weights_per_clock_per_sm: float = field(metadata=_unit("weight/clock/SM"))

    # NVLink: stores leave at the egress rate, arrive one_way later, and a polling peer acts on them a further
    # visibility; a system-scope fence orders stores before a flag
    nvlink_domain_gpus: int = field(metadata=_unit("GPU"))
    nvlink_egress_bytes_per_s: float = field(metadata=_unit("B/s"))
    nvlink_ingress_bytes_per_s: float = field(metadata=_unit("B/s"))
    nvlink_one_way_s: float = field(metadata=_unit("s", zero=True))
    nvlink_visibility_s: float = field(metadata=_unit("s", zero=True))
    system_fence_s: float = field(metadata=_unit("s", zero=True))
    nvlink_multicast: bool = field(metadata=_unit("bool"))
    nvlink_in_switch_reduction: bool = field(metadata=_unit("bool"))
    # A push that is looped back to slots of the own memory: until a poller has seen one slot, and for each further one
    loopback_visibility_s: float = field(metadata=_unit("s", zero=True))
    loopback_slot_s: float = field(metadata=_unit("s", zero=True))

    # Standard deviation between ranks of a kernel's duration, relative to that duration
    rank_skew_relative_sd: float = field(metadata=_unit("1", zero=True))

    # No value of a profile: what each slot beyond the first adds to the visibility of a push (``looped_back``).
    slot_visibility_s: float = 0.0

    @property
    def l2_latency_s(self) -> float:
        """Mean of near and far: addresses are hashed over both partitions, so reads meet both equally."""
        return (self.l2_near_latency_s + self.l2_far_latency_s) / 2

    def even_share(self, num_blocks: int) -> float:
        """Share of the read rate that a grid with one block an SM reaches, blocks having equal parts of the bytes.

        Blocks go to one SM of each pair first. Where some then have a pair to themselves and others have not, those
        read faster and end sooner: most is lost where each is half of the blocks, nothing where all are alike.
        """
        if not self.num_sms / 2 < num_blocks < self.num_sms:
            return 1.0
        paired = (2 * num_blocks - self.num_sms) / num_blocks
        return 1.0 - self.hbm_uneven_loss * 4 * paired * (1 - paired)

    def hbm_rate_for(self, bytes_in_flight: float) -> float:
        """HBM read rate in bytes/s that ``bytes_in_flight`` over the whole GPU sustain.

        Straight lines in log-log between the curve's points, proportional below the first, constant above the
        last, and never above ``hbm_read_bytes_per_s``.
        """
        assert bytes_in_flight >= 0, bytes_in_flight
        per_sm = bytes_in_flight / self.num_sms
        curve = self.hbm_in_flight_curve
        above = bisect_right(curve, per_sm, key=lambda point: point[0])
        if above == 0:
            rate = curve[0][1] * per_sm / curve[0][0]
        elif above == len(curve):
            rate = curve[-1][1]
        else:
            (x0, y0), (x1, y1) = curve[above - 1], curve[above]
            rate = y0 * (y1 / y0) ** (math.log(per_sm / x0) / math.log(x1 / x0))
        return min(rate, self.hbm_read_bytes_per_s)


_FIELDS: dict[str, Field[Any]] = {f.name: f for f in fields(Machine) if f.metadata}


def machine_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def profile_path(name: str) -> Path:
    """File of the shipped profile of that name."""
    return _SHIPPED / f"{name}.json"


def load_machine(name_or_path: str) -> Machine:
    """The shipped profile of that name (in any case), or the profile in a file whose path ends in ``.json``.

    Raises:
        UserError: no such name, or a file that is unreadable, malformed, incomplete, or holds a value outside
            what its field accepts.
    """
    if name_or_path.lower().endswith(".json"):
        return _read(Path(name_or_path).expanduser())
    names = machine_names()
    name = name_or_path.lower()
    if name not in names:
        from difflib import get_close_matches

        near = get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"unknown machine {name_or_path!r}: {hint}Shipped machines: {', '.join(names)}; "
            "or give the path of a profile that ends in .json"
        )
    return _read(profile_path(name))


def of_card(machine: Machine, read_bytes_per_s: float) -> Machine:
    """``machine`` whose HBM reads at most ``read_bytes_per_s``: cards of one kind differ by some 2 %.

    A time measured on a card is compared with a prediction for that card, by the read rate that its run states. The
    curve of bytes in flight ends at that rate and is the same below; copies are slower by the same factor.
    """
    before = machine.hbm_read_bytes_per_s
    return replace(
        machine,
        hbm_read_bytes_per_s=read_bytes_per_s,
        hbm_copy_bytes_per_s=machine.hbm_copy_bytes_per_s * read_bytes_per_s / before,
        hbm_in_flight_curve=tuple(
            (at, read_bytes_per_s if rate >= before else min(rate, read_bytes_per_s))
            for at, rate in machine.hbm_in_flight_curve
        ),
    )


def looped_back(machine: Machine) -> Machine:
    """``machine`` whose one GPU stands for all ranks: what it pushes lands in slots of its own memory.

    Stores cross L2 and other SMs poll all slots there, one store and one load a slot and thread; nobody is late.
    """
    return replace(
        machine,
        nvlink_domain_gpus=1024,
        nvlink_multicast=False,
        nvlink_one_way_s=0.0,
        nvlink_visibility_s=machine.loopback_visibility_s,
        slot_visibility_s=machine.loopback_slot_s,
        nvlink_egress_bytes_per_s=machine.l2_read_bytes_per_s,
        nvlink_ingress_bytes_per_s=machine.l2_read_bytes_per_s,
        rank_skew_relative_sd=0.0,
    )


def standing_in(machine: Machine, num_gpus: int, num_ranks: int) -> Machine:
    """``machine`` whose ``num_gpus`` GPUs stand for ``num_ranks`` ranks, each for equally many (kernels/symmetric.py).

    A GPU sends to every rank as before, but only (W - 1) T / W of its T pushes enter the link, where T - 1 would: a
    port is so much faster. What lands in its own memory is seen before what crosses, so an exchange takes as long as
    the link. W GPUs, not T, are late by chance. Stores are unicast.
    """
    assert 1 < num_gpus <= num_ranks and num_ranks % num_gpus == 0, (num_gpus, num_ranks)
    faster = (num_ranks - 1) / (num_ranks - num_ranks // num_gpus)
    late = expected_maximum_of_normals(num_gpus) / expected_maximum_of_normals(num_ranks)
    return replace(
        machine,
        nvlink_domain_gpus=max(num_ranks, machine.nvlink_domain_gpus),
        nvlink_multicast=False,
        nvlink_egress_bytes_per_s=machine.nvlink_egress_bytes_per_s * faster,
        nvlink_ingress_bytes_per_s=machine.nvlink_ingress_bytes_per_s * faster,
        rank_skew_relative_sd=machine.rank_skew_relative_sd * late,
    )


def describe(machine: Machine) -> list[dict[str, object]]:
    """One row a field, in the order of the profile: field, value, unit, kind, low, high, source.

    ``low`` and ``high`` of a curve are factors on its points.
    """
    return [
        {
            "field": name,
            "value": getattr(machine, name),
            "unit": origin.unit,
            "kind": origin.kind,
            "low": origin.low,
            "high": origin.high,
            "source": origin.source,
        }
        for name, origin in machine.provenance.items()
    ]


def _read(path: Path) -> Machine:
    """Parse and check one profile; a refusal names file, field, what stood there and what is accepted."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UserError(f"cannot read machine profile {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"machine profile {path} is not valid JSON: {error}") from None
    return machine_of(profile, f"machine profile {path}")


def machine_of(profile: object, where: str) -> Machine:
    """The machine of a profile document; ``where`` begins the line of a refusal, which is a UserError."""
    try:
        return _machine(profile)
    except _Refusal as refusal:
        raise UserError(f"{where}: {refusal}") from None


class _Refusal(Exception):
    """What is wrong inside a profile; ``machine_of`` adds the file and turns it into a UserError."""


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice in one object")
        result[key] = value
    return result


def _machine(profile: object) -> Machine:
    top = _keys("profile", profile, required=("schema_version", "name", "title", "values"))
    if top["schema_version"] != SCHEMA_VERSION or isinstance(top["schema_version"], bool):
        raise _Refusal(f"schema_version is {top['schema_version']!r}, accepted is {SCHEMA_VERSION}")
    entries = _keys("values", top["values"], required=tuple(_FIELDS))
    values: dict[str, Any] = {}
    provenance: dict[str, Provenance] = {}
    for name in _FIELDS:
        values[name], provenance[name] = _entry(name, entries[name])
    machine = Machine(
        name=_text("name", top["name"]), title=_text("title", top["title"]), provenance=provenance, **values
    )
    _check_consistency(machine)
    return machine


def _keys(where: str, given: object, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _Refusal(f"{where} is {given!r:.60}, accepted is an object with {', '.join(required)}")
    missing = [key for key in required if key not in given]
    if missing:
        raise _Refusal(f"{where} lacks {', '.join(missing)}; all of these are required")
    unknown = [key for key in given if key not in required and key not in optional]
    if unknown:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], [*required, *optional], n=1)
        hint = f"did you mean {near[0]}?" if near else f"accepted are {', '.join([*required, *optional])}"
        raise _Refusal(f"{where} has unknown {', '.join(unknown)}; {hint}")
    return given


def _text(where: str, given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise _Refusal(f"{where} is {given!r:.60}, accepted is a text that is not empty")
    return given


def _entry(name: str, given: object) -> tuple[Any, Provenance]:
    """Value and provenance of one field."""
    spec = _FIELDS[name]
    curve = spec.type == "Curve"
    bounds = ("interval",) if curve else ("low", "high")
    entry = _keys(
        name, given, required=("value", "unit", "kind", "source", "date", *bounds), optional=("note",)
    )
    if entry["unit"] != spec.metadata["unit"]:
        raise _Refusal(f"{name} has unit {entry['unit']!r}, accepted is {spec.metadata['unit']!r}")
    if entry["kind"] not in KINDS:
        raise _Refusal(f"{name} has kind {entry['kind']!r}, accepted are {', '.join(KINDS)}")
    if curve:
        value: Any = _curve(name, entry["value"])
        interval = entry["interval"]
        if not isinstance(interval, list) or len(interval) != 2:
            raise _Refusal(f"{name} interval is {interval!r:.60}, accepted is [low factor, high factor]")
        low, high = (_number(f"{name} interval", bound, zero=False) for bound in interval)
        ordered = low <= 1 <= high
    else:
        value, low, high = (_scalar(f"{name} {part}", entry[part], spec) for part in ("value", "low", "high"))
        ordered = low <= value <= high
    if not ordered:
        middle = 1 if curve else value
        raise _Refusal(f"{name} has low {low}, value {middle}, high {high}; accepted is low <= value <= high")
    return value, Provenance(
        unit=entry["unit"],
        kind=entry["kind"],
        source=_text(f"{name} source", entry["source"]),
        date=_date(name, entry["date"], required=entry["kind"] == "measured"),
        low=low,
        high=high,
        note=_text(f"{name} note", entry["note"]) if "note" in entry else "",
    )


def _scalar(where: str, given: object, spec: Field[Any]) -> float | int | bool:
    if spec.type == "bool":
        if not isinstance(given, bool):
            raise _Refusal(f"{where} is {given!r:.60}, accepted is true or false")
        return given
    number = _number(where, given, zero=spec.metadata["zero"])
    # Bounds wide enough for any machine, so that arithmetic stays finite: a unit slip shows here, not as overflow.
    time = spec.metadata["unit"] in ("s", "s/B")
    most = 1.0 if time else 1e21
    least = 0.0 if number == 0 else 1e-15 if time else 1e-6
    if not least <= number <= most:
        raise _Refusal(f"{where} is {given!r}, accepted is {least:g} to {most:g} {spec.metadata['unit']}")
    if spec.type == "int":
        if number != int(number):
            raise _Refusal(f"{where} is {given!r}, accepted is a whole number")
        return int(number)
    return number


def _number(where: str, given: object, *, zero: bool) -> float:
    accepted = "a finite number that is not negative" if zero else "a finite number above zero"
    # bool is an int to Python, and integers beyond the range of a float cannot be computed with
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= 1e300:
        raise _Refusal(f"{where} is {given!r:.60}, accepted is {accepted}")
    if given < 0 or (given == 0 and not zero):
        raise _Refusal(f"{where} is {given!r}, accepted is {accepted}")
    return float(given)


def _curve(name: str, given: object) -> Curve:
    if not isinstance(given, list) or not given:
        raise _Refusal(
            f"{name} value is {given!r:.60}, accepted is a list of [bytes in flight per SM, bytes/s]"
        )
    points = []
    for index, point in enumerate(given):
        where = f"{name} point {index}"
        if not isinstance(point, list) or len(point) != 2:
            raise _Refusal(f"{where} is {point!r:.60}, accepted is [bytes in flight per SM, bytes/s]")
        points.append((_number(where, point[0], zero=False), _number(where, point[1], zero=False)))
    for index in range(1, len(points)):
        if points[index][0] <= points[index - 1][0] or points[index][1] < points[index - 1][1]:
            raise _Refusal(
                f"{name} point {index} is {list(points[index])} after {list(points[index - 1])}; "
                "accepted are bytes in flight that increase and rates that do not fall"
            )
    return tuple(points)


def _date(name: str, given: object, *, required: bool) -> str | None:
    if given is None and not required:
        return None
    if isinstance(given, str) and len(given) == 7 and given[4] == "-" and given.isascii():
        year, month = given[:4], given[5:]
        if year.isdigit() and month.isdigit() and 1 <= int(month) <= 12:
            return given
    accepted = '"YYYY-MM"' if required else '"YYYY-MM" or null'
    raise _Refusal(f"{name} date is {given!r:.60}, accepted is {accepted}")


def _check_consistency(machine: Machine) -> None:
    """Refuse profiles whose values contradict each other."""
    for smaller, larger in (
        ("max_smem_bytes_per_block", "smem_bytes_per_sm"),
        ("hbm_read_bytes_per_s", "hbm_datasheet_bytes_per_s"),
        ("hbm_copy_bytes_per_s", "hbm_read_bytes_per_s"),
        ("l2_effective_bytes", "l2_capacity_bytes"),
        ("l2_near_latency_s", "l2_far_latency_s"),
    ):
        low, high = getattr(machine, smaller), getattr(machine, larger)
        if low > high:
            raise _Refusal(f"{smaller} is {low}, accepted is at most {larger}, which is {high}")
    if machine.hbm_uneven_loss >= 1:
        raise _Refusal(f"hbm_uneven_loss is {machine.hbm_uneven_loss}, accepted is a share below 1")
    if not 0 < machine.l2_queueing_utilisation < 1:
        raise _Refusal(
            f"l2_queueing_utilisation is {machine.l2_queueing_utilisation}, accepted is a share between 0 and 1"
        )
    top_rate = machine.hbm_in_flight_curve[-1][1]
    if top_rate > machine.hbm_read_bytes_per_s:
        raise _Refusal(
            f"hbm_in_flight_curve reaches {top_rate} B/s, accepted is at most hbm_read_bytes_per_s, "
            f"which is {machine.hbm_read_bytes_per_s}"
        )
