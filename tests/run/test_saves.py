"""Saves beside training: killed at any stage, on a full disk, fenced, remote."""

import errno
import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.path import gcs_utils

from acco_jax.command.exits import Damaged
from acco_jax.run import continuing
from acco_jax.run.build import validation
from acco_jax.run.config import fields as configs
from acco_jax.run.state import shards, workdir
from acco_jax.run.state.checkpoints import Checkpoints
from tests.run import killed_saves

ROOT = Path(__file__).parents[2]


def placed(x, *names, devices=2):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return jax.device_put(x, NamedSharding(mesh, P(*names)))


def saved(folder, *saved_calls, keep=2, **options):
    """Checkpoints of arrays that are filled with the half-round."""
    checkpoints = Checkpoints(folder, keep, **options)
    for half_round in saved_calls:
        checkpoints.save(half_round, filled(half_round), {})
    checkpoints.wait()
    return checkpoints


def filled(value, devices=2):
    x = np.full((4, 6), value, np.float32)
    return {
        "split": placed(x, "data", devices=devices),
        "whole": placed(x, devices=devices),
    }


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run(
        [sys.executable, "-m", "tests.run.killed_saves", str(folder)],
        check=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("stage", killed_saves.STAGES)
def test_a_kill_loses_nothing_and_is_no_damage(killed, stage, caplog):
    counts = killed_saves.STAGES[stage][3]
    checkpoints = Checkpoints(killed / stage, keep=1)
    like = {"x": jnp.zeros(4096)}
    found, arrays, _ = checkpoints.restore_newest(like)
    assert found == counts == checkpoints.latest()
    np.testing.assert_array_equal(arrays["x"], killed_saves.value(counts))
    assert "damaged" not in caplog.text
    checkpoints.save(3, like, {})
    checkpoints.wait()
    assert names(killed / stage) == {"3", "3.checksums"}


@pytest.fixture
def disk(tmp_path):
    """A disk of 600 kB, where root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def check_full(checkpoints, folder, arrays, capfd, why="No space"):
    """A save that does not fit; what the last one and the next command say."""
    checkpoints.save(2, arrays, {})
    match = rf"2 could not be written: .*{why}"
    with pytest.raises(OSError, match=match) as error:
        checkpoints.wait()
    assert "\n" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
    assert checkpoints.latest() == 1 == Checkpoints(folder, 2).latest()
    assert names(folder) == {"1", "1.checksums"}


def test_a_full_disk_is_one_line_and_the_run_goes_on(disk, capfd):
    checkpoints = saved(disk, 1)
    check_full(checkpoints, disk, {"x": jnp.ones(1 << 18)}, capfd)
    assert saved(disk, 3).restore(1, filled(0))[0]["whole"][0, 0] == 1
    assert names(disk) == {"1", "1.checksums", "3", "3.checksums"}


def test_a_limit_on_files_is_one_line(tmp_path, capfd):
    """As ulimit -f sets it: every write under way fails when the first one has."""
    checkpoints, limits = saved(tmp_path, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        many = {str(i): jnp.ones(1 << 15) for i in range(20)}
        check_full(checkpoints, tmp_path, many, capfd, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_of_checksums(tmp_path, monkeypatch, capfd):
    async def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = saved(tmp_path, 1)
    monkeypatch.setattr(shards.Handler, "_write", full)
    check_full(checkpoints, tmp_path, filled(2), capfd)


def test_what_is_donated_after_a_save_is_saved_as_it_was(tmp_path, monkeypatch):
    """Nothing is summed or finished before the run has overwritten its arrays."""
    trained, crc = threading.Event(), shards.crc
    monkeypatch.setattr(shards, "crc", lambda x: trained.wait(60) and crc(x))
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = filled(5)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tree, {})
    for _ in range(20):
        tree = step(tree)
    jax.block_until_ready(tree)
    assert checkpoints.latest() is None
    trained.set()
    checkpoints.wait()
    arrays, _ = checkpoints.restore(1, tree)
    for x in jax.tree.leaves(arrays):
        np.testing.assert_array_equal(x, 5)


def spoil(monkeypatch, name):
    """What is summed is not what is written: as if a bit flipped on the way."""
    copies = shards.on_host

    def flipped(arrays):
        found = copies(arrays)
        place, shard = sorted(found[name].items())[-1]
        changed = shard.copy()
        changed.view(np.uint8).flat[-1] ^= 1
        found[name][place] = changed
        return found

    monkeypatch.setattr(shards, "on_host", flipped)


@pytest.mark.parametrize("leaf", ["00000.split", "00001.whole"])
def test_a_flipped_bit_in_a_shard_sets_its_checkpoint_aside(
    tmp_path, monkeypatch, caplog, leaf
):
    saved(tmp_path, 1)
    with monkeypatch.context() as patch:
        spoil(patch, leaf)
        checkpoints = saved(tmp_path, 2)
    assert checkpoints.problem(2) is None  # its files are as they were written
    for devices in 2, 1:  # and where the shards are others
        with pytest.raises(Damaged, match=f"of {leaf} differs"):
            checkpoints.restore(2, filled(0, devices))
    assert checkpoints.restore_newest(filled(0))[0] == 1 == checkpoints.latest()
    (line,) = [r.message for r in caplog.records if "damaged" in r.message]
    assert f"{tmp_path}/2 is damaged" in line and f"{leaf} differs" in line
    aside = {"2.damaged", "2.damaged.checksums"}
    assert names(tmp_path) == {"1", "1.checksums"} | aside


def test_one_that_only_reads_sets_nothing_aside(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        spoil(patch, "00001.whole")
        saved(tmp_path, 1)
    before = names(tmp_path)
    with pytest.raises(Damaged, match="differs"):
        Checkpoints(tmp_path, 1, repair=False).restore_newest(filled(0))
    assert names(tmp_path) == before
    with pytest.raises(Damaged, match=r"every checkpoint in .* is damaged"):
        Checkpoints(tmp_path, 1).restore_newest(filled(0))


@pytest.mark.parametrize("passes", range(3))
def test_a_fence_ends_a_save_before_others_are_removed(tmp_path, passes):
    """At its start, before the rename, before it counts."""
    saved(tmp_path, 1, keep=1)
    left = [passes]

    def fence():
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the workdir is another run's")

    checkpoints = Checkpoints(tmp_path, 1, fence=fence)
    with pytest.raises(OSError, match="the workdir is another run's"):
        checkpoints.save(2, filled(2), {})
        checkpoints.wait()
    assert checkpoints.latest() == 1 == Checkpoints(tmp_path, 1).latest()
    assert names(tmp_path) == {"1", "1.checksums"}


class Bucket:
    """A backend of etils that keeps gs://bucket in a folder."""

    def __init__(self, folder):
        self._folder = str(folder)

    def __getattr__(self, name):
        def call(*args, **kwargs):
            here = [self.here(x) if isinstance(x, str) else x for x in args]
            found = getattr(epath.backend.os_backend, name)(*here, **kwargs)
            if name != "glob":
                return found
            return [path.replace(self._folder, "gs://bucket") for path in found]

        return call

    def here(self, path):
        return path.replace("gs://bucket", self._folder)


def test_a_remote_folder(tmp_path, monkeypatch):
    """A bucket whose files are here, through what etils and orbax do with gs://."""
    bucket = Bucket(tmp_path)
    monkeypatch.setitem(epath.gpath._PREFIX_TO_BACKEND, "gs", bucket)
    monkeypatch.setattr(epath.gpath, "_is_tf_installed", lambda: False)
    store = lambda path: {"driver": "file", "path": bucket.here(path)}  # noqa: E731
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", store)
    config = configs.default_config()
    config.checkpoints = "gs://bucket/run"
    validation.validate(config)
    saved("gs://bucket/run", 1, 2, 3)
    folder = tmp_path / "run"
    assert names(folder) == {"begun", "2", "3", "2.checksums", "3.checksums"}
    assert (folder / "3" / "commit_success.txt").exists()
    sums = json.loads((folder / "3.checksums").read_text())
    assert sums["host/metadata"] == 2  # its size
    (folder / "4.saving").touch()  # killed: there, but not committed
    (folder / "4").mkdir()
    (folder / "3" / "host" / "metadata").write_text("{} ")
    again = Checkpoints("gs://bucket/run", 2)
    assert again.restore_newest(filled(0))[1]["whole"][0, 0] == 2
    aside = {"3.damaged", "3.damaged.checksums"}
    assert names(folder) == {"begun", "2", "2.checksums"} | aside


class Store(Bucket):
    """A bucket that has files only: a folder is there once a file in it is."""

    def __init__(self, folder):
        super().__init__(folder)
        self.mkdir = self.makedirs = lambda *_, **__: None

    def open(self, path, mode):
        file = Path(self.here(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open(mode)


def test_a_bucket_s_folder_without_a_checkpoint_is_there(tmp_path, monkeypatch):
    """A run that is killed before its first save can begin again."""
    monkeypatch.setitem(epath.gpath._PREFIX_TO_BACKEND, "gs", Store(tmp_path))
    monkeypatch.setattr(epath.gpath, "_is_tf_installed", lambda: False)
    work, folder = tmp_path / "work", epath.Path("gs://bucket/run")
    work.mkdir()
    (work / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="its folder gs://bucket/run is gone"):
        continuing.check_present(work, folder)
    assert Checkpoints("gs://bucket/run", 2).latest() is None
    continuing.check_present(work, folder)


def test_remote_folders_that_are_refused():
    config = configs.default_config()
    config.checkpoints = "gs://bucket/run"
    with pytest.raises(ValueError, match="checkpoints is gs://bucket/run, which") as e:
        validation.validate(config)
    assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match=r"is remote.* in --config\.checkpoints") as e:
        workdir.check_shared(Path("gs://bucket/run"))
    assert "\n" not in str(e.value)
