"""Verdicts of --require-hidden, computed by hand, in plans and audits."""

import dataclasses
import re

import pytest

from acco_jax.audit import assert_hidden, audit
from acco_jax.command import exits
from acco_jax.plan import programs
from acco_jax.schedule import verdict
from acco_jax.schedule.causes import Cause
from acco_jax.schedule.costs import Spent
from acco_jax.schedule.schedules import Collective
from acco_jax.schedule.verdict import Reading, Verdict
from tests.audit.test_command import run as run_audit
from tests.schedule.recordings import run as run_plan


def reading(size, flops, seconds, exposed, done=9):
    c = Collective(
        "c", "all-reduce", size, "f32", True, 0, done, "ENTRY", 1, (), flops, None, ()
    )
    return Reading(c, Spent(seconds, exposed), (), Cause("why", ""))


# Readings (bytes, FLOPs beside, seconds, exposed), the step's seconds; then READ,
# PREDICTED, and what a gate counts.
SHARES = [
    ([(100, 1, 2.0, 0.0)], 10, 1.0, 1.0, 1.0),
    ([(100, 1, 2.0, 1.5)], 10, 1.0, 0.25, 0.25),  # bytes hidden, seconds exposed
    ([(100, 0, 2.0, 2.0)], 10, 0.0, 0.0, 0.0),
    ([(100, 0, 2.0, 0.0)], 10, 0.0, 1.0, 1.0),  # nothing exposed: negligible
    ([(60, 1, 2.0, 0.0), (40, 0, 2.0, 1.0)], 10, 0.6, 0.75, 0.6),
    ([(99, 1, 1.0, 0.0), (1, 0, 1.0, 1.0)], 10, 0.99, 0.5, 0.5),
    ([(4, 0, 0.009, 0.009)], 10, 0.0, 0.0, 1.0),  # 0.09 % of the step
    ([(4, 0, 0.011, 0.011)], 10, 0.0, 0.0, 0.0),  # 0.11 %
    ([(4, 0, 0.006, 0.006)] * 2, 10, 0.0, 0.0, 0.5),  # one alone is negligible
    ([(50, 1, 1.0, 0.02), (50, 1, 1.0, 0.0)], 10, 1.0, 0.99, 0.99),
]


@pytest.mark.parametrize(("readings", "total", "read", "covered", "share"), SHARES)
def test_the_verdict_is_the_lesser_share(readings, total, read, covered, share):
    found = Verdict(tuple(reading(*r) for r in readings), total)
    assert found.hidden_share == pytest.approx(read)
    assert found.covered_share == pytest.approx(covered)
    assert found.share == pytest.approx(share)
    assert not found.objection(share)
    if share < 1:
        assert found.objection(share + 0.001)
    assert bool(found.objection()) == (share < 0.99)


def test_an_end_that_is_unknown_is_never_negligible():
    found = Verdict((reading(4, 0, 0.0, 0.0, done=None),), 10)
    assert found.share == 0.0 and found.objections


def test_a_rounded_share_leaves_nothing_out():
    assert [verdict.percent(x) for x in (1.0, 0.9996, 0.98999, None)] == [
        "100.0%", "99.9%", "98.9%", "-",
    ]  # fmt: skip


# ---- the commands, on a step that is written by hand

# 1 GiB of float32 beside one product of 2 * 8192**3 FLOPs. At 989.4 TFLOP/s x 0.7 that
# takes 1.59 ms, its bytes 0.3 ms more.
STEP = """HloModule m, is_scheduled=true, num_partitions=16

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (p: f32[MANY], q: bf16[8192,8192]) -> f32[MANY] {
  %p = f32[MANY]{0} parameter(0)
  %q = bf16[8192,8192]{1,0} parameter(1)
  %start = f32[MANY]{0} all-reduce-start(%p), replica_groups={}, to_apply=%add
  %dot = bf16[8192,8192]{1,0} dot(%q, %q), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  ROOT %done = f32[MANY]{0} all-reduce-done(%start)
}
"""
PLACE = "--topology=gpu:h100:2x8"
MANY, FEW = 268_435_456, 262_144  # 1 GiB, 1 MiB


@pytest.mark.parametrize(
    ("many", "network", "gate", "code"),
    [
        # an all-reduce of 1 GiB: 2 x 15/16 GiB over 8 x 400 Gbit/s x 0.8 = 6 ms,
        # of which 2 ms are covered
        (MANY, 400, "--require-hidden", 3),
        (MANY, 400, "--require-hidden=0.2", 0),
        (MANY, 400, "--require-hidden=0.5", 3),
        (MANY, 400, "--norequire-hidden", 0),
        # of 1 MiB 6 us and latency
        (FEW, 400, "--require-hidden", 0),
        (FEW, 0.5, "--require-hidden=1", 3),  # 5 ms
    ],
)
def test_audits_of_hidden_bytes_with_exposed_seconds(
    tmp_path, capsys, many, network, gate, code
):
    file = tmp_path / "step.hlo"
    file.write_text(STEP.replace("MANY", str(many)))
    figure = f"--set=slow_bandwidth={network * 1e9 / 8}"
    assert run_audit(str(file), PLACE, figure, gate) == code
    out, err = capsys.readouterr()
    assert "overlapped: 100.0% of the bytes (READ)" in out
    assert f"(PREDICTED, network of {network:g} Gbit/s)" in out
    assert bool(err) == bool(code)


@pytest.mark.parametrize(
    ("network", "gate", "code"),
    [
        (0.5, "--require-hidden", 3),  # the bytes are hidden, the seconds are not
        (0.5, "--require-hidden=0", 0),
        (400, "--require-hidden=0.5", 0),
        (0.5, "--norequire-hidden", 0),
    ],
)
def test_plans_of_hidden_bytes_with_exposed_seconds(
    stand_in, capsys, network, gate, code
):
    stopped = 0
    try:
        run_plan("--nofit", "--methods=acco", f"--network={network}", gate,
                 "--set=compute_efficiency=0.03")  # fmt: skip
    except SystemExit as error:
        stopped = error.code
    assert stopped == code
    out, err = capsys.readouterr()
    assert "99.9% of the bytes (READ)" in out  # all but some scalars
    assert ("exposed, most by" in err) == bool(code)


def test_every_number_of_devices_is_judged(stand_in, capsys):
    """Hidden on 16 devices; a ring of 16,384 has a thousand times the hops."""
    gate = ["--nofit", "--methods=acco", "--require-hidden=0.9", SLOW_CHIP]
    run_plan(*gate, topology="gpu:h200:2x8")
    with pytest.raises(SystemExit) as stopped:
        run_plan(*gate, "--devices=16384", topology="gpu:h200:2x8")
    assert stopped.value.code == exits.EXPOSED
    assert "acco" in (said := capsys.readouterr().err) and "with 16384 devices" in said


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
        run_plan(*arguments)
    else:
        with pytest.raises(SystemExit) as stopped:
            run_plan(*arguments)
        assert stopped.value.code == code
        assert "most by reduce-scatter" in capsys.readouterr().err
    assert (tmp_path / "timeline.png").exists()


def test_small_collectives_count_by_their_time(stand_in, capsys):
    """On a fast chip the same scalars take 4 % of a half-round of so small a model."""
    with pytest.raises(SystemExit) as stopped:
        run_plan("--require-hidden", "--nofit", "--methods=acco")
    assert stopped.value.code == exits.EXPOSED
    out, err = capsys.readouterr()
    assert "exposed, most by all-reduce" in err
    assert "overlapped: 99.9% of the bytes (READ)" in out


def test_a_verdict_on_nothing_fails(stand_in, monkeypatch, capsys):
    compile_ = programs.Program.compile

    def alone(program, *place):
        compiled = compile_(program, *place)
        nothing = dataclasses.replace(compiled.schedule, collectives=())
        return dataclasses.replace(compiled, schedule=nothing)

    monkeypatch.setattr(programs.Program, "compile", alone)
    with pytest.raises(SystemExit) as stopped:
        run_plan("--require-hidden", "--nofit", "--methods=acco")
    assert stopped.value.code == exits.EXPOSED
    out, err = capsys.readouterr()
    assert "no collective: nothing was overlapped" in err
    assert "none: nothing is communicated, so nothing is overlapped" in out


def test_assert_hidden_counts_exposed_seconds():
    text = STEP.replace("MANY", str(MANY))
    with pytest.raises(AssertionError, match=r"100.0% of the bytes \(READ\).*exposed"):
        assert_hidden(text, (), "gpu:h100:2x8", fraction=1.0)
    assert_hidden(text, (), "gpu:h100:2x8", fraction=0.2)
    assert_hidden(STEP.replace("MANY", str(FEW)), (), "gpu:h100:2x8")


# ---- what a text cannot say


def test_a_send_without_its_recv_costs_and_is_not_hidden():
    text = STEP.replace("MANY", str(MANY))
    one = re.sub(r"f32\[\d+\]\{0\} all-reduce-start\(%p\), replica_groups=\{\}, "
                 r"to_apply=%add", f"(f32[{MANY}]{{0}}, u32[], token[]) send(%p), "
                 "channel_id=1", text)  # fmt: skip
    one = one.replace(f"f32[{MANY}]{{0}} all-reduce-done", "token[] send-done")
    found = audit(one, topology="gpu:h100:2x8").verdict()
    (sent,) = found.readings
    assert sent.status == "unknown" and found.share == 0
    assert sent.spent.exposed == pytest.approx(2**30 / (50e9 * 0.8), rel=0.01)


@pytest.mark.parametrize(
    "target",
    [
        "xla_ffi_python_gpu_callback",
        "xla_python_gpu_callback",
        "xla_buffer_python_gpu_callback",
        "xla_ffi_partitioned_python_gpu_callback",
    ],
)
def test_a_python_callback_may_communicate(target):
    call = f'  %call = f32[] custom-call(), custom_call_target="{target}"\n'
    text = STEP.replace("MANY", str(FEW)).replace("  %dot", f"{call}  %dot")
    found = audit(text, topology="gpu:h100:2x8")
    assert found.schedule.unknown == ("call: custom-call",)
    assert "unknown" in found.verdict().objection(0)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("call(%q), to_apply=%gone", "gone"),
        ("fusion(%q), kind=kLoop, calls=%gone", "gone"),
        ("while(%q), condition=%gone, body=%add", "gone"),
        ("while(%q), condition=%add, body=%gone", "gone"),
        ("while(%q), body=%add", ""),
    ],
)
def test_a_text_that_lacks_a_computation(line, name):
    text = STEP.replace("MANY", str(FEW))
    text = re.sub(r"dot\(%q, %q\).*", line, text)
    with pytest.raises(ValueError, match=rf"dot \(\w+\) calls .*'{name}'.* whole text"):
        audit(text, topology="gpu:h100:2x8")
