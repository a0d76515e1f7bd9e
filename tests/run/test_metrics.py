"""Metrics: written late and once, readable, and stopped by what is not finite."""

import json
import math
import struct
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from acco_jax.run.observe import metrics, timing


def record(workdir, start, stop, losses=None):
    """A recorder that was given the half-rounds start + 1 to stop, loss 1 / h."""
    recorder = metrics.Recorder(
        workdir, done=start, tokens=10 * start, seconds=float(start)
    )
    for h in range(start + 1, stop + 1):
        known = {"kind": "train", "half_round": h, "tokens": 10 * h}
        loss = (losses or {}).get(h, 1.0 / h)
        recorder.train(known, {"loss": jnp.float32(loss)})
    return recorder


def evaluation(h, loss=1.0, kind="validation"):
    return {"kind": kind, "half_round": h, "step": h, "tokens": 10 * h,
            "seconds": 1.0, "loss": loss, "bits_per_byte": loss}  # fmt: skip


def written(workdir):
    return [(row["kind"][0], row["half_round"]) for row in metrics.read(workdir)]


def scalars(workdir):
    """{(tag, step): value} of every event file, in the order they were written."""
    found = {}
    for path in sorted((workdir / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):  # length, its CRC, an event, its CRC
            (size,) = struct.unpack("<Q", content[at : at + 8])
            event = Event.FromString(content[at + 12 : at + 12 + size])
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
            at += 16 + size
    return found


def test_writes_an_interval_late_and_everything_in_the_end(tmp_path):
    recorder = record(tmp_path, 0, 3)
    assert written(tmp_path) == [("t", 1), ("t", 2)]
    with recorder.pause(30):
        assert written(tmp_path)[-1] == ("t", 3)
    recorder.evaluation(evaluation(3))
    recorder.close()
    rows = metrics.read(tmp_path)
    assert written(tmp_path) == [("t", 1), ("t", 2), ("t", 3), ("v", 3)]
    assert [row["loss"] for row in rows[:2]] == [1, 0.5]
    assert all(row["tokens_per_second"] != 0 for row in rows[:3])
    seconds = [row["seconds"] for row in rows[:3]]
    assert seconds == sorted(seconds)
    found = scalars(tmp_path)
    assert found["train/loss", 2] == 0.5 and found["validation/loss", 3] == 1
    assert ("train/half_round", 1) not in found


def test_a_pause_does_not_slow_the_rate(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    recorder = metrics.Recorder(tmp_path, done=0, tokens=0, seconds=0.0)

    def half_round(h):
        now[0] += 2
        known = {"kind": "train", "half_round": h, "tokens": 10 * h}
        recorder.train(known, {"loss": jnp.float32(1)})

    half_round(1)
    half_round(2)
    with recorder.pause(20):
        now[0] += 1000
    half_round(3)
    recorder.flush()
    recorder.close()
    rates = [row["tokens_per_second"] for row in metrics.read(tmp_path)]
    assert rates == [5, 5, 5]  # though 2 is fetched the moment after 1
    assert [row["seconds"] for row in metrics.read(tmp_path)] == [2, 4, 1006]


class Slow:
    """A scalar that is computed when it is told so."""

    def __init__(self):
        self.done = threading.Event()

    def is_ready(self):
        return self.done.is_set()

    def block_until_ready(self):
        self.done.wait()
        return self

    def __array__(self, dtype=None, copy=None):
        return np.asarray(1.0, dtype)


def test_a_rate_is_of_work_that_has_ended(tmp_path, monkeypatch):
    """Three intervals are sent at once, and computed in 4, 2 and 2 seconds."""
    now, slow = [100.0], [Slow() for _ in range(3)]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(metrics.jax, "device_get", lambda tree: {
        k: np.asarray(x) for k, x in jax.block_until_ready(tree).items()})  # fmt: skip
    recorder = metrics.Recorder(tmp_path, done=0, tokens=0, seconds=0.0)
    ends = [recorder._ends.of({"loss": x}) for x in slow]
    monkeypatch.setattr(recorder._ends, "of", lambda device: ends.pop(0))
    for x, seconds, end in zip(slow, (4, 2, 2), list(ends), strict=True):
        now[0] += seconds
        x.done.set()
        end.result()
    for h, x in enumerate(slow, 1):
        now[0] += 0.001  # the host, late
        recorder.train({"kind": "train", "half_round": h, "tokens": 40 * h},
                       {"loss": x})  # fmt: skip
    recorder.flush()
    recorder.close()
    rows = metrics.read(tmp_path)
    assert [row["tokens_per_second"] for row in rows] == [10, 20, 20]
    assert [row["seconds"] for row in rows] == [4, 6, 8]


def test_figures_that_cannot_be_are_not_written(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    recorder = metrics.Recorder(
        tmp_path, done=0, tokens=0, seconds=0.0, late=False, flops=(1.0, 8.0)
    )
    compiling = timing.COMPILER + "backend_compile_duration"

    def interval(h, seconds, compiled=0.0):
        now[0] += seconds
        recorder._compilations._notice(compiling, 0.0, compiled)
        recorder.train({"kind": "train", "half_round": h, "tokens": 10 * h},
                       {"loss": jnp.float32(1)})  # fmt: skip

    interval(1, 10.0, compiled=8.0)
    interval(2, 2.0)
    interval(3, 0.0)  # no time at all
    interval(4, 1.0)  # more than the devices' peak
    interval(5, 4.0, compiled=0.1)  # too little to matter
    recorder.close()
    rows = metrics.read(tmp_path)
    assert [r["tokens_per_second"] for r in rows] == [None, 5, None, None, 2.5]
    used = [r["model_flops_utilization"] for r in rows]
    assert used == [None, 5 / 8, None, None, 2.5 / 8]


def test_a_step_that_waits_is_written_at_once(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    recorder = metrics.Recorder(tmp_path, done=0, tokens=0, seconds=0.0, late=False)
    for h in range(1, 7):
        now[0] += 2
        known = {"kind": "train", "half_round": h, "tokens": 10 * h}
        recorder.train(known, {"loss": jnp.float32(1)})
        assert written(tmp_path)[-1] == ("t", h)
        if h % 2 == 0:
            with recorder.pause(10 * h):
                now[0] += 1000
    recorder.close()
    rates = [row["tokens_per_second"] for row in metrics.read(tmp_path)]
    assert rates == [5] * 6


def test_continues_without_duplicates(tmp_path):
    recorder = record(tmp_path, 0, 5)
    recorder.flush()
    recorder.evaluation(evaluation(5))
    recorder.close()
    # its checkpoint was of half-round 3: what comes later is written again
    recorder = record(tmp_path, 3, 6)
    with recorder.pause(60):
        recorder.evaluation(evaluation(6))
        recorder.evaluation(evaluation(6, loss=2.0, kind="final"))
    recorder.close()
    expected = [*(("t", h) for h in range(1, 7)), ("v", 6), ("f", 6)]
    assert written(tmp_path) == expected
    # finished: only the final evaluation comes again
    recorder = record(tmp_path, 6, 6)
    recorder.evaluation(evaluation(6, loss=3.0, kind="final"))
    recorder.close()
    assert written(tmp_path) == expected
    assert metrics.read(tmp_path)[-1]["loss"] == 3


def test_a_number_that_json_lacks_is_null(tmp_path):
    recorder = metrics.Recorder(tmp_path, done=0, tokens=0, seconds=0.0)
    recorder.evaluation(evaluation(1) | {"ema_loss": math.nan})
    recorder.train(
        {"kind": "train", "half_round": 2, "tokens": 20},
        {"loss": jnp.float32(1), "grad_norm": jnp.float32(np.inf)},
    )
    recorder.flush()
    recorder.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = metrics.read(tmp_path)
    assert [rows[0]["ema_loss"], rows[1]["grad_norm"]] == [None, None]


def test_an_evaluation_at_the_checkpoint_stays(tmp_path):
    recorder = record(tmp_path, 0, 4)
    with recorder.pause(40):
        recorder.evaluation(evaluation(4))
    recorder.close()
    record(tmp_path, 4, 4).close()
    assert written(tmp_path)[-1] == ("v", 4)


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    record(tmp_path, 0, 3).close()
    path = tmp_path / metrics.FILE
    path.write_text(path.read_text() + '{"kind": "train", "half_ro')
    assert written(tmp_path) == [("t", 1), ("t", 2)]
    record(tmp_path, 2, 2).close()
    for line in path.read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_raised_an_interval_late(tmp_path, bad):
    recorder = record(tmp_path, 0, 2, losses={2: bad})
    assert written(tmp_path) == [("t", 1)]
    with pytest.raises(FloatingPointError, match=f"the loss is {bad} at half-round 2"):
        recorder.flush()
    with pytest.raises(FloatingPointError, match="held-out loss") as error:
        recorder.evaluation(evaluation(3, loss=bad))
    assert "\n" not in str(error.value) and "learning_rate" in str(error.value)
    recorder.close()
    assert written(tmp_path) == [("t", 1)]
