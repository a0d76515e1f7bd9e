"""A main thread that is stuck: when the watchdog ends it, and when it waits."""

import select
import threading
import time

import pytest

from acco_jax.run.observe import stalls


class Result:
    """A stand-in for an array that is computed when it is told."""

    def __init__(self, ready=True):
        self.ready = ready

    def is_ready(self):
        return self.ready


@pytest.fixture
def watch(monkeypatch):
    """watch(least): a watchdog that looks often, and the reasons that it gives."""
    monkeypatch.setattr(stalls, "SECONDS", 0.01)
    made = []

    def make(least):
        reasons = []
        made.append(stalls.Watchdog(least, reasons.append))
        return made[-1], reasons

    yield make
    for one in made:
        one.close()


def until(condition):
    deadline = time.monotonic() + 60  # beside other load
    while not condition():
        assert time.monotonic() < deadline
        select.select((), (), (), 0.01)  # `make durations` puts a frame into time.sleep


def test_a_stuck_main_thread_is_lost_and_its_place_is_named(watch):
    watchdog, reasons = watch(0.1)
    watchdog.called(7, Result())
    until(lambda: reasons)
    (reason,) = reasons
    assert reason.startswith("no half-round after half-round 7 for 0 s: its main thre")
    assert reason.rpartition("is in ")[2].startswith("until, test_stalls.py, line")


def test_a_device_that_hangs_and_one_that_computes_an_old_half_round(watch):
    watchdog, reasons = watch(0.2)
    calls = [Result(False) for _ in range(4)]
    for number, call in enumerate(calls, 1):
        watchdog.called(number, call)
    for call in calls[:3]:  # the main thread waits: half-rounds go on to end
        time.sleep(0.12)
        call.ready = True
    assert not reasons
    watchdog._longest = 0.0
    until(lambda: reasons)


def test_patience(watch):
    """With a long half-round, with a save, and where nothing is watched."""
    watchdog, reasons = watch(0.01)
    slow = Result(False)
    with watchdog.aside():
        watchdog.called(1, Result())
        assert watchdog.most == pytest.approx(stalls.ASIDE * 0.01)
    watchdog._least = 0.2
    watchdog.called(2, slow)
    time.sleep(0.1)
    slow.ready = True
    until(lambda: watchdog.most > stalls.FACTOR * 0.09)
    watchdog.called(3, Result())
    time.sleep(0.4)
    assert not reasons
    idle, never = watch(float("inf"))
    idle.called(1, Result())
    assert idle._thread.ident is None and not never and not idle._calls


def test_a_process_that_was_stopped_is_forgiven(watch, monkeypatch):
    clock, started = [100.0], threading.Event()

    class Time:
        @staticmethod
        def monotonic():
            started.set()
            return clock[0]

    monkeypatch.setattr(stalls, "time", Time)
    watchdog, reasons = watch(50.0)
    watchdog.called(1, Result())
    time.sleep(0.05)
    clock[0] += 1000
    time.sleep(0.1)
    assert not reasons
    for _ in range(15):  # of a thread that is stuck, while this one looks
        clock[0] += 4
        time.sleep(0.03)
    until(lambda: reasons)
