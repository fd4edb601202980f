"""One table of options: commands and sides are read as they are written, and what is no option is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.paths import PARTS, SWITCHES
from k3sim.model.switches import named
from k3sim.sim.options import OPTIONS, Options, read_command, read_side
from k3sim.sim.predict import predict, program_of
from k3sim.sim.profile import profile_path
from k3sim.sim.question import ask, question_of

SWITCH_NAMES = st.lists(st.sampled_from([*SWITCHES, *PARTS]), max_size=3, unique=True).map(tuple)
WORDS = st.text("abcdefgh'\" $\\/.-_0", min_size=1, max_size=12)
VALUES = {str: WORDS, int: st.integers(-5, 10**7), float: st.floats(0, 4), bool: st.booleans(), tuple: SWITCH_NAMES}
OPTIONS_GIVEN = st.fixed_dictionaries({}, optional={one.name: VALUES[one.kind] for one in OPTIONS.values()})


@settings(deadline=None, max_examples=200)
@given(OPTIONS_GIVEN)
def test_commands_are_read_as_they_are_written(given: dict[str, object]) -> None:
    options = Options(**given)  # type: ignore[arg-type]
    assert read_command(options.command()) == options


@settings(deadline=None, max_examples=200)
@given(OPTIONS_GIVEN)
def test_sides_are_read_as_they_are_written(given: dict[str, object]) -> None:
    # Sides are parts between commas, stripped of space around them.
    texts = {name: one.strip() if isinstance(one, str) else one for name, one in given.items()}
    options = Options(**texts)  # type: ignore[arg-type]
    assert read_side(options.side(), Options()) == options


def test_a_command_states_what_is_no_default() -> None:
    options = Options(
        machine="h200", with_switches=("l2-prefetch", "sharded-router.logits"), skew=False, kv_dtype="bf16"
    )
    command = "k3sim timeline --machine h200 --with l2-prefetch --with sharded-router.logits --kv-dtype bf16 --no-skew"
    assert options.command() == command
    assert Options().command("compare") == "k3sim compare"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("k3sim compare", "one that begins with 'k3sim timeline'"),
        ("k3sim timeline --tp '8", "cannot be read"),
        ("k3sim timeline tp", "unknown option 'tp'"),
        ("k3sim timeline --out x", "unknown option '--out'"),
        ("k3sim timeline --no-tp", "unknown option '--no-tp'"),
        ("k3sim timeline --tp", "option --tp of .* has no value"),
        ("k3sim timeline --tp 8 --tp=8", "stands twice"),
        ("k3sim timeline --skew --no-skew", "stands twice"),
        ("k3sim timeline --tp eight", "--tp is 'eight'; accepted: a whole number"),
        ("k3sim timeline --routing-skew 0", "unknown option '--routing-skew'"),
        ("k3sim timeline --accepted-tokens 3", "no speculation is modelled"),
        ("k3sim timeline --with welded", "switch 'welded' is called 'fused-allreduce' now"),
        ("k3sim timeline --path persistent", "path 'persistent' is called 'megakernel' now"),
    ],
)
def test_commands_that_cannot_be_asked(command: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        question_of(command)


def test_a_question_holds_its_path_and_switches() -> None:
    question = question_of("k3sim timeline --tp=8 --without fused-allreduce.o-proj --no-skew")
    assert question.layout.tp == 8
    assert question.path.switch_names == ("low-batch-kernels", "fused-allreduce.tail", "sharded-router", "l2-prefetch")
    assert question.expected() == question
    assert predict(question).path is question.path


@pytest.mark.parametrize("switch", SWITCHES)
def test_all_parts_of_a_switch_are_the_switch(switch: str) -> None:
    parts = tuple(part for part in PARTS if part.startswith(f"{switch}."))
    whole, in_parts = (ask(Options(with_switches=names)) for names in ((switch,), parts))
    assert parts and named(parts) == (switch,)
    assert in_parts == whole
    assert ask(Options(without=parts)) == ask(Options(without=(switch,)))


def test_every_option_is_a_field_with_help() -> None:
    assert [one.name for one in OPTIONS.values()] == [one.name for one in dataclasses.fields(Options)]
    assert all(one.help.endswith(".") for one in OPTIONS.values())


@pytest.mark.parametrize("form", ["one-shot", "two-shot", "in-switch", "ring"])
def test_a_form_of_all_reduces_is_taken(form: str) -> None:
    question = question_of(f"k3sim timeline --path stock --all-reduce {form}")
    program, _ = program_of(question)
    assert {call.transport for call in program.calls if call.stage == "kda.all_reduce"} == {form}
    assert question_of("k3sim timeline --path stock --all-reduce library").all_reduce is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--all-reduce tree", "'tree' on gb300; accepted there: library, one-shot, two-shot, in-switch, ring"),
        ("--all-reduce ring --kernels own", "--all-reduce ring needs --kernels public"),
    ],
)
def test_a_form_that_is_not_there_is_refused(options: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        question_of(f"k3sim timeline {options}")


def test_no_switch_sums_without_multicast(tmp_path: Path) -> None:
    profile = json.loads(profile_path("gb300").read_text(encoding="utf-8"))
    profile["name"] = "mine"
    profile["values"]["nvlink_multicast"] |= {"value": False, "low": False, "high": False}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile), encoding="utf-8")
    with pytest.raises(UserError, match=r"accepted there: library, one-shot, two-shot, ring$"):
        question_of(f"k3sim timeline --machine {path} --all-reduce in-switch")
