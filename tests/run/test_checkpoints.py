"""Checkpoints: bitwise there and back, and damage seen before it is trained on."""

import asyncio
import errno
import os
import shutil
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core import small_files
from acco_jax.run.state import checkpoints as checkpoints_module
from acco_jax.run.state import processes
from acco_jax.run.state.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def tree():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    split, whole = (NamedSharding(mesh, P(*names)) for names in (("data",), ()))
    draw = np.random.default_rng(0)
    return {
        "split": jax.device_put(draw.normal(size=(4, 8)).astype(np.float32), split),
        "bf16": jax.device_put(draw.normal(size=8).astype(jnp.bfloat16), whole),
        "nan": jax.device_put(np.float32([np.nan, -0.0, np.inf, 1e-45]), split),
        "key": jax.device_put(jax.random.key(7, impl="rbg"), whole),
        "count": (jax.device_put(np.int32(3), whole),),
    }


@pytest.fixture(scope="module")
def saved(tree, tmp_path_factory):
    """A folder with checkpoints of half-rounds 3 and 5 (1 was one too many)."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.latest() is None
    for half_round in (1, 3, 5):
        now = tree | {"bf16": tree["bf16"] + half_round}
        checkpoints.save(half_round, now, {"batches": {"next": half_round}})
    checkpoints.wait()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def abstract(tree):
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
    return jax.tree.map(place, tree)


def bits(x):
    key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x).tobytes()


@pytest.mark.parametrize("like", [lambda t: t, abstract], ids=["arrays", "abstract"])
def test_restores_bitwise_where_it_was(tree, folder, like):
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.latest() == 5
    found, host = checkpoints.restore(5, like(tree))
    assert host == {"batches": {"next": 5}}
    expected = tree | {"bf16": tree["bf16"] + 5}
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert bits(a) == bits(b)


def test_keeps_the_newest_and_their_checksums(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"3", "5", "3.checksums", "5.checksums"}


def test_a_kill_before_the_checksums_leaves_the_last_one(tree, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    first = Checkpoints(folder, keep=1)
    first.save(1, tree, {})
    first.wait()

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("acco_jax.run.state.checkpoints._checksums", killed)
        first.save(3, tree, {})
        first.wait()
    again = Checkpoints(folder, keep=1)
    assert again.latest() == 1
    again.save(3, tree, {})
    again.wait()
    names = {path.name for path in folder.iterdir()}
    assert names == {"3", "3.checksums"}


@pytest.mark.parametrize("moment", ["_checksums", "write_whole"])
def test_a_kill_in_the_first_save_is_no_damage(tree, tmp_path, monkeypatch, moment):
    """Whatever is there then is discarded, and the run begins again."""
    folder = tmp_path / "checkpoints"

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"acco_jax.run.state.checkpoints.{moment}", killed)
        first = Checkpoints(folder, keep=1)
        first.save(1, tree, {})
        first.wait()
    assert (folder / "1").is_dir() and not (folder / "1.checksums").exists()
    again = Checkpoints(folder, keep=1)
    assert again.latest() is None and not list(folder.iterdir())
    again.save(1, tree, {"a": 1})
    again.wait()
    assert Checkpoints(folder, keep=1).host(1) == {"a": 1}


def test_a_kill_after_the_checksums_leaves_a_sound_checkpoint(tree, folder):
    (folder / "5.saving").touch()
    assert Checkpoints(folder, keep=2).latest() == 5
    assert not (folder / "5.saving").exists()


def test_another_runs_folder_is_left_as_it_is(folder):
    (folder / "9.saving").touch()
    flip(folder, 5)
    before = {path.name for path in folder.iterdir()}
    reader = Checkpoints(folder, keep=2, repair=False)
    assert reader.latest() == 5 and "differs" in reader.problem(5)
    assert reader.problem(3) is None
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize("content", [b"[1]", b"\xff\xfe", b"{", b'{"a": 1}'])
def test_checksums_that_are_none(folder, content, caplog):
    (folder / "5.checksums").write_bytes(content)
    assert Checkpoints(folder, keep=2).latest() == 3
    assert "is damaged" in caplog.text


def data_file(folder, step):
    files = [p for p in (folder / str(step)).rglob("*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


def flip(folder, step):
    path = data_file(folder, step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(folder, step):
    path = data_file(folder, step)
    path.write_bytes(path.read_bytes()[:-1])


def remove(folder, step):
    data_file(folder, step).unlink()


def add(folder, step):
    (folder / str(step) / "more").write_text("more")


def unsummed(folder, step):
    (folder / f"{step}.checksums").unlink()


DAMAGES = [flip, truncate, remove, add, unsummed]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_used(
    folder, tree, damage, caplog
):
    damage(folder, 5)
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.latest() == 3
    assert "is damaged" in caplog.text and "5.damaged" in caplog.text
    found, host = checkpoints.restore(3, tree)
    assert host == {"batches": {"next": 3}}
    assert bits(found["bf16"]) == bits(tree["bf16"] + 3)
    assert (folder / "5.damaged").is_dir()
    # trained again up to 5, and damaged again
    checkpoints.save(5, tree, {})
    checkpoints.wait()
    damage(folder, 5)
    assert Checkpoints(folder, keep=2).latest() == 3


def host_file(folder, step):
    return folder / str(step) / "host" / "metadata"


@pytest.mark.parametrize("content", [b'{"held_out_loss": 1.0-', b"[1]", b"\xff", None])
def test_a_damaged_older_checkpoint_is_named_and_stops_no_save(
    tree, folder, content, caplog
):
    """Pruning reads host data of older checkpoints, which are verified before."""
    if content is None:
        (folder / "3.checksums").write_text("[")
    else:
        host_file(folder, 3).write_bytes(content)
    checkpoints = Checkpoints(folder, keep=1)
    assert checkpoints.saved_calls == [5]
    assert f"{folder}/3 is damaged" in caplog.text and "3.damaged" in caplog.text
    checkpoints.save(7, tree, {})
    checkpoints.wait()
    assert Checkpoints(folder, keep=1).saved_calls == [7]


def test_damage_while_a_run_goes_on_stops_no_save(tree, folder):
    checkpoints = Checkpoints(folder, keep=2)
    host_file(folder, 3).write_bytes(b"{")
    checkpoints.save(7, tree, {})
    checkpoints.wait()
    assert checkpoints.saved_calls == [5, 7]


def test_damaged_host_data_of_the_newest_leave_the_older_one(tree, folder):
    host_file(folder, 5).write_bytes(b"\xff")
    found, _, host = Checkpoints(folder, keep=2).restore_newest(tree)
    assert found == 3 and host == {"batches": {"next": 3}}


def test_what_cannot_be_read_for_another_reason_is_not_set_aside(
    tree, folder, monkeypatch
):
    """Such as too little memory, or a tree of other arrays."""
    checkpoints = Checkpoints(folder, keep=2)
    with pytest.raises(OSError, match=r"/5 cannot be restored, and none of its files"):
        checkpoints.restore_newest({**tree, "another": tree["bf16"]})

    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr(checkpoints._checkpointer, "restore", fails)
    with pytest.raises(OSError, match="what was written: MemoryError"):
        checkpoints.restore_newest(tree)
    gone = OSError(116, "Stale file handle")
    monkeypatch.setattr(checkpoints, "problem", mock.Mock(side_effect=gone))
    with pytest.raises(OSError, match="what was written: MemoryError"):
        checkpoints.restore_newest(tree)
    assert Checkpoints(folder, keep=2).saved_calls == [3, 5]


def unreadable(monkeypatch, name):
    """Files of this name raise what a file system on a network may."""

    def failing(read):
        def fails(path, *rest):
            if os.fspath(path).endswith(name):
                raise OSError(errno.ESTALE, "Stale file handle", os.fspath(path))
            return read(path, *rest)

        return fails

    for module, read in ((small_files, "check"), (checkpoints_module, "_checksum")):
        monkeypatch.setattr(module, read, failing(getattr(module, read)))


@pytest.mark.parametrize(
    "name",
    ["5.checksums", "3.checksums", "5/host/metadata", "3/host/metadata", "0.json"],
)
def test_a_read_error_at_the_start_sets_nothing_aside(folder, monkeypatch, name):
    before = {path.name for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        unreadable(patch, name)
        with pytest.raises(OSError, match=rf"Stale .*{name}.*: start again once they"):
            Checkpoints(folder, keep=2)
    assert {path.name for path in folder.iterdir()} == before
    assert Checkpoints(folder, keep=2).saved_calls == [3, 5]


def test_a_read_error_without_a_text_is_one(tree, folder, monkeypatch):
    """As fsspec raises one where a bucket does not answer."""

    def fails(*_):
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module, "_checksum", fails)
        with pytest.raises(OSError, match=r"cannot be read \(TimeoutError\)"):
            Checkpoints(folder, keep=2)
    checkpoints = Checkpoints(folder, keep=2)
    monkeypatch.setattr(checkpoints_module.shards, "read", fails)
    with pytest.raises(OSError, match="TimeoutError"):
        checkpoints.restore_newest(tree)


def test_a_read_error_of_process_0_ends_every_process(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(processes, "from_process_0", lambda _: np.bool_(True))
    with pytest.raises(OSError, match="process 0 says why"):
        Checkpoints(folder, keep=2)


def test_a_read_error_of_the_shards_sums_is_no_damage(tree, folder, monkeypatch):
    checkpoints = Checkpoints(folder, keep=2)
    unreadable(monkeypatch, "5/shards/0.json")
    with pytest.raises(OSError, match=r"none of its files differs.* Stale file handle"):
        checkpoints.restore_newest(tree)
    assert (folder / "5").is_dir()


def test_another_version_s_state_is_named_with_a_remedy(tree, folder):
    more = {"earlier": np.zeros(2), **tree}
    del more["count"]
    with pytest.raises(OSError, match=r"has count.* and lacks earlier: .*begin") as e:
        Checkpoints(folder, keep=2).restore(5, more)
    assert "\n" not in str(e.value) and (folder / "5").is_dir()


def test_what_may_be_the_best_is_not_removed(tree, folder, monkeypatch, caplog):
    checkpoints = Checkpoints(folder, keep=1)
    with monkeypatch.context() as patch:
        unreadable(patch, "3/host/metadata")
        checkpoints.save(7, tree, {})
    checkpoints.wait()
    assert checkpoints.saved_calls == [3, 5, 7]
    assert "older checkpoints are not removed yet: " in caplog.text
    checkpoints.save(9, tree, {})
    checkpoints.wait()
    assert checkpoints.saved_calls == [9]


def test_what_is_set_aside_by_mistake_can_be_put_back(folder):
    content = host_file(folder, 5).read_bytes()
    host_file(folder, 5).write_bytes(b"")
    assert Checkpoints(folder, keep=2).latest() == 3
    for name in ("5.damaged", "5.damaged.checksums"):
        (folder / name).rename(folder / name.replace(".damaged", ""))
    host_file(folder, 5).write_bytes(content)
    assert Checkpoints(folder, keep=2).latest() == 5


def test_a_fifo_in_a_checkpoint_is_damage(folder):
    path = data_file(folder, 5)
    path.unlink()
    os.mkfifo(path)
    assert Checkpoints(folder, keep=2).latest() == 3


def test_an_old_checkpoint_that_cannot_be_removed_stops_no_save(
    tree, folder, monkeypatch, caplog
):
    def held(self, step):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Checkpoints, "_remove", held)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(7, tree, {})
    checkpoints.wait()
    assert checkpoints.latest() == 7
    assert "3 cannot be removed: [Errno 16]" in caplog.text


def test_refuses_to_start_again_where_all_is_damaged(folder):
    for step in (3, 5):
        flip(folder, step)
    for _ in range(2):  # nor the second time, when they are already set aside
        with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged") as e:
            Checkpoints(folder, keep=2)
        assert "\n" not in str(e.value) and "use another workdir" in str(e.value)


@pytest.mark.parametrize("folder", ["orbax", "others"])
def test_tasks_that_orbax_leaves_end_in_silence(folder, monkeypatch):
    """It reads many arrays at once; the first failure alone is raised."""
    source = """
async def read():
    try:
        await asyncio.Future()
    except BaseException:
        raise OSError("read")
"""
    scope, heard = {"asyncio": asyncio}, []
    exec(compile(source, f"/site-packages/{folder}/read.py", "exec"), scope)
    hook = checkpoints_module._but_for_orbax(lambda said: heard.append(said.exc_type))
    monkeypatch.setattr(sys, "unraisablehook", hook)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = scope["read"]()
    task.send(None)  # it waits, and then nobody waits for it
    del task
    loop.close()
    asyncio.set_event_loop(None)
    assert heard == ([] if folder == "orbax" else [OSError])


def test_what_a_killed_process_left_is_no_checkpoint(folder):
    (folder / "7.orbax-checkpoint-tmp").mkdir()
    (folder / "7.partial").write_text("{")
    assert Checkpoints(folder, keep=2).latest() == 5
