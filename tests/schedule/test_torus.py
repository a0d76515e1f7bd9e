"""Ways of values through a TPU's slice, and the time of permutes that share links."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax.schedule import costs, schedules, topologies, torus
from tests.schedule.recordings import machine

MIB = 2**20
SHAPES = ["tpu:v5e:4x4", "tpu:v5e:16x16", "tpu:v6e:8x8", "tpu:v5p:4x4x4"]


@given(st.sampled_from(SHAPES), st.data())
def test_a_way_is_as_long_as_the_distance(name, data):
    topology = topologies.parse(name)
    place = st.tuples(*(st.integers(0, size - 1) for size in topology.shape))
    source, target = data.draw(place), data.draw(place)
    links = list(torus.route(topology, source, target))
    distance = 0
    for a, b, size, ring in zip(
        source, target, topology.shape, topology.rings, strict=True
    ):
        distance += min(abs(a - b), size - abs(a - b)) if ring else abs(a - b)
    assert len(links) == distance
    at = list(source)
    for place, axis, sign in links:
        assert place == tuple(at)
        at[axis] = (at[axis] + sign) % topology.shape[axis]
    assert tuple(at) == target


def shifts(n):
    """What goes from each device to each other one, a permute for each distance."""
    return [tuple((i, (i + k) % n) for i in range(n)) for k in range(1, n)]


def program(every, asynchronous=True):
    """The schedule of permutes of 1 MiB that are all launched before one ends."""
    n = len(every)
    collectives = tuple(
        schedules.Collective(
            f"permute.{i}", "collective-permute", MIB, "bf16", asynchronous,
            i, n + i if asynchronous else i, "ENTRY", 1,
            (tuple(range(n + 1)),), 0, None, (), pairs=pairs,
        )
        for i, pairs in enumerate(every)
    )  # fmt: skip
    return schedules.Schedule(collectives, (), (), 0, {}, n + 1)


@pytest.mark.parametrize("name", ["tpu:v5e:4x4", "tpu:v5e:16x16"])
def test_all_shifts_together_take_as_long_as_an_all_to_all(name):
    m = machine(name, fast_latency=1e-12)
    n = m.topology.devices
    found = costs.predict(program(shifts(n)), m, n)
    whole = m.seconds("all-to-all", n * MIB, n, n)
    assert found.communication == pytest.approx(whole, rel=1e-2)
    assert found.exposed == pytest.approx(whole, rel=1e-2)


def test_a_permute_takes_longer_the_farther_it_goes():
    m = machine("tpu:v5e:16x16")
    number = {place: i for i, place in enumerate(m.topology.coordinates)}
    link = m.reached("fast") / 4
    # at 8 both ways around a ring are as long: half of the values go either
    for far, crossing in ((1, 1), (4, 4), (8, 4), (15, 1)):
        pairs = [(number[x, y], number[x, (y + far) % 16]) for x, y in number]
        found = costs.predict(program([tuple(pairs)]), m, 256).communication
        hops = min(far, 16 - far) * m.value("fast_latency")
        assert found == pytest.approx(crossing * MIB / link + hops)


def test_permutes_that_wait_for_each_other_share_no_link():
    m = machine("tpu:v5e:4x4")
    every = shifts(16)
    apart = costs.predict(program(every, asynchronous=False), m, 16)
    alone = [costs.predict(program([x]), m, 16).communication for x in every]
    assert apart.communication == pytest.approx(sum(alone))
    assert costs.predict(program(every), m, 16).communication < apart.communication


def test_on_a_wider_slice_ways_are_longer():
    m = machine("tpu:v5e:4x4")
    few, many = (costs.predict(program(shifts(16)), m, n) for n in (16, 64))
    assert many.communication == pytest.approx(2 * few.communication)


def test_a_slices_numbers_move_with_its_pairs():
    schedule = program(shifts(4))
    order = [2, 0, 3, 1]
    moved = schedule.placed(order)
    for a, b in itertools.pairwise([schedule, moved]):
        for x, y in zip(a.collectives, b.collectives, strict=True):
            assert y.pairs == tuple((order[s], order[t]) for s, t in x.pairs)
