"""Machines that differ from a profile in one respect: another card, peers on the same GPU, GPUs that stand for more."""

from __future__ import annotations

from dataclasses import replace

from k3sim.model.routing import expected_maximum_of_normals
from k3sim.sim.machine import Machine


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


def loopback_fabric(machine: Machine) -> Machine:
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


def emulated_ranks(machine: Machine, num_gpus: int, num_ranks: int) -> Machine:
    """``machine`` whose ``num_gpus`` GPUs stand for ``num_ranks`` ranks (kernels/multi_gpu/symmetric.py).

    Each stands for equally many. A GPU sends to every rank as before, but only (W - 1) T / W of its T pushes enter the
    link, where T - 1 would: a port is so much faster. What lands in its own memory is seen before what crosses, so an
    exchange takes as long as the link. W GPUs, not T, are late by chance. Stores are unicast.
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
