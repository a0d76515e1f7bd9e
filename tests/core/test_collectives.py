"""A loss function that communicates over the data axis, or places arrays over it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from tests.methods.test_contract import (
    batch_for,
    loss_fn,
    method,
    refused,
    step_of,
    theta,
)
from tests.reference import AUTO, EXPLICIT, make_mesh

PAIRS = [(0, 1), (1, 0)]


@jax.custom_vjp
def summed_backwards(x):
    return x


summed_backwards.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "data"),))


def nested(fn):
    """fn where a reader of the outermost equations does not see it."""

    def run(x):
        body = lambda x, _: (jax.checkpoint(jax.jit(fn))(x), None)  # noqa: E731
        return lax.cond(x > 0, lambda x: lax.scan(body, x, None, 2)[0], jnp.negative, x)

    return run


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "data"),
    "pmean": lambda x: lax.pmean(x, ("data",)),
    "pmax": lambda x: x + lax.stop_gradient(lax.pmax(lax.stop_gradient(x), "data")),
    "ppermute": lambda x: lax.ppermute(x, "data", PAIRS),
    "all_gather": lambda x: lax.all_gather(x, "data").mean(),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.stack([x, x]), "data"),
    "all_to_all": lambda x: lax.all_to_all(jnp.stack([x, x]), "data", 0, 0).mean(),
    "nested": nested(lambda x: lax.pmean(x, "data")),
    "backwards": summed_backwards,
}
SILENT = {
    "axis_index": lambda x: x * lax.axis_index("data"),
    "another axis of that name": lambda x: jax.vmap(
        lambda x: lax.psum(x, "data"), axis_name="data"
    )(jnp.stack([x, x])).mean(),
}


def through(fn):
    return lambda params, batch, rng: fn(loss_fn(params, batch, rng))


def arguments(tx, microbatches=2):
    params, state = jax.eval_shape(lambda x: acco_jax.start(tx, x), theta())
    return params, state, batch_for(tx, microbatches=microbatches)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_refused_where_counts_may_differ(name):
    tx, words = method("zero1"), r"communicates over data \(.*leave it out of loss_fn"
    step = step_of(tx, through(COLLECTIVES[name]), microbatches=2)
    args = arguments(tx)
    step.lower(*args)  # all compute as many
    step.lower(*args, np.array([2, 2]))
    for counts in (np.array([1, 2]), jnp.array([2, 2])):
        with refused(words):
            step.lower(*args, counts)
    gradients = acco_jax.local_gradients(
        through(COLLECTIVES[name]), mesh=tx.mesh, microbatches=2
    )
    with refused(words):
        gradients(theta(), args[2], [1, 2])


@pytest.mark.parametrize("name", SILENT)
def test_what_does_not_communicate_is_not_refused(name):
    tx = method("zero1")
    step = step_of(tx, through(SILENT[name]), microbatches=2)
    step.lower(*arguments(tx), np.array([1, 2]))


@pytest.mark.parametrize(
    "name", ["acco", "fused_zero1", "dpu", "diloco", "streaming_diloco", "gossip"]
)
def test_every_entry_refuses(name):
    tx, words = method(name), r"communicates over data \(psum.*leave it out"
    step = step_of(tx, through(COLLECTIVES["pmean"]), microbatches=2)
    params, state, batch = arguments(tx)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    for entry in (step, step.compile, step.lower):
        with refused(words):
            entry(params, state, batch, [1, 2])
    with refused(words):
        jax.eval_shape(step, params, state, batch, jnp.array([1, 2]))


def test_microbatches_that_differ_by_themselves(tmp_path):
    log = tmp_path / "counts"
    log.write_text("\n".join(map(json.dumps, ([2, 2], [1, 2]))))
    communicates = through(COLLECTIVES["pmean"])
    for found, form in (
        (acco_jax.Adaptive(1, 2), "split"),
        (acco_jax.Balanced(3, 2), "fused"),
        (acco_jax.Halves(1, (1, 2)), "fused"),
        (acco_jax.Halves((2, 1), 2), "split"),
        (acco_jax.step.Replay(log, 2), "fused"),
        (acco_jax.step.Replay(log, 2), "split"),
    ):
        tx = method("acco")
        step = step_of(tx, communicates, microbatches=found, form=form)
        with refused(r"communicates over data .* counts may differ"):
            step.compile(*arguments(tx))
    for found in (
        acco_jax.Halves(1, 2),
        acco_jax.Halves((2, 2), 1),
        acco_jax.step.Replay(log, 2, last=1),
    ):
        tx = method("acco")
        step = step_of(tx, communicates, microbatches=found, form="fused")
        step.lower(*arguments(tx))


def test_equal_counts_and_one_worker():
    """The mean over the workers of every microbatch, as many as each has."""
    for n in (1, 2):
        tx = method("zero1", optax.sgd(0.1), n=n)
        found = []
        for fn in (COLLECTIVES["pmean"], lambda x: x):
            step = step_of(tx, through(fn), microbatches=2)
            params, state = acco_jax.start(tx, theta())
            counts = [2] * n if n > 1 else jnp.array([2])
            found.append(step(params, state, batch_for(tx, 0, 2), counts)[2]["loss"])
        np.testing.assert_allclose(*found, rtol=1e-6)


def placements(mesh):
    split, at = P("data"), NamedSharding(mesh, P("data"))
    return {
        "a sharding": lambda x: lax.with_sharding_constraint(x, at),
        "a spec": lambda x: lax.with_sharding_constraint(x, split),
        "within": lambda x: lax.with_sharding_constraint(x, P(None, ("data",))),
        "nested": lambda x: jax.jit(lambda x: lax.with_sharding_constraint(x, at))(x),
        "reshard": lambda x: jax.sharding.reshard(x, split),
        "out_sharding": lambda x: jnp.einsum(
            "ij,jk->ik", x, jnp.eye(x.shape[1]), out_sharding=split
        ),
    }


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", list(placements(make_mesh(1))))
def test_placing_over_the_data_axis_is_refused(name, types):
    for tx, microbatches in (
        (method("acco", types=types), 1),
        (method("acco", types=types), 2),
        (method("fused_zero1", types=types), 1),
        (method("diloco", types=types), 1),
    ):
        place = placements(tx.mesh)[name]

        def loss(params, batch, rng, place=place):
            return jnp.mean((place(batch) @ params["w"]) ** 2)

        step = step_of(tx, loss, microbatches=microbatches)
        args = arguments(tx, microbatches)
        with refused(r"places an array over a data axis, P\(.*'data'.*name other axes"):
            step.lower(*args)


def test_other_axes_may_be_constrained():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AUTO, AUTO))
    tx = acco_jax.zero1(optax.sgd(0.1), mesh=mesh, param_specs={"w": P()})

    def loss(params, batch, rng):
        for spec in (P(), P(None, "tensor")):
            y = lax.with_sharding_constraint(batch @ params["w"], spec)
        return jnp.mean(y**2)

    step_of(tx, loss).lower(*arguments(tx, 1))
