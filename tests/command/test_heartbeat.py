"""Messages of a training process: whole lines, whatever they say."""

import json
import os
import threading

import pytest

from acco_jax.command import heartbeat


def test_how_a_process_ended_is_not_lost_in_a_full_pipe(monkeypatch):
    """As of a command that was stopped for a while; a sign of life may be lost."""
    source, pipe = os.pipe()
    os.set_blocking(pipe, False)
    monkeypatch.setattr(heartbeat, "_pipe", pipe)
    while heartbeat._tell():
        pass
    told = threading.Thread(target=heartbeat._tell_for_sure, kwargs={"ended": -9})
    told.start()
    told.join(0.1)
    assert told.is_alive()
    said = b""
    while b"ended" not in said:
        said += os.read(source, 1 << 16)
    told.join()
    assert json.loads(said.splitlines()[-1]) == {"ended": -9}


@pytest.mark.parametrize("letter", ["a", "é", "𝄞", "\udce9", "\x01", '"', "\n"])
def test_a_long_line_arrives_whole(monkeypatch, letter):
    """A pipe takes 4096 bytes at once; the path in an error may be no Unicode."""
    source, pipe = os.pipe()
    monkeypatch.setattr(heartbeat, "_pipe", pipe)
    heartbeat.ends_with(2, letter * 10**4)
    os.close(pipe)
    with os.fdopen(source, "rb") as lines:
        (line,) = lines.readlines()
    assert len(line) <= 4096
    said = json.loads(line)
    assert said == {"code": 2, "error": letter * heartbeat.LONGEST}
