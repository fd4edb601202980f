"""What cold code costs: the fit, the stored file, the device program on paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3sim.calibrate import cold_code
from k3sim.calibrate.own_kernels import CHAINS
from k3sim.errors import UserError
from k3sim.kernels.cases import cases_of
from k3sim.kernels.code_bytes import CODE_BYTES
from k3sim.sim.machine import load_machine

SIZES = {case: sum(CODE_BYTES[link.operator] for link in links) for case, links in CHAINS.items()}


def planted(path: Path, sizes: dict[tuple[str, str], int], ns_per_byte: float) -> Path:
    rows = []
    for (operator, case), num_bytes in {("", ""): 0, **sizes}.items():
        for straight in (False, True):
            for flushed in (False, True):
                added_us = 1e-3 * ns_per_byte * num_bytes if straight and flushed else 0.0
                median_us = 60.0 + (2.0 if straight else 0.0) + (3.0 if operator else 0.0) + added_us
                rows.append(
                    {"operator": operator, "case": case, "straight_code": straight, "flushed": flushed,
                     "median_us": median_us}
                )  # fmt: skip
    path.write_text(json.dumps({"environment": {}, "rows": rows}))
    return path


def test_a_planted_cost_is_found(tmp_path: Path) -> None:
    sizes = {("a", f"{number}"): 1000 * number for number in range(1, 9)}
    found = cold_code.fit_cold_code(sizes, planted(tmp_path / "a.json", sizes, 0.02))
    assert found.value == pytest.approx(0.02e-9, rel=1e-6)
    assert found.low == pytest.approx(found.high, rel=1e-6)  # no noise, no interval
    assert len(found.cases) == 8


def test_the_shipped_value_is_that_of_the_stored_file() -> None:
    found, h200 = cold_code.fit_cold_code(SIZES), load_machine("h200")
    origin = h200.provenance["cold_code_s_per_byte"]
    assert h200.cold_code_s_per_byte == pytest.approx(found.value, rel=0.005)
    assert (origin.low, origin.high) == pytest.approx((found.low, found.high), rel=0.01)
    assert origin.kind == "fitted" and f"over {len(found.cases)} calls" in origin.note


def test_a_file_that_is_none_of_its_is_one_line(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"rows": [{}]}', '{"rows": 5}'):
        path = tmp_path / "a.json"
        path.write_text(text)
        with pytest.raises(UserError, match=r"a\.json is not a file of k3sim\.calibrate\.cold_code") as refused:
            cold_code.fit_cold_code(SIZES, path)
        assert "\n" not in str(refused.value)
    few = {("a", f"{number}"): 1000 for number in range(4)}
    with pytest.raises(UserError, match="has 4 cases whose code is known, accepted: 5 or more"):
        cold_code.fit_cold_code(few, planted(tmp_path / "b.json", few, 0.02))


def test_every_case_exists_and_is_timed() -> None:
    known = {(one.operator, one.name): one for one in cases_of([])}
    for case in cold_code.CASES:
        assert known[case].timed is not None and known[case].rows == 1, case


def test_the_straight_code_is_as_long_as_it_says() -> None:
    straight, loop = cold_code.SOURCE.split("if (straight) {")[1].split("} else {")
    assert straight.count("* ") == cold_code.STRAIGHT_INSTRUCTIONS // 2  # an exclusive or and a product each
    assert loop.count("* ") == 32
