"""Copies of states in memory: which one a restart takes, and what is left out."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core import leaf_names
from acco_jax.run.state import memory, worlds
from acco_jax.run.state.memory import MemoryCopies
from acco_jax.run.state.replicas import ReplicasDiffer
from tests import programs
from tests.reference import make_mesh

IDENTITY = {"seed": 0}
WORLD = worlds.World({"data": 2}, 1, [1, 1], "fused")


def state(half_round):
    """Shards, replicas, a bfloat16 scalar and a key, on two devices."""
    mesh = make_mesh(2)
    x = np.arange(12, dtype=np.float32).reshape(4, 3) * half_round
    return {
        "shards": jax.device_put(x, NamedSharding(mesh, P("data"))),
        "replicas": jax.device_put(x, NamedSharding(mesh, P())),
        "scalar": jax.device_put(jnp.bfloat16(half_round), NamedSharding(mesh, P())),
        "key": jax.device_put(jax.random.key(half_round), NamedSharding(mesh, P())),
    }


def like(axes):
    assert axes == WORLD.axes
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(1)
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder in the place of /dev/shm, and a workdir."""
    # a config file that another test has written is newer than this process
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    found = SimpleNamespace(folder=tmp_path / "shm", workdir=tmp_path / "work")
    found.folder.mkdir()
    found.workdir.mkdir()
    return found


def host(half_round):
    return {"axes": WORLD.axes, "at": half_round}


def opened(place, counts=WORLD.counts, **changes):
    world = dataclasses.replace(WORLD, counts=counts)
    return MemoryCopies(place.folder, place.workdir, IDENTITY | changes, world)


def kept(place, *half_rounds):
    """What a process leaves that is killed after copies of these half-rounds."""
    copies = opened(place)
    copies.begin(0)
    for half_round in half_rounds:
        copies.keep(half_round, state(half_round), lambda h=half_round: host(h))
    copies._writing.result()
    return copies


def files(place):
    return sorted(path.name for path in place.folder.rglob("*.*"))


def flip(place, half_round):
    (path,) = place.folder.rglob(f"{half_round}.data")
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def bits(tree):
    named = leaf_names.named(tree)
    shards = {k: [s.data for s in x.addressable_shards] for k, x in named.items()}
    return {k: [np.asarray(s).tobytes() for s in x] for k, x in shards.items()}


def test_a_restart_takes_the_newest(place):
    kept(place, 2, 4, 6)
    assert files(place) == ["4.data", "4.json", "6.data", "6.json"]
    done, tree, about = opened(place).restore_newest(like, 6)
    assert (done, about) == (6, host(6)) and bits(tree) == bits(state(6))
    assert files(place) == ["6.data", "6.json"]
    assert opened(place).restore_newest(like, 7) is None  # the checkpoint is newer
    assert files(place) == []


def test_a_flipped_bit_leaves_the_older_one_and_then_the_disk(place, caplog):
    kept(place, 4, 6)
    flip(place, 6)
    done, tree, _ = opened(place).restore_newest(like, 0)
    assert done == 4 and bits(tree) == bits(state(4))
    (line,) = caplog.messages
    assert line.startswith("a copy of half-round 6 in memory is damaged: the shard [")
    flip(place, 4)
    assert opened(place).restore_newest(like, 0) is None and files(place) == []
    assert "continuing from the checkpoint on disk" in caplog.text


@pytest.mark.parametrize("fault", ["cut", "unmarked", "sealed", "other"])
def test_copies_that_are_not_whole_or_of_another_run(place, fault):
    kept(place, 4)
    (data,), (mark,) = place.folder.rglob("4.data"), place.folder.rglob("4.json")
    match fault:
        case "cut":
            data.write_bytes(data.read_bytes()[:-1])
        case "unmarked":  # killed meanwhile
            mark.unlink()
        case "sealed":
            mark.write_text(mark.read_text().replace('"at": 4', '"at": 5'))
        case "other":
            (place.workdir / memory.STARTS).unlink()  # begun again from scratch
    assert opened(place).restore_newest(like, 0) is None
    assert files(place) == []


def test_another_config(place, caplog):
    kept(place, 4)
    assert opened(place, seed=1).restore_newest(like, 0) is None
    assert "continuing from the checkpoint on disk" in caplog.text


def test_a_state_that_a_later_start_has_left_behind_is_not_taken(place):
    """A run that went back before it may have computed another one meanwhile."""
    kept(place, 4)
    opened(place).begin(4)  # went on from it
    assert opened(place).restore_newest(like, 0)[0] == 4
    opened(place).begin(2)
    assert opened(place).restore_newest(like, 0) is None


@pytest.mark.parametrize("content", ["", "7", "[1]", '[["a", 1]]', "[[1, 2, 3]]"])
def test_starts_that_are_damaged_leave_the_disk(place, content):
    kept(place, 4)
    (place.workdir / memory.STARTS).write_text(content)
    assert opened(place).restore_newest(like, 0) is None
    assert files(place) == []


def test_a_batch_of_other_workers_leaves_the_disk(place):
    """Which has what the run began with; its first workers' batch is kept."""
    kept(place, 4)
    assert opened(place, workers=3).restore_newest(like, 0) is None


@pytest.mark.parametrize("error", [None, FloatingPointError, ReplicasDiffer, OSError])
def test_what_is_left_at_the_end(place, error):
    with pytest.raises(error) if error else contextlib.nullcontext(), kept(place, 4):
        if error:
            raise error
    assert bool(files(place)) == (error is OSError)


def test_the_last_process_of_a_host_may_have_removed_all(place):
    with kept(place, 4) as copies:
        shutil.rmtree(copies._folder.parent)


def test_a_last_copy_that_cannot_be_written_ends_no_run(place, monkeypatch):
    with kept(place, 4) as copies:
        monkeypatch.setattr(
            memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=1)
        )
        copies.keep(6, state(6), dict)
    assert files(place) == []


def test_what_other_processes_have_left_is_removed(place):
    """Once this one has made its first copies, or ends; not what is as new as they."""
    run = kept(place, 4)._folder.parent
    for name, age in (("7", 3600), ("8", -3600)):
        (run / name / memory.HELD).mkdir(parents=True)
        for folder in (run / name, run / name / memory.HELD):
            os.utime(folder, (time.time() - age,) * 2)
    kept(place, 6, 8, 10)
    assert {x.name for x in run.iterdir()} == {"0", "7", "8"}
    kept(place, 6, 8, 10, 12, 14)
    assert {x.name for x in run.iterdir()} == {"0", "8"}


def test_without_room_there_are_none(place, caplog, monkeypatch):
    full = SimpleNamespace(free=10)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: full)
    copies = kept(place, 4)
    assert "bytes are needed, and 10 are free" in caplog.text
    copies.keep(6, state(6), dict)
    assert files(place) == []
    assert opened(place).restore_newest(like, 0) is None


def test_where_there_is_no_such_folder(tmp_path, caplog):
    off = MemoryCopies(None, tmp_path, IDENTITY, WORLD)
    assert not off.due(5) and off.restore_newest(like, 0) is None
    missing = MemoryCopies(Path("/nowhere"), tmp_path, IDENTITY, WORLD)
    missing.keep(1, state(1), dict)
    assert missing.restore_newest(like, 0) is None and caplog.records == []


def test_copies_take_their_share_of_the_time(place, monkeypatch):
    copies = opened(place)
    monkeypatch.setattr(copies, "_write", lambda *_: 0.0499)
    made = []
    clock = [0.0]
    monkeypatch.setattr(memory.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(memory.time, "thread_time", lambda: 0.0)
    for half_round in range(1, 61):
        clock[0] += 0.5
        if copies.due(half_round):
            copies.keep(half_round, state(1), dict)
            made.append(half_round)
    # the first ones are early; then 0.0499 s are 1 % of ten half-rounds
    assert made == [5, 9, 13, 17, 27, 37, 47, 57]


def test_the_next_process_copies_as_often(place):
    copies = opened(place)
    copies._copying.every, copies._sending.every = 3, 50
    copies.keep(4, state(4), lambda: host(4))
    copies._writing.result()
    again = opened(place)
    assert again.restore_newest(like, 0)[0] == 4
    assert not again.due(4)
    assert [n for n in range(5, 9) if again.due(n)] == [7, 8]
    assert again._sending.every == 50


def test_old_copies_of_runs_that_are_gone_are_removed(place, monkeypatch):
    kept(place, 4)
    other = SimpleNamespace(folder=place.folder, workdir=place.workdir / "other")
    other.workdir.mkdir()
    opened(other)
    assert files(place)
    monkeypatch.setattr(memory, "LEFT_SECONDS", -1)
    opened(other)
    assert not files(place)


def taken(place, **changes):
    found = []
    there = opened(place, **changes).take_programs(found.append, found.clear)
    assert there == bool(found)
    return found


def test_programs_are_for_the_same_run_and_code(place, monkeypatch):
    opened(place).keep_programs(lambda: b"a\nb")
    assert taken(place, counts=[1, 2]) == []
    assert taken(place) == [b"a\nb"]
    assert taken(place) == []  # who took them has not run yet
    kept(place, 4)
    opened(place).restore_newest(like, 7)  # which removes copies that are old
    assert taken(place) == [b"a\nb"]
    kept(place, 4)
    here = memory.program_store.environment()
    monkeypatch.setattr(memory.program_store, "environment", lambda: here + "edited")
    assert taken(place) == []


def test_untried_programs_do_not_come_back_over_newer_ones(place):
    opened(place).keep_programs(lambda: b"one")
    assert taken(place) == [b"one"]  # and has died
    opened(place).keep_programs(lambda: b"two")
    kept(place, 4)
    assert taken(place) == [b"two"]


def test_all_processes_take_what_was_kept_together_or_none_does(place, monkeypatch):
    opened(place).keep_programs(lambda: b"one")
    other = memory.processes.gathered
    seven = lambda x: np.stack([other(x)[0], np.full_like(other(x)[0], 7)])  # noqa: E731
    monkeypatch.setattr(memory.processes, "gathered", seven)
    assert taken(place) == []
    kept(place, 4)
    both = lambda x: np.stack([other(x)[0], x if x.dtype == np.int32 else ~x])  # noqa: E731
    monkeypatch.setattr(memory.processes, "gathered", both)
    assert taken(place) == []  # the other one could not load them


def test_programs_that_are_damaged_or_cannot_be_loaded(place, caplog):
    def fails(data):
        raise RuntimeError("another compiler's")

    opened(place).keep_programs(lambda: b"abc")
    assert not opened(place).take_programs(fails, lambda: None)
    assert "compiled again: another compiler's" in caplog.text
    opened(place).keep_programs(lambda: b"abc")
    (path,) = place.folder.rglob(memory.PROGRAMS)
    path.write_bytes(path.read_bytes()[:-1] + b"d")
    assert taken(place) == []


def test_programs_that_cannot_be_kept(place, monkeypatch, caplog):
    def fails():
        raise TypeError("cannot pickle")

    caplog.set_level("INFO", logger="absl")
    opened(place).keep_programs(lambda: None)
    assert taken(place) == [] and not caplog.text
    opened(place).keep_programs(fails)
    assert "not kept in memory: cannot pickle" in caplog.text
    full = SimpleNamespace(free=10)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: full)
    opened(place).keep_programs(lambda: b"a" * 6)
    assert taken(place) == []


def test_programs_give_way_to_copies_of_the_state(place, monkeypatch):
    opened(place).keep_programs(lambda: b"abc")
    (path,) = place.folder.rglob(memory.PROGRAMS)
    space = lambda _: SimpleNamespace(free=10 if path.exists() else 10**9)  # noqa: E731
    monkeypatch.setattr(memory.shutil, "disk_usage", space)
    kept(place, 4)
    assert files(place) == ["4.data", "4.json"] and not path.exists()


@pytest.mark.long
def test_kills_at_random_times(tmp_path):
    """Twenty-five, some during a copy, and one bit that changes: the same end."""
    command = [sys.executable, "-m", "tests.run.killed_copies", str(tmp_path)]
    environment = programs.environment(JAX_PLATFORMS="cpu")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 25 and found["meanwhile"] > 0 and found["bits"]
    assert max(found["repeated"]) <= 8 and found["left"] == 0
    assert done.stderr.count("in memory is damaged") == 1


def test_a_clock_set_back_removes_nobody_here(place):
    copies = kept(place, 4)
    copies._hosts = [5, 5, 7]
    folders = [copies._folder.with_name(name) for name in ("1", "2")]
    for folder in folders:
        folder.mkdir()
        os.utime(folder, (time.time() - 3600,) * 2)
    copies._remove_left(copies._folder.parent)
    assert [folder.exists() for folder in folders] == [True, False]


def test_an_old_run_that_another_process_removes_meanwhile(place):
    other = place.folder / f"acco_jax-{os.getuid()}-old"
    other.mkdir()
    (other / "0").symlink_to("gone")
    assert opened(place)._folder is not None


def test_records_are_written_by_a_process_without_copies(place):
    copies, called = opened(place), []
    copies._folder = None
    copies.keep(4, state(4), lambda: called.append(4) or {})
    assert called == [4]


def test_copies_remain_of_a_run_that_has_saved_nothing_as_new(place):
    with kept(place, 4) as copies:
        copies.remain()
    assert files(place)
    with kept(place, 4):
        pass
    assert not files(place)
