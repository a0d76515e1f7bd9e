"""Other people's trainers, as they were and with acco_jax: losses side by side.

    JAX_NUM_CPU_DEVICES=4 python -m experiments.trainers train_state
    python -m experiments.trainers train_state --audit=gpu:h100:4x8

The first command prints the losses; with zero1 they are those of before. The second
reads the schedule of acco's step, compiled for described hardware.

The trainers are the files of this folder. Each has `before(width)`, which returns a
state and a train step; `after(width, method, mesh, microbatches)`, which returns the
step of acco_jax, too; and `arguments(state)`, the parameters and the optimizer state of
that step.
"""

import argparse
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.audit import Audit, audit, devices

STEPS, WIDTH, ROWS = 20, 16, 8  # rows of a microbatch
METHODS = {"before": None, "zero1": acco_jax.zero1, "acco": acco_jax.acco}


def batch_of(key, rows, width):
    x = jax.random.normal(key, (rows, width))
    return x, jnp.sin(jnp.sum(x, 1, keepdims=True))


def losses_of(state, train_step, batches):
    found = []
    for batch in batches:
        state, loss = train_step(state, batch)
        found.append(float(loss))
    return found


# what a recipe may have of its own; the width and rows at which it is audited
DEFAULTS = {"batch_of": batch_of, "losses_of": losses_of, "AUDITED": (4096, 2**18)}


def load(name: str) -> types.SimpleNamespace:
    module = importlib.import_module(f"experiments.trainers.{name}")
    return types.SimpleNamespace(**DEFAULTS | vars(module))


def losses(recipe, mesh, method=None) -> list[float]:
    """Returns the loss of each step; of the trainer as it was without a method."""
    if method is None:
        state, train_step = recipe.before(WIDTH)
    else:
        state, train_step, _ = recipe.after(WIDTH, method, mesh, microbatches=1)
    keys, rows = jax.random.split(jax.random.key(0), STEPS), ROWS * mesh.size
    batches = [recipe.batch_of(key, rows, WIDTH) for key in keys]
    batches = jax.device_put(batches, NamedSharding(mesh, P("data")))
    return recipe.losses_of(state, train_step, batches)


def audited(recipe, topology: str, method=acco_jax.acco) -> Audit:
    """Returns the audit of a method's step, at a size that is worth a cluster."""
    mesh, steps = Mesh(np.array(devices(topology)), ("data",)), []
    width, rows = recipe.AUDITED

    def start():
        state, _, step = recipe.after(width, method, mesh, microbatches=2)
        steps.append(step)
        key, total = jax.random.key(0), 2 * rows * mesh.size
        return *recipe.arguments(state), recipe.batch_of(key, total, width)

    args = jax.eval_shape(start)
    return audit(steps[0].lower(*args).compile(), topology=topology)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", help="a file of experiments/trainers")
    parser.add_argument("--audit", metavar="TOPOLOGY", help="such as gpu:h100:4x8")
    args = parser.parse_args()
    recipe = load(args.trainer)
    if args.audit:
        found = audited(recipe, args.audit)
        share = found.verdict("data").share
        print(
            f"{found}\nverdict: {100 * share:.1f}% of the communication is overlapped"
        )
        return
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    columns = [losses(recipe, mesh, method) for method in METHODS.values()]
    print("step", *(f"{name:>10}" for name in METHODS))
    for step, row in enumerate(zip(*columns, strict=True)):
        print(f"{step:4}", *(f"{loss:10.6f}" for loss in row))


if __name__ == "__main__":
    main()
