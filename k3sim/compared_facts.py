"""What a step is of, as the facts in which two compared steps may differ: fact -> text, the same for a prediction, for
its file, and for the file of a measured step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3sim.sim.predict import Prediction

Facts = Mapping[str, str]


def facts_of_prediction(prediction: Prediction) -> Facts:
    """Of a step that was predicted just now."""
    question = prediction.question
    return _facts(
        step="predicted",
        model=question.architecture.name,
        path=prediction.path.name,
        switches=prediction.path.switch_names,
        kernels=prediction.path.kernel_set,
        machine=question.machine.title,
        gpus=question.layout.num_gpus,
        layout=question.layout.tag,
        concurrency=question.workload.concurrency,
        context=question.workload.context,
        kv_dtype=question.workload.kv_dtype,
        ranks={"expected": "one rank, mean skew", "off": "one rank, no skew"}.get(
            question.skew.value, f"all ranks, skew of seed {question.seed}"
        ),
        routing=question.routing.name,
    )


def facts_of_document(document: Mapping[str, Any]) -> Facts:
    """Of a step out of a file; facts that it does not state are left out."""
    measured = document.get("measured") is True
    return _facts(
        step="measured" if measured else "predicted",
        gpus=document.get("gpus") or (None if measured else _num_gpus(str(document.get("layout")))),
        layers=document.get("layers"),
        **{
            key: document.get(key)
            for key in ("model", "path", "switches", "kernels", "machine", "layout", "concurrency", "context")
        },
        kv_dtype=document.get("kv_dtype"),
        routing=document.get("routing"),
    )


def _num_gpus(tag: str) -> int | None:
    """GPUs of a layout by its tag."""
    found = re.match(r"tp(\d+)(?:dp(\d+))?ep", tag)
    return int(found[1]) * int(found[2] or 1) if found else None


def in_words(fact: str, text: str) -> str:
    """A fact in a list of facts: ``concurrency 1``, but ``predicted``."""
    if fact == "layers":
        return f"{text} layers"
    return f"{fact} {text}" if fact in ("switches", "concurrency", "context", "routing") else text


def _facts(**given: Any) -> Facts:
    switches = given.get("switches")
    shown = {
        "step": given.get("step"),
        "model": given.get("model"),
        "path": given.get("path"),
        "switches": None if switches is None or given.get("path") == "megakernel" else " + ".join(switches) or "none",
        "kernels": given.get("kernels") and f"{given['kernels']} kernels",
        "machine": given.get("machine"),
        "GPUs": given.get("gpus") and f"{given['gpus']} GPU{'s' if given['gpus'] != 1 else ''}",
        "layout": given.get("layout"),
        "layers": given.get("layers"),
        "concurrency": given.get("concurrency"),
        "context": given.get("context"),
        "KV cache": given.get("kv_dtype") and f"{given['kv_dtype']} KV cache",
        "ranks": given.get("ranks"),
        "routing": given.get("routing"),
    }
    return {fact: str(value) for fact, value in shown.items() if value is not None}
