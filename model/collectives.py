"""Which form of an all-reduce a serving library takes, by bytes and ranks.

| Form | What moves into a port of ``n`` ranks for ``B`` bytes | Hand-overs |
| --- | --- | --- |
| one-shot | every rank's ``B`` bytes: ``(n - 1) B`` | 1 |
| two-shot | a slice of every rank's, then the sums of the others: ``2 (n - 1) / n B`` | 2 |
| in-switch | the sum of a slice, made by the switch, then the others' by multicast: ``B`` | 2 |
| ring | ``2 (n - 1) / n B``, from one neighbour, slice by slice | ``2 (n - 1)`` |

Libraries choose by thresholds that they tuned on each generation. Those here are SGLang's of CUDA graphs, which name
all forms up to 16 ranks (sglang, dispatch tables of the custom all-reduce in ``kernels/ops/communication``, tuned on
B200, GB200 and H200, 2026); beyond the last it calls NCCL. Others agree about the first step: TensorRT-LLM's
``SelectStrategyLP`` (``customAllReduceUtils.h``) leaves one-shot at 2 MiB on 8 Blackwell GPUs and at 512 KiB on 8 of
Hopper, vLLM's ``custom_all_reduce.cuh`` at 512 KiB on 4 and 256 KiB on 8 GPUs, and FlashInfer's over several trays
(``MNNVL_ONE_SHOT_THRESHOLD``) where 1 MiB would enter a port, which is 64 KiB on 16 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

KIB, MIB = 1 << 10, 1 << 20


class Form(str, Enum):
    """How the ranks of an all-reduce move their parts."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    IN_SWITCH = "in-switch"
    RING = "ring"


FORMS = tuple(Form)  # a shape holds numbers: the position of a form
Bounds = tuple[tuple[int, Form], ...]  # up to how many bytes, in order
Thresholds = tuple[tuple[int, Bounds], ...]  # by ranks, in order

#: One-shot by push and by pull count as one form.
BLACKWELL: Thresholds = (
    (2, ((32 * MIB, Form.ONE_SHOT), (128 * MIB, Form.TWO_SHOT))),
    (4, ((9 * MIB // 4, Form.ONE_SHOT), (128 * MIB, Form.TWO_SHOT))),
    (8, ((512 * KIB, Form.ONE_SHOT), (8 * MIB - 1, Form.TWO_SHOT), (128 * MIB, Form.IN_SWITCH))),
    (16, ((256 * KIB, Form.ONE_SHOT), (128 * MIB, Form.IN_SWITCH))),
)
HOPPER: Thresholds = (
    (2, ((128 * MIB, Form.ONE_SHOT),)),
    (4, ((384 * KIB, Form.ONE_SHOT), (128 * MIB, Form.TWO_SHOT))),
    (8, ((128 * KIB, Form.ONE_SHOT), (512 * KIB - 1, Form.TWO_SHOT), (128 * MIB, Form.IN_SWITCH))),
)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """What a library finds on a machine.

    ``has_multicast``: the switch copies stores to all, and adds up loads. ``forced``: the form whatever the size.
    """

    thresholds: Thresholds = BLACKWELL
    has_multicast: bool = True
    forced: Form | None = None

    @property
    def block_scaled(self) -> bool:
        """Whether tensor cores take block scales: of Blackwell, which its thresholds tell."""
        return self.thresholds is not HOPPER

    def form(self, num_bytes: int, num_ranks: int) -> Form:
        """The form for ``num_bytes`` on every one of ``num_ranks``.

        A number of ranks without a row takes the next that has one. Beyond the last, one-shot ends where as many bytes
        would enter a port. Without multicast a sum in the switch is one in two steps.
        """
        if self.forced is not None:
            return self.forced
        listed, bounds = next((one for one in self.thresholds if one[0] >= num_ranks), self.thresholds[-1])
        (one_shot_bytes, first), *others = bounds
        if num_bytes <= one_shot_bytes * min(1.0, listed / num_ranks):
            return first
        for most_bytes, form in others:
            if num_bytes <= most_bytes:
                return form if self.has_multicast or form is not Form.IN_SWITCH else Form.TWO_SHOT
        return Form.RING
