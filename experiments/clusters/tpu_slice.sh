#!/bin/bash
# Trains on a Cloud TPU slice, with a checkout of this repository on each of its hosts:
#
#   gcloud compute tpus tpu-vm create NAME --zone=ZONE --accelerator-type=v5litepod-16 \
#       --version=v2-alpha-tpuv5-lite
#   ZONE=ZONE experiments/clusters/tpu_slice.sh setup NAME
#   ZONE=ZONE experiments/clusters/tpu_slice.sh train NAME \
#       --config=experiments/tinystories_36m.py --config.microbatch_size=40 \
#       --config.data.path=/mnt/data/tinystories --workdir=/mnt/runs/tinystories
#   ZONE=ZONE experiments/clusters/tpu_slice.sh stop NAME
#
# The same command runs on every host (--worker=all); JAX learns from the slice's
# metadata who they are. /mnt is a file system that the hosts share (Filestore, or a
# bucket through gcsfuse with --config.checkpoints=gs://bucket/run). `stop` has the run
# stop with a checkpoint; `train` again goes on, also on a new slice of that shape.
set -eu

usage="usage: ZONE=ZONE $0 setup|train|stop NAME [FLAGS OF acco_jax.train]"
what=${1:?$usage} name=${2:?$usage} zone=${ZONE:?$usage}
shift 2

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

case $what in
setup)
    repository=${REPOSITORY:-https://github.com/acco-jax/acco-jax}
    on_all_hosts "git clone -q $repository acco-jax && cd acco-jax &&
        python3 -m venv .venv &&
        .venv/bin/pip install -q -c requirements.txt -e '.[train]' 'jax[tpu]'"
    ;;
train)
    flags=$(printf ' %q' "$@")
    on_all_hosts "cd acco-jax && .venv/bin/python -m acco_jax.train$flags"
    ;;
stop)
    on_all_hosts "pkill -TERM -f '[m] acco_jax.train'"
    ;;
*)
    echo "error: $what is unknown: $usage" >&2
    exit 2
    ;;
esac
