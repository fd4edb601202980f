"""Options, from what a user writes: the one table of them, commands and sides of comparisons.

The fields of ``Options`` are the one table of options. The command line, the Python interface, the sides of
``k3sim compare``, the commands in files of published results and claims, and the reproducing command of a report all
go by it, so that an option is added in one place and read in one way. ``question`` checks them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from k3sim.errors import UserError
from k3sim.model.routing import UNIFORM

#: Options of the published commands that no version of the workload has yet; scenario files may use them before.
NOT_YET = ("drafted-tokens", "accepted-tokens")


def _option(default: Any, kind: type, help_line: str, word: str = "") -> Any:
    """A field of ``Options``; ``word`` is its name on the command line where that is another."""
    return field(default=default, metadata={"kind": kind, "help": help_line, "word": word})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options by the names they have on every command; the defaults are those of ``k3sim timeline``."""

    machine: str = _option("gb300", str, "Machine profile: a name (see 'k3sim machines') or a JSON file.")
    tp: int = _option(16, int, "Tensor parallel: GPUs of a replica, 1 to 32 a group of attention, a power of two.")
    ep: int = _option(1, int, "Expert parallel: groups of a replica's GPUs that own whole experts.")
    dp: int = _option(1, int, "Data-parallel replicas of --tp GPUs each, which share the concurrency and nothing else.")
    dcp: int = _option(1, int, "Decode context parallel: ranks of an attention group that share the KV cache.")
    attn_dp: int = _option(
        1, int, "Attention groups inside the --tp GPUs, each with its own requests; experts are shared by all."
    )
    enable_dp_attention: bool = _option(False, bool, "SGLang's older spelling: --dp counts attention groups in --tp.")
    pp: int = _option(1, int, "Pipeline parallel: stages of --tp GPUs each.")
    flags: str = _option(
        "sglang", str, "Whose meaning --tp, --dp and --ep have: sglang, or vllm, where --dp ranks share the experts."
    )
    expert_exchange: str = _option(
        "gather", str, "How tokens of attention groups reach the experts: gather, or dispatch (all-to-all)."
    )
    expert_imbalance: float | None = _option(
        None, float, "Tokens of the busiest rank's experts over the mean; by default as the routing gives."
    )
    shard_all: bool = _option(False, bool, "Divide router and latent projections over the ranks too.")
    path: str = _option("fused", str, "Execution path: stock, fused or megakernel (see 'k3sim paths').")
    kernels: str = _option("public", str, "Kernels of the path: public, or the project's own.")
    engine: str = _option("vllm", str, "Whose kernels the stock path runs, where engines differ: vllm or sglang.")
    with_switches: tuple[str, ...] = _option(
        (), tuple, "Switch of the fused path, or part of one, to have, starting from none (repeatable).", "with"
    )
    without: tuple[str, ...] = _option(
        (), tuple, "Switch of the fused path, or part of one, to leave out (repeatable)."
    )
    concurrency: int = _option(1, int, "Requests decoded together, over all replicas.")
    context: int = _option(8192, int, "Cached tokens of each request.")
    kv_dtype: str = _option("fp8", str, "KV cache type: fp8 or bf16.")
    seed: int = _option(0, int, "Seed of the skew between ranks.")
    skew: bool | None = _option(
        None, bool, "Simulate all ranks with sampled skew, or none; by default one rank with the expected skew."
    )
    routing: str = _option(
        UNIFORM.name, str, "How tokens choose experts: uniform, text, distinct experts a layer, or a file of counts."
    )
    pad_experts: bool | None = _option(None, bool, "Pad expert slices to 128; by default as the path does.")
    all_reduce: str = _option(
        "library", str, "All-reduces of the stock path: as libraries choose, or one-shot, two-shot, in-switch, ring."
    )
    model: str | None = _option(None, str, "Another model: a name of k3sim models, a config.json, or its folder.")
    weights: tuple[str, ...] = _option(
        (), tuple, "Weights in another format: TARGET=FORMAT, such as attention=fp8_block (repeatable)."
    )
    state_dtype: str = _option("", str, "Type of KDA's recurrent state: fp32 or bf16; by default the model's.")
    ignored_fields: tuple[str, ...] = _option(
        (), tuple, "Go on without a field of the config that is not known (repeatable).", word="ignore-field"
    )
    speculation: str = _option("", str, "Draft model that proposes tokens: dspark.")
    draft_length: str = _option("", str, "Tokens drafted a step: 0 to 15, or best; by default 7.")
    acceptance: str = _option(
        "", str, "Tokens a step (3.8), share accepted by position (0.9,0.7), geometric:P, or coding, mt-bench, qa."
    )
    memory: float | None = _option(None, float, "Memory of one GPU in GB; by default the machine profile's.")
    ignore_memory: bool = _option(False, bool, "Go on, with a warning, where memory does not suffice.")

    def command(self, verb: str = "timeline") -> str:
        """The command line that asks the same question; ``read_command`` reads it back."""
        words = ["k3sim", verb]
        for word, option in OPTIONS.items():
            value = getattr(self, option.name)
            if value == option.default:
                continue
            if option.kind is bool:
                words.append(f"--{word}" if value else f"--no-{word}")
            else:
                for one in value if option.kind is tuple else (value,):
                    words += [f"--{word}", str(one)]
        return shlex.join(words)

    def side(self) -> str:
        """``key=value,...``: what one side of a comparison changes of the defaults; ``read_side`` reads it back."""
        items = []
        for word, option in OPTIONS.items():
            value = getattr(self, option.name)
            if value != option.default:
                text = "+".join(value) if option.kind is tuple else _YES_NO[value] if option.kind is bool else value
                items.append(f"{word}={text}")
        return ",".join(items)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One field of ``Options`` as users write it. ``kind``: str, int, float, bool, or tuple for one that repeats."""

    name: str
    kind: type
    default: Any
    help: str


#: The options by their words on the command line, which are also the keys of a side.
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        one.metadata["word"] or one.name.replace("_", "-"): Option(
            name=one.name, kind=one.metadata["kind"], default=one.default, help=one.metadata["help"]
        )
        for one in fields(Options)
    }
)
_YES_NO = {True: "yes", False: "no"}


def has_option(word: str) -> bool:
    """Whether this version can honour an option of published commands (``NOT_YET``)."""
    return word in OPTIONS


def read_command(command: str, *, not_yet: bool = False) -> Options:
    """The options of ``k3sim timeline ...``, defaults filled in.

    ``not_yet``: leave out the options of ``NOT_YET`` that this version lacks instead of refusing them. Raises UserError
    for another command, an option that is unknown or given twice (switches may repeat), and a value that is not of its
    kind.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"command {command!r} cannot be read: {error}") from None
    if words[:2] != ["k3sim", "timeline"]:
        raise UserError(f"command {command!r}; accepted: one that begins with 'k3sim timeline'")
    given: dict[str, Any] = {}
    rest = iter(words[2:])
    for written in rest:
        word, has_value, value = written.removeprefix("--").partition("=")
        negated = word.removeprefix("no-")
        option = OPTIONS.get(word) or (_boolean(negated) if negated != word else None)
        if not written.startswith("--") or (option is None and word not in NOT_YET):
            accepted = ", ".join(f"--{one}" for one in OPTIONS)
            raise UserError(f"unknown option {written!r} in {command!r}; accepted: {accepted}")
        name = option.name if option else word
        if name in given and (option is None or option.kind is not tuple):
            raise UserError(f"option {written} stands twice in {command!r}; accepted: once")
        if option is not None and option.kind is bool:
            given[name] = option is OPTIONS.get(word)
            continue
        found = value if has_value else next(rest, None)
        if found is None:
            raise UserError(f"option {written} of {command!r} has no value; accepted: one after each option")
        if option is None:
            if not not_yet:
                raise UserError(f"option {written} of {command!r} is not there yet: no speculation is modelled")
            given[name] = _typed(f"--{word}", found, int)
        elif option.kind is tuple:
            given[name] = (*given.get(name, ()), found)
        else:
            given[name] = _typed(f"--{word}", found, option.kind)
    return Options(**{name: value for name, value in given.items() if name not in NOT_YET})


def read_side(text: str, base: Options) -> Options:
    """``key=value,key=value`` on top of ``base``, for one side of a comparison.

    Keys are the words of the options; ``with`` and ``without`` take names joined by ``+``, and what is on or off is
    ``yes`` or ``no``. Raises UserError for an unknown key, one that stands twice, and a value that is not of its kind.
    """
    given: dict[str, Any] = {}
    accepted = ", ".join(OPTIONS)
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = item.partition("=")
        if not separator:
            raise UserError(f"{item!r} in side {text!r} is not key=value; accepted keys: {accepted}")
        option = OPTIONS.get(key)
        if option is None:
            raise UserError(f"unknown key {key!r} in side {text!r}; accepted: {accepted}")
        if option.name in given:
            raise UserError(f"key {key!r} stands twice in side {text!r}; accepted: once")
        given[option.name] = typed_value(f"{key} in side {text!r}", option, value)
    return replace(base, **given)


def typed_value(what: str, option: Option, text: str) -> Any:
    """A value as a side has it: names joined by ``+`` for an option that repeats, ``yes`` or ``no`` for one that is on.

    Raises UserError, which begins with ``what``, for a value that is not of its kind.
    """
    return tuple(name for name in text.split("+") if name) if option.kind is tuple else _typed(what, text, option.kind)


def _boolean(word: str) -> Option | None:
    option = OPTIONS.get(word)
    return option if option is not None and option.kind is bool else None


def _typed(what: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value not in _YES_NO.values():
            raise UserError(f"{what} is {value!r}; accepted: yes or no")
        return value == _YES_NO[True]
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{what} is {value!r}; accepted: a {'whole number' if kind is int else 'number'}") from None
