"""Recorded schedules with known answers, and what must not fool their reader."""

import re

import pytest

from acco_jax.schedule import hlo, schedules
from tests.schedule.recordings import recorded, text_of

MIB = 2**20

# What tests/recorded/record_schedules.py compiled: D, F, L, V, T, B there.
LAYER = 2 * 512 * (512 * 1536 + 512 * 512 + 2 * 512 * 2048) + 4 * 2 * 256 * 256 * 512
LOGITS = 2 * 512 * 512 * 4096
# forward, recomputed forward but for its last product, backward
MICROBATCH = 4 * (4 * LAYER - 2 * 512 * 512 * 2048) + 3 * LOGITS


PAIR = ["reduce-scatter", "all-gather"]
HALVES = ["all-reduce", "send-recv", "send-recv", "all-gather"]


@pytest.mark.parametrize(
    ("name", "kinds", "hidden", "loops"),
    [
        ("gpu_hidden", PAIR, [1, 1], 2),
        ("gpu_hidden_jax0102", PAIR, [1, 1], 2),
        ("gpu_cublas", PAIR, [1, 1], 2),
        ("gpu_no_barriers", PAIR, [0, 1], 2),
        ("gpu_one_loop", PAIR, [0, 1], 1),
        (
            "gpu_per_leaf",
            5 * ["reduce-scatter"] + 5 * ["all-gather"],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            1,
        ),
        ("gpu_synchronous", PAIR, [0, 0], 1),
        ("tpu_v5e_hidden", ["all-reduce", "all-gather"], [1, 1], 2),
        ("tpu_v5e_synchronous", ["all-reduce", "all-gather"], [0, 0], 1),
        ("tpu_v5e_slices", HALVES, [1, 1, 1, 1], 4),
        ("tpu_7x_scatter", PAIR, [0, 0], 2),  # asynchronous, after the loops
        ("tpu_v6e_hidden", PAIR, [1, 1], 2),
        ("tpu_v6e_hidden_libtpu51", PAIR, [1, 1], 2),
        ("tpu_v6e_hidden_jax0102", PAIR, [1, 1], 2),
    ],
)
def test_recorded(name, kinds, hidden, loops):
    schedule = recorded(name)
    large = schedule.select()
    assert [c.kind for c in large] == kinds
    assert [c.hidden for c in large] == hidden
    assert {c.dtype for c in large} == {"bf16"}
    assert all((c.where, c.times) == ("ENTRY", 1) for c in large)
    # two microbatches per loop: on GPU and TPU the same products, counted exactly
    assert schedule.flops == 2 * loops * MICROBATCH
    assert {x.flops_per_trip for x in schedule.loops if x.where == "ENTRY"} == {
        MICROBATCH
    }
    for c in large:
        assert bool(c.whiles_between) == c.hidden
        assert c.flops_between == len(c.whiles_between) * 2 * MICROBATCH
    assert "overlapped: " in schedule.summary()


@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        ("gpu_hidden", 1),
        ("gpu_no_barriers", 1 / 2),
        ("gpu_per_leaf", 8 / 56),  # MiB: the last of five all-gathers
        ("gpu_synchronous", 0),
        ("tpu_v6e_hidden", 1),
    ],
)
def test_hidden_fraction_is_by_bytes(name, fraction):
    assert recorded(name).hidden_fraction() == pytest.approx(fraction, abs=1e-12)


@pytest.mark.parametrize("name", ["gpu_hidden", "tpu_v5e_hidden", "tpu_v6e_hidden"])
def test_bytes_are_the_full_buffer(name):
    assert {c.bytes for c in recorded(name).select()} == {14592 * 1024 * 2}
    assert {c.group_size for c in recorded(name).select()} == {16}


def test_transfers_between_slices_are_pairs_of_send_and_receive():
    schedule = recorded("tpu_v5e_slices")
    scatter, gather = (c for c in schedule.select() if c.kind == "send-recv")
    assert scatter.bytes == gather.bytes == 14848 * 1024 * 2 // 16
    assert scatter.groups == ()
    small = [c for c in schedule.collectives if c.bytes < MIB]
    assert [c.kind for c in small] == 2 * ["all-reduce", "send-recv"]


def test_model_axis_is_told_from_data_axis():
    schedule = recorded("gpu_model2")
    sizes = {"data": 4, "model": 2}
    data = hlo.axis_groups(sizes, "data")
    model = hlo.axis_groups(sizes, "model")
    assert data == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert [c.kind for c in schedule.select(groups=data)] == PAIR
    assert schedule.hidden_fraction(groups=data) == 1
    assert schedule.hidden_fraction(groups=4) == 1
    assert schedule.hidden_fraction(groups=model) == 0
    assert schedule.hidden_fraction() < 0.5
    inside = schedule.select(groups=model)
    assert all(c.where != "ENTRY" for c in inside)
    # in the microbatch loop 2, in the layers' loop 2 x 4 times; counted by bytes
    assert {c.times for c in inside} == {2, 8}
    assert schedule.flops == 4 * MICROBATCH // 2
    exposed = recorded("gpu_model2_limit1")
    assert exposed.hidden_fraction(groups=data) == 0


def test_without_such_a_collective_there_is_no_fraction():
    with pytest.raises(
        ValueError, match="no collective of at least 1048576 bytes over"
    ):
        recorded("gpu_hidden").hidden_fraction(groups=2)


def test_unknown_trip_counts_come_from_the_caller():
    unknown = recorded("gpu_hidden", iterations=None)
    outer = [x for x in unknown.loops if x.where == "ENTRY"]
    assert [x.iterations for x in outer] == [None, None]
    assert unknown.flops == 2 * MICROBATCH  # one trip each
    assert {x.iterations for x in unknown.loops if x.where != "ENTRY"} == {4}  # known
    text = text_of("gpu_hidden")
    named = schedules.read(text, trip_counts={outer[0].name: 3, outer[1].name: 5})
    assert named.flops == 8 * MICROBATCH
    first, second = named.select()
    assert (first.flops_between, second.flops_between) == (
        3 * MICROBATCH,
        5 * MICROBATCH,
    )
    inner = next(x.name for x in unknown.loops if x.iterations == 4)
    for wrong in (inner, "while.0"):
        with pytest.raises(ValueError, match=rf"{wrong}.*while\.184"):
            schedules.read(text, trip_counts={wrong: 2})


@pytest.mark.parametrize("name", ["tpu_v5e_hidden", "tpu_v6e_hidden"])
def test_trip_counts_of_tpu_come_from_the_condition(name):
    iterations = [x.iterations for x in recorded(name, iterations=None).loops]
    assert iterations == [None, None, 4, 4, 4, 4]


@pytest.mark.parametrize("name", ["gpu_hidden", "tpu_v5e_hidden", "tpu_v6e_hidden"])
def test_operations_are_a_timeline(name):
    schedule = recorded(name)
    positions = [x.position for x in schedule.operations]
    assert positions == sorted(positions)
    loops = [x for x in schedule.operations if x.kind == "while"]
    assert [x.flops for x in loops] == [2 * MICROBATCH, 2 * MICROBATCH]
    assert sum(x.flops for x in schedule.operations) == schedule.flops
    # a loop reads its weights and writes its gradients each trip, not much more; of so
    # small a model most of it stays in a TPU's vector memory
    least = 0 if name.startswith("tpu") else 2 * 2 * 16.8e6
    for x in loops:
        assert least < x.bytes / 2 < 4e9
    assert not {x.kind for x in schedule.operations} & {"parameter", "tuple"}


# ------------------------------------------------------------ what must not fool it


def lines_of(text: str, *names: str) -> tuple[list[str], list[int]]:
    """The text's lines, and where ENTRY's instructions of these names are."""
    lines = text.splitlines()
    entry = next(i for i, x in enumerate(lines) if x.startswith("ENTRY"))
    return lines, [
        next(i for i in range(entry, len(lines)) if lines[i].startswith(f"  %{n} ="))
        for n in names
    ]


def moved(text: str, name: str, before: str) -> str:
    """The text with an instruction of ENTRY moved to just before another."""
    lines, (source, target) = lines_of(text, name, before)
    line = lines.pop(source)
    lines.insert(target - (source < target), line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "moves", "exposed"),
    [
        # done before the loop; start after it
        ("gpu_hidden", ("reduce-scatter-done", "while.184"), "reduce-scatter"),
        ("gpu_hidden", ("all-gather-start", "all-gather-done"), "all-gather"),
        # the real launch after the loop, the start before it
        (
            "tpu_v6e_hidden",
            (
                "reduce-scatter.2.cloned.1.call-update",
                "reduce-scatter.2.cloned.1.call-done",
            ),
            "reduce-scatter",
        ),
        (
            "tpu_v6e_hidden_libtpu51",
            ("all-gather.2.cloned.1.call-update", "all-gather.2.cloned.1.call-done"),
            "all-gather",
        ),
        (
            "tpu_v6e_hidden_jax0102",
            ("all-gather.2.cloned.1.call-start", "all-gather.2.cloned.1.call-done"),
            "all-gather",
        ),
        # of a pair of send and receive, the second launch after the loop
        ("tpu_v5e_slices", ("recv.1", "send-done.1"), "send-recv"),
    ],
)
def test_moved_launch_or_end_hides_nothing(name, moves, exposed):
    text = moved(text_of(name), *moves)
    found = [
        c.kind for c in schedules.read(text, trip_counts=2).select() if not c.hidden
    ]
    assert found == [exposed]


@pytest.mark.parametrize("name", ["gpu_hidden", "tpu_v5e_hidden", "tpu_v6e_hidden"])
def test_loops_without_products_hide_nothing(name):
    text = re.sub(r" (dot|convolution)\(", " multiply(", text_of(name))
    schedule = schedules.read(text, trip_counts=2)
    assert schedule.flops == 0
    assert schedule.hidden_fraction() == 0
    assert all(c.asynchronous and not c.whiles_between for c in schedule.select())


def test_synchronous_start_hides_nothing():
    text = text_of("gpu_hidden_jax0102")
    text = text.replace('"is_sync":false', '"is_sync":true')
    assert schedules.read(text, trip_counts=2).hidden_fraction() == 0


def test_woven_collective_needs_fusions_that_carry_it_on():
    reduce, gather = recorded("tpu_v5e_hidden").select()
    # the logits' three products carry it on: 2 trips of them, of a loop's products
    assert reduce.flops_carried == gather.flops_carried == 2 * 3 * LOGITS
    assert recorded("tpu_v6e_hidden").select()[0].flops_carried is None
    text = re.sub(  # without them all its steps would run in its last fusion
        r"(?m)^(%async_collective_fusion[^\n]*\{\n(?:  .*\n)*?.*)chain_id=\"0\"",
        r"\1",
        text_of("tpu_v5e_hidden"),
    )
    reduce, gather = schedules.read(text, trip_counts=2).select()
    assert (reduce.flops_carried, reduce.hidden) == (0, False)
    assert gather.hidden


def test_lost_end_hides_nothing():
    text = text_of("tpu_v5e_hidden").replace("AsyncCollectiveDone", "Other")
    assert schedules.read(text, trip_counts=2).hidden_fraction() == 0
    text = text_of("gpu_hidden").replace("reduce-scatter-done(%red", "copy(%red")
    reduce, gather = schedules.read(text, trip_counts=2).select()
    assert (reduce.done, reduce.hidden, gather.hidden) == (None, False, True)
