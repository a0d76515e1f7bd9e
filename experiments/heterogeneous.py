"""Workers of unequal speed, the paper's heterogeneous run: 4 workers, one 4 x slower.

for i in 0 1 2 3; do
    slow=; [ $i = 3 ] && slow="systemd-run --user --scope -q -p CPUQuota=25%"
    $slow taskset -c $i python -m acco_jax.train --config=experiments/heterogeneous.py \
        --coordinator=localhost:9911 --processes=4 --process=$i --workdir=runs/acco &
done; wait

Without systemd: leave out $slow, and let three idle loops leave process 3 a quarter of
its core, until they are killed:

for i in 1 2 3; do taskset -c 3 bash -c 'while :; do :; done' & done

Compare with zero1, whose fast workers wait for the slow one in every step: the same
with --config.method=zero1 --config.microbatches=fixed and --workdir=runs/zero1; and
with counts that follow the workers' measured speed, --config.microbatches=balanced
--config.microbatches_per_step=16 --config.most_microbatches=12 and
--workdir=runs/balanced, whose log names the slow one. On two cores, with quotas:
`python benchmarks/heterogeneous.py`, whose figures are in
experiments/results/heterogeneous.md. The `tokens_per_second` of each metrics.jsonl and
the losses against `seconds` are what differs; counts.jsonl has how many microbatches
each worker computed in each half-round, and
--config.microbatches=replay:runs/acco/counts.jsonl repeats them to the bit.

Parameters: 1,122,992. Tokens per step of 4 workers: 8,192, and more of fast workers.

Hardware: 4 CPU cores of one host, or of several: then --coordinator names the first.

Time: some 20 minutes with acco, if a core makes 20 GFLOP/s; not measured here, where
there are two cores.

To expect: a half-round lasts as long as the slow worker's one microbatch and the
communication; the fast ones add up to most_microbatches meanwhile, about 4 each, so
that 13 microbatches take the time in which zero1 computes 4. The paper shows that the
fast workers accumulate while they wait, and gives no number that could be compared.

On CPUs in a minute: add --config.scale=smoke to all four.
"""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.devices = 1  # of each process
    c.steps = 500
    c.microbatch_size = 8
    c.microbatches_per_step = 2
    c.microbatches = "adaptive"
    c.most_microbatches = 8
    c.length = 128
    c.model.width = 208
    c.model.layers = 2
    c.model.heads = 4
    c.model.window = 64
    c.model.dtype = "float32"
    c.model.param_dtype = "float32"
    c.optimizer.learning_rate = 1e-3
    c.optimizer.warmup_steps = 100
    c.checkpoint_every = 250
    c.keep_checkpoints = 1
    c.scales.smoke = {
        "steps": 10,
        "microbatch_size": 2,
        "most_microbatches": 4,
        "length": 64,
        "model": {"width": 32, "heads": 2, "window": 32},
        "optimizer": {"warmup_steps": 2},
        "log_every": 2,
        "eval_every": 5,
        "eval_batches": 2,
    }
    return c
