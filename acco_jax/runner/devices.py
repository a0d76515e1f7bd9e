"""Chooses a program's devices, before JAX starts a backend."""

import functools
import glob
import importlib.util
import os
import urllib.request

import jax
from absl import logging


def has_accelerator() -> bool:
    """Whether this machine has a device file of a GPU or a TPU."""
    gpus = "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"  # NVIDIA's, WSL's, AMD's
    tpus = "/dev/accel*", "/dev/vfio/[0-9]*"
    return any(glob.glob(pattern) for pattern in gpus + tpus)


def choose_platform(cpu_devices: int | None, *, several_processes: bool) -> None:
    """Chooses the CPU where there is nothing else, and how many devices it has.

    With an accelerator's plugin installed and no accelerator, JAX left to itself
    searches for one and prints a traceback.
    `several_processes` says that CPU processes must be able to communicate.
    """
    platforms = jax.config.values["jax_platforms"] or os.environ.get("JAX_PLATFORMS")
    if not platforms and not has_accelerator():
        platforms = "cpu"
        jax.config.update("jax_platforms", "cpu")
    if cpu_devices:  # without effect on another backend
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if platforms == "cpu" and several_processes:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def launched_by_a_cluster() -> bool:
    """Whether a launcher that JAX detects started several of these processes."""
    counts = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    kubernetes = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
    return (
        any(int(os.environ.get(name, "1")) > 1 for name in counts)
        or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
        or all(name in os.environ for name in kubernetes)
        or _tpu_hosts() > 1
    )


def has_tpu() -> bool:
    """Whether JAX can use this machine's TPU."""
    files = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
    installed = importlib.util.find_spec("libtpu") is not None
    return installed and any(glob.glob(pattern) for pattern in files)


@functools.cache
def _tpu_hosts() -> int:
    """Returns the hosts of the slice that this Cloud TPU VM is of; 1 if it is none.

    Its environment does not say; its metadata, at the address that JAX asks too, does.
    """
    if not has_tpu() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return 1
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    name = "instance/attributes/worker-network-endpoints"
    url = f"http://{server}/computeMetadata/v1/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return len(answer.read().decode().split(","))
    except OSError:  # no such server, or no TPU of its cloud
        return 1


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 1 <= int(port[:6]) <= 65535


def check_together(
    coordinator: str | None, processes: int | None, process: int | None
) -> None:
    """Refuses flags that say who else takes part and do not fit together.

    Raises:
      ValueError: in one line, which.
    """
    if coordinator is None and processes is None and process is None:
        return
    if coordinator is None or processes is None or process is None:
        raise ValueError(
            "--coordinator, --processes and --process go together: set all three or, "
            "under SLURM, Open MPI, Kubernetes or on Cloud TPU, none."
        )
    if process >= processes:
        raise ValueError(
            f"--process is {process}: with --processes={processes} it is 0 to "
            f"{processes - 1}."
        )
    if not _is_address(coordinator):
        raise ValueError(
            f"--coordinator is {coordinator!r}: give host:port of process 0, with a "
            "port from 1 to 65535, e.g. localhost:12355."
        )


def connect(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    start_within: float = 300.0,
    lost_after: float = 60.0,
) -> None:
    """Joins the other processes: as told, or as the launcher says, or not at all.

    The coordinator is address:port of process 0. `start_within` and `lost_after` are
    seconds.

    Raises:
      ValueError: the others were not found.
    """
    if coordinator is None and not launched_by_a_cluster():
        return
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=int(start_within),
            # on the address that was named alone, not on every interface
            coordinator_bind_address=coordinator,
            # The command is to say it first: this one aborts without a word of its own.
            heartbeat_timeout_seconds=max(100, int(2 * lost_after)),
        )
    except RuntimeError as error:
        raise ValueError(f"the processes did not find each other: {error}") from error
    if jax.process_index():
        logging.set_verbosity(logging.WARNING)  # process 0 speaks for all
