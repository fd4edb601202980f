"""A question, from what a user writes to what is simulated: Options -> Question.

The fields of ``Options`` are the one table of options. The command line, the Python interface, the sides of
``k3sim compare``, the commands in files of published results and claims, and the reproducing command of a report all
go by it, so that an option is added in one place and read in one way.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.model.routing import UNIFORM, Routing, read_routing
from k3sim.sim.compared_range import range_warnings
from k3sim.sim.components.skew import Skew

if TYPE_CHECKING:
    from k3sim.model.architecture import Architecture
    from k3sim.model.collectives import Form
    from k3sim.model.layout import Layout, Workload
    from k3sim.model.step import Path
    from k3sim.sim.machine import Machine

MAX_SEED = 2**31 - 1
#: Options of the published commands that no version of the workload has yet; scenario files may use them before.
NOT_YET = ("drafted-tokens", "accepted-tokens")


def _option(default: Any, kind: type, help_line: str, word: str = "") -> Any:
    """A field of ``Options``; ``word`` is its name on the command line where that is another."""
    return field(default=default, metadata={"kind": kind, "help": help_line, "word": word})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options by the names they have on every command; the defaults are those of ``k3sim timeline``."""

    machine: str = _option("gb300", str, "Machine profile: a name (see 'k3sim machines') or a JSON file.")
    tp: int = _option(16, int, "Tensor parallel: 1 to 32, a power of two.")
    ep: int = _option(1, int, "Expert parallel within the tensor-parallel group.")
    dp: int = _option(1, int, "Data-parallel replicas that share the concurrency.")
    dcp: int = _option(1, int, "Decode context parallel: ranks that share the KV cache.")
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


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is predicted: checked options as the objects that they name. ``predict`` answers it."""

    architecture: Architecture
    layout: Layout
    workload: Workload
    machine: Machine
    path: Path
    skew: Skew = Skew.EXPECTED
    seed: int = 0
    routing: Routing = UNIFORM
    pad_experts: bool | None = None  # None: as the path does it
    all_reduce: Form | None = None  # None: as libraries choose
    folded: bool = True
    memory_warning: str = ""  # what does not fit, where that is ignored
    footprint_draw: int = 0  # which of the footprints that are not published; 0: the middle of each

    def expected(self) -> Question:
        """The same question with the mean of the skew in place of its sample: one rank, folded."""
        if self.skew is not Skew.SAMPLED:
            return self
        return replace(self, skew=Skew.EXPECTED, folded=True)

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before using the answer."""
        machine, tp = self.machine, self.layout.tp
        found = [*self.architecture.notes, *range_warnings(self.architecture, self.layout, self.workload)]
        if self.memory_warning:
            found.append(f"memory is ignored (--ignore-memory): {self.memory_warning}")
        if tp > machine.nvlink_domain_gpus:
            found.append(
                f"{tp} ranks span more than the {machine.nvlink_domain_gpus} GPUs of one NVLink domain of "
                f"{machine.name}: exchanges are priced as if they shared one, no network between domains is modelled"
            )
        return found


def ask(options: Options) -> Question:
    """Check everything; nothing has been simulated or written yet.

    Raises UserError for an unknown name, a value out of range, and a layout that does not divide the model or fit.
    """
    from k3sim.model.config_file import load_architecture
    from k3sim.model.layout import KV_DTYPE_BYTES, Layout, Workload, check_layout, check_workload
    from k3sim.model.paths import find_path
    from k3sim.model.paths.own import check_own
    from k3sim.sim.profile import load_machine

    machine = load_machine(options.machine)
    architecture = load_architecture(
        options.model, ignored=options.ignored_fields, weights=options.weights, state_dtype=options.state_dtype
    )
    path = find_path(
        options.path, with_switches=options.with_switches, without=options.without, kernel_set=options.kernels,
        engine=options.engine,
    )  # fmt: skip
    layout = Layout(tp=options.tp, ep=options.ep, dp=options.dp, dcp=options.dcp)
    check_layout(architecture, layout)
    if options.kv_dtype not in KV_DTYPE_BYTES:
        raise UserError(f"unknown KV cache type {options.kv_dtype!r}; accepted: {', '.join(KV_DTYPE_BYTES)}")
    workload = Workload(concurrency=options.concurrency, context=options.context, kv_dtype=options.kv_dtype)  # type: ignore[arg-type]
    check_workload(architecture, workload)
    if path.kernel_set == "own":
        check_own(architecture, layout, -(-workload.concurrency // layout.dp))
    routing = read_routing(options.routing)
    moe = architecture.moe
    routing.distinct_experts(moe.num_experts, moe.top_k, -(-workload.concurrency // layout.dp))
    if not 0 <= options.seed <= MAX_SEED:
        raise UserError(f"seed is {options.seed}; accepted: 0 to {MAX_SEED}")
    memory_warning = _misfit(options, architecture, path.layout(layout, workload, options.pad_experts), machine)
    all_reduce = _form(options, machine)
    skew = {None: Skew.EXPECTED, True: Skew.SAMPLED, False: Skew.OFF}[options.skew]
    return Question(
        architecture=architecture,
        layout=layout,
        workload=workload,
        machine=machine,
        path=path,
        skew=skew,
        seed=options.seed,
        routing=routing,
        pad_experts=options.pad_experts,
        all_reduce=all_reduce,
        memory_warning=memory_warning,
        folded=skew is not Skew.SAMPLED,
    )


def _misfit(options: Options, architecture: Architecture, layout: Layout, machine: Machine) -> str:
    """What does not fit, where that is to be ignored; nothing where all fits. Raises UserError otherwise."""
    from k3sim.model.memory import check_fits

    if options.memory is not None and not 1 <= options.memory <= 1e6:
        raise UserError(f"memory is {options.memory:g} GB; accepted: 1 to 1000000 GB of one GPU")
    stated = options.memory is not None
    try:
        check_fits(
            architecture,
            layout,
            hbm_capacity_bytes=round(options.memory * 1e9) if stated else machine.hbm_capacity_bytes,  # type: ignore[operator]
            machine_name="--memory" if stated else machine.name,
            concurrency=options.concurrency,
            context=options.context,
            kv_dtype=options.kv_dtype,  # type: ignore[arg-type]
        )
    except UserError as error:
        if not options.ignore_memory:
            raise UserError(f"{error}; or --memory GB for another capacity, --ignore-memory to go on") from None
        return str(error)
    return ""


def _form(options: Options, machine: Machine) -> Form | None:
    """The form of all-reduces that is asked for. Raises UserError for one that there is not."""
    from k3sim.model.collectives import FORMS, Form

    word = OPTIONS["all-reduce"].default
    if options.all_reduce == word:
        return None
    sums = machine.nvlink_multicast and machine.nvlink_in_switch_reduction
    accepted = [word, *(form.value for form in FORMS if sums or form is not Form.IN_SWITCH)]
    if options.all_reduce not in accepted:
        raise UserError(
            f"all-reduce form {options.all_reduce!r} on {machine.name}; accepted there: {', '.join(accepted)}"
        )
    if options.kernels == "own":
        raise UserError(
            f"the project's own kernels sum in one shot; --all-reduce {options.all_reduce} needs --kernels public"
        )
    return Form(options.all_reduce)


@lru_cache(maxsize=512)
def question_of(command: str) -> Question:
    """The question of ``k3sim timeline ...``. Raises UserError as ``read_command`` and ``ask`` do."""
    return ask(read_command(command))


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
        if option.kind is tuple:
            given[option.name] = tuple(name for name in value.split("+") if name)
        else:
            given[option.name] = _typed(f"{key} in side {text!r}", value, option.kind)
    return replace(base, **given)


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
