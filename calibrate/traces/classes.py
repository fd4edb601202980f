"""Kernel names: their short forms, and classes by a table of patterns, the first that matches.

Order matters. Collectives stand before "reduce", attention before the products it is named after, and the words that
occur inside others ("norm", "sum") last. A user's file adds patterns in front.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from re import Pattern

from k3sim.calibrate.traces.events import ATTENTION, CLASSES, COLLECTIVE, COPY, GEMM, MOE, NORM, OTHER
from k3sim.errors import UserError
from k3sim.model.documents.document import Accepted, read_json

#: Names as public engines and libraries have them: NCCL, RCCL, vLLM, SGLang, TensorRT-LLM, CUTLASS, Triton, AITER.
PATTERNS: tuple[tuple[str, str], ...] = (
    (r"^(Memcpy|Memset|CopyDevice|__amd_rocclr_(copy|fill)|MEMORY_COPY)", COPY),
    (
        r"nccl|rccl|cross_device_reduce|multimem_all_?reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
        r"|nvshmem|one_?shot_?push|deep_?ep|lamport",
        COLLECTIVE,
    ),
    (
        r"flash|fmha|attention|paged_?kv|decode_?with_?paged|mla_|_mla|kda|gated_?delta|gdn|causal_?conv1d|recompute_w_u"
        r"|scaled_dot_kkt|merge_?state|selective_scan|mamba",
        ATTENTION,
    ),
    (r"moe|expert|topk_?gating|grouped_?topk|routing|finalize_?kernel|router", MOE),
    (r"rms_?norm|layer_?norm|norm_?kernel|_norm(_|$|<)|fused_add_norm|l2norm", NORM),
    (r"gemm|gemv|matmul|nvjet|cutlass::device_kernel|^Cijk_|wvSplitK|^bmm_|cublas|splitk|_mm(_|$)|linear|proj", GEMM),
)
LONGEST_NAME = 4000
_LONGEST_PATTERN = 500
_MOST_PATTERNS = 1000
_ACCEPTED = Accepted(what="patterns of kernel classes", kinds=(), most_bytes=1_000_000)
Patterns = Sequence[tuple[Pattern[str], str]]


class KernelNames:
    """Short name and class of each name, looked up once: a trace has hundreds of names on 100,000s of kernels."""

    def __init__(self, patterns: Patterns | None = None) -> None:
        self._patterns = [*(patterns or ()), *((re.compile(text, re.I), word) for text, word in PATTERNS)]
        self._found: dict[str, tuple[str, str, str]] = {}

    def of(self, name: str) -> tuple[str, str, str]:
        """The name, cleaned (one object for all kernels), its short form, its class."""
        found = self._found.get(name)
        if found is None:
            clean = clean_text(name, LONGEST_NAME)
            word = next((word for pattern, word in self._patterns if pattern.search(clean)), OTHER)
            found = self._found[name] = (clean, short_name(clean), word)
        return found


def clean_text(value: object, most: int = 200) -> str:
    """A text of a trace as it can be written again: no half surrogate pairs and no control characters."""
    text = str(value)[:most]
    if text.isprintable():
        return text
    whole = text.encode("utf-8", "replace").decode()
    return "".join(sign if sign.isprintable() else " " for sign in whole)


def short_name(name: str) -> str:
    """A name without return type, namespaces, template arguments and parameters; the last word of a mangled one."""
    if name.startswith("_Z"):
        return _last_mangled(name) or name
    if name.startswith(("Memcpy", "Memset")):
        return name
    text = name.replace("(anonymous namespace)", "").removeprefix("void ")
    depth, kept = 0, []
    for sign in text:
        if sign == "<":
            depth += 1
        elif sign == ">":
            depth = max(0, depth - 1)
        elif sign == "(" and not depth:
            break
        elif not depth:
            kept.append(sign)
    words = "".join(kept).strip().split("::")[-1].split()
    return words[-1] if words else name


def _last_mangled(name: str) -> str:
    """The innermost name of an Itanium-mangled one: ``_ZN4vllm3foo...`` gives foo. Empty where it is another form."""
    position = 3 if name.startswith("_ZN") else 2
    found = ""
    while (digits := re.match(r"\d{1,4}", name[position:])) is not None:
        begin = position + digits.end()
        word = name[begin : begin + int(digits[0])]
        if not word:
            break
        if not word.startswith("_GLOBAL__N"):
            found = word
        position = begin + len(word)
        if not name.startswith("_ZN"):
            break
    return found


def read_patterns(path: str | Path) -> Patterns:
    """Patterns from a user's file: a JSON object ``{"regular expression": "class", ...}``, tried in its order.

    A class is one of ``CLASSES`` or a word of the user's own. Raises UserError, all faults at once.
    """
    document = read_json(path, _ACCEPTED)
    value, found = document.value, []
    if not isinstance(value, dict) or len(value) > _MOST_PATTERNS:
        raise UserError(f'{path}: an object {{"pattern": "class"}} of at most {_MOST_PATTERNS} patterns is accepted')
    for text, word in value.items():
        if not isinstance(word, str) or not 0 < len(word) <= 40 or not word.isprintable():
            document.fault((text,), f"is no class; {', '.join(CLASSES)} or a word of at most 40 characters is accepted")
            continue
        try:
            if len(text) > _LONGEST_PATTERN:
                raise ValueError(f"longer than {_LONGEST_PATTERN} characters")
            found.append((re.compile(text, re.I), word))
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            document.fault((text,), f"is no regular expression ({error})")
    document.settle()
    return found
