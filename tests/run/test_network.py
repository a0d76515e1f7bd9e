"""Rates are understood, and what a machine lacks is said; links: tests/benchmarks."""

import pytest

from acco_jax.run.compare import network


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("200mbit", 200), ("1.5gbit", 1500), ("500kbit", 0.5), ("10MBIT", 10)],
)
def test_rates(text, mbit):
    assert network.parse(text) == mbit


@pytest.mark.parametrize(
    "text", ["", "200", "mbit", "-1mbit", "0mbit", "2 gbit", "1e3mbit"]
)
def test_what_is_no_rate_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="for example 200mbit") as error:
        network.parse(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


def test_says_that_the_tools_are_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert network.why_not() == "no ip and tc here: apt-get install -y iproute2."


def test_says_that_root_is_needed(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert network.why_not() == "only root can make network namespaces: run as root."
