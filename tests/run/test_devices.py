"""Who launched this process, and flags that do not go together."""

import http.server
import os
import re
import subprocess
import sys
import threading

import pytest

from acco_jax.command import devices, exits

LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES",
             "TPU_WORKER_HOSTNAMES", "KUBERNETES_SERVICE_HOST",
             "JOB_COMPLETION_INDEX", "TPU_SKIP_MDS_QUERY")  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_PROCID": "0",
         "SLURM_LOCALID": "0"}  # fmt: skip
OMPI = {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:3", "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # fmt: skip
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.fixture
def launched(monkeypatch):
    """launched(environment): what launchers have said is only that."""

    def set_(environment):
        for name in (*LAUNCHERS, *SLURM, *OMPI):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "8", **SLURM}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", **OMPI}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", **OMPI, "SLURM_NTASKS": "2"}, True),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        (INDEXED, True),
    ],
)
def test_launched_by_a_cluster(launched, monkeypatch, environment, several):
    launched(environment)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(devices, "has_tpu", lambda: False)
    assert devices.launched_by_a_cluster() == several


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_a_launcher_of_one_process_may_start_it_again(launched, name):
    launched({})
    assert not devices.launched()
    launched({name: "1"})
    assert devices.launched() and not devices.launched_by_a_cluster()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS is 4, but SLURM_JOB_ID .* srun, or uns"),
        (
            {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
            "SLURM_NTASKS is 4, but SLURM_STEP_NODELIST is not set.* srun",
        ),
        ({"SLURM_NTASKS": ""}, "SLURM_NTASKS is '', .* unset it"),
        ({"SLURM_NTASKS": "0"}, "SLURM_NTASKS is '0', .* unset it"),
        ({"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE is 'x', .* unset it"),
        ({"MEGASCALE_NUM_SLICES": " "}, "MEGASCALE_NUM_SLICES is ' ', .* unset it"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "SIZE is 2, but OMPI_MCA_orte_hnp_uri is not set.*--coordinator, .* unset",
        ),
        (INDEXED, r"JOB_COMPLETION_INDEX is 0, .*'jax\[k8s\]', or .*--coord.* unset"),
    ],
)
def test_a_launcher_without_what_jax_needs(launched, monkeypatch, environment, message):
    launched(environment)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        devices.connect(None, None, None)
    assert devices.are_several("localhost:1", 2)  # flags need no launcher
    assert not devices.are_several("localhost:1", 1)


def test_peers_that_do_not_come_end_it_with_a_line_and_5(tmp_path):
    """Without a supervisor, as under SLURM: JAX alone would abort with 134."""
    program = """
from acco_jax.command import devices
devices.connect(None, None, None, start_within=0.5)
"""
    task = {"SLURM_NTASKS": "4", **SLURM, "SLURM_STEP_NODELIST": "localhost"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={k: v for k, v in os.environ.items() if k not in LAUNCHERS} | task,
        capture_output=True,
        text=True,
        timeout=100,
    )
    line = r"error: not all processes of SLURM_NTASKS=4 came within 0.5 s: .*--start_w"
    assert done.returncode == exits.LOST and re.match(line, done.stderr), done
    assert done.stderr.count("\n") == 1


def test_peers_that_jax_does_not_find_end_it_with_5(launched, monkeypatch, capsys):
    """As where the first pod has no address yet: a scheduler starts them again."""

    def initialize(*args, **kwargs):
        raise RuntimeError("Retry failed with all attempts exhausted")

    launched({"SLURM_NTASKS": "4", **SLURM})
    monkeypatch.setattr(devices.jax.distributed, "initialize", initialize)
    with pytest.raises(SystemExit, match=str(exits.LOST)):
        devices.connect(None, None, None)
    assert (
        "error: the processes did not find each other: Retry" in capsys.readouterr().err
    )
    # a command may begin another attempt: what users give was accepted before it
    with pytest.raises(exits.Failed, match="did not find each other"):
        devices.connect(None, None, None, supervised=True)


@pytest.fixture
def metadata(monkeypatch):
    """metadata(endpoints): a Cloud TPU VM whose metadata say so; None: they are not."""
    servers = []

    def answer(endpoints):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.path.endswith("/attributes/worker-network-endpoints")
                told = self.headers["Metadata-Flavor"] == "Google"
                self.send_response(200 if asked and told and endpoints else 404)
                self.end_headers()
                self.wfile.write((endpoints or "").encode())

            def log_message(self, *args):
                pass

        server = http.server.HTTPServer(("localhost", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        monkeypatch.setenv("GCE_METADATA_IP", f"localhost:{server.server_port}")

    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "has_tpu", lambda: True)
    devices._tpu_hosts.cache_clear()
    yield answer
    devices._tpu_hosts.cache_clear()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("endpoints", "several"),
    [("t0:1:10.0.0.2,t1:2:10.0.0.3", True), ("10.0.0.2", False), (None, False)],
)
def test_a_slice_of_cloud_tpu_vms_is_known_by_its_metadata(
    metadata, endpoints, several
):
    metadata(endpoints)
    assert devices.launched_by_a_cluster() == several


def test_no_metadata_are_asked_for_without_a_tpu(metadata, monkeypatch):
    metadata("t0,t1")
    monkeypatch.setattr(devices, "has_tpu", lambda: False)
    assert not devices.launched_by_a_cluster()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", None, None), "go together"),
        ((None, 2, 0), "go together"),
        ((None, None, 0), "go together"),
        (("localhost:1", 2, 2), "--process is 2: with --processes=2 it is 0 to 1"),
        (("localhost", 2, 0), "--coordinator is 'localhost': give host:port"),
        (("::1:8000", 2, 0), r"--coordinator is '::1:8000': .*\[::1\]:12355"),
        (("[]:8000", 2, 0), r"--coordinator is '\[\]:8000': give host:port"),
    ],
)
def test_refuses_flags_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        devices.check_together(*given)


@pytest.mark.parametrize("address", ["[::1]:12355", "host.a.b:1", "10.0.0.1:65535"])
def test_addresses_that_are(address):
    devices.check_together(address, 2, 1)


def test_alone_without_flags_or_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    devices.connect(None, None, None)  # nothing to wait for
