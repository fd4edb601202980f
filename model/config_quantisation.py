"""Which format each matrix of a checkpoint is stored in, from what its ``config.json`` says of quantisation.

Read are compressed-tensors (groups with targets, ``ignore``), DeepSeek's fp8 blocks, ModelOpt (``quant_algo``,
``exclude_modules`` or ``ignore``, ``quantized_layers``), AWQ and GPTQ. Names of modules are tried for every layer, so a
matrix whose format changes from layer to layer is refused, as is a product of matrices in several formats.

Patterns say more than files hold: router, latent projections, residual queries, norms and the folded W_UK and W_UV stay
bf16 whatever they say, since engines build them without quantisation and the released files hold them so. Sources: the
released configs of Kimi K3, Kimi-K2.5 and DeepSeek-V3, NVIDIA's and Red Hat's exports of them,
https://github.com/vllm-project/compressed-tensors and https://github.com/NVIDIA/Model-Optimizer.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from k3sim.model.weight_formats import BF16, FORMATS, FP8_BLOCK, WeightFormat

#: Matrix of ``layout.rank_matrices`` -> modules of the file that lie in it, and the kind of layer that has it.
MODULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kda.in_proj": ("kda", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "kda.g_b": ("kda", ("self_attn.g_b_proj",)),
    "kda.f_b": ("kda", ("self_attn.f_b_proj",)),
    "kda.o_proj": ("kda", ("self_attn.o_proj",)),
    "mla.qkv_a": ("mla", ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")),
    "mla.q": ("mla", ("self_attn.q_proj",)),
    "mla.kv_a": ("mla", ("self_attn.kv_a_proj_with_mqa",)),
    "mla.gate": ("mla", ("self_attn.g_proj",)),
    "mla.q_b": ("mla", ("self_attn.q_b_proj",)),
    "mla.o_proj": ("mla", ("self_attn.o_proj",)),
    "mla.index_q": ("mla", ("self_attn.indexer.wq_b",)),
    "gqa.qkv": ("gqa", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "gqa.o_proj": ("gqa", ("self_attn.o_proj",)),
    "moe.expert_w13": ("moe", ("{moe}.experts.0.gate_proj", "{moe}.experts.0.up_proj")),
    "moe.expert_w2": ("moe", ("{moe}.experts.0.down_proj",)),
    "moe.shared_gate_up": ("moe", ("{moe}.shared_experts.gate_proj", "{moe}.shared_experts.up_proj")),
    "moe.shared_down": ("moe", ("{moe}.shared_experts.down_proj",)),
    "dense.gate_up": ("dense", ("mlp.gate_proj", "mlp.up_proj")),
    "dense.down": ("dense", ("mlp.down_proj",)),
    "lm_head": ("", ("lm_head",)),
}
#: Parts that ``--weights`` takes beside the names of single matrices.
TARGETS: Mapping[str, tuple[str, ...]] = {
    "experts": ("moe.expert_w13", "moe.expert_w2"),
    "shared": ("moe.shared_gate_up", "moe.shared_down"),
    "dense": ("dense.gate_up", "dense.down"),
    "attention": tuple(name for name in MODULES if name.startswith(("kda.", "mla.", "gqa."))),
    "head": ("lm_head",),
    "all": tuple(MODULES),
}
#: ModelOpt's algorithms.
ALGORITHMS: Mapping[str, str] = {
    "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "FP8": "fp8", "FP8_PB_WO": "fp8_block",
    "FP8_BLOCK_SCALES": "fp8_block", "MXFP8": "mxfp8", "MXFP4": "mxfp4", "W4A8_MXFP4_FP8": "mxfp4",
    "W4A8_MXFP4_MXFP8": "mxfp4",
}  # fmt: skip

FormatOf = Callable[[str], "WeightFormat | None"]  # of a module by its name in the file; None: not quantised


class Refused(Exception):
    """Why a quantisation is not read; the text follows the name of the field ``at``."""

    def __init__(self, at: tuple[str, ...], says: str) -> None:
        super().__init__(says)
        self.at = at


def reader_of(given: Mapping[str, Any] | None) -> FormatOf:
    """What a ``quantization_config`` says of modules. Raises ``Refused``."""
    if given is None:
        return lambda _: None
    method = given.get("quant_method", "compressed-tensors" if "config_groups" in given else None)
    if "quantization" in given and isinstance(given["quantization"], dict):  # hf_quant_config.json
        return _modelopt(given["quantization"])
    readers = {
        "compressed-tensors": _compressed_tensors, "fp8": _fp8, "modelopt": _modelopt, "modelopt_fp4": _modelopt,
        "modelopt_mixed": _modelopt, "awq": _integers, "gptq": _integers, "mxfp4": _mxfp4,
    }  # fmt: skip
    if not isinstance(method, str) or method not in readers:
        raise Refused(("quant_method",), f"is {method!r}, accepted: {', '.join(readers)}")
    return readers[method](given)


def _compressed_tensors(given: Mapping[str, Any]) -> FormatOf:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise Refused(("config_groups",), "names no group; accepted: an object with one or more")
    ignored = _patterns(given.get("ignore"))
    read = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise Refused(("config_groups", name), "is no object")
        weights = group.get("weights")
        stored = None if weights is None else _stored(("config_groups", name, "weights"), weights)
        _check_form(("config_groups", name, "format"), group.get("format"), stored)
        read.append((_patterns(group.get("targets", ["Linear"])), stored))

    _check_form(("format",), given.get("format"), read[0][1] if len(read) == 1 else None)

    def format_of(module: str) -> WeightFormat | None:
        if matches(ignored, module):
            return None
        return next((stored for targets, stored in read if matches(targets, module)), None)

    return format_of


def _check_form(at: tuple[str, ...], form: Any, stored: WeightFormat | None) -> None:
    """What a file calls the form of its packing says the same as the weights of its group."""
    forms = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}
    if stored is not None and isinstance(form, str) and form in forms and forms[form] != stored.name:
        right = next((one for one, name in forms.items() if name == stored.name), stored.name)
        raise Refused(at, f'is "{form}", accepted: "{right}", as the weights of the group are')


def _stored(at: tuple[str, ...], weights: Any) -> WeightFormat:
    """Format of the ``weights`` of a group of compressed-tensors."""
    if not isinstance(weights, dict):
        raise Refused(at, "is no object")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "float"), weights.get("strategy")
    group, block = weights.get("group_size"), weights.get("block_structure")
    if not (isinstance(bits, int) and isinstance(kind, str) and (group is None or isinstance(group, int))):
        raise Refused(at, f"has num_bits {bits!r}, type {kind!r} and group_size {group!r}, accepted: a number, a word, "
                      "and a number or null")  # fmt: skip
    name = {
        (4, "float", 32): "mxfp4", (4, "float", 16): "nvfp4", (8, "float", 32): "mxfp8", (4, "int", 32): "int4_g32",
        (4, "int", 128): "int4_g128",
    }.get((bits, kind, group or 0))  # fmt: skip
    if name is None and (bits, kind) == (8, "float"):
        blocks = strategy == "block" or block is not None
        if blocks and block not in ([128, 128], "128x128"):
            raise Refused((*at, "block_structure"), f"is {block!r}, accepted: [128, 128]")
        if blocks or group is None:
            name = "fp8_block" if blocks else "fp8"
    if name is None:
        raise Refused(
            at, f"has {bits!r} bits of type {kind!r} in groups of {group!r}, accepted: {', '.join(sorted(FORMATS))}"
        )
    return FORMATS[name]


def _fp8(given: Mapping[str, Any]) -> FormatOf:
    block = given.get("weight_block_size")
    if block not in (None, [128, 128]):
        raise Refused(("weight_block_size",), f"is {block!r}, accepted: [128, 128]")
    stored = FORMATS["fp8"] if block is None else FP8_BLOCK
    kept = _patterns(given.get("modules_to_not_convert")) or ["lm_head"]
    return lambda module: None if module == "lm_head" or _starts(kept, module) else stored


def _mxfp4(given: Mapping[str, Any]) -> FormatOf:
    kept = _patterns(given.get("modules_to_not_convert"))
    return lambda module: FORMATS["mxfp4"] if ".experts." in module and not _starts(kept, module) else None


def _integers(given: Mapping[str, Any]) -> FormatOf:
    """AWQ and GPTQ: every linear layer but the head and those that are named."""
    bits, group = given.get("bits", given.get("w_bit")), given.get("group_size", given.get("q_group_size"))
    name = {(4, 32): "int4_g32", (4, 128): "int4_g128"}.get((bits, group)) if _whole(bits, group) else None
    if name is None:
        raise Refused(("bits",), f"is {bits!r} in groups of {group!r}, accepted: 4 in groups of 32 or 128")
    kept = _patterns(given.get("modules_to_not_convert"))
    return lambda module: None if module == "lm_head" or _starts(kept, module) else FORMATS[name]


def _whole(*values: Any) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in values)


def _modelopt(given: Mapping[str, Any]) -> FormatOf:
    algorithm = given.get("quant_algo")
    if isinstance(given.get("quantization"), dict):
        return _modelopt(given["quantization"])
    kept = [*_patterns(given.get("exclude_modules")), *_patterns(given.get("ignore"))]
    if algorithm == "MIXED_PRECISION":
        layers = given.get("quantized_layers")
        if not isinstance(layers, dict) or not layers:
            raise Refused(("quantized_layers",), "is not there, and quant_algo is MIXED_PRECISION; accepted: an object")
        by_module = {name: _algorithm(("quantized_layers", name), one) for name, one in layers.items()}

        def format_of(module: str) -> WeightFormat | None:
            parts = module.split(".")
            whole = (".".join(parts[:end]) for end in range(len(parts), 0, -1))  # a module or one that holds it
            return next((by_module[one] for one in whole if one in by_module), None)

        return format_of
    stored = _algorithm((), given)
    return lambda module: None if any(fnmatch.fnmatchcase(module, one) or module == one for one in kept) else stored


def _algorithm(at: tuple[str, ...], given: Any) -> WeightFormat:
    name = given.get("quant_algo") if isinstance(given, dict) else given
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise Refused((*at, "quant_algo"), f"is {name!r}, accepted: {', '.join(ALGORITHMS)}, MIXED_PRECISION")
    return FORMATS[ALGORITHMS[name]]


def _patterns(given: Any) -> list[str]:
    return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []


def _starts(names: list[str], module: str) -> bool:
    return any(module == one or module.startswith(f"{one}.") or f".{one}." in f".{module}." for one in names)


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether one of compressed-tensors' patterns names a matrix: ``re:`` an expression, else a class or a name."""
    for one in patterns:
        if not one.startswith("re:"):
            if one == "Linear" or name == one or name.endswith(f".{one}"):
                return True
        # Of expressions only those are tried that cannot take long.
        elif re.fullmatch(r"[\w.\\*|()?:^$\[\]-]{1,200}", one[3:]) and one.count("*") <= 4 and ")*" not in one:
            try:
                if re.match(one[3:], name):
                    return True
            except re.error:
                continue
    return False


def formats_of(
    format_of: FormatOf, *, layers: Mapping[str, Iterable[int]], prefix: str, moe: str, parts: Iterable[str]
) -> dict[str, WeightFormat]:
    """Format of each matrix. ``layers``: of each kind of sublayer; ``prefix`` and ``moe``: names in the file.

    Raises ``Refused`` for a matrix in several formats.
    """
    found: dict[str, WeightFormat] = {}
    for part in parts:
        kind, modules = MODULES[part]
        places = [f"{prefix}model.layers.{layer}." for layer in layers[kind]] if kind else [prefix]
        stored = {
            (format_of(f"{place}{module.format(moe=moe)}") or BF16).name for place in places for module in modules
        }
        if len(stored) > 1:
            raise Refused((), f"stores {part} as {' and '.join(sorted(stored))}; accepted: one format for all layers")
        if stored:
            found[part] = FORMATS[stored.pop()]
    return found


def check_group(part: str, stored: WeightFormat, depth: int) -> str | None:
    """Why a matrix of this depth cannot be in a format: its groups of weights that share a scale are whole."""
    if not stored.group or depth % stored.group == 0:
        return None
    return f"{part} has a depth of {depth}, and {stored.name} has groups of {stored.group}"
