"""Methods whose communication is quantized, against a plain NumPy loop and the step."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.reference import (
    AUTO,
    EXPLICIT,
    make_mesh,
    parameters,
    quantized,
)

pytestmark = pytest.mark.usefixtures("x64")

# 16 rows of 128 for each of 4 workers: a packed buffer is the leaf itself
N, SHAPE, LR = 4, (64, 128), 2.0**-4
INNER = optax.sgd(LR)


class InNumpy:
    """The equations of `acco_jax.wire` around any recurrence."""

    def __init__(self, theta, reduce_bits):
        self.replica, self.reduce_bits = theta, reduce_bits
        self.error = np.zeros((N, *theta.shape))

    def arrive(self, gradients, weight):
        """G, W of what the workers sent; nothing if it weighs nothing."""
        if not weight.sum():
            return 0.0, 0.0
        if self.reduce_bits:
            own = gradients + self.error
            low = own.astype(np.float32)
            gradients = np.stack([quantized(x, self.reduce_bits) for x in low])
            self.error = own - gradients
        return gradients.sum(0), weight.sum()

    def move(self, point, bits):
        """The parameters when the workers have heard of a new point."""
        old = self.replica
        new = point
        if bits is not None:
            new = old + quantized((point - old).astype(np.float32), bits)
        self.replica = old + (new - old)
        return self.replica


def opt(theta, total, weight):
    return theta - LR * (total / weight) if weight else theta


def loop(method, theta, gradients, weights, bits, reduce_bits, resync=0):
    """[(parameters, theta)] after each half-round."""
    wire, points = InNumpy(theta, reduce_bits), []
    pending, carry = (gradients[0], np.zeros(N)), (0.0, 0.0)
    for t, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        full = resync and t % resync == 0
        sent = (gradient, weight) if method == "zero1" else pending
        pending, arrived = (gradient, weight), wire.arrive(*sent)
        if method == "acco" and t % 2:
            here, carry = opt(theta, *arrived), arrived
        elif method == "acco":
            theta = here = opt(theta, carry[0] + arrived[0], carry[1] + arrived[1])
        else:
            theta = here = opt(theta, *arrived)
            if method == "wp":
                here = opt(theta, *arrived)
        here = wire.move(here, None if full else bits[1 - t % 2])
        points.append((here, theta))
    return points


def plain_run(tx, theta, gradients, weights):
    """The same of the library's update."""
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, state, points = theta, tx.init(theta), []
    for gradient, weight in zip(gradients, weights, strict=True):
        updates, state = update(gradient, state, params, weight=weight)
        params = apply(params, updates)
        held = acco_jax.committed_params(state, params)
        points.append(jax.tree.map(np.asarray, (params, held)))
    return points, state


CASES = [
    ("acco", 8, None, 0),
    ("acco", 4, 8, 0),
    ("acco", (4, 8), None, 3),
    ("zero1", 8, 8, 0),
    ("dpu", 4, None, 4),
    ("wp", None, 8, 0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_equals_a_numpy_loop_to_the_bit(case):
    """Numbers short in base 2 make sums exact, and too long to lie at a tie."""
    method, bits, reduce_bits, resync = case
    theta = np.round(parameters(SHAPE) * 8) / 8
    half_rounds, rng = 9, np.random.default_rng(0)
    gradients = rng.integers(-(2**20), 2**20, (half_rounds, N, *SHAPE)) / 2.0**20
    weights = [np.array([1, 1, 2, 0]) * (h % 4 != 3) for h in range(half_rounds)]
    sent = list(gradients)
    sent[3] = np.full_like(sent[3], np.nan)  # weighs nothing
    tx = getattr(acco_jax, method)(
        INNER,
        mesh=make_mesh(N),
        gather_bits=bits,
        reduce_bits=reduce_bits,
        **({"resync_every": resync} if resync else {}),
    )
    points, _ = plain_run(tx, theta, sent, weights)
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    expected = loop(method, theta, gradients, weights, pair, reduce_bits, resync)
    assert np.any(expected[-1][1] != theta)
    if bits is not None:
        assert any(np.any(here != at) for here, at in expected)
    for h, (got, want) in enumerate(zip(points, expected, strict=True)):
        np.testing.assert_array_equal(got[1], want[1], err_msg=f"theta, {h}")
        np.testing.assert_array_equal(got[0], want[0], err_msg=f"parameters, {h}")


# ------------------------------------------------------------------ with the step

SHAPES = {"b": (40,), "s": (), "v": (40, 7), "w": (130, 40)}


def loss_fn(params, batch, rng):
    del rng
    x, y = batch
    out = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] * params["s"]
    return jnp.sum((out - y).astype(jnp.float32) ** 2), jnp.float32(y.size)


def batch(h, rows):
    rng = np.random.default_rng(h)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return draw(rows, 130), draw(rows, 7)


class Setup:
    """One method, its step in both forms and the plain update."""

    def __init__(self, method, options, types=AUTO, dtype=np.float32, sizes=(N,)):
        self.mesh = make_mesh(*sizes, types=types)
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        self.tx = getattr(acco_jax, method)(inner, mesh=self.mesh, **options)
        self.dtype, self.specs = dtype, options.get("param_specs")
        make = functools.partial(
            acco_jax.make_train_step, loss_fn, self.tx, mesh=self.mesh, microbatches=2
        )
        self.steps = {form: make(form=form) for form in ("fused", "split")}
        self.gradients = acco_jax.local_gradients(
            loss_fn, mesh=self.mesh, microbatches=2
        )
        self.update = jax.jit(self.tx.update)
        self.apply = jax.jit(optax.apply_updates)

    def start(self):
        dtypes = jax.tree.map(
            lambda _: self.dtype, SHAPES, is_leaf=lambda s: isinstance(s, tuple)
        )
        params = parameters(SHAPES, dtypes=dtypes)
        params = jax.tree.map(lambda x: jnp.array(x / 4), params)
        return params, self.tx.init(params)

    def half_round(self, form, params, state, h):
        counts = np.random.default_rng(h).integers(0, 3, N)
        if form != "plain":
            return self.steps[form](params, state, batch(h, 4 * N), counts)[:2]
        grads, weight, _ = self.gradients(params, batch(h, 4 * N), counts)
        updates, state = self.update(grads, state, params, weight=weight)
        return self.apply(params, updates), state

    def run(self, forms, at=None, first=0):
        params, state = at or self.start()
        for h, form in enumerate(forms, first):
            params, state = self.half_round(form, params, state, h)
        return params, state


setup = functools.cache(lambda name: Setup(*SETUPS[name]))
BOTH = {"gather_bits": 8, "reduce_bits": 8}
SETUPS = {
    "acco": ("acco", BOTH),
    "pair": ("acco", {"gather_bits": (4, 8), "resync_every": 5}, EXPLICIT),
    "rounded": ("acco", {"gather_bits": 4, "comm_dtype": jnp.bfloat16}),
    "bf16": ("acco", BOTH, AUTO, jnp.bfloat16),
    "dpu": ("dpu", BOTH | {"warmup_steps": 2}),
    "zero1": ("zero1", BOTH),
}


@pytest.mark.parametrize("name", SETUPS)
def test_all_forms_are_one_half_round(name):
    made, half_rounds = setup(name), 6
    fused = made.run(["fused"] * half_rounds)
    start = made.start()[0]
    assert np.any(np.asarray(start["w"]) != np.asarray(fused[0]["w"]))
    chex.assert_trees_all_equal(made.run(["split"] * half_rounds), fused)
    one_by_one(fused[0])
    # another program may contract products and sums in the model otherwise, and a
    # number rounded the other way then differs by a step
    plain = made.run(["plain", "fused", "split", "plain", "fused", "plain"])
    one_by_one(plain[0])
    near = lambda x: jax.tree.map(lambda y: np.asarray(y, np.float32), x)  # noqa: E731
    atol = 3e-2 if name == "bf16" else 2e-3
    chex.assert_trees_all_close(near(plain[0]), near(fused[0]), rtol=0, atol=atol)


def one_by_one(params):
    """Every worker holds the same parameters, to the bit."""
    for x in jax.tree.leaves(params):
        first, *others = (np.asarray(s.data) for s in x.addressable_shards)
        assert others
        for other in others:
            np.testing.assert_array_equal(first, other)


def owned(state):
    """What the owners of the shards think that the parameters are."""
    held = state._replace(master=state.wire.replica)
    return held.layout.gather_exact(held.master)


@pytest.mark.parametrize("name", SETUPS)
def test_owners_know_what_replicas_hold(name):
    made = setup(name)
    for form in ("fused", "plain"):
        params, state = made.run([form] * 5)
        held = jax.jit(owned)(state)
        if name == "rounded":  # both hold what the wire can
            cast = lambda t: jax.tree.map(lambda x: x.astype(jnp.bfloat16), t)  # noqa: E731
            chex.assert_trees_all_equal(cast(params), cast(held))
        chex.assert_trees_all_equal(params, held)


@pytest.mark.parametrize("name", ["acco", "pair", "dpu"])
def test_a_saved_run_continues_to_the_bit(name):
    """Params and state in NumPy and back, in the middle of a step too."""
    made = setup(name)
    through = made.run(["fused"] * 6)
    for stop in (3, 4):
        half = made.run(["fused"] * stop)
        homes = jax.tree.map(lambda x: x.sharding, half)
        saved = jax.tree.map(np.asarray, half)
        again = made.run(["fused"] * (6 - stop), jax.device_put(saved, homes), stop)
        chex.assert_trees_all_equal(again, through)
