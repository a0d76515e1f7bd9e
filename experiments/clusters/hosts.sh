#!/bin/bash
# Trains on hosts that ssh reaches, a process on each; the first one's address must be
# reachable from the others:
#
#   experiments/clusters/hosts.sh "host0 host1" --config=experiments/openwebtext_125m.py \
#       --config.data.path=DATA --config.data.tokenizer=TOKENIZER --workdir=RUN --restarts=3
#
# Each host has the checkout in FOLDER (acco-jax). The commands prove to each other that
# they have the same ACCO_TOKEN. This script makes a fresh one; ssh hands it over on
# standard input, so that no list of processes shows it.
set -u

hosts=${1:?'usage: hosts.sh "HOST0 HOST1 ..." FLAGS OF acco_jax.train'}
shift
read -ra all <<<"$hosts"
token=${ACCO_TOKEN:-$(openssl rand -hex 16)}
flags=$(printf ' %q' "$@" "--coordinator=${all[0]}:${PORT:-12355}" "--processes=${#all[@]}")

pids=()
for i in "${!all[@]}"; do
    ssh "${all[i]}" "read -r ACCO_TOKEN && export ACCO_TOKEN && cd ${FOLDER:-acco-jax} &&
        exec .venv/bin/python -m acco_jax.train$flags --process=$i" <<<"$token" &
    pids+=($!)
done
highest=0
for pid in "${pids[@]}"; do
    wait "$pid"
    code=$?
    [ "$code" -gt "$highest" ] && highest=$code
done
exit "$highest"
