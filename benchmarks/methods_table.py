"""What each method sends and holds, in bytes per parameter: read off its program.

    python benchmarks/methods_table.py [--workers=8]

Traces the train step of every method for 16.8M parameters with AdamW and runs nothing.
Prints a Markdown table, of one worker:

    sent       per optimizer step (an inner step of local methods), in what collectives
               of at least 1 kB carry, by a ring's costs
    at once    the most that one call of the train step sends
    held       between calls: parameters, state, in-flight gradients

Parameters, gradients and collectives are bfloat16, master weights and the optimizer's
moments float32.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.schedule.footprint import bytes_held, bytes_sent

LAYERS, WIDTH = 4, 2048
PARAMETERS = LAYERS * WIDTH**2
METHODS = (
    ("ddp", {}),
    ("zero1", {}),
    ("fused_zero1", {}),
    ("acco", {}),
    ("acco", {"gather_bits": 8}),
    ("acco", {"gather_bits": 8, "reduce_bits": 8}),
    ("dpu", {}),
    ("wp", {}),
    ("diloco", {"local_steps": 50}),
    ("slowmo", {"local_steps": 50}),
    ("co2", {"local_steps": 50}),
    ("streaming_diloco", {"local_steps": 100, "fragments": 4}),
    ("gossip", {}),
    ("cellm", {"local_steps": 50}),
    ("sparseloco", {"local_steps": 50}),
)
PARTS = {  # of what is held, and their fields of a method's state
    "master weights": "master",
    "optimizer state": "inner",
    "in-flight gradients": "in_flight",
}
HEAD = (
    "| method | calls per step | sent per step | at once | held |\n" + "|---" * 5 + "|"
)


def loss_fn(params, batch, rng):
    for w in params.values():
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch.astype(jnp.float32) ** 2)


def start(name, options, workers):
    """A method's transformation, its mesh, and its abstract parameters and state."""
    mesh = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
    tx = getattr(acco_jax, name)(optax.adamw(1e-3), mesh=mesh, **options)
    one = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    params = {f"layer_{i}": one for i in range(LAYERS)}
    return tx, mesh, acco_jax.abstract_start(tx, params)


def parts(name, options, workers):
    """What is held between calls, in bytes per parameter, by what it is."""
    _, _, (params, state) = start(name, options, workers)
    held = {"parameters": bytes_held(params) / PARAMETERS}
    for part, field in PARTS.items():
        held[part] = bytes_held(getattr(state, field, ())) / PARAMETERS
    held["other state"] = bytes_held((params, state)) / PARAMETERS - sum(held.values())
    return held


def label(name, options):
    given = ", ".join(f"{k}={v}" for k, v in options.items())
    return f"{name}({given})" if given else name


def row(name, options, workers):
    """One line of the table."""
    tx, mesh, state = start(name, options, workers)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=2)
    shape = (workers * 2 * tx.steps_per_call, WIDTH)
    rows = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows)
    turns = step.turns()
    sent = {
        k: bytes_sent(*step.lowered(*state, batch, call=k)) / PARAMETERS for k in turns
    }
    mean = sum(sent[k] * times for k, times in turns.items()) / sum(turns.values())
    calls = tx.calls_per_step / tx.steps_per_call
    many = f"{calls:.0f}" if calls >= 1 else f"1 in {1 / calls:.0f}"
    return (
        f"| `{label(name, options)}` | {many} | {mean * calls:.3g} "
        f"| {max(sent.values()):.3g} | {bytes_held(state) / PARAMETERS:.3g} |"
    )


def table(workers, methods=METHODS):
    return "\n".join([HEAD, *(row(*method, workers) for method in methods)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", arguments.workers)
    print(table(arguments.workers))
