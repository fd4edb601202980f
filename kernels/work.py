"""Work: what one kernel does on one rank, in counts that any machine can price.

A cost function turns a shape into a Work; the simulator turns a Work and a Machine into time. Bytes alone do not
predict a decode kernel: at one row the small ones are chains of dependent round trips (a fused KDA decode reaches
2 % of HBM bandwidth at batch 1), so a Work also counts dependent loads, block reductions, barriers and
tensor-core set-ups. It holds no times: those belong to the machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

# Carve-out, in per cent of an SM's shared memory at its largest, of kernels that load a whole matrix into registers.
# What is left is L1, and a load into registers has its place there while it is on its way. With the 28 KB that are left
# of 256 when all is shared, an SM reads 66 GB/s by such loads, with 60 or more 134 (H200, probe ``register_loads``);
# and loads of others wait behind those that have no place. Kernels that ask for a whole matrix so leave more of it.
REGISTER_LOAD_CARVE_OUT = 60
BLOCK_SLOTS = 32  # blocks that an SM takes at once, compute capability 9.0, 10.0 and 10.3
THREADS_PER_SM = 2048  # of the same
REGISTER_UNIT = 8  # of a thread, in which an SM's register file is given out


class ReadKind(str, Enum):
    WEIGHTS = "weights"
    KV_STATE = "kv and state"


class Unit(str, Enum):
    """The execution unit that bounds a pass."""

    CUDA_CORE = "cuda core"  # fp32 FMA, two flops each
    BF16 = "bf16 tensor core"
    FP4 = "fp4 tensor core"  # MXFP4 weights; a machine without FP4 decodes them to bf16 first


class Barrier(str, Enum):
    NONE = "none"
    CLUSTER = "cluster"
    CLUSTER_RELEASE = "cluster barrier with DSMEM release fence"  # behind stores of all threads to other blocks' memory
    GRID = "grid"
    LAST = "last block"  # stores, a ticket from a counter, and the last block to take one loads what all have stored
    LAUNCH = "launch"  # the rest is a kernel of its own, behind a plain graph edge


class ActivationForm(str, Enum):
    """How the blocks of a kernel ask for the input that they all load."""

    COALESCED = "whole rows by loads"
    CP_ASYNC = "whole rows by copies into shared memory"
    MMA_FRAGMENTS = "operands of tensor cores"  # 64 bytes of each of eight rows by a warp


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """What a kernel's machine code is, as far as it takes time: a launch whose code is no longer in the instruction
    caches of its SMs fetches it as it runs.

    ``num_bytes`` is read from what was built for sm_90a (``kernels/footprints``). ``serial_instructions``: of 16 bytes,
    that one warp runs straight through after the dependency wait, counted in SASS at TP16 and one row, from one barrier
    of the block or cluster to the next, along the warp that ends last. What other counts price is not in it: loops, the
    products, what each slot of an exchange takes (its visibility). Where it grows with rows, the cost counts it
    (``Work.serial_instructions``).
    ``icache_miss_instructions``: of straight code that another count prices while the cache holds it, the instructions
    whose fetch that count does not hide.
    """

    num_bytes: int = 0
    serial_instructions: int = 0
    icache_miss_instructions: int = 0


@dataclass(frozen=True, kw_only=True)
class Read:
    """Bytes that come from HBM unless L2 holds ``region``; ``early`` when the address needs no predecessor."""

    region: str
    num_bytes: int
    kind: ReadKind = ReadKind.WEIGHTS
    early: bool = False


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One sweep of a kernel: dependent loads, then streaming beside arithmetic, then reductions and barriers."""

    num_address_loads: int = 0  # L2 round trips in series before the reads can be asked for
    num_dependent_loads: int = 0  # L2 round trips in series before arithmetic, that of the input included
    activation_bytes_per_block: int = 0  # activations that each block reads from L2 before it can multiply
    streamed_activation_bytes_per_block: int = 0  # further ones, which come slot by slot with what is read
    activation_form: ActivationForm = ActivationForm.COALESCED
    reads: tuple[Read, ...] = ()
    fill_bytes: int = 0  # of a tile, for which a block fills its ring at a time; 0: the ring is full all along
    written_bytes: int = 0  # state and cache written back to HBM
    flops: float = 0.0
    unit: Unit = Unit.CUDA_CORE
    decoded_weights: int = 0  # FP4 weights that enter the tensor core, or are decoded before it
    num_blocks: int = 0  # blocks that take part, when not all of the kernel's do
    num_tensor_core_setups: int = 0  # scales, pipeline fill, TMEM allocation, in series
    num_tile_epilogues: int = 0  # of one block in series, two block reductions long each, beside the stream
    num_dependent_mmas: int = 0  # of a warp, each adding to the sums of the one before, once its operands are there
    num_stages: int = 0  # of a warp in series beside the stream, each ending with sums over the warp
    stage_instructions: int = 0  # of a warp, in each
    num_block_reductions: int = 0  # in series, after the stream
    num_selection_rounds: int = 0  # of these, those that find the largest scores
    barrier: Barrier = Barrier.NONE
    num_barriers: int = 0


@dataclass(frozen=True, kw_only=True)
class Unpublished:
    """What the footprint of a kernel may be whose source says nothing of it; each draw of an interval takes one.

    ``registers``: the lowest and the highest of a thread. ``carve_out_percents``: as likely as one another.
    """

    registers: tuple[int, int]
    carve_out_percents: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Work:
    """Footprint and passes of one kernel on one rank.

    ``bytes_in_flight_per_block`` is the depth of the load pipeline: it caps the HBM rate, and it is also what
    a kernel can load before its dependency wait.
    """

    num_blocks: int
    threads_per_block: int
    smem_bytes_per_block: int
    bytes_in_flight_per_block: int
    max_blocks_per_sm: int  # the kernel's own limit, where it has one below what an SM holds
    registers_per_thread: int  # as allocated
    passes: tuple[Pass, ...]
    unpublished: Unpublished | None = None  # what else its footprint may be, where it is not published
    early_bytes_in_flight_per_block: int = 0  # at once on their way before the dependency wait; 0: the whole pipeline
    carve_out_percent: int | None = 100  # of an SM's shared memory at its largest that it asks for; None: the driver's
    ring_slots: int = 0  # of the load pipeline: the last slot's arithmetic begins when its bytes are there; 0: unknown
    register_loads: bool = False  # weights to registers by loads: what follows is asked for behind them
    triggers_after_loads: bool = False  # lets the next launch in when it has asked for them
    co_resident: bool = False  # blocks start together, or wait for one another: none is done before all have started
    serial_instructions: int = 0  # of a warp behind its wait, where it grows with rows; 0: those of its ``MachineCode``
    deep_prefetch: bool = False  # all bytes in flight are asked for at once, and others' trips to L2 wait behind them
    sent_bytes_per_peer: int = 0  # payload each peer receives
    polled_slots: int = 0  # that each poller waits for one after the other, 0: those of all ranks
    prefetches: bool = False  # its reads only fill L2, for kernels that ask for the same regions later

    @property
    def trigger_waits_for_loads(self) -> bool:
        """Whether it lets the next launch in behind its early reads, when it has asked for the last of them."""
        return self.triggers_after_loads or 0 < self.early_bytes_in_flight_per_block < self.bytes_in_flight_per_block

    def drawn(self, draw: int, name: str) -> Work:
        """The kernel as one of many possible: with another footprint where its own is not published.

        ``name``: of its operator. The same for the same draw; 0 is the central one.
        """
        if not draw or self.unpublished is None:
            return self
        low, high = self.unpublished.registers
        registers = low * (high / low) ** random.Random(f"{draw} {name}").random()
        # Kernels of one build ask for the same.
        carve_out = random.Random(draw).choice(self.unpublished.carve_out_percents or (self.carve_out_percent,))
        return replace(
            self,
            registers_per_thread=round(registers / REGISTER_UNIT) * REGISTER_UNIT,
            carve_out_percent=carve_out,
        )

    def read_bytes(self) -> int:
        """HBM bytes read when L2 holds nothing."""
        return sum(read.num_bytes for one in self.passes for read in one.reads)

    def moved_bytes(self) -> int:
        """HBM bytes read and written when L2 holds nothing: the numerator of the floor."""
        return self.read_bytes() + sum(one.written_bytes for one in self.passes)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Kernels launched one by one by the host, outside the graph."""

    num_launches: int
    num_graph_launches: int = 0


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one block of a kernel holds of an SM: its footprint.

    ``registers`` of a thread, as allocated. ``max_per_sm``: the kernel's own limit. ``carve_out_percent`` and
    ``unpublished``: as of ``Work``.
    """

    threads: int
    registers: int
    smem_bytes: int
    max_per_sm: int = BLOCK_SLOTS
    carve_out_percent: int | None = 100
    unpublished: Unpublished | None = None


def block_work(
    num_blocks: int,
    *passes: Pass,
    block: Block,
    in_flight_kib: int,
    sent_bytes_per_peer: int = 0,
) -> Work:
    """Work of blocks whose footprint stands in a table: public kernels, and small ones of the project."""
    return Work(
        num_blocks=num_blocks,
        threads_per_block=block.threads,
        smem_bytes_per_block=block.smem_bytes,
        bytes_in_flight_per_block=in_flight_kib * 1024,
        max_blocks_per_sm=block.max_per_sm,
        registers_per_thread=block.registers,
        carve_out_percent=block.carve_out_percent,
        unpublished=block.unpublished,
        passes=passes,
        sent_bytes_per_peer=sent_bytes_per_peer,
    )
