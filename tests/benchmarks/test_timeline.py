"""The boxes of a timeline, and the committed animation of them."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks import pictures, timeline


def of(found, *names):
    return [(x.begin, x.end) for x in found if x.name in names]


def test_zero1_waits_and_acco_does_not():
    zero1 = timeline.boxes("zero1", 2, 0.5, 5)
    assert of(zero1, "computation") == [(0, 2), (2.5, 4.5)]
    assert of(zero1, "waiting") == [(2, 2.5), (4.5, 5)]
    acco = timeline.boxes("acco", 2, 0.5, 3)
    assert of(acco, "computation") == [(0, 1), (1, 2), (2, 3)]
    assert of(acco, *timeline.NETWORK) == [
        (1, 1.25),
        (1.25, 1.5),
        (2, 2.25),
        (2.25, 2.5),
    ]
    assert of(acco, "waiting") == []


def test_a_slow_network_makes_acco_wait():
    acco = timeline.boxes("acco", 2, 1.5, 4)
    assert of(acco, "computation") == [(0, 1), (1, 2), (2.5, 3.5)]
    assert of(acco, "waiting") == [(2, 2.5), (3.5, 4)]
    assert timeline.computed(acco, 2.75) == 2.25


@pytest.mark.parametrize("ending", pictures.STYLES)
def test_the_committed_animation_is_the_drawn_one(ending, tmp_path, monkeypatch):
    committed = (pictures.ASSETS / f"moving{ending}.svg").read_text()
    monkeypatch.setattr(pictures, "ASSETS", tmp_path)
    pictures.draw_moving(ending)
    assert (tmp_path / f"moving{ending}.svg").read_text() == committed
    assert len(committed) < 200_000
    text = [x.text for x in ElementTree.fromstring(committed).iter() if x.text]
    counts = [float(x[:-8]) for x in text if re.fullmatch(r"[\d.]+M tokens", x)]
    zero1, acco = counts[: timeline.TICKS + 1], counts[timeline.TICKS + 1 :]
    assert zero1 == sorted(zero1) and acco == sorted(acco)
    assert (zero1[0], zero1[-1], acco[-1]) == (0, 4.7, 5.8)
