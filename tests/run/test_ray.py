"""experiments/clusters/ray_train.py: Ray Train restarts a run, which ends bitwise."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks import common
from tests import programs

RAY = programs.ROOT / ".venv-ray" / "bin" / "python"
SCRIPT = programs.ROOT / "experiments" / "clusters" / "ray_train.py"
PROCESSES = 4
PATIENCE = 1500.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not RAY.exists(), reason=f"no {RAY}: make test-ray"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a config and its texts, for runs in a Ray cluster of their own."""
    place = tmp_path_factory.mktemp("ray")
    common.write_config(
        place / "config.py", common.texts(place), devices=1, steps=40,
        microbatches_per_step=2, eval_every=40, eval_batches=1, checkpoint_every=10,
        model={"family": "llama", "width": 16},
    )  # fmt: skip
    ray = {  # a small cluster, which writes nothing outside of the folder
        "HOME": str(place),
        "RAY_OVERRIDE_RESOURCES": f'{{"CPU": {PROCESSES}}}',
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100_000_000),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (common.environment(place) | ray).items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:
            patch.setenv("RAY_TMPDIR", short)  # of sockets, whose paths are limited
            yield place


@pytest.fixture(scope="module")
def undisturbed(place):
    """The last checkpoint's bits of a run that Ray has not started."""

    def flags(process, port):
        return (
            f"--config={place / 'config.py'}", f"--workdir={place / 'undisturbed'}",
            f"--coordinator=localhost:{port}", f"--processes={PROCESSES}",
            f"--process={process}",
        )  # fmt: skip

    programs.together("acco_jax.train", PROCESSES, flags, timeout=PATIENCE)
    return common.bits(place / "undisturbed")


def training(workdir, process):
    """Return the pid of a run's process of this number."""
    place = f"OMPI_COMM_WORLD_RANK={process}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"acco_jax.train" not in command:
                continue
            ours = f"--workdir={workdir}".encode() in command
            if ours and place in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:  # it has ended
            pass
    raise AssertionError(f"no process {process} trains in {workdir}")


@pytest.mark.parametrize("killed", [0, 3])
def test_the_run_continues_bitwise_after_a_kill(place, undisturbed, killed):
    workdir, log = place / f"killed-{killed}", place / f"killed-{killed}.log"
    with log.open("w") as output:
        script = subprocess.Popen(
            [
                RAY, SCRIPT, f"--processes={PROCESSES}", "--max_failures=1",
                f"--config={place / 'config.py'}", f"--workdir={workdir}",
            ],
            cwd=programs.ROOT, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while not common.last_checkpoint(workdir):
            assert script.poll() is None and time.monotonic() < deadline, (
                log.read_text()[-4000:]
            )
            time.sleep(0.05)
        os.kill(training(workdir, killed), signal.SIGKILL)
        code = script.wait(PATIENCE)
    finally:
        script.terminate()
        script.wait(60)
    text = log.read_text()
    assert code == 0, text[-4000:]
    assert f"process {killed} of {PROCESSES} ended with -9" in text
    assert common.bits(workdir) == undisturbed
