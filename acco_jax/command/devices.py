"""Choice of a program's devices, before JAX starts a backend."""

import ctypes
import functools
import glob
import importlib.util
import os
import socket
import sys
import threading
import time
import urllib.request

import jax
from absl import logging

from acco_jax.command import exits

PATIENCE = 60  # seconds that JAX waits longer for the others than this process does


def has_accelerator() -> bool:
    """Return whether this machine has a device file of a GPU or a TPU."""
    gpus = "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"  # NVIDIA's, WSL's, AMD's
    tpus = "/dev/accel*", "/dev/vfio/[0-9]*"
    return any(glob.glob(pattern) for pattern in gpus + tpus)


def usable_cores() -> int:
    """Return how many processor cores this process may use; it may keep to a few."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_platform(cpu_devices: int | None, *, several_processes: bool) -> None:
    """Choose the CPU if there is no accelerator, and its number of devices.

    With an accelerator's plugin installed and no accelerator, JAX would search for one
    and print a traceback. With `several_processes`, CPU processes can communicate.
    """
    platforms = jax.config.values["jax_platforms"] or os.environ.get("JAX_PLATFORMS")
    if not platforms and not has_accelerator():
        platforms = "cpu"
        jax.config.update("jax_platforms", "cpu")
    if cpu_devices:  # without effect on another backend
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if platforms == "cpu" and several_processes:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        keep_memory()


def keep_memory() -> None:
    """Keep freed memory in this process, where its C library is glibc.

    XLA:CPU frees its arrays in each call. glibc gives those of more than 32 MB back to
    the kernel, which fills new pages with zeros: a half-round of 24M parameters in two
    threads took 1.5 times as long. The process holds at its peak 8 % more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mmap_max, trim_threshold, arena_max = -4, -1, -8  # malloc.h
    for option, value in ((mmap_max, 0), (trim_threshold, -1), (arena_max, 1)):
        mallopt(option, value)


# A launcher's number of processes, the variables from which JAX finds them, and what
# to do where one is missing.
LAUNCHERS = {
    "SLURM_NTASKS": (
        ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"),
        "start the command with srun",
    ),
    "OMPI_COMM_WORLD_SIZE": (
        ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "give --coordinator, --processes and --process",
    ),
    "MEGASCALE_NUM_SLICES": ((), ""),
}
KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


def launched_by_a_cluster() -> bool:
    """Return whether a launcher that JAX detects started several of these processes.

    Raises:
      ValueError: with the launcher's variable, if JAX lacks what finds the others.
    """
    several = [name for name in LAUNCHERS if _number_of(name) > 1]
    lacking = {name: lacks for name in several if (lacks := _missing(name))}
    if several and len(lacking) == len(several):
        name, missing = next(iter(lacking.items()))
        raise ValueError(
            f"{name} is {os.environ[name]}, but {missing} is not set, from which the "
            f"processes find each other: {LAUNCHERS[name][1]}, or unset {name} to "
            "train in this process only."
        )
    if several or "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    if all(os.environ.get(name) for name in KUBERNETES):
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                f"JOB_COMPLETION_INDEX is {os.environ[KUBERNETES[1]]}, that of an "
                "Indexed Job, but the package kubernetes is not installed, with which "
                "the pods find each other: pip install 'jax[k8s]', or give "
                "--coordinator, --processes and --process, or unset "
                "JOB_COMPLETION_INDEX in a Job of one pod."
            )
        return True
    return _tpu_hosts() > 1


def launched() -> bool:
    """Return whether a launcher has started this process, which it may start again."""
    names = (*LAUNCHERS, "SLURM_JOB_ID", KUBERNETES[0])
    return any(os.environ.get(name) for name in names)


def are_several(coordinator: str | None, processes: int | None) -> bool:
    """Return whether flags, or without flags a launcher, name several processes.

    Raises:
      ValueError: as `launched_by_a_cluster`.
    """
    if coordinator is None and processes is None:
        return launched_by_a_cluster()
    return (processes or 1) > 1


def _number_of(name: str) -> int:
    """Return the number of processes in a launcher's variable; 1 if unset."""
    text = os.environ.get(name, "1")
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(
            f"{name} is {text!r}, which is not a number of processes: set it to one, "
            "or unset it to train in this process only."
        )
    return number


def _missing(name: str) -> str:
    """Return the first variable that JAX lacks to find the processes, or ""."""
    return next((x for x in LAUNCHERS[name][0] if not os.environ.get(x)), "")


def has_tpu() -> bool:
    """Return whether JAX can use this machine's TPU."""
    files = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
    installed = importlib.util.find_spec("libtpu") is not None
    return installed and any(glob.glob(pattern) for pattern in files)


@functools.cache
def _tpu_hosts() -> int:
    """Return the hosts of this Cloud TPU VM's slice; 1 if it is not one.

    Its environment does not tell; its metadata, at the address that JAX asks, does.
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
    bracketed = host.startswith("[") and host.endswith("]")  # as in [::1]:12355
    whole = len(host) > 2 if bracketed else bool(host) and ":" not in host
    return whole and port.isdecimal() and 1 <= int(port[:6]) <= 65535


def check_together(
    coordinator: str | None, processes: int | None, process: int | None
) -> None:
    """Raise a ValueError if flags about the processes do not fit together.

    Raises:
      ValueError: with the flags and the remedy.
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
            "port from 1 to 65535, e.g. localhost:12355 or [::1]:12355."
        )


def connect(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    start_within: float = 300.0,
    lost_after: float = 20.0,
    *,
    supervised: bool = False,
) -> None:
    """Join the other processes as flags or a launcher name them, if there are several.

    If they do not come in time, or JAX does not find them, the process ends with
    `exits.LOST`.

    Args:
      coordinator: address:port of process 0; None: the launcher's.
      processes: their number; None: the launcher's.
      process: this one's number; None: the launcher's.
      start_within: seconds until all must be there.
      lost_after: seconds without a sign of life until a process is lost.
      supervised: whether a command decides when the others are late.

    Raises:
      exits.Failed: if a supervised process did not find the others.
    """
    if coordinator is None and not are_several(None, processes):
        return
    late = threading.Timer(start_within, _end_alone, (start_within, processes))
    late.daemon = True
    # JAX itself would abort without a line: it waits longer than the timer
    patience = start_within if supervised else start_within + PATIENCE
    try:
        if not supervised:
            late.start()
        elif process and coordinator:
            patience -= _until_it_listens(coordinator, patience)
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=max(int(patience), 1),
            # on the named address only, not on every interface
            coordinator_bind_address=coordinator,
            # The command must report it first: JAX aborts without a line of its own.
            heartbeat_timeout_seconds=max(100, int(2 * lost_after)),
        )
    except RuntimeError as error:
        what = f"the processes did not find each other: {error}"
        if supervised:
            raise exits.Failed(what) from error
        # the first pod may have no address yet: a scheduler starts all of them again
        exits.end(exits.LOST, what)
    finally:
        late.cancel()
    if jax.process_index():
        logging.set_verbosity(logging.WARNING)  # only process 0 logs


def _until_it_listens(address: str, seconds: float) -> float:
    """Wait until a port is open, which JAX tries but once a second; return how long."""
    host, _, port = address.rpartition(":")
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
            break
        except OSError:
            time.sleep(0.02)
    return time.monotonic() - begin


def _end_alone(seconds: float, processes: int | None) -> None:
    """End this process, whose main thread waits in C++ for the other processes."""
    told = [f"{x}={os.environ[x]}" for x in LAUNCHERS if os.environ.get(x)]
    if processes is not None:
        told = [f"--processes={processes}"]
    sys.stderr.write(
        f"error: not all processes of {' and '.join(told) or 'this job'} came within "
        f"{seconds:g} s: start all of them, or raise --start_within.\n"
    )
    sys.stderr.flush()
    os._exit(exits.LOST)
