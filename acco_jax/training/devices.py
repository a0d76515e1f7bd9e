"""Which devices a program runs on, decided before JAX starts a backend."""

from __future__ import annotations

import glob
import os

import jax
from absl import logging


def has_accelerator() -> bool:
    """Whether this machine has a device file of a GPU or a TPU."""
    files = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
    return any(glob.glob(pattern) for pattern in files)


def choose_platform(cpu_devices: int | None, *, several_processes: bool) -> None:
    """Settles on the CPU where there is nothing else, with as many devices as asked.

    With an accelerator's plugin installed and no accelerator, JAX left to itself
    searches for one and prints a traceback.

    Args:
      cpu_devices: how many devices a CPU process has; None means one.
      several_processes: whether CPU processes must be able to communicate.
    """
    platforms = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS")
    if not platforms and not has_accelerator():
        platforms = "cpu"
        jax.config.update("jax_platforms", "cpu")
    if platforms == "cpu":
        if cpu_devices:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        if several_processes:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")


def launched_by_a_cluster() -> bool:
    """Whether a launcher that JAX detects started several of these processes."""
    counts = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    if any(int(os.environ.get(name, "1")) > 1 for name in counts):
        return True
    if "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    return "KUBERNETES_SERVICE_HOST" in os.environ and (
        "JOB_COMPLETION_INDEX" in os.environ
    )


def connect(
    coordinator: str | None, processes: int | None, process: int | None
) -> None:
    """Joins the other processes: by flags, or as the launcher says, or not at all.

    Args:
      coordinator: address:port of process 0; None to ask the launcher.
      processes: how many there are.
      process: which one this is.

    Raises:
      ValueError: only some of the three are given.
    """
    given = [coordinator, processes, process]
    if any(x is not None for x in given):
        if any(x is None for x in given):
            raise ValueError(
                "--coordinator, --processes and --process go together: give all three "
                "or, under SLURM, Open MPI, Kubernetes or on Cloud TPU, none."
            )
        jax.distributed.initialize(coordinator, processes, process)
    elif launched_by_a_cluster():
        jax.distributed.initialize()
    else:
        return
    logging.info("process %d of %d", jax.process_index(), jax.process_count())
