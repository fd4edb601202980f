"""Values of a machine as integers."""

from __future__ import annotations

from k3sim.sim.units import bytes_per_us, picoseconds


def test_units_are_whole_and_never_zero_rates() -> None:
    assert bytes_per_us(8e12) == 8_000_000
    assert bytes_per_us(1.0) == 1  # a rate is never zero
    assert picoseconds(1.5e-9) == 1500
