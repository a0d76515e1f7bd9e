"""Who launched this process, and flags that do not go together."""

import pytest

from acco_jax.runner import devices

LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES",
             "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "8"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, True),
    ],
)
def test_launched_by_a_cluster(monkeypatch, environment, several):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert devices.launched_by_a_cluster() == several


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", None, None), "go together"),
        ((None, 2, 0), "go together"),
        ((None, None, 0), "go together"),
        (("localhost:1", 2, 2), "--process is 2: with --processes=2 it is 0 to 1"),
        (("localhost", 2, 0), "--coordinator is 'localhost': give host:port"),
    ],
)
def test_refuses_flags_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        devices.check_together(*given)


def test_alone_without_flags_or_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    devices.connect(None, None, None)  # nothing to wait for
