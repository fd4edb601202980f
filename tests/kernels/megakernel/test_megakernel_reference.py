"""The interpreter against layers written out on their own, in several orders that the counters allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dense_model import MLA_CONTEXT, RANKS, program_of

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import InstructionList, Opcode
from k3sim.model.architecture import Architecture

torch = pytest.importorskip("torch")

from k3sim.kernels.megakernel import launch, operands, reference  # noqa: E402
from k3sim.kernels.megakernel.whole_layers import attended, run_layers  # noqa: E402


@pytest.fixture(scope="module")
def memory(small: Architecture, small_list: InstructionList) -> reference.Memory:
    found = operands.random_operands(program_of(small, RANKS), small, tp=RANKS, device="cpu")
    reference.fill(found, small_list, hidden=small.hidden_size, ranks=RANKS)
    return found


def copied(memory: reference.Memory) -> reference.Memory:
    return {name: tensor.clone() for name, tensor in memory.items()}


def test_layers_are_those_written_out(
    small: Architecture, small_list: InstructionList, memory: reference.Memory
) -> None:
    expected, found = copied(memory), copied(memory)
    run_layers(expected, small.num_layers, RANKS)
    reference.run(small_list, found)
    torch.testing.assert_close(found["residual"].float(), expected["residual"].float(), rtol=0.02, atol=0.02)
    for layer in range(small.num_layers):
        for name in ("state", "past"):
            one, other = found[f"{layer}/kda.{name}"], expected[f"{layer}/kda.{name}"]
            torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)
            assert not torch.equal(one, memory[f"{layer}/kda.{name}"])


def test_latent_experts_are_those_written_out(small_moe: Architecture, small_moe_list: InstructionList) -> None:
    memory = operands.random_operands(program_of(small_moe, RANKS), small_moe, tp=RANKS, device="cpu")
    reference.fill(memory, small_moe_list, hidden=small_moe.hidden_size, ranks=RANKS)
    expected, ends = copied(memory), []
    run_layers(expected, small_moe.num_layers, RANKS)
    for seed in range(2):
        ends.append(copied(memory))
        reference.run(small_moe_list, ends[-1], seed=seed)
        torch.testing.assert_close(ends[-1]["residual"].float(), expected["residual"].float(), rtol=0.02, atol=0.05)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in memory)


def test_attention_is_that_written_out(small_mla: Architecture, small_mla_list: InstructionList) -> None:
    program = program_of(small_mla, RANKS, context=MLA_CONTEXT)
    memory = operands.random_operands(program, small_mla, tp=RANKS, device="cpu")
    reference.fill(memory, small_mla_list, hidden=small_mla.hidden_size, ranks=RANKS)
    expected, found = copied(memory), copied(memory)
    run_layers(expected, small_mla.num_layers, RANKS, MLA_CONTEXT)
    reference.run(small_mla_list, found, seed=1)
    torch.testing.assert_close(found["residual"].float(), expected["residual"].float(), rtol=0.02, atol=0.05)
    for layer in small_mla.mla_layers:
        cache, before = found[f"{layer}/mla.cache"].view(-1, 576), memory[f"{layer}/mla.cache"].view(-1, 576)
        changed_rows = (cache != before).any(1).nonzero().flatten().tolist()
        assert changed_rows == [MLA_CONTEXT - 1]
        torch.testing.assert_close(cache, expected[f"{layer}/mla.cache"].view(-1, 576), rtol=0.02, atol=0.02)
    # The last layer's attention by itself, from the latents that the list has left.
    last = small_mla.mla_layers[-1]
    latents = (found["mla.qkv_a_gate out"] & ~0xFFFF).view(torch.float32).bfloat16()
    out = attended(found, last, latents, MLA_CONTEXT).float()
    words = (found["mla.lift_gate out"] & ~0xFFFF).view(torch.float32)
    assert float((words - out).norm() / out.norm()) < 0.01


def test_instructions_without_body_are_not_launched(small_moe_list: InstructionList) -> None:
    with pytest.raises(UserError, match=r"layer 1 moe.front FRONT_PUSH SM 0: the kernel has no body"):
        launch.Megakernel(small_moe_list, {}, hidden=168, ranks=RANKS)


def test_every_legal_order_gives_the_same_bits(small_list: InstructionList, memory: reference.Memory) -> None:
    ends, orders = [], set()
    for seed in range(4):
        one = copied(memory)
        orders.add(tuple(instruction.name for instruction in reference.run(small_list, one, seed=seed)))
        ends.append(one)
    assert len(orders) == 4
    for other in ends[1:]:
        assert all(torch.equal(ends[0][name], other[name]) for name in memory)


def test_receive_buffers_end_empty(small_list: InstructionList, memory: reference.Memory) -> None:
    one = copied(memory)
    reference.run(small_list, one)
    for number in range(3):
        received = one[f"received {number}"]
        assert bool(((received == 0) & received.signbit()).all())


def test_a_missing_signal_hangs(small_list: InstructionList, memory: reference.Memory) -> None:
    silent = tuple(
        tuple(replace(one, signals=()) if one.opcode is Opcode.KDA_HEAD and one.layer == 1 else one for one in queue)
        for queue in small_list.queues
    )
    with pytest.raises(UserError, match=r"layer 1 kda.o_proj GEMV_PUSH SM \d waits for ever"):
        reference.run(replace(small_list, queues=silent), copied(memory))
