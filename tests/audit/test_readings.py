"""Train steps of others, as XLA compiled them for 4 hosts of 8 H100, read by hand.

What stands here was read from the texts line by line, with awk: in which computation a
collective starts and ends, on which of its lines, how many bytes its full buffer has
and how often the loops around it run. tests/recorded/record_foreign.py made the texts.
"""

import functools
import gzip
import pathlib

import pytest

from acco_jax.audit import audit

FOREIGN = pathlib.Path(__file__).parents[1] / "recorded" / "foreign"
MIB = 2**20
MESHES = {
    "plain_dp": {"data": 32},
    "dp_accumulation": {"data": 32},
    "fsdp": {"data": 4, "fsdp": 8},
    "fsdp_accumulation": {"data": 4, "fsdp": 8},
    "fsdp_fine_remat": {"data": 4, "fsdp": 8},
    "peft_trainer": {"fsdp": 32, "tp": 1},
    "levanter_step": {"data": 32, "replica": 1},
}
EMBED = 32_000 * 2048 * 2 / MIB  # 125: the embedding, or its gradient, in bfloat16
TABLE = 128_256 * 2048 * 4 / MIB  # that of Llama 3.2, in float32
# of Levanter's Llama in bfloat16: heads of 64 and two norms, a matrix, the table
NORM = 2048 * 2 / MIB
HEADS, MLP, WORDS = 2048 * (2048 + 512) * 2 * 2 / MIB + 2 * NORM, 32, TABLE / 2
QKV, OUT, UP, DOWN = (2048 * n * 2 / MIB for n in (6144, 2048, 8192, 8192))


@functools.cache
def read(name):
    text = gzip.decompress((FOREIGN / f"{name}.txt.gz").read_bytes()).decode()
    return audit(text, topology="gpu:h100:4x8", mesh=MESHES[name])


# axis, kind, MiB, executions, where, line of the start, line of the end, hidden
LOSS = 4 / MIB
HAND = {
    "plain_dp": [
        ("data", "all-reduce", EMBED, 1, "ENTRY", 35, 50, True),
        ("data", "all-reduce", EMBED, 1, "ENTRY", 57, 77, False),
        ("data", "all-reduce", LOSS, 1, "ENTRY", 78, 82, False),
        ("data", "all-reduce", OUT, 8, "region_11.19_spmd", 69, 79, True),
        ("data", "all-reduce", QKV, 8, "region_11.19_spmd", 80, 84, True),
        ("data", "all-reduce", DOWN, 8, "region_11.19_spmd", 85, 88, True),
        ("data", "all-reduce", UP, 8, "region_11.19_spmd", 89, 101, True),
    ],
    # 4 microbatches: all but the lookup's gradient is reduced in each
    "dp_accumulation": [
        ("data", "all-reduce", EMBED, 1, "ENTRY", 20, 40, False),
        ("data", "all-reduce", LOSS, 4, "region_0.23_spmd", 49, 52, True),
        ("data", "all-reduce", EMBED, 4, "region_0.23_spmd", 53, 71, False),
        ("data", "all-reduce", OUT, 32, "region_13.20_spmd", 69, 79, True),
        ("data", "all-reduce", QKV, 32, "region_13.20_spmd", 80, 84, True),
        ("data", "all-reduce", DOWN, 32, "region_13.20_spmd", 85, 88, True),
        ("data", "all-reduce", UP, 32, "region_13.20_spmd", 89, 101, True),
    ],
    "fsdp": [
        ("fsdp", "all-gather", EMBED, 1, "ENTRY", 9, 12, False),
        ("fsdp", "all-gather", QKV, 8, "region_0.5_spmd", 5, 12, False),
        ("fsdp", "all-gather", OUT, 8, "region_0.5_spmd", 14, 28, True),
        ("fsdp", "all-gather", UP, 8, "region_0.5_spmd", 30, 43, True),
        ("fsdp", "all-gather", DOWN, 8, "region_0.5_spmd", 45, 49, True),
        ("fsdp", "all-gather", QKV, 8, "region_11.19_spmd", 21, 26, False),
        ("fsdp", "all-gather", OUT, 8, "region_11.19_spmd", 38, 42, True),
        ("fsdp", "all-gather", DOWN, 8, "region_11.19_spmd", 44, 52, True),
        ("fsdp", "all-gather", UP, 8, "region_11.19_spmd", 54, 58, True),
        ("fsdp", "reduce-scatter", 96, 8, "region_11.19_spmd", 93, 93, False),
        ("data+fsdp", "all-reduce", EMBED, 1, "ENTRY", 42, 54, True),
        ("data+fsdp", "all-reduce", EMBED, 1, "ENTRY", 61, 68, False),
        ("data+fsdp", "all-reduce", LOSS, 1, "ENTRY", 69, 97, False),
        ("data", "all-reduce", 12, 8, "region_11.19_spmd", 104, 110, True),
    ],
    "fsdp_accumulation": [
        ("fsdp", "all-gather", EMBED, 4, "region_0.23_spmd", 5, 8, False),
        ("fsdp", "all-gather", QKV, 32, "region_1.5_spmd", 5, 12, False),
        ("fsdp", "all-gather", OUT, 32, "region_1.5_spmd", 14, 28, True),
        ("fsdp", "all-gather", UP, 32, "region_1.5_spmd", 30, 43, True),
        ("fsdp", "all-gather", DOWN, 32, "region_1.5_spmd", 45, 49, True),
        ("fsdp", "all-gather", QKV, 32, "region_13.20_spmd", 21, 26, False),
        ("fsdp", "all-gather", OUT, 32, "region_13.20_spmd", 38, 42, True),
        ("fsdp", "all-gather", DOWN, 32, "region_13.20_spmd", 44, 52, True),
        ("fsdp", "all-gather", UP, 32, "region_13.20_spmd", 54, 58, True),
        ("fsdp", "reduce-scatter", 96, 32, "region_13.20_spmd", 93, 93, False),
        ("data+fsdp", "all-reduce", EMBED, 4, "region_0.23_spmd", 50, 53, False),
        ("data+fsdp", "all-reduce", LOSS, 4, "region_0.23_spmd", 54, 60, False),
        ("data+fsdp", "all-reduce", EMBED, 4, "region_0.23_spmd", 61, 77, False),
        ("data", "all-reduce", 12, 32, "region_13.20_spmd", 104, 110, True),
    ],
    # the backward pass gathers down and reduces over "data" with nothing beside it
    "fsdp_fine_remat": [
        ("fsdp", "all-gather", EMBED, 1, "ENTRY", 5, 14, False),
        ("fsdp", "all-gather", QKV, 8, "region_0.5_spmd", 6, 13, False),
        ("fsdp", "all-gather", OUT, 8, "region_0.5_spmd", 15, 37, True),
        ("fsdp", "all-gather", UP, 8, "region_0.5_spmd", 39, 47, True),
        ("fsdp", "all-gather", DOWN, 8, "region_0.5_spmd", 49, 55, True),
        ("fsdp", "all-gather", DOWN, 8, "region_11.19_spmd", 30, 33, False),
        ("fsdp", "all-gather", UP, 8, "region_11.19_spmd", 35, 41, True),
        ("fsdp", "all-gather", OUT, 8, "region_11.19_spmd", 43, 63, True),
        ("fsdp", "all-gather", QKV, 8, "region_11.19_spmd", 69, 90, True),
        ("fsdp", "reduce-scatter", 96, 8, "region_11.19_spmd", 107, 107, False),
        ("data+fsdp", "all-reduce", EMBED, 1, "ENTRY", 50, 60, True),
        ("data+fsdp", "all-reduce", EMBED, 1, "ENTRY", 70, 77, False),
        ("data+fsdp", "all-reduce", LOSS, 1, "ENTRY", 78, 106, False),
        ("data", "all-reduce", 12, 8, "region_11.19_spmd", 118, 120, False),
    ],
    # google-tunix: two layers' weights are gathered before the first product
    "peft_trainer": [
        ("fsdp", "all-reduce", LOSS, 1, "ENTRY", 2, 5, False),
        ("fsdp", "all-gather", 16, 1, "ENTRY", 7, 7, False),
        ("fsdp", "all-gather", 16, 1, "ENTRY", 10, 13, False),
        ("fsdp", "all-gather", 24, 1, "ENTRY", 17, 20, False),
        ("fsdp", "all-gather", 24.5, 1, "ENTRY", 24, 24, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 27, 27, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 30, 33, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 35, 35, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 38, 38, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 41, 44, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 46, 50, False),
        ("fsdp", "all-to-all", 32, 1, "ENTRY", 52, 54, False),
        ("fsdp", "all-gather", TABLE, 1, "ENTRY", 55, 148, True),
        ("fsdp", "all-gather", 24, 1, "ENTRY", 167, 177, False),
        ("fsdp", "all-gather", 16, 1, "ENTRY", 190, 202, True),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 204, 207, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 209, 227, True),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 229, 233, True),
        ("fsdp", "all-gather", 24, 1, "ENTRY", 305, 307, True),
        ("fsdp", "all-gather", 16, 1, "ENTRY", 320, 332, True),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 334, 338, False),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 340, 360, True),
        ("fsdp", "all-gather", 64, 1, "ENTRY", 362, 366, True),
        ("fsdp", "reduce-scatter", 464, 1, "ENTRY", 431, 434, True),
        ("fsdp", "reduce-scatter", TABLE, 1, "ENTRY", 435, 448, True),
        ("fsdp", "all-to-all", 32, 1, "ENTRY", 450, 546, False),
        ("fsdp", "all-reduce", 10_256 * 4 / MIB, 1, "ENTRY", 572, 616, False),
    ],
    # Levanter: 16 layers' weights are gathered twice, their gradients reduced once
    "levanter_step": [
        ("data", "all-gather", 1 + NORM, 1, "ENTRY", 4, 7, False),  # tokens
        ("data", "all-to-all", 32, 1, "ENTRY", 11, 40, False),
        ("data", "all-gather", WORDS, 1, "ENTRY", 55, 68, False),
        ("data", "all-reduce", LOSS, 1, "ENTRY", 71, 74, False),
        ("data", "reduce-scatter", WORDS + NORM, 1, "ENTRY", 105, 108, False),
        ("data", "all-to-all", 32, 1, "ENTRY", 110, 129, False),
        ("data", "all-reduce", 2 * LOSS, 1, "ENTRY", 149, 163, False),
        ("data", "all-gather", HEADS, 16, "region_1.10_spmd", 21, 24, False),
        ("data", "all-gather", MLP, 16, "region_1.10_spmd", 26, 60, True),
        ("data", "all-gather", MLP, 16, "region_1.10_spmd", 62, 74, True),
        ("data", "all-gather", MLP, 16, "region_1.10_spmd", 76, 79, True),
        ("data", "all-gather", HEADS, 16, "region_21.43_spmd", 21, 33, False),
        ("data", "all-gather", MLP, 16, "region_21.43_spmd", 35, 71, True),
        ("data", "all-gather", MLP, 16, "region_21.43_spmd", 73, 79, True),
        ("data", "all-gather", MLP, 16, "region_21.43_spmd", 81, 85, True),
        ("data", "reduce-scatter", HEADS + 3 * MLP, 16, "region_21.43_spmd", 159, 161,
         False),
    ],
}  # fmt: skip


OWN = {
    "peft_trainer": "site-packages/tunix/",
    "levanter_step": ("site-packages/levanter/", "site-packages/haliax/"),
}


def rows(result):
    return [
        (axis, c.kind, c.bytes / MIB, c.times, c.where, c.start, c.done, c.hidden)
        for axis, verdict in result.axes.items()
        for c in (r.collective for r in verdict.readings)
    ]


@pytest.mark.parametrize("name", HAND)
def test_a_program_is_read_as_by_hand(name):
    result = read(name)
    assert rows(result) == HAND[name]
    whole = result.verdict()
    sizes = [(mib * times, hidden) for _, _, mib, times, *_, hidden in HAND[name]]
    assert whole.bytes / MIB == pytest.approx(sum(size for size, _ in sizes))
    assert whole.hidden_bytes / MIB == pytest.approx(
        sum(size for size, hidden in sizes if hidden)
    )
    assert not result.schedule.unknown


@pytest.mark.parametrize("name", HAND)
def test_a_collective_has_its_source(name):
    """A line of the program itself, without the folder that it lay in."""
    own = OWN.get(name, "benchmarks/foreign.py:")
    for verdict in read(name).axes.values():
        for r in verdict.readings:
            assert r.collective.source.startswith(own)


def test_a_source_names_its_function_and_operation():
    (gather,) = (
        r.collective
        for r in read("fsdp").axes["fsdp"].readings
        if r.collective.name == "all-gather-start.5"
    )
    assert gather.source.endswith("(_loss.<locals>.block)")
    assert gather.op_name.endswith("/while/body/closed_call/dot_general")


def test_what_runs_beside_a_collective():
    by_name = {r.collective.name: r for r in read("fsdp").axes["fsdp"].readings}
    beside = by_name["all-gather-start.5"].beside
    product = next(b for b in beside if b.flops)
    # lines 16 and 25: what makes queries, keys and values, and attention's scores
    tokens = 4 * 2048
    scores = 2 * tokens * 2048 * 2048
    assert sum(b.flops for b in beside) == 2 * tokens * 2048 * 6144 + scores
    assert beside[0].seconds >= product.seconds > 0
    assert not by_name["reduce-scatter-start"].beside  # synchronous


def test_fine_rematerialization_exposes_more():
    """openxla/xla#14397, from two schedules alone."""
    coarse, fine = read("fsdp"), read("fsdp_fine_remat")
    assert fine.verdict().bytes == coarse.verdict().bytes
    lost = coarse.verdict().hidden_bytes - fine.verdict().hidden_bytes
    # all-reduces over data and the gather of down, for that of qkv: of 8 layers
    assert lost / MIB == 8 * (12 + DOWN - QKV)
    assert fine.prediction.exposed > 1.4 * coarse.prediction.exposed
    (exposed,) = fine.axes["data"].objections
    assert "no matrix product between its launch and its end" in exposed.cause.text


@pytest.mark.parametrize(
    ("name", "single"), [("dp_accumulation", "plain_dp"), ("fsdp_accumulation", "fsdp")]
)
def test_accumulation_reduces_in_every_microbatch(name, single):
    """AI-Hypercomputer/maxtext#5099: nothing is saved by 4 microbatches a step."""
    once, four = (
        sum(
            r.bytes
            for verdict in read(n).axes.values()
            for r in verdict.readings
            if r.collective.kind in ("all-reduce", "reduce-scatter")
        )
        for n in (single, name)
    )
    assert four > 3.5 * once
    causes = [r.cause for v in read(name).axes.values() for r in v.readings]
    (loop, *_) = (x.name for x in read(name).schedule.loops if x.where == "ENTRY")
    said = [c for c in causes if f"in each of the 4 iterations of {loop}" in c.text]
    assert said and all("reduce once" in c.advice for c in said)
    assert not any(
        "iterations" in r.cause.text for r in read(single).verdict().readings
    )


def test_a_loop_over_layers_is_no_accumulation():
    """Levanter's, with loops over attention's blocks in them."""
    (data,) = (v for v in read("levanter_step").axes.values() if v.readings)
    texts = [r.cause.text for r in data.readings if r.collective.times == 16]
    assert len(texts) == 9 and not any("iterations" in text for text in texts)
