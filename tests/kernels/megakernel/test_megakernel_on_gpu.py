"""The kernel on a GPU, at K3's widths with TP16: against layers written out, replay by replay, and when it hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dense_model import dense_architecture, program_of

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import InstructionList, Opcode
from k3sim.kernels.megakernel.schedule import schedule
from k3sim.model.architecture import Architecture

torch = pytest.importorskip("torch")

from k3sim.kernels.megakernel import launch, operands, reference  # noqa: E402
from k3sim.kernels.megakernel.whole_layers import run_layers  # noqa: E402

pytestmark = pytest.mark.gpu

RANKS = 16
CHANGING = ("residual", "packets 0", "kda.state", "kda.past")


def made(num_layers: int) -> tuple[Architecture, InstructionList, reference.Memory]:
    architecture = dense_architecture(num_layers)
    program = program_of(architecture, RANKS)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    listed = schedule(program, architecture, num_sms=num_sms)
    memory = operands.random_operands(program, architecture, tp=RANKS, device="cuda")
    reference.fill(memory, listed, hidden=architecture.hidden_size, ranks=RANKS)
    return architecture, listed, memory


def changing(memory: reference.Memory) -> reference.Memory:
    return {name: one.clone() for name, one in memory.items() if name.split("/")[-1] in CHANGING}


@pytest.mark.parametrize("num_layers", (1, 3))
def test_a_launch_is_the_layers_written_out(num_layers: int) -> None:
    architecture, listed, memory = made(num_layers)
    expected = {**memory, **changing(memory)}
    run_layers(expected, num_layers, RANKS)
    run = launch.Megakernel(listed, memory, hidden=architecture.hidden_size, ranks=RANKS)
    run()
    run.check()
    for name in changing(memory):
        if not name.startswith("packets"):
            one, other = memory[name].float(), expected[name].float()
            assert float((one - other).norm() / other.norm()) < 0.01, name
    assert all(bool(((memory[f"received {n}"] == 0) & memory[f"received {n}"].signbit()).all()) for n in range(3))
    assert run.launches == 1


def test_replays_give_the_same_bits() -> None:
    architecture, listed, memory = made(2)
    start = changing(memory)
    run = launch.Megakernel(listed, memory, hidden=architecture.hidden_size, ranks=RANKS)
    ends = []
    for _ in range(2):
        for name, one in start.items():
            memory[name].copy_(one)
        for _ in range(1000):
            run()
        run.check()
        ends.append(changing(memory))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in start)
    assert run.launches == 2000


@pytest.mark.parametrize(
    ("opcode", "words"),
    ((Opcode.KDA_HEAD, r"kda.o_proj GEMV_PUSH SM \d+ waited in vain for words that it reads"),
     (Opcode.GEMV_PUSH, r"gate_up FOLD_GEMV_SITU SM \d+ waited in vain for words that it reads")),
)  # fmt: skip
def test_a_wait_in_vain_is_named(opcode: Opcode, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction is taken out of a queue behind the validator's back: the kernel ends and says who waited."""
    architecture, listed, memory = made(1)
    lost = next(one for one in listed if one.opcode is opcode)
    broken = tuple(tuple(one for one in queue if one is not lost) for queue in listed.queues)
    monkeypatch.setattr(launch, "check", lambda one: one)
    run = launch.Megakernel(
        replace(listed, queues=broken), memory, hidden=architecture.hidden_size, ranks=RANKS, watchdog_s=0.1
    )
    run()
    with pytest.raises(UserError, match=words):
        run.check()


def test_a_broken_list_is_not_launched() -> None:
    architecture, listed, memory = made(1)
    silent = tuple(
        tuple(replace(one, signals=()) if one.opcode is Opcode.KDA_HEAD else one for one in queue)
        for queue in listed.queues
    )
    with pytest.raises(UserError, match="waits for 6 signals"):
        launch.Megakernel(replace(listed, queues=silent), memory, hidden=architecture.hidden_size, ranks=RANKS)
