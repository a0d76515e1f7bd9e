"""Train on the workers of a Ray cluster; Ray Train restarts them.

With acco-jax[train] and ray[train], on Linux:

    python experiments/clusters/ray_train.py --processes=4 --max_failures=3 \
        --config=experiments/quickstart.py --workdir=/shared/runs/ray

It joins the cluster of RAY_ADDRESS, or starts one on this machine. Each worker has one
CPU and --gpus=N GPUs. It runs `python -m acco_jax.train` with the other flags, in this
folder. All hosts share this folder, the workdir and the data.

If a process is lost, Ray ends the others and starts all of them again, at most
--max_failures times. They continue from the newest checkpoint, so the flags have no
--coordinator and no --restarts. A run that finished (0), stopped (75), diverged (4) or
was rejected (2) is not started again. This script returns its code.
"""

import argparse
import os
import pathlib
import socket
import subprocess
import sys

import ray
from ray import train
from ray.train import collective
from ray.train.v2.jax import JaxConfig, JaxTrainer

ENDS = (0, 2, 4, 75)  # python -m acco_jax.train --help


def work(job: dict) -> int:
    """Run this worker's process, and return its exit code.

    Raises:
      RuntimeError: if it was lost, so that Ray starts all of them again.
    """
    context = train.get_context()
    process, processes = context.get_world_rank(), context.get_world_size()
    with socket.socket() as free:
        free.bind(("", 0))
        mine = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    # JAX finds its place in Open MPI's variables, and the others at this address
    place = {
        "JAX_COORDINATOR_ADDRESS": collective.broadcast_from_rank_zero(mine),
        "OMPI_MCA_orte_hnp_uri": "unused",
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(job["gpus"]))),
    }
    # a process ends with its worker, also where Ray or the kernel has killed that
    kept = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "acco_jax.train"]
    command, environment = [*kept, *job["flags"]], {**os.environ, **place}
    code = subprocess.run(command, cwd=job["folder"], env=environment).returncode
    if code not in ENDS:
        raise RuntimeError(f"process {process} of {processes} ended with {code}")
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    parser.add_argument("--max_failures", type=int, default=3)
    parser.add_argument("--workdir", required=True)
    args, flags = parser.parse_known_args()
    workdir = str(pathlib.Path(args.workdir).expanduser().absolute())
    job = {"flags": [*flags, f"--workdir={workdir}"], "folder": os.getcwd()}
    result = JaxTrainer(
        work,
        train_loop_config=job | {"gpus": args.gpus},
        jax_config=JaxConfig(),  # Ray's workers do not start JAX
        scaling_config=train.ScalingConfig(
            num_workers=args.processes,
            use_gpu=args.gpus > 0,
            resources_per_worker={"CPU": 1, "GPU": args.gpus},
        ),
        run_config=train.RunConfig(
            storage_path=os.path.join(workdir, "ray"),
            failure_config=train.FailureConfig(max_failures=args.max_failures),
        ),
    ).fit()
    sys.exit(result.return_value)
