"""Time of a whole schedule: what is computed, what is sent, and what is waited for."""

import dataclasses
import itertools

import pytest

from acco_jax.schedule import costs
from tests.schedule.recordings import BUFFER, machine, recorded


@pytest.mark.parametrize(
    ("name", "topology", "slices"),
    [
        ("gpu_hidden", "gpu:h200:2x8", 1),
        ("gpu_cublas", "gpu:h200:2x8", 1),
        ("gpu_synchronous", "gpu:h200:2x8", 1),
        ("gpu_no_barriers", "gpu:h200:2x8", 1),
        ("gpu_per_leaf", "gpu:h200:2x8", 1),
        ("gpu_model2", "gpu:h200:1x8", 1),
        ("tpu_v5e_hidden", "tpu:v5e:4x4", 1),
        ("tpu_v5e_slices", "tpu:v5e:4x4", 2),
        ("tpu_v6e_hidden", "tpu:v6e:4x4", 1),
        ("tpu_7x_scatter", "tpu:tpu7x:2x2x2", 1),
    ],
)
@pytest.mark.parametrize("slowed", [1, 1e-3])
def test_time_adds_up(name, topology, slices, slowed):
    m = machine(topology, slices)
    m = machine(
        topology,
        slices,
        fast_bandwidth=m.value("fast_bandwidth") * slowed,
        slow_bandwidth=m.value("slow_bandwidth") * slowed,
    )
    p = costs.predict(recorded(name), m, m.topology.devices)
    busy = {
        track: sorted((s for s in p.spans if s.track in track), key=lambda s: s.start)
        for track in (("computation", "waiting"), ("communication",))
    }
    for spans in busy.values():  # one thing at a time, forwards
        for a, b in itertools.pairwise(spans):
            assert a.start < a.end <= b.start + 1e-15
    assert p.total == pytest.approx(max(s.end for s in p.spans))
    assert 0 <= p.exposed <= p.communication * (1 + 1e-9)
    assert 0 <= p.hidden <= 1
    assert 0 < p.matrix <= p.computation
    at_peak = recorded(name).flops / (m.value("flops") * m.value("compute_efficiency"))
    assert p.matrix >= at_peak * (1 - 1e-9)


def test_what_the_schedule_hides_is_hidden_in_time():
    m = machine("gpu:h200:2x8")
    hidden, sync, half = (
        costs.predict(recorded(name), m, 16)
        for name in ("gpu_hidden", "gpu_synchronous", "gpu_no_barriers")
    )
    pair = 2 * m.seconds("all-gather", BUFFER, 16, 8)
    assert hidden.communication >= pair
    small = hidden.communication - pair  # the scalars' all-reduces wait
    assert hidden.exposed == pytest.approx(small)
    # beside the packing, a little of what the schedule does not hide is hidden
    assert 0.85 * sync.communication < sync.exposed < sync.communication
    assert half.exposed == pytest.approx(half.communication - pair / 2, rel=0.1)


@pytest.mark.parametrize("slowed", [1, 1e-3])
def test_what_is_overlapped_slows_what_is_computed(slowed):
    network = {"slow_bandwidth": 50e9 * slowed}
    alone, beside = (
        costs.predict(
            recorded("gpu_hidden"),
            machine("gpu:h200:2x8", contention=c, **network),
            16,
        )
        for c in (0.0, 0.25)
    )
    assert alone.slowing == 0
    assert beside.computation == pytest.approx(alone.computation)
    overlapped = alone.communication - alone.exposed
    assert beside.exposed == pytest.approx(alone.exposed)
    assert beside.slowing == pytest.approx(0.25 * overlapped)
    assert beside.total == pytest.approx(alone.total + beside.slowing)


def test_what_does_not_fit_behind_the_computation_is_waited_for():
    m = machine("gpu:h200:2x8", slow_bandwidth=50e6)
    p = costs.predict(recorded("gpu_hidden"), m, 16)
    assert p.communication > 10 * p.computation
    # both loops hide as much as they last
    assert p.exposed == pytest.approx(p.communication - p.matrix, rel=0.1)
    assert p.total == pytest.approx(p.communication, rel=0.1)


def in_few_bits(bits, hide=True):
    """The recording of 2x8, and with these bits."""
    whole = recorded("gpu_hidden")
    names = [c.name for c in whole.select()]
    return whole, costs.in_few_bits(whole, names, *bits, hide_reduction=hide)


def test_a_reduction_is_known_by_its_kind():
    """Not by its place among several."""
    whole = recorded("gpu_hidden")
    reduce, gather = whole.select()
    assert (reduce.kind, gather.kind) == ("reduce-scatter", "all-gather")
    second = dataclasses.replace(reduce, name="second")
    found = dataclasses.replace(whole, collectives=(reduce, second, gather))
    names = [c.name for c in found.collectives]
    few = costs.in_few_bits(found, names, 4, 8, hide_reduction=True).collectives
    kinds = [c.kind for c in few]
    assert kinds == ["all-to-all", "all-to-all", "all-gather"]
    assert few[0].bytes == few[1].bytes == reduce.bytes // 2
    assert few[2].bytes == gather.bytes // 4


@pytest.mark.parametrize(
    ("bits", "share"), [((8, None), 0.75), ((4, None), 0.625), ((8, 8), 0.5)]
)
def test_few_bits_gain_what_a_slow_network_costs(bits, share):
    m = machine("gpu:h200:16x1", slow_bandwidth=50e6)  # every device its own adapter
    whole, few = in_few_bits(bits)
    plain, p = costs.predict(whole, m, 16), costs.predict(few, m, 16)
    expected = plain.communication * share
    assert p.communication == pytest.approx(expected, rel=1e-3)
    assert p.computation == pytest.approx(plain.computation)
    assert p.total < (share + 0.1) * plain.total


def test_few_bits_of_the_reduction_cost_a_ring_s_advantage():
    """Of a ring's steps few leave the host; of an all-to-all's blocks half of them."""
    m = machine("gpu:h200:2x8", slow_bandwidth=50e6)
    whole, none = in_few_bits((None, None))
    assert none == whole
    _, gathers = in_few_bits((8, None))
    _, both = in_few_bits((8, 8))
    _, alone = in_few_bits((8, 8), hide=False)
    p, q, r = (costs.predict(s, m, 16) for s in (gathers, both, alone))
    ring = m.seconds("reduce-scatter", BUFFER, 16, 8)
    blocks = m.seconds("all-to-all", BUFFER // 2, 16, 8)
    assert blocks == pytest.approx(
        BUFFER / 4 / (50e6 * m.value("network_efficiency")), rel=1e-2
    )
    assert q.communication - p.communication == pytest.approx(blocks - ring)
    assert blocks > 2 * ring
    assert r.communication == pytest.approx(q.communication)
    assert r.exposed > q.exposed


def test_a_transfer_between_slices_belongs_to_the_way_it_lies_on():
    whole = recorded("tpu_v5e_slices")
    chosen = whole.select()
    kinds = [c.kind for c in chosen]
    assert kinds == ["all-reduce", "send-recv", "send-recv", "all-gather"]
    names = [c.name for c in chosen]
    few = costs.in_few_bits(whole, names, 8, None, hide_reduction=False)
    sizes = {c.name: c.bytes for c in few.collectives}
    assert [sizes[c.name] / c.bytes for c in chosen] == [1, 1, 0.5, 0.5]


def test_a_reduction_in_few_bits_is_for_the_slower_network():
    """Within a slice gradients stay as they are, between slices they are halved."""
    whole, m = recorded("tpu_v5e_slices"), machine("tpu:v5e:4x4", 2)
    chosen = whole.select()
    assert [m.domains(c) for c in chosen] == [1, 2, 2, 1]
    names = [c.name for c in chosen]
    few = costs.in_few_bits(
        whole, names, 8, 8, hide_reduction=False, within=[names[0], names[-1]]
    )
    found = {c.name: c for c in few.collectives}
    now = [found[name] for name in names]
    shares = [a.bytes / b.bytes for a, b in zip(now, chosen, strict=True)]
    assert shares == [1, 0.5, 0.5, 0.5]
    assert [c.kind for c in now] == [c.kind for c in chosen]
    assert [c.asynchronous for c in now] == [c.asynchronous for c in chosen]


def test_a_collective_between_hosts_grows_with_their_number():
    m, whole = machine("gpu:h200:4x8"), recorded("gpu_hidden")
    gather = dataclasses.replace(whole.select()[1], groups=((0, 8, 16, 24),))
    alone = dataclasses.replace(whole, collectives=(gather,))
    for hosts in (1, 4, 64):
        p = costs.predict(alone, m, 8 * hosts)
        want = m.seconds("all-gather", gather.bytes, hosts, 1)
        assert p.communication == pytest.approx(want)
        assert p.communication >= BUFFER * (1 - 1 / hosts) / m.value("slow_bandwidth")


def test_a_group_over_some_of_the_hosts_grows_with_their_number():
    """Workers are groups of two hosts: their axis crosses every second one."""
    m, whole = machine("gpu:h100:4x8"), recorded("gpu_hidden")
    groups = tuple((i, i + 16) for i in range(16))
    c = dataclasses.replace(whole.select()[0], groups=groups)
    for devices in (32, 64, 128):
        want = m.seconds(c.kind, c.bytes, devices // 16, 1)
        assert costs.collective_seconds(c, m, devices) == pytest.approx(want)


def test_one_of_groups_of_devices_grows_with_them():
    """Those of neighbours do not: they are a model's own groups."""
    m, whole = machine("gpu:h100:1x8"), recorded("gpu_hidden")

    def seconds(groups, devices):
        c = dataclasses.replace(whole.select()[1], groups=groups)
        return costs.collective_seconds(c, m, devices), c.bytes

    apart, size = seconds(((0, 2, 4, 6), (1, 3, 5, 7)), 64)
    assert apart == pytest.approx(m.seconds("all-gather", size, 32, 4))
    here, size = seconds(((0, 2, 4, 6), (1, 3, 5, 7)), 8)
    assert here == pytest.approx(m.seconds("all-gather", size, 4, 4))
    neighbours, size = seconds(((0, 1), (2, 3), (4, 5), (6, 7)), 64)
    assert neighbours == pytest.approx(m.seconds("all-gather", size, 2, 2))


def test_a_model_s_own_group_does_not_grow():
    """Of data 2, fsdp 2 and tensor 2 those of fsdp are not neighbours."""
    m, whole = machine("gpu:h100:1x8"), recorded("gpu_hidden")
    data = dataclasses.replace(
        whole.select()[1], groups=((0, 4), (1, 5), (2, 6), (3, 7))
    )
    fsdp = dataclasses.replace(data, groups=((0, 2), (1, 3), (4, 6), (5, 7)))
    schedule = dataclasses.replace(whole, collectives=(data, fsdp))
    for devices, domain in (8, 2), (512, 2):
        p = costs.predict(schedule, m, devices, lambda c: c is fsdp)
        grown, own = (spent.seconds for spent in p.each)
        want = m.seconds("all-gather", data.bytes, devices // 4, domain)
        assert grown == pytest.approx(want)
        assert own == pytest.approx(m.seconds("all-gather", data.bytes, 2, 2))


def test_the_widest_of_unequal_groups_decides():
    m, c = machine("gpu:h100:2x4"), recorded("gpu_hidden").select()[1]
    within, between = ((0, 1), (2, 3)), ((0, 1), (2, 6))
    times = [
        costs.collective_seconds(
            dataclasses.replace(c, groups=g, kind="collective-permute"), m, 8
        )
        for g in (within, between)
    ]
    assert times[0] == pytest.approx(m.seconds("collective-permute", c.bytes, 2, 2))
    assert times[1] == pytest.approx(m.seconds("collective-permute", c.bytes, 2, 1))


def test_who_waits_for_another_is_not_charged_for_it():
    """A large collective in flight holds back a small one, which waits right there."""
    m, whole = machine("gpu:h100:1x8"), recorded("gpu_hidden")
    c = whole.select()[1]
    large = dataclasses.replace(c, start=2, done=9, flops_carried=None)
    small = dataclasses.replace(
        c, start=5, done=5, bytes=c.bytes // 100, asynchronous=False
    )
    schedule = dataclasses.replace(
        whole, collectives=(large, small), operations=(), bodies={}
    )
    p = costs.predict(schedule, m, 8)
    for spent in p.each:
        assert spent.exposed == pytest.approx(spent.seconds)
    assert p.exposed == pytest.approx(p.communication)
    assert p.total == pytest.approx(p.exposed)


def test_a_v5e_collective_goes_on_in_the_fusions_that_carry_it():
    m = machine("tpu:v5e:4x4", fast_bandwidth=2e9)
    schedule = recorded("tpu_v5e_hidden")
    p = costs.predict(schedule, m, 16)
    carried = {c.kind: c.flops_carried / c.flops_between for c in schedule.select()}
    assert all(0 < share < 1 for share in carried.values())
    assert p.communication - p.exposed < 0.9 * p.matrix


def test_more_devices_make_collectives_longer_and_nothing_else():
    m = machine("gpu:h200:1x8")
    few, here, many = (
        costs.predict(recorded("gpu_hidden"), machine("gpu:h200:2x8"), n)
        for n in (8, 16, 4096)
    )
    assert few.communication < here.communication < many.communication
    assert few.computation == pytest.approx(here.computation)
    assert many.computation == pytest.approx(here.computation)
    assert m.domain(4) == 4
    assert m.domain(4096) == 8
    assert machine("tpu:v6e:4x4").domain(64) == 64
    assert machine("tpu:v6e:4x4").domain(512) == 256
    assert machine("tpu:v6e:4x4", 2).domain(512) == 16


def test_zero1_by_formula():
    p = costs.predict(recorded("gpu_hidden"), machine("gpu:h200:2x8"), 16)
    update = p.computation - p.matrix
    assert costs.synchronous(p, 2) == pytest.approx(
        2 * p.matrix + update + p.communication
    )


def test_two_halves_one_after_the_other():
    schedule, m = recorded("gpu_hidden"), machine("gpu:h200:2x8")
    once, both = costs.predict(schedule, m, 16), costs.in_turn([schedule] * 2, m, 16)
    assert both.total == pytest.approx(2 * once.total)
    assert (both.hidden, both.each) == (pytest.approx(once.hidden), once.each * 2)
    assert both.spans[-1].end == pytest.approx(once.total + once.spans[-1].end)
    assert costs.synchronous(both, 1) == pytest.approx(costs.synchronous(once, 2))
