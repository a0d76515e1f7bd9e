"""One run at a time in a workdir, and no other run's files in it."""

import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

import jax
import pytest

from acco_jax.command.files import read_object, read_text, write_whole
from acco_jax.run import continuing, preparation
from acco_jax.run.continuing import check_whole
from acco_jax.run.observe import metrics
from acco_jax.run.state import workdir, worlds
from acco_jax.run.state.workdir import LOCK, check_held, claimed, own


def one_line(error):
    assert "\n" not in str(error.value)


def test_two_runs_in_one_workdir_are_refused(tmp_path):
    with claimed(tmp_path):
        held = read_object(tmp_path / LOCK)
        assert held["pid"] == os.getpid() and held["host"] == socket.gethostname()
        refused = pytest.raises(ValueError, match=r"another run works in .*remove")
        with refused as error, claimed(tmp_path):
            pass
        one_line(error)
        assert read_object(tmp_path / LOCK) == held
    assert not (tmp_path / LOCK).exists()
    with claimed(tmp_path):
        pass


KILLED = """
import os, pathlib, sys
from acco_jax.run.continuing import check_whole
from acco_jax.run.state.workdir import claimed
with claimed(pathlib.Path(sys.argv[1])):
    os._exit(9)
"""


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert killed.returncode == 9
    assert (tmp_path / LOCK).exists()
    with claimed(tmp_path):
        assert read_object(tmp_path / LOCK)["pid"] == os.getpid()


RIVAL = """
import pathlib, sys, time
from acco_jax.run.state import workdir
for line in sys.stdin:
    folder, begin = line.split()
    folder = pathlib.Path(folder)
    while time.time() < float(begin):
        pass
    got = not workdir._take(folder / workdir.LOCK, workdir._identity(), 0.0)
    print(int(got), flush=True)
"""


@pytest.fixture
def processes():
    """processes(folder): how many of three processes get its lock at the same time."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]

    def take(folder):
        begin = time.time() + 0.005
        for process in started:
            process.stdin.write(f"{folder} {begin}\n")
            process.stdin.flush()
        return sum(int(process.stdout.readline()) for process in started)

    yield take
    for process in started:
        process.communicate()


@pytest.fixture
def threads():
    """threads(folder): the same of three threads, which are less often in between."""
    start = threading.Barrier(3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def one(folder, rank):
        start.wait()
        return not workdir._take(folder / LOCK, workdir._identity() | {"rank": rank}, 0)

    with futures.ThreadPoolExecutor(3) as pool:
        yield lambda folder: sum(pool.map(one, [folder] * 3, range(3)))
    sys.setswitchinterval(interval)


DEAD = {
    "killed": json.dumps(workdir._identity() | {"pid": 2**22 + 1}),
    "of another host": '{"host": "elsewhere", "pid": 1, "started": "7"}',
    "cut": "",
}


def take_stale_locks(folder, rivals, rounds):
    for i in range(rounds):
        work = folder / str(i)
        work.mkdir()
        path = work / LOCK
        text = list(DEAD.values())[i % 3]
        path.write_text(text)
        os.utime(path, (0, 0))
        if i % 2:  # and a process was killed during its takeover
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            claim = work / f"{LOCK}.{digest}"
            claim.write_text(DEAD["killed"])
            os.utime(claim, (0, 0))
        assert rivals(work) == 1, i
        assert [p.name for p in work.iterdir()] == [LOCK]


def test_one_of_three_takes_a_stale_lock_over(tmp_path, threads):
    take_stale_locks(tmp_path, threads, 150)


@pytest.mark.long
def test_one_of_three_takes_a_stale_lock_over_thousands_of_times(tmp_path, processes):
    take_stale_locks(tmp_path, processes, 6000)


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / LOCK
    for text in (None, *DEAD.values()):
        if text is not None:
            path.write_text(text)
            os.utime(path, (0, 0))
        with claimed(tmp_path):
            assert read_object(path) == workdir._identity()
            with pytest.raises(ValueError, match="another run"), claimed(tmp_path):
                pass
        assert list(tmp_path.iterdir()) == []


def test_who_finds_a_lock_stale_too_late_does_not_take_it(tmp_path, monkeypatch):
    """Another process takes the lock over between the look and the claim."""
    path, stale = tmp_path / LOCK, workdir._is_stale
    path.write_text(DEAD["killed"])

    def late(where, held):
        found = stale(where, held)
        if held == DEAD["killed"].encode():
            path.write_text(json.dumps(workdir._identity()))
        return found

    monkeypatch.setattr(workdir, "_is_stale", late)
    monkeypatch.setattr(workdir, "_identity", lambda: {"host": "mine"})
    with pytest.raises(ValueError, match="another run"), claimed(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_process_that_nobody_waits_for_has_ended():
    process = subprocess.Popen(["true"])
    stat = pathlib.Path(f"/proc/{process.pid}/stat")
    while ") Z " not in stat.read_text():
        time.sleep(0.01)
    assert workdir._started(process.pid) is None
    assert workdir._started(os.getpid()) is not None
    process.wait()


def test_a_process_number_that_was_given_again_is_another_process(tmp_path):
    lock = workdir._identity() | {"started": "0"}
    (tmp_path / LOCK).write_text(json.dumps(lock))
    with claimed(tmp_path):
        pass


@pytest.mark.parametrize("age", [5.0, 300.0])
def test_the_lock_of_another_host_is_believed_while_it_shows_life(tmp_path, age):
    path = tmp_path / LOCK
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "7"}))
    os.utime(path, (time.time() - age,) * 2)
    if age < workdir.STALE_SECONDS:
        with pytest.raises(ValueError, match="elsewhere"), claimed(tmp_path):
            pass
    else:
        with claimed(tmp_path):
            pass


@pytest.mark.parametrize("other", ["4026532999", None])
def test_a_container_with_this_host_name_is_another_machine(tmp_path, other):
    """Its processes have numbers of their own, which may be nobody's here."""
    numbering = other and workdir._numbering().split()[0] + f" pid:[{other}]"
    lock = {"pid": 2**22 + 1, "started": "7", "processes": numbering}
    path = tmp_path / LOCK
    path.write_text(json.dumps({"host": socket.gethostname()} | lock))
    with pytest.raises(ValueError, match="another run works in"), claimed(tmp_path):
        pass
    os.utime(path, (time.time() - 300,) * 2)
    with claimed(tmp_path):
        pass


def test_a_file_is_written_through_no_symbolic_link(tmp_path):
    target, path = tmp_path / "target", tmp_path / "config.json"
    target.write_text("mine")
    for name in ("config.partial", "config.json.partial", "config.json"):
        (tmp_path / name).symlink_to(target)
    write_whole(path, "{}")
    assert target.read_text() == "mine"
    assert path.read_text() == "{}" and not path.is_symlink()


def test_a_failed_write_leaves_no_partial_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_whole(tmp_path / "folder", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_refusal_after_the_preparation_leaves_no_config(tiny, tmp_path):
    """As of --replay=/nowhere: the workdir stays free for another seed."""
    experiment = preparation.build(tiny(), tmp_path, jax.devices()[:2])
    with pytest.raises(ValueError, match=r"nowhere/config\.json cannot be read"):
        continuing.repeating(experiment, tmp_path / "nowhere")
    assert not (tmp_path / "config.json").exists()
    preparation.prepare(tiny(seed=5), tmp_path, jax.devices()[:2])


@pytest.mark.parametrize("line", ['{"half_round": 0-', "[]", "\0"])
def test_a_damaged_record_of_worlds_is_refused_in_one_line(tmp_path, line):
    (tmp_path / "worlds.jsonl").write_text(f"{line}\n{{}}\n")
    with pytest.raises(ValueError, match=r"worlds\.jsonl is damaged in line 1") as e:
        check_whole(tmp_path, tmp_path / "checkpoints")
    one_line(e)


def test_a_later_attempt_waits_for_a_lost_host(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "STALE_SECONDS", 1.5)
    lock = {"host": "elsewhere", "pid": 1, "started": "1"}
    (tmp_path / LOCK).write_text(json.dumps(lock))
    with pytest.raises(ValueError, match="elsewhere"), claimed(tmp_path):
        pass
    with claimed(tmp_path, patience=10):
        assert json.loads((tmp_path / LOCK).read_text())["host"] != "elsewhere"


def test_a_run_that_lives_here_is_not_waited_for(tmp_path, monkeypatch):
    """As where a launcher's pod begins a second run in the same workdir."""
    monkeypatch.setattr(workdir, "DYING_SECONDS", 0.1)
    with claimed(tmp_path):
        begun = time.monotonic()
        another = pytest.raises(ValueError, match="another run works")
        with another, claimed(tmp_path, patience=60):
            pass
        assert time.monotonic() - begun < 30


def test_a_process_that_wakes_up_late_writes_nothing(tmp_path):
    with claimed(tmp_path):
        workdir.check_held(tmp_path)
        (tmp_path / LOCK).write_text('{"host": "elsewhere", "pid": 1, "started": "1"}')
        with pytest.raises(OSError, match=r"another run has taken over .*elsewhere"):
            workdir.check_held(tmp_path)
    workdir.check_held(tmp_path / "nobody's")


def test_a_host_that_is_renamed_holds_its_lock(tmp_path, monkeypatch):
    with claimed(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
        check_held(tmp_path)


def test_a_folder_is_new_until_a_run_has_written(tmp_path):
    with claimed(tmp_path):
        assert workdir.is_new(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        assert not workdir.is_new(tmp_path)


def test_a_lock_shows_life(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "BEAT_SECONDS", 0.05)
    with claimed(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        limit = time.monotonic() + 30
        while (tmp_path / LOCK).stat().st_mtime == 0:
            assert time.monotonic() < limit
            time.sleep(0.02)


def test_metrics_without_checkpoints_are_refused(tmp_path):
    folder = tmp_path / "checkpoints"
    check_whole(tmp_path, folder)
    (tmp_path / metrics.FILE).touch()
    with pytest.raises(ValueError, match=r"its folder .*checkpoints is gone") as error:
        check_whole(tmp_path, folder)
    one_line(error)
    folder.mkdir()
    check_whole(tmp_path, folder)


def test_a_new_folder_for_checkpoints_gets_the_old_ones_content(tmp_path):
    before, other = tmp_path / "checkpoints", tmp_path / "other"
    (tmp_path / metrics.FILE).touch()
    (tmp_path / "config.json").write_text('{"checkpoints": null}')
    before.mkdir()
    check_whole(tmp_path, other)  # nothing was saved yet: it begins there
    (before / "5").mkdir()
    with pytest.raises(ValueError, match=r"other has no checkpoint.*move that folder"):
        check_whole(tmp_path, other)


def test_an_empty_folder_is_not_that_of_the_checkpoints(tmp_path):
    """A run would begin anew there, and its records would be gone."""
    before, other = tmp_path / "checkpoints", tmp_path / "other"
    (tmp_path / metrics.FILE).touch()
    (tmp_path / "config.json").write_text('{"checkpoints": null}')
    other.mkdir()
    before.mkdir()
    check_whole(tmp_path, other)  # nothing was saved yet
    (before / "5").mkdir()
    with pytest.raises(ValueError, match=r"other has no checkpoint, but the run") as e:
        check_whole(tmp_path, other)
    one_line(e)
    before.rename(tmp_path / "moved")
    check_whole(tmp_path, tmp_path / "moved")


@pytest.mark.fast("None")
@pytest.mark.parametrize("change", [{"seed": 5}, {"model.width": 32}, None])
def test_a_checkpoint_says_which_run_it_is_of(train, tiny, tmp_path, change):
    """Without config.json beside it, another run cannot continue it."""
    train(tmp_path, stop_after=1)
    (tmp_path / "config.json").unlink()
    if change is None:
        preparation.prepare(tiny(), tmp_path, jax.devices()[:2])
        return
    (field,) = change
    with pytest.raises(ValueError, match=f"checkpoints/1 is of a run with {field}="):
        preparation.prepare(tiny(**change), tmp_path, jax.devices()[:2])


def test_a_refused_run_leaves_no_checkpoints(tiny, tmp_path):
    with pytest.raises(ValueError, match="less than a batch"):
        preparation.prepare(tiny(length=9999), tmp_path, jax.devices()[:2])
    assert not (tmp_path / "checkpoints").exists()


def folder_in_place(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe{"),
    "a list": lambda path: path.write_text("[1]\n[2]"),
    "cut": lambda path: path.write_text('{"seed": \n{}'),
    "a folder": folder_in_place,
}


@pytest.fixture(scope="module")
def stopped(train_quickly, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    train_quickly(folder, stop_after=3)
    return folder


@pytest.mark.parametrize("name", ["config.json", metrics.FILE])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_in_one_line(
    stopped, train_quickly, tmp_path, name, damage
):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / name)
    with pytest.raises(ValueError, match=name) as error:
        train_quickly(tmp_path, stop_after=3)
    one_line(error)


def test_a_row_without_its_fields_is_named_in_one_line(
    stopped, train_quickly, tmp_path
):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    rows = (tmp_path / metrics.FILE).read_text()
    (tmp_path / metrics.FILE).write_text('{"kind": 3}\n' + rows)
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged in line 1: ") as e:
        train_quickly(tmp_path, stop_after=3)
    one_line(e)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="nothing cannot be read: No such file"):
        read_text(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot be read: it is a folder"):
        read_object(tmp_path)


def test_a_folder_of_checkpoints_is_one_run_s(tmp_path):
    run = tmp_path / "run"
    (tmp_path / "link").symlink_to(run)
    for inside in (run / "checkpoints", run / "a" / "b", run, tmp_path / "link"):
        assert own(run, inside) == [run]  # one lock, not twice the same
    assert own(tmp_path / "run", "gs://bucket/run") == [tmp_path / "run"]
    apart = tmp_path / "kept"
    held = own(tmp_path / "run", apart)
    assert held == [tmp_path / "run", apart]
    with claimed(apart):
        check_held(*held)
        _, folder = own(tmp_path / "other", apart)
        refused = pytest.raises(ValueError, match="another run works in")
        with refused, claimed(folder):
            pass
    (apart / LOCK).write_text('{"host": "elsewhere", "pid": 1, "started": "1"}')
    with pytest.raises(OSError, match=r"taken over .*kept"):
        check_held(*held)


@pytest.mark.parametrize("damage", ["number", "cut", "first", "pipe"])
def test_damage_to_the_record_of_worlds_is_found(tmp_path, damage):
    one, two = (worlds.World({"data": n}, 1, [1] * n, "fused") for n in (2, 4))
    worlds.record(tmp_path, 0, one)
    worlds.record(tmp_path, 7, two)
    assert worlds.recorded(tmp_path) == [(0, one), (7, two)]
    file = tmp_path / worlds.FILE
    text = file.read_text()
    if damage == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        changed = {
            "number": text.replace('"half_round": 7', '"half_round": 8'),
            "cut": text[:-20],
            "first": text.replace("{", "[", 1),
        }[damage]
        assert changed != text
        file.write_text(changed)
    with pytest.raises(ValueError, match=worlds.FILE):
        worlds.recorded(tmp_path)


def test_all_say_that_process_0_cannot_write(tmp_path, monkeypatch):
    """The others would look for its file until they lose it."""
    shared = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(workdir.processes, "from_process_0", lambda x: x)
    monkeypatch.setattr(
        workdir.processes,
        "bytes_from",
        lambda source, data: shared.append(data) or shared[0],
    )
    (tmp_path / "file").touch()
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with pytest.raises(ValueError, match=r"process 0 cannot write to .*file"):
            workdir.check_shared(tmp_path / "file" / "in")
    assert b"Not a directory" in shared[0] and shared[1] == b""
