"""A question: checked options as the objects that they name. Options -> Question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from k3sim.errors import UserError
from k3sim.model.routing import UNIFORM, Routing, read_routing
from k3sim.sim.compared_range import range_warnings
from k3sim.sim.components.skew import Skew
from k3sim.sim.options import OPTIONS, Options, read_command

if TYPE_CHECKING:
    from k3sim.model.architecture import Architecture
    from k3sim.model.collectives import Form
    from k3sim.model.layout import Layout, Workload
    from k3sim.model.memory import Room
    from k3sim.model.speculation import Acceptance
    from k3sim.model.step import Path
    from k3sim.sim.machine import Machine

MAX_SEED = 2**31 - 1


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
    memory_bytes: int | None = None  # of one GPU, where it was stated; None: the machine's
    acceptance: Acceptance | None = None  # of drafts; None: no speculation, or steps alone are asked for
    footprint_draw: int = 0  # which of the footprints that are not published; 0: the middle of each

    def expected(self) -> Question:
        """The same question with the mean of the skew in place of its sample: one rank, folded."""
        if self.skew is not Skew.SAMPLED:
            return self
        return replace(self, skew=Skew.EXPECTED, folded=True)

    def room(self) -> Room:
        """What one GPU holds, and how many users and tokens would fit."""
        from k3sim.model.memory import room

        return room(
            self.architecture,
            self.path.layout(self.layout, self.workload, self.pad_experts),
            concurrency=self.workload.concurrency,
            context=self.workload.context,
            kv_dtype=self.workload.kv_dtype,
            capacity=self.memory_bytes or self.machine.hbm_capacity_bytes,
        )

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before using the answer."""
        machine, tp = self.machine, self.layout.tp
        found = [*self.architecture.notes, *range_warnings(self.architecture, self.layout, self.workload)]
        if self.memory_warning:
            found.append(f"memory is ignored (--ignore-memory): {self.memory_warning}")
        if not self.architecture.attn_res_block_size and self.path.name == "fused":
            found.append(
                f"{self.architecture.name} has a plain residual: of the switches l2-prefetch and "
                "sharded-router.sampling have kernels for it, and the others change nothing"
            )
        if self.layout.dp > 1:
            found.append(
                f"{self.layout.dp} replicas of {tp * self.layout.pp} GPUs each, with experts of their own: "
                f"{self.layout.num_gpus} GPUs; attention groups that share the experts are --attn-dp, or --dp with "
                "--enable-dp-attention (SGLang) or --flags vllm"
            )
        if self.layout.pp > 1:
            found.append(
                f"the step passes {self.layout.pp} stages in turn; with as many batches of this size on their way as "
                "there are stages, tok/s of all GPUs are up to that many times as high"
            )
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
    from k3sim.model.layout import KV_DTYPE_BYTES, Workload, check_layout, check_workload
    from k3sim.model.paths import find_path
    from k3sim.model.paths.own import check_own
    from k3sim.model.step import check_path
    from k3sim.sim.profile import load_machine

    machine = load_machine(options.machine)
    architecture = load_architecture(
        options.model, ignored=options.ignored_fields, weights=options.weights, state_dtype=options.state_dtype
    )
    path = find_path(
        options.path, with_switches=options.with_switches, without=options.without, kernel_set=options.kernels,
        engine=options.engine,
    )  # fmt: skip
    layout = _layout(options)
    check_layout(architecture, layout)
    architecture, acceptance = _with_draft(options, architecture, layout)
    check_path(path, layout, verifies=architecture.draft is not None)
    if options.kv_dtype not in KV_DTYPE_BYTES:
        raise UserError(f"unknown KV cache type {options.kv_dtype!r}; accepted: {', '.join(KV_DTYPE_BYTES)}")
    workload = Workload(concurrency=options.concurrency, context=options.context, kv_dtype=options.kv_dtype)  # type: ignore[arg-type]
    check_workload(architecture, workload)
    if path.kernel_set == "own":
        check_own(architecture, layout, layout.rows(workload.concurrency))
    routing = read_routing(options.routing)
    moe = architecture.moe
    if moe.num_experts:
        routing.distinct_experts(moe.num_experts, moe.top_k, layout.rows(workload.concurrency) * layout.attn_dp)
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
        acceptance=acceptance,
        memory_bytes=None if options.memory is None else round(options.memory * 1e9),
        folded=skew is not Skew.SAMPLED,
    )


def _with_draft(
    options: Options, architecture: Architecture, layout: Layout
) -> tuple[Architecture, Acceptance | None]:
    """The model with its draft, and what is accepted of it. Raises UserError for options that do not go together."""
    from k3sim.model.speculation import find_draft, read_acceptance

    if not options.speculation:
        if options.draft_length or options.acceptance:
            raise UserError("--draft-length and --acceptance are of speculation; give --speculation dspark too")
        return architecture, None
    draft = find_draft(options.speculation, architecture, layout, options.draft_length)
    acceptance = read_acceptance(options.acceptance) if options.acceptance else None
    if acceptance is not None:
        acceptance.tokens_per_step(draft.num_drafts if draft else 0)
    if draft is None:
        return architecture, None
    return replace(architecture, draft=draft), acceptance


def _layout(options: Options) -> Layout:
    """The layout that options ask for, by whose meaning they have. Raises UserError for unknown words."""
    from k3sim.model.layout import Layout, engine_sizes
    from k3sim.model.names import check_name

    check_name("meaning of flags", options.flags, ("sglang", "vllm"))
    check_name("expert exchange", options.expert_exchange, ("gather", "dispatch"))
    sizes = engine_sizes(
        options.flags, tp=options.tp, dp=options.dp, ep=options.ep, attn_dp=options.attn_dp,
        dp_attention=options.enable_dp_attention,
    )  # fmt: skip
    return Layout(
        tp=sizes["tp"],
        dp=sizes["dp"],
        ep=sizes["ep"],
        attn_dp=sizes["attn_dp"],
        dcp=options.dcp,
        pp=options.pp,
        dispatch=options.expert_exchange == "dispatch",
        expert_imbalance=options.expert_imbalance,
        shard_all=options.shard_all,
    )


def _misfit(options: Options, architecture: Architecture, layout: Layout, machine: Machine) -> str:
    """What does not fit, where that is to be ignored; nothing where all fits. Raises UserError otherwise."""
    from k3sim.model.memory import check_fits

    if options.memory is not None and not 1 <= options.memory <= 1e6:
        raise UserError(f"memory is {options.memory:g} GB; accepted: 1 to 1000000 GB of one GPU")
    stated = options.memory is not None
    capacity = machine.hbm_capacity_bytes if options.memory is None else round(options.memory * 1e9)
    try:
        check_fits(
            architecture,
            layout,
            hbm_capacity_bytes=capacity,
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


def gpus_of(command: str) -> int | None:
    """GPUs that the question of a command is about; None for a command that is not a prediction's."""
    if not command.startswith("k3sim timeline"):
        return None
    return _layout(read_command(command, not_yet=True)).num_gpus


@lru_cache(maxsize=512)
def question_of(command: str) -> Question:
    """The question of ``k3sim timeline ...``. Raises UserError as ``read_command`` and ``ask`` do."""
    return ask(read_command(command))
