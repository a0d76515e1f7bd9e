"""Colours of methods in pictures."""

from acco_jax.command import palette
from acco_jax.methods import METHODS


def test_every_method_has_a_colour_of_its_own():
    assert set(palette.METHODS) == set(METHODS)
    assert len(set(palette.METHODS.values())) == len(METHODS)


def test_variants_have_other_colours():
    names = ["acco(gather_bits=8)", "zero1", "acco", "runs/dpu", "wp(feedback=1.0)"]
    found = palette.of_methods(names)
    assert list(found) == names
    of = palette.METHODS
    assert [found[x] for x in names[1:]] == [
        of[x] for x in ("zero1", "acco", "dpu", "wp")
    ]
    assert found[names[0]] not in [of[x] for x in ("zero1", "acco", "dpu", "wp")]
    assert len(set(found.values())) == 5


def test_colours_repeat_when_none_is_left():
    found = palette.of_methods([f"run {i}" for i in range(30)])
    assert set(found.values()) == set(palette.METHODS.values())
