"""The memory of another host has what a lost one had."""

import json
import shutil

import hypothesis
import pytest
from hypothesis import strategies as st

from acco_jax.run.state import neighbours
from tests import programs


@hypothesis.given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_each_process_has_one_on_another_host(hosts):
    holder = neighbours.holders(hosts)
    if holder is None:
        assert 2 * max(map(hosts.count, hosts)) > len(hosts)
        return
    assert sorted(holder) == list(range(len(hosts)))
    assert all(hosts[i] != hosts[j] for i, j in enumerate(holder))


@pytest.mark.parametrize(
    ("hosts", "holder"),
    [
        ([5, 5, 7, 7], [2, 3, 0, 1]),
        ([5, 7, 5, 7], [1, 0, 3, 2]),
        ([1, 2, 3], [1, 2, 0]),
        ([1], None),
        ([1, 1], None),
        ([1, 1, 2], None),
    ],
)
def test_holders(hosts, holder):
    assert neighbours.holders(hosts) == holder


def run(hosts, *folders):
    """What processes on these hosts find, by name, and their output."""
    outputs = programs.together(
        "tests.run.neighbours_program",
        len(hosts),
        lambda i, port: (i, hosts, port, *folders),
    )
    results = [
        [json.loads(x[6:]) for x in output.splitlines() if x.startswith("RESULT")]
        for output in outputs
    ]
    assert all(each == results[0] for each in results)
    return dict(results[0]), outputs


WANTED = {
    "Auto: nothing is lost": 8,
    "Auto: a host is lost": 8,
    "Auto: the first host is lost": 8,
    "Auto: a host and its neighbour are lost": None,
    "Auto: all are lost": None,
    "Auto: a bit has changed": 8,
    "Auto: a host is lost, and a bit of its copy": 4,
    "Auto: a copy was not ended": 8,
    "Explicit: a host is lost": 8,
    "Auto: nothing is lost, after a copy that was not sent": 10,
    "Auto: a host is lost, after a copy that was not sent": 8,
    "Auto: twice, after a copy that was not sent": 8,  # the first time 10
}


@pytest.mark.fast(slow=("one",))
@pytest.mark.parametrize(
    "others", [["02"], ["20", "201345", "0"]], ids=["one", "several"]
)
def test_what_is_found_is_bitwise_what_was_kept(others, tmp_path):
    """The processes compare the bits of shards, replicas, -0.0 and keys themselves.

    Later host 1 is gone, and others go on: the state is there, and lost where host 2's
    copies are gone, too. Host 0 alone has its own shards and host 2's.
    """
    memory, workdirs = tmp_path / "memory", tmp_path / "workdirs"
    workdirs.mkdir()
    found, (first, _, third) = run("012", memory, workdirs)
    assert found == WANTED
    for output in (first, third):
        assert "a copy of half-round 8 in memory is damaged: the shard [" in output
    for hosts in others:
        copied = tmp_path / hosts
        shutil.copytree(memory, copied, ignore=lambda *_: ["host1"])
        found, _ = run(hosts, copied, workdirs)
        left = None if hosts == "0" else 8
        assert found == {"Auto: left": left, "Auto: left without one": None}
