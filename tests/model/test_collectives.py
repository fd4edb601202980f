"""Forms of an all-reduce, as libraries choose them by bytes and ranks."""

from __future__ import annotations

import pytest

from k3sim.model.collectives import BLACKWELL, HOPPER, KIB, MIB, Collectives, Form, Thresholds
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import find_path
from k3sim.model.program import build_program

K3 = load_architecture()
ONE, TWO, SWITCH, RING = Form


@pytest.mark.parametrize(
    ("thresholds", "ranks", "last_bytes", "before", "after"),
    [
        (BLACKWELL, 4, 9 * MIB // 4, ONE, TWO),
        (BLACKWELL, 8, 512 * KIB, ONE, TWO),
        (BLACKWELL, 8, 8 * MIB - 1, TWO, SWITCH),
        (BLACKWELL, 16, 256 * KIB, ONE, SWITCH),
        (BLACKWELL, 32, 128 * KIB, ONE, SWITCH),  # as many bytes into a port as on 16
        (BLACKWELL, 16, 128 * MIB, SWITCH, RING),
        (HOPPER, 2, 128 * MIB, ONE, RING),
        (HOPPER, 4, 384 * KIB, ONE, TWO),
        (HOPPER, 8, 128 * KIB, ONE, TWO),
        (HOPPER, 8, 512 * KIB - 1, TWO, SWITCH),
        (HOPPER, 16, 64 * KIB, ONE, TWO),
    ],
)
def test_a_form_ends_at_its_threshold(
    thresholds: Thresholds, ranks: int, last_bytes: int, before: Form, after: Form
) -> None:
    library = Collectives(thresholds=thresholds)
    assert library.form(last_bytes, ranks) is before
    assert library.form(last_bytes + 1, ranks) is after


def test_three_ranks_choose_as_four_do() -> None:
    assert Collectives().form(2 * MIB, 3) is ONE
    assert Collectives().form(3 * MIB, 3) is TWO


def test_without_multicast_no_switch_sums() -> None:
    library = Collectives(has_multicast=False)
    assert library.form(1 * MIB, 16) is TWO
    assert library.form(129 * MIB, 16) is RING


@pytest.mark.parametrize(("tp", "rows"), [(8, 36), (16, 18)])
def test_stock_steps_change_form_behind_these_rows(tp: int, rows: int) -> None:
    def transports(concurrency: int, path: str) -> set[str]:
        workload = Workload(concurrency=concurrency)
        program = build_program(K3, Layout(tp=tp), workload, find_path(path), only_layers=(0, 1))
        return {call.transport for call in program.calls if call.stage.endswith("all_reduce")}

    assert transports(rows, "stock") == {"one-shot"}
    assert transports(rows + 1, "stock") == {"two-shot" if tp == 8 else "in-switch"}
    assert transports(rows + 1, "fused") == set()
