"""Traces: what is read of each platform's, and what a summary makes of it.

The traces of GPUs and TPUs here are SYNTHETIC: written by hand after the lines that
those platforms' profilers have, not taken on such a machine. Those of CPUs are real.
"""

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from acco_jax.run.config.fields import profiled
from acco_jax.run.observe import intervals, profiling, traces

SIZE = 60
KINDS = ("all-gather", "reduce-scatter")


def event(name, begin, end, **statistics):
    return name, begin, end, statistics


def synthetic(planes):
    """A trace of {plane: {line: [event(...), ...]}}; times in microseconds."""
    text = []
    for plane, lines in planes.items():
        names, kinds, body = {}, {}, []
        for number, (line, events) in enumerate(lines.items(), 1):
            body.append(f'lines {{ id: {number} name: "{line}"')
            for name, begin, end, statistics in events:
                key = names.setdefault(name, len(names) + 1)
                body.append(
                    f"events {{ metadata_id: {key} offset_ps: {begin * 10**6} "
                    f"duration_ps: {(end - begin) * 10**6}"
                )
                for kind, value in statistics.items():
                    kind = kinds.setdefault(kind, len(kinds) + 1)
                    shown = f'str_value: "{value}"'
                    if isinstance(value, int):
                        shown = f"int64_value: {value}"
                    body.append(f"stats {{ metadata_id: {kind} {shown} }}")
                body.append("}")
            body.append("}")
        for table, metadata in ((names, "event_metadata"), (kinds, "stat_metadata")):
            body += [
                f'{metadata} {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
                for name, key in table.items()
            ]
        text.append(f'planes {{ name: "{plane}" {" ".join(body)} }}')
    data = ProfileData.text_proto_to_serialized_xspace(" ".join(text))
    return ProfileData.from_serialized_xspace(data)


def host(*spans):
    steps = [event("half_round", *span, step_num=n) for n, span in enumerate(spans, 7)]
    return {"/host:CPU": {"python": [*steps, event("PjitFunction", 0, 99)]}}


def summary(planes, workers=2):
    return profiling.summarized(traces.read(synthetic(planes), workers))


def microseconds(row):
    """A row's times, whole."""
    flat = {**row, **row.get("waited_for", {})}
    return {k: round(1e6 * v) for k, v in flat.items()
            if k not in ("half_round", "waited_for")}  # fmt: skip


GPU = {
    "Stream #7(Compute)": [
        event("loop_multiply_fusion", 10, 30, hlo_op="fusion.3"),
        event("nvjet_gemm", 30, 60, hlo_op="dot.1"),
        event("MemcpyD2D", 60, 65, hlo_op="copy.2"),
        event("loop_add_fusion", 80, 90, hlo_op="fusion.4"),
    ],
    "Stream #13(Communication)": [
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 5, 20),
        event("ncclDevKernel_AllGather_RING_LL(x)", 50, 75, hlo_op="all-gather-start"),
    ],
    "XLA Modules": [event("jit_run_call", 5, 90)],
}


def test_a_synthetic_gpu_trace():
    """Streams side by side; a copy is neither computation nor communication."""
    got = summary(host((0, 100)) | {"/device:GPU:0": GPU})
    assert got["unknown"] == "" and got["devices"] == ["/device:GPU:0"]
    (row,) = got["calls"]
    assert row["half_round"] == 7
    assert microseconds(row) == {
        "seconds": 100, "computation": 60, "communication": 15 + 25, "hidden": 10 + 10,
        "reduce-scatter": 5, "all-gather": 15, "neither": 5 + 5 + 10,
    }  # fmt: skip


TPU = {
    "Steps": [event("7", 1000, 1100), event("8", 1100, 1200)],
    "XLA Modules": [event("jit_run_call(1)", 1000, 1200)],
    "XLA Ops": [
        event("%while.3", 1000, 1100),
        event("%all-gather-start.1", 1000, 1002),
        event("%fusion.12", 1002, 1060),
        event("%all-gather-done.1", 1060, 1080),
        event("%convolution_fusion", 1080, 1100),
        event("%all-reduce.5", 1100, 1130),
        event("%fusion.13", 1130, 1190),
    ],
    "Async XLA Ops": [event("%all-gather-start.1", 1002, 1080)],
}


def test_a_synthetic_tpu_trace():
    """Half-rounds are the device's own; a loop is not the computation in it."""
    got = summary(host((0, 100), (100, 200)) | {"/device:TPU:0": TPU})
    first, second = map(microseconds, got["calls"])
    assert first == {
        "seconds": 100, "computation": 78, "communication": 80, "hidden": 58,
        "all-gather": 22, "all-reduce": 0, "neither": 0,
    }  # fmt: skip
    assert second == {
        "seconds": 100, "computation": 60, "communication": 30, "hidden": 0,
        "all-gather": 0, "all-reduce": 30, "neither": 10,
    }  # fmt: skip


def on(device, *events):
    return [event(n, b, e, hlo_op=n, device_ordinal=device) for n, b, e in events]


def test_a_synthetic_cpu_trace():
    """Devices share threads; what a device does in one of them hides what it sends."""
    threads = {
        "one": on(0, ("while.1", 0, 60), ("dot.3", 5, 25), ("dot.4", 30, 50)),
        "two": [*on(0, ("reduce_scatter.1", 20, 40)), *on(1, ("dot.3", 40, 90))],
        "three": on(1, ("psum_scatter.9", 0, 10)),
    }
    planes = host((0, 100))
    planes["/host:CPU"] |= threads
    got = summary(planes)
    assert got["devices"] == ["CPU 0", "CPU 1"]
    (row,) = got["calls"]
    # of device 0 and 1: 40 and 50 computing, 20 and 10 sending, 15 and 0 hidden
    assert microseconds(row) == {
        "seconds": 100, "computation": 45, "communication": 15, "hidden": 8,
        "reduce-scatter": 8, "neither": 48,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("planes", "why"),
    [
        ({}, "no events of devices in a form that is known here; the trace has /host"),
        ({"/device:CUSTOM:0": {"Queue 1": [event("gemm", 0, 9)]}}, "/device:CUSTOM:0"),
        (
            {"/device:GPU:0": {"Stream #7": [event("gemm", 0, 9)]}},
            "no collective by a ",
        ),
        (
            {"/device:TPU:0": {"XLA Ops": [event("all-gather.1", 0, 9)]}},
            "no computation",
        ),
    ],
)
def test_what_is_unknown_is_not_hidden(planes, why):
    got = summary(host((0, 100)) | planes)
    assert why in got["unknown"]
    assert got["calls"] == [{"half_round": 7, "seconds": pytest.approx(1e-4)}]
    (line,) = profiling.lines(got)
    assert line.startswith("what was overlapped is unknown: ")


def test_one_worker_sends_nothing():
    planes = {"/device:GPU:0": {"Stream #7": [event("gemm", 0, 90)]}}
    got = summary(host((0, 100)) | planes, workers=1)
    assert got["unknown"] == ""
    assert "none sent" in list(profiling.lines(got))[-1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all-reduce.3", "all-reduce"), ("psum.12", "all-reduce"),
        ("%reduce-scatter-start", "reduce-scatter"), ("all_gather.1", "all-gather"),
        ("ncclDevKernel_SendRecv(x)", "collective-permute"), ("reduce.3", None),
        ("ncclDevKernel_Broadcast_RING_LL", "other"), ("gather.2", None),
        ("async-collective-fusion.1", None), ("async-collective-done", "other"),
        ("sendings", None), ("dot.1", None), ("all-reduced", None),
    ],
)  # fmt: skip
def test_collectives_by_name(name, kind):
    assert traces.kind_of(name) == kind


TIMES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8)


@given(
    TIMES,
    st.lists(TIMES, min_size=2, max_size=2),
    st.tuples(*2 * [st.integers(0, SIZE)]),
)
def test_a_half_round_against_a_raster(computing, sending, window):
    def raster(spans):
        inside = np.zeros(SIZE, bool)
        for begin, end in spans:
            inside[begin:end] = True
        return inside

    window = min(window), max(window)
    kinds = dict(zip(KINDS, map(intervals.union, sending), strict=True))
    device = traces.Activity("x", kinds, intervals.union(computing), {})
    got = profiling._spent(device, window)
    here, busy = raster([window]), raster(computing)
    gather, scatter = map(raster, sending)
    assert got["computation"] == (here & busy).sum()
    assert got["communication"] == (here & (gather | scatter)).sum()
    assert got["hidden"] == (here & busy & (gather | scatter)).sum()
    assert got["waited_for"] == {
        "all-gather": (here & ~busy & gather).sum(),
        "reduce-scatter": (here & ~busy & ~gather & scatter).sum(),
        "neither": (here & ~busy & ~gather & ~scatter).sum(),
    }
    waited = sum(got["waited_for"].values())
    assert waited + got["computation"] == window[1] - window[0]


@pytest.mark.parametrize(
    "text", ["", "3", "0:4", "5:4", "-1:4", "1:2:3", "a:b", "1.5:2", "1:", " 1:2"]
)
def test_what_is_no_range_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"profile is .* give START:STOP") as error:
        profiled(text)
    assert "\n" not in str(error.value)


def test_a_range_has_both_its_ends():
    assert profiled("20:23") == range(20, 24)
    assert profiled("5:5", 5) == range(5, 6)
    assert not profiled(None)
    with pytest.raises(ValueError, match="'5:6', but the run has 5 half-rounds"):
        profiled("5:6", 5)


def test_a_run_is_traced(train_quickly, tmp_path):
    """On CPU devices: one program, whose collectives nothing runs beside."""
    train_quickly(tmp_path, profile="4:6")
    ((process, got),) = profiling.summaries(tmp_path)
    assert process == "process 0" and got["unknown"] == ""
    assert [row["half_round"] for row in got["calls"]] == [4, 5, 6]
    assert len(got["devices"]) == 2
    for row in got["calls"]:
        assert 0 < row["computation"] < row["seconds"]
        assert 0 < row["communication"] < row["seconds"]
        parts = row["computation"] + sum(row["waited_for"].values())
        assert parts == pytest.approx(row["seconds"], rel=1e-6)
        assert {"all-gather", "reduce-scatter"} <= row["waited_for"].keys()
    spent = json.loads((tmp_path / "summary.json").read_text())["seconds_by_cause"]
    assert spent["profiling"] > 0
    assert traces.found(tmp_path / "profile" / "process-0") is not None


@pytest.mark.slow
def test_a_stopped_run_keeps_its_trace(train_quickly, tmp_path):
    train_quickly(tmp_path, profile="3:9", stop_after=5)
    ((_, got),) = profiling.summaries(tmp_path)
    assert [row["half_round"] for row in got["calls"]] == [3, 4, 5]
    train_quickly(tmp_path, profile="7:8")  # it may go on with another
    ((_, got),) = profiling.summaries(tmp_path)
    assert [row["half_round"] for row in got["calls"]] == [7, 8]


def test_a_damaged_summary_is_named(tmp_path):
    folder = tmp_path / "profile"
    folder.mkdir()
    row = {"half_round": 1, "seconds": 1, "computation": 1, "communication": 0}
    whole = {"unknown": "", "devices": [], "calls": [row | {"hidden": 0}]}
    for text in ("{}", '{"unknown": "", "devices": [], "calls": [{}]}',
                 json.dumps(whole)):  # fmt: skip
        (folder / "process-0.json").write_text(text)
        with pytest.raises(ValueError, match=r"process-0\.json is damaged") as error:
            profiling.summaries(tmp_path)
        assert "\n" not in str(error.value)
    whole["calls"][0]["waited_for"] = {}
    for number in (0, 2, 10):
        (folder / f"process-{number}.json").write_text(json.dumps(whole))
    names = [name for name, _ in profiling.summaries(tmp_path)]
    assert names == ["process 0", "process 2", "process 10"]
    assert jax.device_count() > 1
