"""Values in the units of the field."""

from __future__ import annotations

import pytest

from k3sim.sim.quantities import quantity, quantity_range


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (3.43e-7, "s", "343 ns"),
        (1.25e-6, "s", "1.25 us"),
        (4.7939e-3, "s", "4.794 ms"),
        (5.5e-10, "s", "0.55 ns"),
        (0.0, "s", "0 s"),
        (7e12, "B/s", "7 TB/s"),
        (7.17e11, "B/s", "717 GB/s"),
        (2.07e9, "Hz", "2.07 GHz"),
        (2.5e15, "FLOP/s", "2.5 PFLOP/s"),
        (233472, "B", "228 KiB"),
        (298013687808, "B", "277.5 GiB"),
        (0, "B", "0 B"),
        (152, "SM", "152 SMs"),
        (1, "GPU", "1 GPU"),
        (2048, "thread", "2,048 threads"),
        (0.05, "1", "0.05"),
        (True, "bool", "yes"),
        (16.0, "weight/clock/SM", "16 weight/clock/SM"),
    ],
)
def test_a_value_has_the_unit_of_its_size(value: float, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown


def test_both_ends_of_a_range_share_a_unit() -> None:
    assert quantity_range(9.5e-7, 1.1e-6, "s") == "0.95 to 1.1 us"
    assert quantity_range(9.5e-7, 1.1e-6, "s", like=9.8e-7) == "950 to 1,100 ns"
    assert quantity_range(0.92, 1.12, "1") == "0.92 to 1.12"
