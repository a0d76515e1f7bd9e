#!/bin/bash
# Trains on a SLURM cluster, a process per GPU, until the run is finished:
#
#   sbatch experiments/clusters/slurm.sh --config=experiments/openwebtext_125m.py \
#       --config.data.path=DATA --config.data.tokenizer=TOKENIZER --workdir=RUN
#
# JAX reads SLURM's variables, finds the other processes, and gives each task the GPU of
# its number on the node. A run that the time limit stops has saved what it had and goes
# on after its place in the queue comes again; so does one that lost a process, at most
# MOST_LOSSES times (sbatch --export=ALL,MOST_LOSSES=20). What is refused or has diverged
# ends the job.
#SBATCH --job-name=acco
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# SIGTERM to every task so many seconds before the limit: they stop with a checkpoint.
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

# The limit's SIGTERM is for the tasks alone. One to this shell is of scancel, or of a
# preemption, after which SLURM itself puts the job back.
told=
trap 'told=1' TERM

# All tasks are there when they save, and end within seconds of each other. --wait is
# for a task that alone did not start: the others would wait for it.
srun --kill-on-bad-exit=0 --wait=300 python -m acco_jax.train "$@"
code=$?
[ -n "$told" ] && exit "$code"

if [ "$code" -eq "$STOPPED" ]; then
    requeue
elif [ "$code" -eq "$LOST" ] || [ "$code" -gt "$SIGNALLED" ]; then
    # srun says the highest code: of a task that was killed, the signal plus 128.
    echo "$code" >>"$losses"
    if [ "$(wc -l <"$losses")" -le "${MOST_LOSSES:-5}" ]; then
        requeue
    fi
    echo "error: a process was lost more than ${MOST_LOSSES:-5} times: see above." >&2
fi
exit "$code"
