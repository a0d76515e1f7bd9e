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


@pytest.mark.parametrize("supervised", [True, False])
def test_one_signal_that_the_command_passes_on(hangup, monkeypatch, supervised):
    """A service manager signals the command and its process, which has it twice."""
    signal.signal(hangup, signal.SIG_DFL)
    clock = [100.0]
    monkeypatch.setattr(signals.heartbeat, "supervised", lambda: supervised)
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    with signals.stopping() as stopped:
        os.kill(os.getpid(), hangup)
        assert stopped()
        clock[0] += signals.AGAIN / 2
        if supervised:
            os.kill(os.getpid(), hangup)
            clock[0] += signals.AGAIN
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), hangup)
