#!/bin/bash
# Trains on a SLURM cluster, a process per GPU, until the run is finished:
#
#   sbatch experiments/clusters/slurm.sh --config=experiments/openwebtext_125m.py \
#       --config.data.path=DATA --config.data.tokenizer=TOKENIZER --workdir=RUN
#
# JAX reads SLURM's variables, finds the other processes, and gives each task the GPU of
# its number on the node. Exit codes decide what follows, so the flags have no --restarts:
#
# - The time limit stops the run with a checkpoint (75): this script requeues the job.
# - A process is lost (5, or a signal): it requeues the job, at most MOST_LOSSES times
#   (sbatch --export=ALL,MOST_LOSSES=20).
# - A node fails, or the job is preempted: SLURM itself requeues it (--requeue).
# - The input is rejected (2), or the loss diverges (4): the job ends.
#
# Each start has the same workdir, and continues from its newest checkpoint.
#SBATCH --job-name=acco
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# SIGTERM to every task 300 seconds before the limit: they stop with a checkpoint.
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u

readonly STOPPED=75 LOST=5 SIGNALLED=128
losses=${SLURM_SUBMIT_DIR:-.}/slurm-$SLURM_JOB_ID.losses # a line each

requeue() {
    scontrol requeue "$SLURM_JOB_ID" && exit 0
}

# The limit's SIGTERM goes to the tasks only. This shell receives one from scancel, from a
# preemption or from a node failure. SLURM itself requeues the job after the last two.
told=
trap 'told=1' TERM

# All tasks save together and end within seconds of each other. --wait ends the tasks
# that wait for one that did not start.
srun --kill-on-bad-exit=0 --wait=300 python -m acco_jax.train "$@"
code=$?
[ -n "$told" ] && exit "$code"

if [ "$code" -eq "$STOPPED" ]; then
    requeue
elif [ "$code" -eq "$LOST" ] || [ "$code" -gt "$SIGNALLED" ]; then
    # srun returns the highest code: of a task that was killed, the signal plus 128.
    echo "$code" >>"$losses"
    if [ "$(wc -l <"$losses")" -gt "${MOST_LOSSES:-5}" ]; then
        echo "error: a process was lost more than ${MOST_LOSSES:-5} times: see above." >&2
        exit "$code"
    fi
    requeue
fi
exit "$code"
