"""Numbers in words: units that fit."""

import pytest

from acco_jax.schedule import machines, tables


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (3e-12, "under 1 ns"), (1.25e-9, "1.25 ns"), (0.0042, "4.2 ms")],
)
def test_seconds_have_a_unit_that_fits(value, text):
    assert tables.seconds(value) == text


def test_quantities_have_prefixes():
    assert tables.quantity(machines.Constant(50e9, "B/s", "")) == "50 GB/s"
    assert tables.quantity(machines.Constant(14e-6, "s", "")) == "14 µs"
    assert tables.quantity(machines.Constant(0.8, "", "")) == "0.8"
    assert tables.seconds(0.0123) == "12.3 ms"
