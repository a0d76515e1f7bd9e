"""Signals that ask a run to stop: ignored ones, and one that comes twice."""

import os
import signal

import pytest

from acco_jax.command import signals


@pytest.fixture
def hangup():
    """SIGHUP, as it was found again afterwards."""
    before = signal.getsignal(signal.SIGHUP)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


def test_an_ignored_signal_stays_ignored(hangup):
    """As nohup has it, so that a run outlives its terminal."""
    signal.signal(hangup, signal.SIG_IGN)
    with signals.stopping() as stopped:
        os.kill(os.getpid(), hangup)
        assert not stopped()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopped()


@pytest.mark.parametrize(
    ("number", "supervised", "twice"),
    [
        (signal.SIGUSR1, True, True),
        (signal.SIGTERM, False, True),
        (signal.SIGHUP, False, True),
        (signal.SIGINT, True, True),
        (signal.SIGINT, False, False),
    ],
)
def test_one_signal_that_comes_twice(hangup, monkeypatch, number, supervised, twice):
    """A service manager's comes to the parent, too, and a terminal's to its shell.

    Who presses Ctrl-C twice means it.
    """
    signal.signal(hangup, signal.SIG_DFL)
    clock = [100.0]
    monkeypatch.setattr(signals.heartbeat, "supervised", lambda: supervised)
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    with signals.stopping() as stopped:
        os.kill(os.getpid(), number)
        assert stopped()
        clock[0] += signals.AGAIN / 2
        if twice:
            os.kill(os.getpid(), number)
            clock[0] += signals.AGAIN
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_several_processes_stay_told(monkeypatch):
    """JAX's service says it at one call only, after which a run may roll back."""
    monkeypatch.setattr(signals.jax, "process_count", lambda: 2)
    reached = signals.multihost_utils, "reached_preemption_sync_point"
    monkeypatch.setattr(*reached, lambda call: call == 3)
    with signals.stopping() as stopped:
        assert [stopped() for _ in range(5)] == [False, False, True, True, True]
