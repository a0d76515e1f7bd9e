"""Messages of a training process: whole lines, whatever they say."""

import json
import os

import pytest

from acco_jax.command import heartbeat


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
