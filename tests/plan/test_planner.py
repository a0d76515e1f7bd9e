"""Plans of recorded schedules: what they compile, and what they make of it."""

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from acco_jax.command import exits
from acco_jax.plan import planner, programs
from acco_jax.schedule import costs, footprint, machines, topologies
from tests.schedule.recordings import BUFFER, SCHEDULES, machine, recorded, run


def test_the_optimizer_s_own_collectives(stand_in, monkeypatch, tmp_path, capsys):
    """As if only the reduce-scatter had been asked for, and both."""
    compile_, shape = programs.Program.compile, (BUFFER // 2,)
    kinds = ["reduce_scatter"]

    def with_asked(program, *place):
        source = tuple(footprint.Transfer(k, "bf16", shape, 16) for k in kinds)
        return dataclasses.replace(compile_(program, *place), source_collectives=source)

    monkeypatch.setattr(programs.Program, "compile", with_asked)
    file = tmp_path / "plan.json"
    arguments = "--nofit", "--methods=acco", f"--json={file}"
    run(*arguments)
    line = next(x for x in capsys.readouterr().out.splitlines() if "own" in x)
    assert re.fullmatch(
        r"    the optimizer's own, of any size: \d all-reduces?, \d+ bytes; "
        r"1 all-gather, 28.5 MiB; 100% of these bytes overlapped",
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
    run("--methods=acco", f"--json={file}")
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


@pytest.mark.slow
def test_microbatches_are_of_rows_that_a_group_divides(
    stand_in, monkeypatch, tmp_path, refusal, capsys
):
    compile_, file, most = programs.Program.compile, tmp_path / "plan.json", [30]

    def limited(program, *place):
        if program.rows > most[0]:
            raise programs.DoesNotFit("it needs too much")
        return compile_(program, *place)

    def mesh(*_):
        return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"))

    monkeypatch.setattr(programs.Program, "compile", limited)
    monkeypatch.setattr(programs, "data_mesh", mesh)
    monkeypatch.setattr(planner, "COMPILES", 4)
    # the recording's groups are of 16 devices
    monkeypatch.setattr(programs.Program, "in_group", lambda self, c: False)
    group = "--methods=acco", "--config.mesh.fsdp=4"
    run(*group, f"--json={file}")
    found = json.loads(file.read_text())["methods"]["acco"]["candidates"]
    assert [c["microbatch_size"] for c in found] == [4, 16, 24, 32, 64]
    most[0] = 3
    capsys.readouterr()
    assert refusal(*group).endswith("set model.remat, or take more devices.")
    assert refusal(*group, "--config.microbatch_size=8").endswith("nor does 4.")


def test_tokens_are_those_of_the_rows_that_are_compiled(stand_in, tmp_path, capsys):
    file = tmp_path / "plan.json"
    rows = "--config.data.task=chat", "--config.data.lengths=(32,64)"
    run("--methods=acco", *rows, f"--json={file}")
    assert "2 microbatches of 4 x 64 tokens" in capsys.readouterr().out
    plan = json.loads(file.read_text())
    (row,), candidates = plan["predicted"], plan["methods"]["acco"]["candidates"]
    assert row["tokens_per_step"] == 8 * 2 * 4 * 64
    assert row["tokens_per_second"] == pytest.approx(
        row["tokens_per_step"] / row["step"]
    )
    assert candidates[0]["tokens_per_second"] == row["tokens_per_second"]


def test_what_stays_in_a_group_does_not_grow_with_the_devices(
    stand_in, monkeypatch, tmp_path
):
    monkeypatch.setattr(programs.Program, "in_group", lambda self, c: True)
    file = tmp_path / "plan.json"
    more = "--devices=512", f"--json={file}"
    run("--nofit", "--methods=acco", *more, topology="gpu:h200:2x8")
    here, many = json.loads(file.read_text())["predicted"]
    assert (here["devices"], many["devices"]) == (16, 512)
    assert here["communication"] == many["communication"] > 0


def test_without_fit_there_is_one_compile_per_method(stand_in, capsys):
    run("--nofit", "--methods=acco")
    assert [p.method for p in stand_in] == ["acco"]
    text = capsys.readouterr().out
    assert "largest microbatch" not in text
    assert "zero1 by formula" in text


def test_ddp_is_compared_with_where_it_is_asked_for(stand_in, monkeypatch, capsys):
    monkeypatch.setitem(SCHEDULES, "ddp", "gpu_synchronous")
    run("--nofit", "--methods=acco,ddp")
    text = capsys.readouterr().out
    assert "over ddp" in text and "over zero1" not in text


def test_a_misfit_does_not_discard_another_s_result(
    stand_in, monkeypatch, tmp_path, capsys
):
    compile_, file = programs.Program.compile, tmp_path / "plan.json"

    def limited(program, *place):
        if program.method == "acco":
            raise programs.DoesNotFit("it needs 9G of 8G of memory")
        return compile_(program, *place)

    monkeypatch.setattr(programs.Program, "compile", limited)
    run("--nofit", f"--json={file}")
    text = capsys.readouterr().out
    assert "DOES NOT FIT\n  acco with microbatch_size 4 does not fit" in text
    assert "zero1: 1 call per step" in text
    plan = json.loads(file.read_text())
    assert plan["methods"].keys() == {"zero1"} and "9G" in plan["do_not_fit"]["acco"]
    for methods in ("--methods=acco,zero1", "--methods=acco"):  # and if nothing fits
        with pytest.raises(SystemExit) as stopped:
            run("--nofit", "--require-hidden", methods)
        assert stopped.value.code == exits.EXPOSED


def test_a_method_is_not_given_another_s_options(stand_in, capsys):
    run("--nofit", "--config.method_options.gather_bits=(8,4)")
    text = capsys.readouterr().out
    assert "its calls differ" in text
    # in the order in which threads have come to compile them
    quantized = {p.method: bool(p.tx.codecs.gather_quantized) for p in stand_in}
    assert quantized == {"acco": True, "zero1": False} and len(stand_in) == 2


@pytest.mark.parametrize("bits", ["gather_bits", "reduce_bits"])
def test_fewer_bits_are_not_zero1_s_bytes(stand_in, tmp_path, bits):
    file = tmp_path / "plan.json"
    options = f"--config.method_options.{bits}=8", f"--json={file}"
    run("--nofit", "--methods=acco", *options)
    (row,) = json.loads(file.read_text())["predicted"]
    assert row["speedup"] is None


@pytest.mark.parametrize("hosts", [1, 2])
def test_domains_are_advised_where_there_are_hosts(stand_in, capsys, hosts):
    run("--nofit", "--methods=acco", topology=f"gpu:h200:{hosts}x8")
    advised = "with config.domains=2 gradients are summed" in capsys.readouterr().out
    assert advised == (hosts == 2)


def test_a_local_method_is_timed_per_inner_step(
    stand_in, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(SCHEDULES, "diloco", "gpu_synchronous")
    file = tmp_path / "plan.json"
    options = "--config.method=diloco", "--config.method_options.local_steps=10"
    run("--nofit", "--methods=diloco", *options, f"--json={file}")
    text = capsys.readouterr().out
    assert "diloco: 10 inner steps per call, 2 microbatches in each" in text
    (row,) = json.loads(file.read_text())["predicted"]
    p = costs.predict(recorded("gpu_synchronous"), machine("gpu:h200:1x8"), 8)
    assert row["step"] == pytest.approx(p.total / 10)
    assert row["tokens_per_step"] == 2 * 4 * 128 * 8
    assert row["speedup"] is None


@pytest.mark.slow
def test_unequal_halves_are_two_readings(stand_in, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(planner, "COMPILES", 1)
    file, hlo = tmp_path / "plan.json", tmp_path / "hlo"
    arguments = "--config.microbatches_per_step=8", f"--json={file}"
    arguments += (f"--dump-hlo={hlo}",)
    run(*arguments, "--config.first_half=2")
    out = capsys.readouterr().out
    assert "2 calls per step, 2 and 6 microbatches in them" in out
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
    # fewer and larger microbatches are tried in the same ratio
    tried = {p.halves for p in stand_in if p.method == "acco"}
    assert {(2, 6), (1, 3)} <= tried
    assert all(second == 3 * first for first, second in tried)

    stand_in.clear()
    # one of eight: its program is another
    run("--nofit", *arguments, "--config.first_half=1")
    compiled = [(p.counts[0], p.single) for p in stand_in if p.method == "acco"]
    assert compiled == [(1, True), (7, False)]


def test_the_first_half_is_the_smallest_that_covers_the_communication(
    stand_in, tmp_path
):
    def planned(bandwidth):
        file = tmp_path / "plan.json"
        run("--nofit", "--methods=acco", "--config.microbatches_per_step=16",
            f"--set=fast_bandwidth={bandwidth}", f"--json={file}")  # fmt: skip
        plan = json.loads(file.read_text())
        return [h["microbatches"] for h in plan["methods"]["acco"]["halves"]]

    assert planned(450e9) == [4, 12]
    halves = planned(23e9)  # a quarter would take longer, a half does not
    assert halves == []


def test_equal_halves_stay_equal_whatever_is_tried(stand_in, monkeypatch):
    monkeypatch.setattr(planner, "COMPILES", 2)
    run("--methods=acco", "--config.microbatches_per_step=4", "--config.first_half=2")
    assert {(p.per_step, p.halves) for p in stand_in} == {(4, ()), (2, ())}


def test_only_steps_of_whole_halves_are_tried(stand_in, monkeypatch):
    """A third of the step first: of three microbatches there is no half."""
    monkeypatch.setattr(planner, "COMPILES", 2)
    run("--methods=acco", "--config.microbatches_per_step=6", "--config.first_half=2")
    assert {p.per_step % 6 for p in stand_in} == {0}


@pytest.mark.slow
def test_adaptive_microbatches_are_as_many_as_communication_lasts(stand_in, tmp_path):
    def planned(bandwidth):
        file = tmp_path / "plan.json"
        run("--nofit", "--methods=acco", "--config.microbatches=adaptive",
            "--config.most_microbatches=64", f"--set=fast_bandwidth={bandwidth}",
            f"--json={file}")  # fmt: skip
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


def test_adaptive_counts_are_of_one_number_of_devices(stand_in, refusal):
    line = refusal("--devices=8,64", "--config.microbatches=adaptive")
    assert "microbatches is 'adaptive', and other --devices" in line and not stand_in


def test_one_worker_says_nothing_of_several(refusal):
    line = refusal("--devices=1,64", topology="gpu:h200:1x1")
    assert "devices is 64, but gpu:h200:1x1 is one worker, whose program" in line


def test_counts_are_of_one_kind_of_call(stand_in, refusal):
    counts = "--config.microbatches_per_step=4", "--config.counts=(2,2,2,2,2,2,2,1)"
    line = refusal(*counts)
    assert "acco and zero1 have different numbers of calls per step" in line
    run("--methods=acco", *counts)
    assert {p.counts for p in stand_in} == {(2, 2, 2, 2, 2, 2, 2, 1)}


def test_few_bits_leave_the_optimizers_own_collectives(monkeypatch):
    whole = recorded("gpu_hidden")
    reduced, gathered = whole.select()
    moved = dataclasses.replace(gathered, name="muon's", dtype="f32")
    schedule = dataclasses.replace(whole, collectives=(reduced, moved, gathered))
    monkeypatch.setattr(planner, "optimizers_own", lambda *_: [(moved, moved.bytes)])
    tx = types.SimpleNamespace(axis=("data",))
    part = types.SimpleNamespace(
        program=types.SimpleNamespace(tx=tx),
        compiled=types.SimpleNamespace(schedule=schedule),
        collectives=schedule.collectives,
    )
    place = topologies.parse("gpu:h200:1x8")
    machine = machines.Machine(place, machines.figures(place.chip))
    found = planner._in_few_bits(part, machine, 8, 8).collectives
    assert found[1] == moved
    assert [c.bytes for c in found if c is not found[1]] == [
        c.bytes // 2 for c in (reduced, gathered)
    ]
