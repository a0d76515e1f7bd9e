"""A machine's figures, as given or replaced, and the time of one collective."""

import itertools
import re

import pytest

from acco_jax.schedule import machines, topologies
from acco_jax.schedule.chips import CHIPS
from tests.schedule.recordings import machine

MIB = 2**20


def test_figures_can_be_replaced():
    found = machines.figures(CHIPS["h200"], {"flops": 5e14})
    assert (found["flops"].value, found["flops"].unit) == (5e14, "FLOP/s")
    assert found["flops"].source == "given on the command line"
    assert (
        found["memory_bandwidth"] == machines.figures(CHIPS["h200"])["memory_bandwidth"]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flop": 1.0}, "figure is 'flop': did you mean 'flops'? Known: flops,"),
        ({"flops": 0.0}, "the figure flops is 0: it must be positive."),
        ({"flops": float("nan")}, "the figure flops is nan: it must be positive."),
    ],
)
def test_figures_refuse(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        machines.figures(CHIPS["h200"], changes)


def test_seconds_of_a_ring_on_gpus():
    e = machines.EFFICIENCIES["network"].likely
    one = machine("gpu:h200:1x8")
    gather = one.seconds("all-gather", 800 * MIB, 8, 8)
    assert gather == pytest.approx(700 * MIB / (450e9 * e) + 7 * 3.4e-6)
    twice = one.seconds("all-reduce", 800 * MIB, 8, 8)
    assert twice == pytest.approx(2 * gather)
    # 4 hosts: 8 adapters of 50 GB/s each are slower than NVLink
    far = machine("gpu:h200:4x8").seconds("reduce-scatter", 320 * MIB, 32, 8)
    latency = 28 * 3.4e-6 + 3 * 14e-6
    assert far == pytest.approx(310 * MIB / (400e9 * e) + latency)
    # 16 hosts of one GPU: every step crosses the network
    lone = machine("gpu:h200:16x1").seconds("all-gather", 160 * MIB, 16, 1)
    assert lone == pytest.approx(150 * MIB / (50e9 * e) + 15 * 14e-6)


def test_small_collectives_cost_latency_alone():
    m = machine("gpu:h200:2x8")
    assert m.seconds("all-reduce", 4, 16, 8) == pytest.approx(2 * (7 * 0.6e-6 + 5e-6))
    assert m.seconds("all-reduce", 4, 1, 1) == 0


@pytest.mark.parametrize("hosts", [1, 8, 128])
def test_a_byte_more_costs_no_more_than_a_byte(hosts):
    m = machine(f"gpu:h100:{hosts}x8")
    sizes = [1 << 12, (1 << 16) - 1, 1 << 16, 1 << 20]
    found = [m.seconds("all-reduce", size, 8 * hosts, 8) for size in sizes]
    assert found == sorted(found)
    assert found[2] < 6 * found[1]  # of other steps: 125 times as a ring of 1,024


def test_a_small_permute_takes_one_step():
    m = machine("gpu:h200:1x8")
    found = [m.seconds("collective-permute", n, 8, 8) for n in (1 << 10, 1 << 20)]
    assert found[0] < found[1] < 2 * found[0]


def test_a_measured_share_is_of_the_measured_rate():
    chip = CHIPS["h100"]
    measured = {
        "slow_bandwidth": (4e10, 6e10), "slow_efficiency": 1.0, "flops": 5e14,
        "compute_efficiency": 1.0,
    }  # fmt: skip
    kept = machines.figures(chip, {}, measured)
    assert kept["slow_efficiency"].value == kept["compute_efficiency"].value == 1
    assert kept["flops"].source == machines.MEASURED
    given = machines.figures(chip, {"slow_bandwidth": 5e10}, measured)
    assert "slow_efficiency" not in given  # so network_efficiency counts
    assert given["compute_efficiency"].value == 1
    assumed = machines.figures(chip, {"flops": 9e14}, measured)["compute_efficiency"]
    assert assumed == machines.figures(chip)["compute_efficiency"]
    both = machines.figures(
        chip, {"slow_bandwidth": 5e10, "slow_efficiency": 0.9}, measured
    )
    place = topologies.parse("gpu:h100:2x8")
    assert machines.Machine(place, both).at("slow", 1e10).reached("slow") == 9e9
    varied = machines.Machine(place, kept).at("slow", 1e10)
    likely = machines.EFFICIENCIES["network"].likely
    assert varied.reached("slow") == pytest.approx(1e10 * likely)


def test_seconds_on_a_torus_and_between_slices():
    e = machines.EFFICIENCIES["network"].likely
    m = machine("tpu:v6e:4x4")  # no rings: a corner has two of four links
    gather = m.seconds("all-gather", 160 * MIB, 16, 16)
    assert gather == pytest.approx(150 * MIB / (200e9 * e) + 6e-6)
    both = m.seconds("all-gather", 160 * MIB, 32, 16)
    between = 10 * MIB * 0.5 / (12.5e9 * e) + 14e-6
    assert both == pytest.approx(gather + between)
    sent = m.seconds("send-recv", 10 * MIB, 32, 1)
    assert sent == pytest.approx(10 * MIB / (12.5e9 * e) + 14e-6)


def test_an_all_to_all_and_a_neighbour():
    e = machines.EFFICIENCIES["network"].likely
    m = machine("gpu:h200:4x8")
    sent = m.seconds("all-to-all", 320 * MIB, 32, 8)  # 24 of 32 blocks leave the host
    latency = 28 * 3.4e-6 + 3 * 14e-6
    assert sent == pytest.approx(240 * MIB / (50e9 * e) + latency)
    inside = machine("gpu:h200:1x8").seconds("all-to-all", 800 * MIB, 8, 8)
    assert inside == pytest.approx(700 * MIB / (450e9 * e) + 7 * 3.4e-6)
    lone = m.seconds("collective-permute", 320 * MIB, 32, 8)
    assert lone == pytest.approx(320 * MIB / (50e9 * e) + 14e-6)
    # a ring of k: k / 4 hops on average; a torus of 16 x 16 four in each dimension
    torus = machine("tpu:v6e:16x16").seconds("all-to-all", 160 * MIB, 256, 256)
    assert torus == pytest.approx(8 * 160 * MIB / (400e9 * e) + 30e-6)
    # without rings twice as many cross the links in the middle
    slices = machine("tpu:v6e:4x4", 2).seconds("all-to-all", 160 * MIB, 32, 16)
    out = 80 * MIB / (12.5e9 * e) + 14e-6
    assert slices == pytest.approx(160 * MIB / (200e9 * e) + 6e-6 + out)


@pytest.mark.parametrize(
    ("topology", "rings"),
    [
        ("tpu:v5e:4x4", (False, False)),
        ("tpu:v5e:8x16", (False, True)),
        ("tpu:v6e:16x16", (True, True)),
        ("tpu:v5p:2x4x4", (False, False, False)),
        ("tpu:v5p:4x4x8", (True, True, True)),
        ("tpu:tpu7x:2x2x2", (False, False, False)),
    ],
)
def test_which_dimensions_of_a_slice_are_rings(topology, rings):
    assert machine(topology).topology.rings == rings


@pytest.mark.parametrize(
    ("topology", "places", "links"),
    [  # links of each dimension, over all of a device's
        ("tpu:v5e:16x16", [(0, y) for y in range(16)], (1, 2 / 4)),
        ("tpu:v5e:16x16", [(0, y) for y in range(8)], (1, 1 / 4)),  # half a ring
        ("tpu:v5e:4x4", [(0, 0), (1, 0)], (1, 1 / 4)),
        ("tpu:v5e:4x4", [(x, y) for x in (0, 1) for y in (2, 3)], (2, 2 / 4)),
        ("tpu:v5e:4x4", [(0, 0), (0, 2)], (1, 1 / 8)),  # beside (0, 1) and (0, 3)
        (
            "tpu:v5e:16x16",
            [(0, y) for y in range(0, 16, 2)],
            (1, 1 / 4),
        ),  # two of a ring
        ("tpu:v5p:4x4x4", [(x, y, 3) for x in range(4) for y in range(4)], (2, 4 / 6)),
        ("tpu:tpu7x:2x2x2", [(0, 0, 0), (0, 0, 0)], (1, 1.0)),  # of one chip
    ],
)
def test_links_of_groups_on_a_torus(topology, places, links):
    m = machine(topology)
    numbers = [m.topology.coordinates.index(place) for place in places]
    assert m.links(m.topology.fast_domain, numbers) == pytest.approx(links)


def test_links_of_slices_that_are_not_the_topologys():
    m = machine("tpu:v5e:4x4")
    assert [m.links(n) for n in (16, 64, 256)] == [(2, 0.5), (2, 0.5), (2, 1.0)]
    cube = machine("tpu:v5p:2x2x2").links(64)  # whose side is 3.99... in floats
    assert cube == (3, 1.0) == machine("tpu:tpu7x:2x2x2").links(128)


def test_places_without_the_compiler(monkeypatch):
    m = machine("tpu:v5e:2x4", 2)

    def missing(_):
        raise RuntimeError

    monkeypatch.setattr(topologies.Topology, "description", missing)
    places = m.topology.coordinates
    assert places[:9] == [*itertools.product(range(2), range(4)), (0, 0)]
    assert len(places) == 16


def test_a_permute_goes_to_one_neighbour():
    e = machines.EFFICIENCIES["network"].likely
    for topology, rate, hop in (
        ("gpu:h200:1x8", 450e9, 3.4e-6),  # through a switch
        ("gpu:mi300x:1x8", 448e9 / 7, 3.4e-6),
        ("tpu:v5e:4x4", 200e9 / 2, 1e-6),
        ("tpu:v5p:4x4x4", 600e9 / 3, 1e-6),
    ):
        m = machine(topology)
        seconds = m.seconds("collective-permute", 320 * MIB, 8, m.domain(8))
        assert seconds == pytest.approx(320 * MIB / (rate * e) + hop)
