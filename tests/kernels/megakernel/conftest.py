"""The list of a small model's layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dense_model import MLA_CONTEXT, RANKS, dense_architecture, program_of

from k3sim.kernels.megakernel.instructions import InstructionList
from k3sim.kernels.megakernel.schedule import schedule
from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture


@pytest.fixture(scope="session")
def small() -> Architecture:
    k3 = load_architecture()
    kda = replace(k3.kda, num_heads=4)
    return dense_architecture(3, hidden_size=168, kda=kda, dense_intermediate=256)


@pytest.fixture(scope="session")
def small_moe() -> Architecture:
    """A dense layer, then two of latent experts."""
    k3 = load_architecture()
    moe = replace(k3.moe, first_moe_layer=1, latent_size=64, expert_intermediate=64, shared_intermediate=64)
    kda = replace(k3.kda, num_heads=4)
    return replace(dense_architecture(3, hidden_size=168, kda=kda, dense_intermediate=256), moe=moe)


@pytest.fixture(scope="session")
def small_moe_list(small_moe: Architecture) -> InstructionList:
    return schedule(program_of(small_moe, RANKS), small_moe, num_sms=5)


@pytest.fixture(scope="session")
def small_mla() -> Architecture:
    """MLA in front of a dense FFN and of latent experts."""
    k3 = load_architecture()
    moe = replace(k3.moe, first_moe_layer=2, latent_size=64, expert_intermediate=64, shared_intermediate=64)
    kda, mla = replace(k3.kda, num_heads=4), replace(k3.mla, num_heads=4)
    dense = dense_architecture(3, hidden_size=168, kda=kda, mla=mla, dense_intermediate=256)
    return replace(dense, moe=moe, kda_layers=(0,), mla_layers=(1, 2))


@pytest.fixture(scope="session")
def small_mla_list(small_mla: Architecture) -> InstructionList:
    return schedule(program_of(small_mla, RANKS, context=MLA_CONTEXT), small_mla, num_sms=5)


@pytest.fixture(scope="session")
def small_list(small: Architecture) -> InstructionList:
    return schedule(program_of(small, RANKS), small, num_sms=5)
