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


class Clock:
    """Time that passes when a test says so; the watchdog looks at it very often."""

    def __init__(self):
        self.now, self.looks = 100.0, 0

    def monotonic(self):
        self.looks += threading.current_thread() is not threading.main_thread()
        return self.now

    def passes(self, seconds=0.0):
        """Let time pass, and a watchdog that has begun see it."""
        self.now += seconds
        seen = self.looks + 2  # the first of them may have been under way
        deadline = time.monotonic() + 60  # beside other load
        while self.looks < seen:
            assert time.monotonic() < deadline
            select.select((), (), (), 0.01)  # `make durations` frames time.sleep


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(stalls, "time", found)
    return found


@pytest.fixture
def watch(monkeypatch, clock):
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


def test_a_stuck_main_thread_is_lost_and_its_place_is_named(watch, clock):
    watchdog, reasons = watch(50.0)
    watchdog.called(7, Result())
    clock.passes()  # it is computed
    for _ in range(12):
        clock.passes(4.0)
    assert not reasons
    clock.now += 4.0
    until(lambda: reasons)
    (reason,) = reasons
    said = (
        "no half-round after half-round 7 for 52 s: its main thread is in until, test_"
    )
    assert reason.startswith(said)


def test_a_device_that_hangs_and_one_that_computes_an_old_half_round(watch, clock):
    watchdog, reasons = watch(3.0)
    calls = [Result(False) for _ in range(4)]
    for number, call in enumerate(calls, 1):
        watchdog.called(number, call)
    for call in calls[:3]:  # the main thread waits: half-rounds go on to end
        clock.passes(2.0)
        call.ready = True
        clock.passes()
        watchdog._longest = 0.0
    assert not reasons
    clock.now += 4.0
    until(lambda: reasons)


def test_patience(watch, clock):
    """With a long half-round, with a save, and where nothing is watched."""
    watchdog, reasons = watch(0.5)
    slow = Result(False)
    with watchdog.aside():
        watchdog.called(1, Result())
        assert watchdog.most == pytest.approx(stalls.ASIDE * 0.5)
        clock.passes()
    watchdog._least = 3.0
    watchdog.called(2, slow)
    clock.passes(2.0)
    slow.ready = True
    clock.passes()
    assert watchdog.most == pytest.approx(stalls.FACTOR * 2.0)
    watchdog.called(3, Result())
    clock.passes()
    clock.passes(4.0)
    assert not reasons
    idle, never = watch(float("inf"))
    idle.called(1, Result())
    assert idle._thread.ident is None and not never and not idle._calls


def test_a_process_that_was_stopped_is_forgiven(watch, clock):
    watchdog, reasons = watch(50.0)
    watchdog.called(1, Result())
    clock.passes()
    clock.passes(1000)
    assert not reasons
    for _ in range(12):  # of a thread that is stuck, while this one looks
        clock.passes(4)
    assert not reasons
    clock.now += 4
    until(lambda: reasons)


def until(condition):
    deadline = time.monotonic() + 60  # beside other load
    while not condition():
        assert time.monotonic() < deadline
        select.select((), (), (), 0.01)  # `make durations` frames time.sleep
