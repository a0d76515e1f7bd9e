"""Who launched this process, and flags that do not go together."""

import http.server
import threading

import pytest

from acco_jax.runner import devices

LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES",
             "TPU_WORKER_HOSTNAMES", "KUBERNETES_SERVICE_HOST",
             "JOB_COMPLETION_INDEX", "TPU_SKIP_MDS_QUERY")  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "8"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
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
    ],
)
def test_refuses_flags_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        devices.check_together(*given)


def test_alone_without_flags_or_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    devices.connect(None, None, None)  # nothing to wait for
