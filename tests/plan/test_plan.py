"""The plan command on recorded schedules; nothing is compiled here."""

import dataclasses
import functools
import gzip
import itertools
import json
import pathlib
import re
import sys
import types
import warnings
from unittest import mock

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from jax.sharding import Mesh

from acco_jax.plan import __main__ as command
from acco_jax.plan import (
    costs,
    footprint,
    machines,
    planner,
    programs,
    report,
    schedules,
    tables,
    topologies,
)
from acco_jax.plan.chips import CHIPS, LARGEST_SLICE
from acco_jax.runner import exits, models
from acco_jax.runner.config import default_config

RECORDED = pathlib.Path(__file__).parents[1] / "recorded" / "schedules"
QUICKSTART = pathlib.Path(__file__).parents[2] / "experiments" / "quickstart.py"
MIB = 2**20
BUFFER = 14592 * 1024 * 2  # bytes of the recordings' packed buffer


@functools.cache
def text_of(name):
    return gzip.decompress((RECORDED / f"{name}.txt.gz").read_bytes()).decode()


@functools.cache
def recorded(name):
    return schedules.read(text_of(name), trip_counts=2)


def machine(name, slices=1, **changes):
    topology = topologies.parse(name, slices)
    return machines.Machine(topology, machines.figures(topology.chip, changes))


# ------------------------------------------------------------------------- figures


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_figure_has_a_source(chip):
    for name, figure in machines.figures(chip).items():
        assert figure.value > 0 or name == "call_seconds"
        assert figure.source
        assert figure.unit or name.endswith(("_efficiency", "_fraction"))
        if figure.range is not None:
            assert 0 < figure.range[0] < figure.value < figure.range[1] <= 1
    assert chip.platform == "gpu" or chip.name in LARGEST_SLICE


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


# ---------------------------------------------------------------- one collective


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


def test_seconds_on_a_torus_and_between_slices():
    e = machines.EFFICIENCIES["network"].likely
    m = machine("tpu:v6e:4x4")
    gather = m.seconds("all-gather", 160 * MIB, 16, 16)
    assert gather == pytest.approx(150 * MIB / (400e9 * e) + 6e-6)
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
    # a ring of k: k / 4 hops on average; a torus of 4 x 4 one hop in each dimension
    torus = machine("tpu:v6e:4x4").seconds("all-to-all", 160 * MIB, 16, 16)
    assert torus == pytest.approx(2 * 160 * MIB / (400e9 * e) + 6e-6)
    slices = machine("tpu:v6e:4x4", 2).seconds("all-to-all", 160 * MIB, 32, 16)
    out = 80 * MIB / (12.5e9 * e) + 14e-6
    assert slices == pytest.approx(160 * MIB / (400e9 * e) + 6e-6 + out)


# -------------------------------------------------------------- a whole schedule


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


# ------------------------------------------------------------------- the command


SCHEDULES = {"acco": "gpu_hidden", "zero1": "gpu_synchronous"}


@pytest.fixture
def stand_in(monkeypatch):
    """Recorded schedules instead of compiles, CPU devices instead of described ones."""
    compiled = []

    def compile_(program, *place):
        compiled.append(program)
        name = SCHEDULES[program.method]
        parts = {"parameters": 100, "optimizer state (shard)": 40}
        memory = programs.Memory(parts, 10**9 + 8 * 10**6 * program.rows, shards=40)
        return programs.Compiled(text_of(name), recorded(name), memory, 1.0)

    def mesh(topology, domains=None, group=types.MappingProxyType({})):
        assert set(group.values()) <= {1}
        return Mesh(np.array(jax.devices()[:8]), ("data",))

    monkeypatch.setattr(programs.Program, "compile", compile_)
    monkeypatch.setattr(programs, "data_mesh", mesh)
    return compiled


def run(*arguments, config=QUICKSTART, topology="gpu:h200:1x8"):
    """Runs the command in this process."""
    with flagsaver.flagsaver():
        line = ["plan", f"--config={config}", *arguments]
        if not any(x.startswith("--topology") for x in arguments):
            line.append(f"--topology={topology}")
        with warnings.catch_warnings(), mock.patch.object(sys, "argv", line):
            # how ml_collections 1.1.0 loads a file
            warnings.filterwarnings("ignore", r"the load_module\(\) method")
            flags.FLAGS(line)
        command.main(["plan"])


@pytest.fixture
def refusal(capsys):
    """refusal(*arguments): the one line in which the command refuses them."""

    def refused(*arguments, **options):
        with pytest.raises(SystemExit) as stopped:
            run(*arguments, **options)
        assert stopped.value.code == exits.REFUSED
        out, err = capsys.readouterr()
        (line,) = (x for x in err.splitlines() if not re.match(r"[IW]\d{4} ", x))
        assert out == "" and line.startswith("error: ")
        return line

    return refused


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (3e-12, "under 1 ns"), (1.25e-9, "1.25 ns"), (0.0042, "4.2 ms")],
)
def test_seconds_have_a_unit_that_fits(value, text):
    assert tables.seconds(value) == text


def test_the_whole_report(stand_in, tmp_path, capsys):
    out, file, hlo = tmp_path / "out", tmp_path / "a" / "plan.json", tmp_path / "hlo"
    run("--devices=8,64", f"--out={out}", f"--json={file}", f"--dump-hlo={hlo}")
    text = capsys.readouterr().out
    for words in (
        "gpu:h200:1x8: 8 x NVIDIA H200 141GB HBM3e",
        "READ is from the schedule",
        "989.4 TFLOP/s",
        "450 GB/s",
        "3.4 µs",
        "NVIDIA's data sheet",
        "acco: 2 half-rounds per step, 1 microbatch in each",
        "zero1: 1 half-round per step, 2 microbatches in each",
        "reduce-scatter  28.5 MiB bf16",
        "EXPOSED",
        "hidden: 99.9% of the bytes (READ)",
        "hidden: 0.0% of the bytes (READ)",
        "at equal tokens, NVLink (zero1 as compiled; intervals:",
        "4 programs compiled",
        "the fastest",
        "over zero1",
        "0.5 - 0.9",
        "PREDICTED with method_options.gather_bits and reduce_bits",
        "PREDICTED as devices grow (compiled for 8;",
    ):
        assert words in text, words
    assert max(map(len, text.splitlines())) < 140
    for picture in ("timeline.png", "scaling.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
        assert str(out / picture) in text
    assert (hlo / "acco.hlo.txt").read_text() == text_of("gpu_hidden")
    assert (hlo / "zero1.hlo.txt").read_text() == text_of("gpu_synchronous")

    data = json.loads(file.read_text())
    hidden = data["methods"]["acco"]["hidden_bytes_fraction"]
    assert 1 - 1e-6 < hidden < 1  # scalars count, too
    assert data["methods"]["zero1"]["hidden_bytes_fraction"] < 1e-6
    listed = data["methods"]["acco"]["collectives"]
    large = [c["kind"] for c in listed if c["bytes"] >= MIB]
    assert large == ["reduce-scatter", "all-gather"]
    assert {c["kind"] for c in listed if c["bytes"] < MIB} == {"all-reduce"}
    rows = {(r["method"], r["devices"]): r for r in data["predicted"]}
    assert set(rows) == {(m, n) for m in ("acco", "zero1") for n in (8, 64)}
    for row in rows.values():
        tokens = 2 * 4 * 128 * row["devices"]  # the quickstart's, of each worker
        assert row["tokens_per_step"] == tokens
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step"])
        assert row["step"] == pytest.approx(row["computation"] + row["exposed"])
        parts = row["matmul"] + row["memory_access"]
        assert row["computation"] == pytest.approx(parts)
        baseline = rows["zero1", row["devices"]]["step"]
        assert row["baseline"] == "zero1"
        assert row["speedup"] == pytest.approx(baseline / row["step"])
        for name in planner.RANGES:
            low, high = row[f"{name}_range"]
            assert low <= row[name] <= high
        assert row["step_range"][1] > 1.5 * row["step_range"][0]
    for method, before in (("acco", rows["acco", 8]), ("zero1", rows["zero1", 8])):
        bits = [r for r in data["few_bits"] if r["method"] == method]
        choices = [(r["gather_bits"], r["reduce_bits"]) for r in bits]
        assert choices == [(None, None), (8, None), (4, None), (8, 8), (4, 8)]
        shares = [r["share_of_bytes"] for r in bits]
        assert shares == [1, 0.75, 0.625, 0.5, 0.375]
        assert bits[0]["step"] == pytest.approx(before["step"])
    faster = [r["speedup"] for r in data["few_bits"] if r["method"] == "zero1"]
    assert 1 == faster[0] < faster[1] < faster[2]
    # an all-to-all among the recording's 16 devices leaves the host more than a ring
    assert faster[3] < faster[1]
    saved = rows["acco", 8]["memory"] - rows["acco", 64]["memory"]
    assert saved == 40 - 5  # the shard at an eighth


def test_the_optimizer_s_own_collectives(stand_in, monkeypatch, tmp_path, capsys):
    """As if only the reduce-scatter had been asked for, and both."""
    compile_, shape = programs.Program.compile, (BUFFER // 2,)
    kinds = ["reduce_scatter"]

    def with_asked(program, *place):
        source = tuple(footprint.Collective(k, "bf16", shape, 16) for k in kinds)
        return dataclasses.replace(compile_(program, *place), source_collectives=source)

    monkeypatch.setattr(programs.Program, "compile", with_asked)
    file = tmp_path / "plan.json"
    arguments = "--nofit", "--methods=acco", f"--out={tmp_path}", f"--json={file}"
    run(*arguments)
    line = next(x for x in capsys.readouterr().out.splitlines() if "own" in x)
    assert re.fullmatch(
        r"    the optimizer's own, of any size: \d all-reduces?, \d+ bytes; "
        r"1 all-gather, 28.5 MiB; 100% of these bytes hidden",
        line,
    )
    own = json.loads(file.read_text())["methods"]["acco"]["optimizers_own"]
    assert own["all-gather"] == {"number": 1, "bytes": BUFFER, "hidden_bytes": BUFFER}

    kinds.append("all_gather")
    run(*arguments)
    assert "the optimizer's own" not in capsys.readouterr().out  # scalars alone
    own = json.loads(file.read_text())["methods"]["acco"]["optimizers_own"]
    assert own.keys() == {"all-reduce"}


def test_the_largest_microbatch_is_bracketed(stand_in, monkeypatch, tmp_path, capsys):
    """By compiles alone: above 40 rows the compiler finds no way."""
    compile_, file = programs.Program.compile, tmp_path / "plan.json"

    def limited(program, *place):
        if program.rows > 40:
            raise programs.DoesNotFit("it needs too much")
        return compile_(program, *place)

    monkeypatch.setattr(programs.Program, "compile", limited)
    run("--methods=acco", f"--out={tmp_path}", f"--json={file}")
    found = json.loads(file.read_text())["methods"]["acco"]
    tried = [c["microbatch_size"] for c in found["candidates"]]
    assert tried[0] == 4 and len(tried) == 1 + planner.COMPILES
    assert found["largest_microbatch"] <= 40 < found["smallest_misfit"]
    fits = [c for c in found["candidates"] if c["memory"]]
    same = [c for c in fits if c["microbatch_size"] * c["microbatches_per_step"] <= 10]
    (best,) = (c for c in found["candidates"] if c["best"])
    assert best["tokens_per_second"] == max(c["tokens_per_second"] for c in same)
    text = capsys.readouterr().out
    assert f"largest microbatch that fits: {found['largest_microbatch']} rows" in text
    assert f"{len(tried)} programs compiled" in text


def test_without_fit_there_is_one_compile_per_method(stand_in, tmp_path, capsys):
    run("--nofit", "--methods=acco", f"--out={tmp_path}")
    assert [p.method for p in stand_in] == ["acco"]
    text = capsys.readouterr().out
    assert "largest microbatch" not in text
    assert "zero1 by formula" in text


def test_ddp_is_compared_with_where_it_is_asked_for(
    stand_in, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(SCHEDULES, "ddp", "gpu_synchronous")
    run("--nofit", "--methods=acco,ddp", f"--out={tmp_path}")
    text = capsys.readouterr().out
    assert "over ddp" in text and "over zero1" not in text


SLOW_CHIP = "--set=compute_efficiency=0.002"


@pytest.mark.parametrize(
    ("methods", "code"),
    [
        ([SLOW_CHIP], None),
        ([SLOW_CHIP, "--methods=acco"], None),
        ([SLOW_CHIP, "--methods=acco,zero1"], 3),
    ],
)
def test_require_hidden(stand_in, tmp_path, capsys, methods, code):
    """Scalars expose at most 0.1 % of a half-round's time on a slow chip."""
    arguments = ["--require-hidden", "--nofit", f"--out={tmp_path}", *methods]
    if code is None:
        run(*arguments)
    else:
        with pytest.raises(SystemExit) as stopped:
            run(*arguments)
        assert stopped.value.code == code
        assert "most by reduce-scatter" in capsys.readouterr().err
    assert (tmp_path / "timeline.png").exists()


def test_small_collectives_count_by_their_time(stand_in, tmp_path, capsys):
    """On a fast chip the same scalars take 4 % of a half-round of so small a model."""
    with pytest.raises(SystemExit) as stopped:
        run("--require-hidden", "--nofit", "--methods=acco", f"--out={tmp_path}")
    assert stopped.value.code == exits.EXPOSED
    out, err = capsys.readouterr()
    assert "exposed, most by all-reduce" in err
    assert "hidden: 99.9% of the bytes (READ)" in out


def test_a_verdict_on_nothing_fails(stand_in, monkeypatch, tmp_path, capsys):
    compile_ = programs.Program.compile

    def alone(program, *place):
        compiled = compile_(program, *place)
        nothing = dataclasses.replace(compiled.schedule, collectives=())
        return dataclasses.replace(compiled, schedule=nothing)

    monkeypatch.setattr(programs.Program, "compile", alone)
    with pytest.raises(SystemExit) as stopped:
        run("--require-hidden", "--nofit", "--methods=acco", f"--out={tmp_path}")
    assert stopped.value.code == exits.EXPOSED
    out, err = capsys.readouterr()
    assert "there is no collective: nothing was hidden" in err
    assert "none: nothing is communicated, so nothing is hidden" in out


def test_network_and_other_figures_from_the_command_line(stand_in, tmp_path, capsys):
    slow = "--network=100", "--set=compute_efficiency=0.5"
    run("--nofit", f"--out={tmp_path}", *slow)
    lines = capsys.readouterr().out.splitlines()
    assert any(
        re.match(r"\s+slow_bandwidth\s+12.5 GB/s\s+given on the command", x)
        for x in lines
    )
    assert any(re.match(r"\s+compute_efficiency\s+0.5\s+given", x) for x in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=gpu:h20o:4x8"], "the gpu chip is 'h20o': did you mean 'h20'?"),
        (
            ["--topology=tpu:v5e:32x32"],
            "1024 chips, but a slice of TPU v5e has at most",
        ),
        (["--topology=tpu:v6e:17x16"], "272 chips, but a slice of TPU v6e has at most"),
        (["--topology=tpu:v5p:21x21x21"], "at most 8960: take several with --slices."),
        (["--set=flops=1:2:3"], "--set=flops=1:2:3: give NAME=NUMBER or NAME=LEAST"),
        (["--set=compute_efficiency=0.7:0.4"], "is 0.7:0.4: give the least first."),
        (["--set=memory_efficiency=0.7:4"], "memory_efficiency is 4: it is a share"),
        (
            ["--set=memory_fraction=75"],
            "the figure memory_fraction is 75: it is a share",
        ),
        (["--tokens=many"], "--tokens: 'many' is no positive number."),
        (["--tokens=-1"], "--tokens: '-1' is no positive number."),
        (["--tokens=1e9", "--price=h100=2"], "for a chip of --topology (h200)."),
        (["--tokens=1e9", "--price=h200=-2"], "--price=h200: give CHIP=PRICE"),
        (["--price=h200=2"], "--tokens is missing: a decision needs the length"),
        (["--network=100,200"], "--tokens is missing: a decision needs the length"),
        (["--tokens=1e9", "--devices=8"], "--devices and --dump-hlo are of one plan"),
        (["--tokens=1e9", "--failure-hours=0"], "--failure-hours: '0' is no positive"),
        (["--tokens=1e9", "--restart-seconds=x"], "--restart-seconds: 'x' is no pos"),
        (["--tokens=1e9", "--checkpoint-seconds=nan"], "'nan' is no positive number"),
        (["--calibration=nowhere.json"], "is no report of --calibrate:"),
        (["--topology=h200"], "'h200' is not of the form gpu:CHIP:HOSTSxGPUS"),
        (["--slices=2"], "slices is 2, but must be 1 for GPUs"),
        (["--methods=aco"], "--methods is 'aco': did you mean 'acco'? Known: acco,"),
        (["--devices=12"], "devices is 12: it must be at least 1 and, above 8, a mult"),
        (["--devices=8,x"], "--devices: 'x' is no whole number."),
        (["--devices=0"], "devices is 0: it must be at least 1"),
        (["--set=flops"], "--set=flops: give NAME=NUMBER"),
        (["--set=flop=1"], "the name of a figure is 'flop': did you mean"),
        (["--set=flops=-1"], "the figure flops is -1: it must be positive."),
        (["--set=flops=nan"], "the figure flops is nan: it must be positive."),
        (["--set=flops=1e15,flops="], "--set=flops=: give NAME=NUMBER"),
        (["--set=compute_efficiency=40"], "at most 1 (0.4 for 40 %)."),
        (["--network=0"], "--network: '0' is no positive number."),
        (["--network=-100"], "--network: '-100' is no positive number."),
        (["--network=inf"], "--network: 'inf' is no positive number."),
        (["--topology=gpu:h200:0x8"], "with sizes of at least 1"),
        (["--topology=tpu:h200:4x4"], "the tpu chip is 'h200'"),
        (["--topology=cpu:x:1x8"], "the platform is 'cpu'"),
        (["--devices=-8"], "devices is -8: it must be at least 1"),
        (["--devices=8.5"], "--devices: '8.5' is no whole number."),
        (["--config.method=aco"], "method is 'aco': did you mean 'acco'"),
        (["--config.length=0"], "length is 0"),
        (["--config.microbatches_per_step=3"], "does not divide into the 2 half-round"),
        (["--config.microbatch_size=0"], "microbatch_size is 0: it must be at least 1"),
        (["--config.counts=(1,)"], "counts is (1,): give one number from 0 to 1 for"),
        (["--config.form=split"], "form is 'split', which is for CPUs"),
        (["--config.microbatches=replay:x"], "which a run finds or has logged: plan"),
        (
            ["--config.microbatches=halves", "--config.first_half=2"],
            "first_half is 2 of microbatches_per_step=2 with acco: it is for acco,",
        ),
        (["--config.data.tokenizer=bpe"], "set model.vocab_size, or data.vocab_size"),
        (["--config.model.heads=3"], "width=128 is not divisible by heads=3"),
    ],
)
def test_errors_are_one_line_before_any_compile(
    stand_in, tmp_path, refusal, arguments, message
):
    assert message in refusal(f"--out={tmp_path}", *arguments)
    assert not stand_in
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--out={}/x", "--json={}/x/y.json", "--dump-hlo={}"])
def test_where_nothing_can_be_written_is_said_first(stand_in, tmp_path, refusal, flag):
    file = tmp_path / "file"
    file.touch()
    line = refusal(f"--out={tmp_path}", flag.format(file))
    assert "cannot be written to" in line and str(file) in line
    assert not stand_in


def test_a_missing_compiler_is_one_line_with_the_remedy(monkeypatch, tmp_path, refusal):
    monkeypatch.setattr(topologies, "_installed", lambda module: False)
    line = refusal(f"--out={tmp_path}", topology="tpu:v6e:4x4")
    assert "pip install 'acco-jax[plan-tpu]'" in line


def test_a_program_too_large_is_said_with_what_would_fit(
    stand_in, monkeypatch, refusal
):
    compile_ = programs.Program.compile

    def limited(program, *place):
        if program.rows > 2:
            raise programs.DoesNotFit("it needs 200G of 141G hbm")
        return compile_(program, *place)

    monkeypatch.setattr(programs.Program, "compile", limited)
    assert re.fullmatch(
        r"error: acco with microbatch_size 4 does not fit into the memory of a NVIDIA "
        r"H200 141GB HBM3e: it needs 200G of 141G hbm; 2 would fit\.",
        refusal("--methods=acco"),
    )


@pytest.mark.parametrize("arguments", [[], ["--nofit"]])
def test_a_gpu_program_larger_than_its_memory_is_refused(
    stand_in, tmp_path, refusal, arguments
):
    # the stand-in's 1 GB and 8 MB per row
    line = refusal(
        "--set=memory_bytes=1.01e9,memory_fraction=1", f"--out={tmp_path}", *arguments
    )
    assert "does not fit into the memory" in line
    assert "it needs 1.0G of 0.9G of memory" in line
    assert ("; lower it." if arguments else "; 1 would fit.") in line


def test_what_jax_leaves_of_a_gpu_s_memory_is_not_used(stand_in, tmp_path, refusal):
    room = "--set=memory_bytes=1.2e9"  # of which JAX takes three quarters
    line = refusal("--nofit", "--methods=acco", room, f"--out={tmp_path}")
    assert "it needs 1.0G of 0.8G of memory, JAX's share of the GPU" in line
    run("--nofit", "--methods=acco", f"{room},memory_fraction=0.9", f"--out={tmp_path}")


def test_what_cannot_fit_is_said_before_any_compile(stand_in, tmp_path, refusal):
    line = refusal("--set=memory_bytes=2e6", f"--out={tmp_path}")
    assert "parameters, state and batch alone needs" in line
    assert "take more devices" in line
    assert not stand_in


def test_a_misfit_does_not_discard_another_s_result(
    stand_in, monkeypatch, tmp_path, capsys
):
    compile_, file = programs.Program.compile, tmp_path / "plan.json"

    def limited(program, *place):
        if program.method == "acco":
            raise programs.DoesNotFit("it needs 9G of 8G of memory")
        return compile_(program, *place)

    monkeypatch.setattr(programs.Program, "compile", limited)
    run("--nofit", f"--out={tmp_path}", f"--json={file}")
    text = capsys.readouterr().out
    assert "DOES NOT FIT\n  acco with microbatch_size 4 does not fit" in text
    assert "zero1: 1 half-round per step" in text
    plan = json.loads(file.read_text())
    assert plan["methods"].keys() == {"zero1"} and "9G" in plan["do_not_fit"]["acco"]
    with pytest.raises(SystemExit) as stopped:
        run("--nofit", "--require-hidden", f"--out={tmp_path}")
    assert stopped.value.code == exits.EXPOSED


def test_a_method_is_not_given_another_s_options(stand_in, tmp_path, capsys):
    run("--nofit", "--config.method_options.gather_bits=(8,4)", f"--out={tmp_path}")
    assert [p.method for p in stand_in] == ["acco", "zero1"]
    text = capsys.readouterr().out
    assert "its half-rounds differ" in text
    assert stand_in[0].tx.codecs.gather_quantized
    assert not stand_in[1].tx.codecs.gather_quantized


@pytest.mark.parametrize("hosts", [1, 2])
def test_domains_are_advised_where_there_are_hosts(stand_in, tmp_path, capsys, hosts):
    run(
        "--nofit", "--methods=acco", f"--out={tmp_path}", topology=f"gpu:h200:{hosts}x8"
    )
    advised = "with config.domains=2 gradients are summed" in capsys.readouterr().out
    assert advised == (hosts == 2)


@pytest.mark.parametrize(
    ("name", "slices", "domains", "said"),
    [
        ("gpu:h200:2x8", 1, 4, "domains is 4, but gpu:h200:2x8 has 2 hosts: give that"),
        ("tpu:v5e:4x4", 2, 3, "has 2 slices: give that or 1"),
        ("gpu:h200:2x8", 1, 0, "domains is 0"),
    ],
)
def test_domains_are_hosts_or_slices(name, slices, domains, said):
    with pytest.raises(ValueError, match=said):
        programs.data_mesh(topologies.parse(name, slices), domains)


def test_a_local_method_is_timed_per_inner_step(
    stand_in, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(SCHEDULES, "diloco", "gpu_synchronous")
    file = tmp_path / "plan.json"
    options = "--config.method=diloco", "--config.method_options.local_steps=10"
    run("--nofit", "--methods=diloco", *options, f"--out={tmp_path}", f"--json={file}")
    text = capsys.readouterr().out
    assert "diloco: 10 inner steps per half-round, 2 microbatches in each" in text
    (row,) = json.loads(file.read_text())["predicted"]
    p = costs.predict(recorded("gpu_synchronous"), machine("gpu:h200:1x8"), 8)
    assert row["step"] == pytest.approx(p.total / 10)
    assert row["tokens_per_step"] == 2 * 4 * 128 * 8
    assert row["speedup"] is None


def test_what_more_devices_divide(stand_in):
    mesh, config = programs.data_mesh(None), default_config()
    sizes = {}
    for name in ("acco", "ddp", "diloco"):
        config.method = name
        program = programs.describe(config, mesh)
        memory = program.held()
        assert memory.total == sum(memory.parts.values()) and not memory.temporaries
        sizes[name] = memory
    psi = 4 * program.parameters  # bytes of one float32 copy
    whole = sizes["acco"].parts
    assert sizes["acco"].shards == pytest.approx(4 * psi / 8, rel=0.02)
    assert {"master copy (shard)", "optimizer state (shard)"} <= set(whole)
    assert sizes["ddp"].shards == 0 and "optimizer state" in sizes["ddp"].parts
    assert sizes["diloco"].shards == pytest.approx(2 * psi / 8, rel=0.02)
    assert sizes["diloco"].parts["optimizer state"] == pytest.approx(2 * psi, rel=0.02)


# ------------------------------------------------------------------- the program


def test_the_program_is_that_of_training(stand_in):
    """The same step, model and microbatches as training's preparation has."""
    mesh = programs.data_mesh(None)
    config = default_config()
    config.microbatches_per_step, config.counts = 6, (1, 2, 3, 3, 3, 3, 3, 3)
    program = programs.describe(config, mesh)
    params, state, batch, counts = program.arguments
    assert (program.microbatches, program.computed, program.workers) == (3, 21, 8)
    assert batch["tokens"].shape == (8 * 3 * 8, 257)
    assert counts.shape == (8,)
    assert params["wte"]["embedding"].shape == (models.BYTE_TOKENS, 128)
    assert params["wte"]["embedding"].sharding.is_fully_replicated
    assert {f for f in state._fields if "pending" in f} == {"pending"}
    assert program.groups is None
    program.step.lower(*program.arguments)  # traces


def test_a_frozen_model_is_held_beside_the_adapters(stand_in):
    mesh, config = programs.data_mesh(None), default_config()
    config.microbatches_per_step = 4
    whole = programs.describe(config, mesh)
    config.lora.rank = 4
    program = programs.describe(config, mesh)
    assert (whole.frozen, program.frozen) == (0, 2 * whole.parameters)  # bfloat16
    assert program.parameters < whole.parameters / 20
    assert len(program.step.lower(*program.arguments).as_text()) < 1_000_000


def test_unequal_halves_are_two_readings(stand_in, tmp_path, capsys):
    file, hlo = tmp_path / "plan.json", tmp_path / "hlo"
    halves = "--config.microbatches=halves", "--config.microbatches_per_step=8"
    arguments = *halves, f"--json={file}", f"--dump-hlo={hlo}", f"--out={tmp_path}"
    run(*arguments, "--config.first_half=2")
    out = capsys.readouterr().out
    assert "2 half-rounds per step, 2 and 6 microbatches in them" in out
    assert "READ from the schedule of the first half, the estimate" in out
    assert "READ from the schedule of the second half, the commit" in out
    assert "both halves" in out and "the second  " in out
    plan = json.loads(file.read_text())
    first, second = plan["methods"]["acco"]["halves"]
    assert (first["microbatches"], second["microbatches"]) == (2, 6)
    assert second["flops"] > first["flops"]
    acco, zero1 = plan["predicted"]
    assert acco["step"] == pytest.approx(first["seconds"] + second["seconds"])
    assert acco["tokens_per_step"] == zero1["tokens_per_step"]  # its own are equal
    assert plan["methods"]["zero1"]["halves"] == []
    assert {p.name for p in hlo.iterdir()} == {
        "acco-first.hlo.txt", "acco-second.hlo.txt", "zero1.hlo.txt"}  # fmt: skip
    # larger and smaller microbatches are tried in the same ratio, with one program each
    tried = [p for p in stand_in if p.method == "acco"]
    assert len({p.rows for p in tried}) == len(tried) > 1
    for program in tried:
        assert program.counts == (program.halves[0],) * 8
        assert program.halves[1] == 3 * program.halves[0]

    stand_in.clear()
    run("--nofit", *arguments)  # one of eight: its program is another
    compiled = [(p.counts[0], p.single) for p in stand_in if p.method == "acco"]
    assert compiled == [(1, True), (7, False)]


def test_adaptive_microbatches_are_as_many_as_communication_lasts(stand_in, tmp_path):
    def planned(bandwidth):
        file = tmp_path / "plan.json"
        run("--nofit", "--methods=acco", "--config.microbatches=adaptive",
            "--config.most_microbatches=64", f"--set=fast_bandwidth={bandwidth}",
            f"--json={file}", f"--out={tmp_path}")  # fmt: skip
        plan = json.loads(file.read_text())
        (row,) = plan["predicted"]
        (count,) = set(plan["methods"]["acco"]["counts"])
        return count, row

    found = {b: planned(b) for b in (450e9, 20e9, 10e9)}
    counts = {b: count for b, (count, _) in found.items()}
    assert counts[450e9] <= 2 < counts[20e9] < counts[10e9] < 64
    # twice the time of communication takes twice the microbatches to hide it
    assert counts[10e9] == pytest.approx(2 * counts[20e9], rel=0.2)
    for _, row in found.values():
        assert row["exposed"] < 0.1 * row["step"]


def test_trips_of_dynamic_loops_are_the_busiest_workers():
    step = type("Step", (), {})()
    tx = types.SimpleNamespace(local=False)
    program = programs.Program("acco", tx, step, 5, (2, 5), (None,) * 4)
    trips = program._trips(text_of("gpu_hidden"))
    assert list(trips.values()) == [2, 3]
    single = programs.Program("acco", tx, step, 1, (), (None,) * 4)
    assert list(single._trips(text_of("gpu_hidden")).values()) == [1, 1]
    idle = programs.Program("acco", tx, step, 2, (0, 1), (None,) * 4)
    assert list(idle._trips(text_of("gpu_hidden")).values()) == [0, 1]
    every = programs.Program("acco", tx, step, 4, (), (None,) * 4)
    assert list(every._trips(text_of("gpu_hidden")).values()) == [2, 2]


@pytest.mark.parametrize(
    ("tokenizer", "data", "model", "expected"),
    [("bytes", None, None, 257), ("bpe", 10000, None, 10000), ("bpe", None, 512, 512)],
)
def test_vocabulary_without_a_corpus(tokenizer, data, model, expected):
    config = default_config()
    config.data.tokenizer, config.data.vocab_size = tokenizer, data
    config.model.vocab_size = model
    assert programs.vocab_size(config) == expected


def test_bytes_are_those_of_the_tokenizer():
    from acco_jax.data.tokenizers import ByteTokenizer

    assert ByteTokenizer.vocab_size == models.BYTE_TOKENS


def test_quantities_have_prefixes():
    assert report.quantity(machines.Figure(50e9, "B/s", "")) == "50 GB/s"
    assert report.quantity(machines.Figure(14e-6, "s", "")) == "14 µs"
    assert report.quantity(machines.Figure(0.8, "", "")) == "0.8"
    assert report.seconds(0.0123) == "12.3 ms"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
            "memory space hbm. Used 40.00G of 31.25G hbm. Exceeded by 8.75G.",
            "it needs 40.00G of 31.25G of memory",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (3.76T) exceeds available HBM (31.25G).",
            "it needs 3.76T of 31.25G of memory",
        ),
        ("RESOURCE_EXHAUSTED: too much\nand more", "RESOURCE_EXHAUSTED: too much"),
    ],
)
def test_what_a_compiler_says_of_memory(message, said):
    assert programs.what_it_needs(message) == said
