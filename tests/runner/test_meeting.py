"""Who is to blame, and commands that come again to a meeting."""

import asyncio
import json

import pytest

from acco_jax.runner import meeting
from acco_jax.runner.meeting import Limits, Member
from acco_jax.runner.messages import End


def members(*changes):
    base = {
        "host": "a",
        "heard": 100.0,
        "idle": False,
        "half_round": 7,
        "started": True,
    }
    return [Member(**(base | {"process": i} | c)) for i, c in enumerate(changes)]


@pytest.mark.parametrize(
    ("changes", "process"),
    [
        (({}, {}, {}), None),
        (({}, {"silent": 61.0}, {}), 1),
        (({}, {"silent": 59.0}, {}), None),
        (({}, {"heard": 39.0}, {}), 1),
        (({"silent": 61.0}, {"gone": True}, {}), 1),
        (({}, {"started": False, "silent": 299.0}, {}), None),
        (({}, {"started": False, "silent": 301.0}, {}), 1),
        # one that aborts while another is silent was waiting for it
        (({}, {"end": End(-6), "ended": 90.0}, {"silent": 30.0}), 2),
        (({}, {"end": End(-6), "ended": 90.0}, {}), 1),
        (({}, {"end": End(-6), "ended": 99.0}, {}), None),  # it may be another's fault
        (({}, {"end": End(-6), "ended": 90.0}, {"end": End(-9), "ended": 91.0}), 2),
        (({}, {"end": End(0), "ended": 50.0}, {}), None),  # process 0 writes a report
        (({}, {"end": End(75), "ended": 99.0, "half_round": None}, {}), 1),
        (({}, {"end": End(75), "ended": 50.0}, {}), None),
    ],
)
def test_judge(changes, process):
    verdict = meeting.judge(members(*changes), 100.0, Limits(), 1)
    assert (verdict and verdict.process) == process


def test_a_command_comes_again_while_its_old_words_arrive():
    """When a cut link is whole, what was said before it was cut is heard at once."""
    lines = []

    async def say(port, command, *more):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        hello = {"process": 1, "processes": 2, "host": "a", "attempt": 0}
        for message in (hello | {"command": command}, *more):
            writer.write((json.dumps(message) + "\n").encode())
        lines.append(next(iter(json.loads(await reader.readline()))))
        return writer

    async def commands():
        async with meeting.Meeting(2, Limits()).at("127.0.0.1", 0) as here:
            beat = {"beat": {"half_round": 1, "started": True, "silent": 0.0}}
            commands = "one", "one", "other"
            writers = [await say(here.port, name, beat) for name in commands]
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(commands(), 20))
    assert lines == ["welcome", "welcome", "refused"]
