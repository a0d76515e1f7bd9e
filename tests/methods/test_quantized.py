"""Methods whose communication is quantized, against a plain NumPy loop and the step."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.step import fused as fused_step
from tests.compiling import optimized
from tests.reference import (
    AUTO,
    EXPLICIT,
    make_mesh,
    parameters,
    quantization_step,
    quantized,
)
from tests.stablehlo import collectives

pytestmark = pytest.mark.usefixtures("x64")

# 16 rows of 128 for each of 4 workers: a packed buffer is the leaf itself
N, SHAPE, LR = 4, (64, 128), 2.0**-4
INNER = optax.sgd(LR)


class InNumpy:
    """The equations of `acco_jax.wire` around any recurrence, with so many senders."""

    def __init__(self, theta, reduce_bits, senders):
        self.replica, self.reduce_bits = theta, reduce_bits
        self.error = np.zeros((senders, *theta.shape))

    def arrive(self, gradients, weight):
        """G, W of what the workers sent; nothing if it weighs nothing."""
        if not weight.sum():
            return 0.0, 0.0
        if self.reduce_bits:
            of_each = gradients.reshape(len(self.error), -1, *gradients.shape[1:])
            own = of_each.sum(1) + self.error
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


def loop(method, theta, gradients, weights, wire, bits, resync=0):
    """[(parameters, theta)] after each half-round."""
    points = []
    in_flight, carry = (gradients[0], np.zeros(N)), (0.0, 0.0)
    for t, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        full = resync and t % resync == 0
        sent = (gradient, weight) if method == "zero1" else in_flight
        in_flight, arrived = (gradient, weight), wire.arrive(*sent)
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


FLAT, HOSTS = {"data": N}, {"host": 2, "gpu": 2}
CASES = [
    ("acco", 8, None, 0, FLAT),
    ("acco", 4, 8, 0, FLAT),
    ("acco", 4, 8, 0, HOSTS),
    ("acco", (4, 8), None, 3, FLAT),
    ("zero1", 8, 8, 0, FLAT),
    ("zero1", None, 8, 0, HOSTS),
    ("dpu", 4, None, 4, FLAT),
    ("wp", None, 8, 0, FLAT),
]


@pytest.mark.fast("acco-4-8-0-host-gpu", "dpu-*", "wp-*")
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "-".join(map(str, (*c[:-1], *c[-1])))
)
def test_equals_a_numpy_loop_to_the_bit(case):
    """Numbers short in base 2 make sums exact, and too long to lie at a tie.

    Of hosts of several GPUs, what crosses in few bits is a host's sum.
    """
    method, bits, reduce_bits, resync, axes = case
    theta = np.round(parameters(SHAPE) * 8) / 8
    calls, rng = 9, np.random.default_rng(0)
    gradients = rng.integers(-(2**20), 2**20, (calls, N, *SHAPE)) / 2.0**20
    weights = [np.array([1, 1, 2, 0]) * (h % 4 != 3) for h in range(calls)]
    sent = list(gradients)
    sent[3] = np.full_like(sent[3], np.nan)  # weighs nothing
    tx = getattr(acco_jax, method)(
        INNER,
        mesh=make_mesh(*axes.values(), names=tuple(axes)),
        axis_name=tuple(axes),
        gather_bits=bits,
        reduce_bits=reduce_bits,
        **({"resync_every": resync} if resync else {}),
    )
    points, state = plain_run(tx, theta, sent, weights)
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    wire = InNumpy(theta, reduce_bits, senders=next(iter(axes.values())))
    counted = [
        np.where(w[:, None, None] != 0, g, 0)
        for g, w in zip(gradients, weights, strict=True)
    ]
    expected = loop(method, theta, counted, weights, wire, pair, resync)
    assert np.any(expected[-1][1] != theta)
    if bits is not None:
        assert any(np.any(here != at) for here, at in expected)
    for h, (got, want) in enumerate(zip(points, expected, strict=True)):
        np.testing.assert_array_equal(got[1], want[1], err_msg=f"theta, {h}")
        np.testing.assert_array_equal(got[0], want[0], err_msg=f"parameters, {h}")
    if reduce_bits:  # and no more is remembered than is sent
        (error,) = state.residual.error.buffers
        assert error.size == wire.error.size
        np.testing.assert_array_equal(np.sort(error, None), np.sort(wire.error, None))


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


ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


class Setup:
    """One method, its step in both forms and the plain update."""

    def __init__(
        self, method, options, types=AUTO, dtype=np.float32, sizes=(N,), inner=ADAMW
    ):
        self.mesh = make_mesh(*sizes, types=types)
        self.tx = getattr(acco_jax, method)(inner, mesh=self.mesh, **options)
        self.dtype, self.specs = dtype, options.get("param_specs")
        make = functools.partial(
            acco_jax.make_train_step, loss_fn, self.tx, microbatches=2
        )
        forms = ("fused",) if self.specs else ("fused", "split")  # split: no groups
        self.steps = {form: make(form=form) for form in forms}
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

    def run_call(self, form, params, state, h):
        counts = np.random.default_rng(h).integers(0, 3, N)
        if form != "plain":
            return self.steps[form](params, state, batch(h, 4 * N), counts)[:2]
        grads, weight, _ = self.gradients(params, batch(h, 4 * N), counts)
        updates, state = self.update(grads, state, params, weight=weight)
        return self.apply(params, updates), state

    def run(self, forms, at=None, first=0):
        params, state = at or self.start()
        for h, form in enumerate(forms, first):
            params, state = self.run_call(form, params, state, h)
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


@pytest.mark.fast(slow=("pair",))
@pytest.mark.parametrize("name", SETUPS)
@optimized()  # the forms' float32 bits
def test_all_forms_are_one_half_round(name):
    made, calls = setup(name), 6
    fused = made.run(["fused"] * calls)
    start = made.start()[0]
    assert np.any(np.asarray(start["w"]) != np.asarray(fused[0]["w"]))
    chex.assert_trees_all_equal(made.run(["split"] * calls), fused)
    one_by_one(fused[0])
    # another program may contract products and sums in the model otherwise, and a
    # number rounded the other way then differs by a step
    plain = made.run(["plain", "fused", "split", "plain", "fused", "plain"])
    one_by_one(plain[0])
    near = lambda x: jax.tree.map(lambda y: np.asarray(y, np.float32), x)  # noqa: E731
    atol = 3e-2 if name == "bf16" else 2e-3
    chex.assert_trees_all_close(near(plain[0]), near(fused[0]), rtol=0, atol=atol)


@pytest.mark.fast("acco")
@pytest.mark.parametrize("name", ["acco", "zero1"])
def test_the_next_update_undoes_an_edit(name):
    """As without quantization: the owner encodes what the replicas lack."""
    made = setup(name)
    theta, state = made.run(["plain"] * 3)
    edited = jax.tree.map(lambda x: x + 5, theta)
    for h in 3, 4, 5:
        edited, state = made.run_call("plain", edited, state, h)
    far = lambda x, y: float(jnp.abs(x - y).max())  # noqa: E731
    chex.assert_trees_all_equal(edited, jax.jit(owned)(state))
    plain, _ = made.run(["plain"] * 3, at=made.run(["plain"] * 3), first=3)
    assert max(jax.tree.leaves(jax.tree.map(far, edited, plain))) < 0.5


def test_a_parameter_recovers_from_an_overflow_where_values_are_gathered():
    """No difference leads away from infinity."""

    def loss_fn(params, batch, rng):
        return (params["w"].astype(jnp.float32) * batch.mean()).sum()

    def run(**options):
        tx = acco_jax.zero1(optax.sgd(1.0), mesh=make_mesh(2), **options)
        call = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
        theta = {"w": jnp.full((4, 256), 60000, jnp.float16)}
        params, state = acco_jax.start(tx, theta)
        found = []
        for g in (-5000.0, -5000.0, 20000.0, 100.0):
            params, state, _ = call(params, state, np.full((2, 1), g, np.float32))
            found.append(float(params["w"][0, 0]))
        return found

    plain, few = run(), run(gather_bits=8, resync_every=2)
    assert np.isinf(plain[1]) and np.isinf(few[1])
    assert plain[2:] == [49984.0, 49888.0] and few[2] == plain[2]
    assert np.isfinite(few[3])


def test_a_period_has_one_kind_of_half_round_several_times():
    def turns(**options):
        tx = acco_jax.acco(INNER, mesh=make_mesh(2), **options)
        return acco_jax.make_train_step(
            lambda params, batch, rng: jnp.sum(params), tx, microbatches=1, form="fused"
        ).turns()

    assert turns(gather_bits=8) == {0: 1}
    assert turns(gather_bits=8, resync_every=4) == {0: 1, 1: 3}
    assert turns(gather_bits=(8, 4), resync_every=4) == {0: 1, 1: 2, 2: 1}


def one_by_one(tree):
    """Devices that hold the same part of an array hold the same, to the bit."""
    for x in jax.tree.leaves(tree):
        parts = {}
        for shard in x.addressable_shards:
            data = np.asarray(shard.data)
            first = parts.setdefault(str(shard.index), data)
            np.testing.assert_array_equal(first, data)
        assert len(parts) < len(x.addressable_shards)


def owned(state):
    """What the owners of the shards think that the parameters are."""
    held = state._replace(master=state.residual.replica)
    return held.layout.gather_exact(held.master)


@pytest.mark.fast("pair", slow=("bf16", "zero1"))
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


@pytest.mark.fast("pair")
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


@pytest.mark.parametrize("form", ["fused", "split"])
def test_other_parameters_than_the_states_are_undone(form):
    """In differences, too: of few bits to what the owners take for the parameters."""
    mesh = make_mesh(N)
    theta = parameters(SHAPE, dtypes=np.float32)
    batch = np.ones((2 * N, 3), np.float32)
    for bits in (None, 8):
        tx = acco_jax.dpu(optax.sgd(0.0), mesh=mesh, gather_bits=bits)
        step = acco_jax.make_train_step(
            lambda w, x, rng: jnp.sum(w) * jnp.mean(x), tx, microbatches=2, form=form
        )
        for run in (step, jax.jit(step)) if form == "fused" else (step,):
            params, state = acco_jax.start(tx, jnp.copy(theta))
            params, state, _ = run(params, state, batch)
            params, state = jax.tree.map(jnp.copy, (params, state))  # as restored
            params, state, _ = run(params + 1, state, batch)
            here, committed = params, acco_jax.committed_params(state, params)
            np.testing.assert_allclose(committed, theta)
            # of one difference of at most 1, in steps of 1/127
            np.testing.assert_allclose(here, theta, atol=0.02 if bits else 1e-6)


@pytest.mark.slow
def test_replicas_stay_equal_and_near_for_a_thousand_half_rounds():
    """Less than a step of the last difference away, and the rounding of one sum."""
    mesh, rate = make_mesh(N), 0.5
    tx = acco_jax.acco(optax.sgd(rate), mesh=mesh, gather_bits=8)
    step = acco_jax.make_train_step(
        lambda w, x, rng: jnp.mean((jnp.tanh(x @ w) - x[:, :1]) ** 2),
        tx,
        microbatches=2,
    )
    theta = parameters(SHAPE, dtypes=np.float32) / 16
    params, state = jnp.array(theta), tx.init(theta)
    split = jax.jit(state.layout.split)
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(4 * N, 64)).astype(np.float32) for _ in range(16)]
    before, rounded = theta, 0
    for h in range(1000):
        params, state, _ = step(params, state, batches[h % 16])
        here, point = np.asarray(params), np.asarray(state.master)
        if h % 2:  # an estimate: its point is a step from theta
            carried = np.asarray(split(*state.carry))
            mean = carried / np.float32(state.carried.weight)
            point = point - np.float32(rate) * mean
        away = np.abs(here - point)
        ulps = 2 * np.spacing(np.maximum(abs(here), abs(point)))  # theta~'s too
        assert np.all(away <= quantization_step(point - before, 8) + ulps), h
        rounded += np.count_nonzero(away > ulps)
        before = here
        if h % 100 == 99:
            one_by_one(params)
    assert rounded > 1000 * theta.size / 4  # it was no exact copy
    assert int(state.steps) == 499
    assert np.abs(np.asarray(state.master) - theta).max() > 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here")
def test_a_model_axis_shares_scales():
    """A leaf that it does not split stays the same along it."""
    specs = {"b": P("model"), "s": P(), "v": P("model"), "w": P(None, "model")}
    inner = optax.sgd(1e-3, momentum=0.9)
    made = Setup("acco", BOTH | {"param_specs": specs}, sizes=(N, 2), inner=inner)
    fused = made.run(["fused"] * 5)
    one_by_one(fused[0])
    chex.assert_trees_all_equal(jax.jit(owned)(fused[1]), fused[0])
    one_by_one(fused[1].master["s"])  # split over data alone
    # the rows are others than without it: near, not the same
    flat = lambda t: np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)])  # noqa: E731
    start, here = flat(made.start()[0]), flat(fused[0])
    there = flat(Setup("acco", BOTH, inner=inner).run(["fused"] * 5)[0])
    norm = np.linalg.norm
    assert 0 < norm(here - there) < 0.05 * norm(there - start)


@pytest.mark.slow
def test_few_bits_cross_the_slow_one_of_two_data_axes():
    mesh = make_mesh(2, 2, names=("host", "gpu"))
    axes = {"mesh": mesh, "axis_name": ("host", "gpu")}
    tx = acco_jax.acco(INNER, **axes, **BOTH)
    steps = {
        form: acco_jax.make_train_step(loss_fn, tx, microbatches=2, form=form)
        for form in ("fused", "split")
    }
    start, _ = setup("acco").start()
    ends = {}
    for form, step in steps.items():
        params, state = jax.tree.map(jnp.copy, start), tx.init(start)
        for h in range(4):
            params, state, _ = step(params, state, batch(h, 4 * N))
        one_by_one(params)
        chex.assert_trees_all_equal(jax.jit(owned)(state), params)
        ends[form] = params, state
    chex.assert_trees_all_equal(*ends.values())
    found = sent(steps["fused"].lower(start, tx.init(start), batch(0, 4 * N)))
    (buffer,) = state.layout.zeros().buffers
    size = buffer.size // N  # of one worker's gradients
    assert sorted(found) == [
        ("all_gather", "ui32", size // 2 // 4),  # four values to a word
        ("all_gather", "ui32", size // 4),
        ("all_to_all", "ui32", size // 2 // 4),
        ("reduce_scatter", "f32", size // 2),
    ]


def test_a_nan_arrives_and_leaves_no_trace_in_the_error():
    """The optimizer may skip it and go on."""
    inner = optax.chain(optax.zero_nans(), INNER)
    tx = acco_jax.zero1(inner, mesh=make_mesh(N), **BOTH)
    params = np.zeros(SHAPE, np.float32)
    state, update = tx.init(params), jax.jit(tx.update)
    gradients = np.random.default_rng(0).normal(size=(3, N, *SHAPE)).astype(np.float32)
    gradients[1, 2, 5, 7] = np.nan
    masters = [np.asarray(state.master)]
    for g in gradients:
        _, state = update(g, state, params)
        masters.append(np.asarray(state.master))
        errors = np.asarray(state.residual.error.buffers[0])
        assert np.isfinite(errors).all()
    moved = [(a != b).any(1) for a, b in itertools.pairwise(masters)]
    assert moved[0].all() and moved[2].all()
    assert np.flatnonzero(~moved[1]).tolist() == [5]  # the row that shared its scale
    # and without such an optimizer it is there to be seen
    tx = acco_jax.zero1(INNER, mesh=make_mesh(N), **BOTH)
    _, state = jax.jit(tx.update)(gradients[1], tx.init(params), params)
    assert np.isnan(np.asarray(state.master)[5]).all()


def test_a_step_never_waits_to_know_its_codec(monkeypatch):
    """The count of half-rounds is read once, then kept on the host."""
    reads = []

    def read(x):
        reads.append(x)
        return int(x)

    made = setup("pair")
    monkeypatch.setattr(fused_step, "int", read, raising=False)
    half = made.run(["fused"] * 4)
    phases = {phase for _, phase, _ in made.steps["fused"]._programs}
    assert {phase.codec.gather_bits for phase in phases} == {4, 8, None}
    assert len(reads) == 1
    made.run(["fused"] * 3, half, 4)  # the state that it returned itself
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("acco", {"gather_bits": 5}, "gather_bits is 5: choose None, 8 or 4"),
        ("acco", {"gather_bits": 8.0}, "gather_bits is 8.0: choose None, 8 or 4"),
        ("acco", {"reduce_bits": 8.0}, "reduce_bits is 8.0: choose None or 8"),
        ("acco", {"gather_bits": (8,)}, r"gather_bits is \(8,\): a pair"),
        ("zero1", {"gather_bits": (4, 8)}, r"gather_bits is \(4, 8\): a pair"),
        ("dpu", {"reduce_bits": 4}, "reduce_bits is 4: choose None or 8"),
        ("wp", {"gather_bits": 8, "resync_every": -1}, "resync_every is -1"),
        ("acco", {"resync_every": 2}, "without gather_bits"),
    ],
)
def test_refusals(method, options, said):
    params = np.zeros(SHAPE, np.float32)
    with pytest.raises(ValueError, match=said) as error:
        getattr(acco_jax, method)(INNER, mesh=make_mesh(N), **options).init(params)
    assert "\n" not in str(error.value)


def test_another_methods_state_is_refused():
    made = setup("acco")
    params, _ = made.start()
    plain = acco_jax.acco(INNER, mesh=made.mesh).init(params)
    with pytest.raises(ValueError, match="without gather_bits and without reduce_bits"):
        made.run_call("fused", params, plain, 0)
    with pytest.raises(ValueError, match="without gather_bits and without reduce_bits"):
        made.run_call("plain", params, plain, 0)


def sent(lowered):
    """[(kind, dtype, elements of the result)]"""
    return [(c.kind, c.dtype, c.result) for c in collectives(lowered)]


def test_what_crosses_is_in_bytes():
    """Words of 32 bits: four values of 8 bits in each, or eight of 4."""
    params = np.zeros(SHAPE, np.float32)
    for bits, reduce_bits in ((8, None), (4, 8), ((4, 8), None)):
        mesh = make_mesh(N)
        tx = acco_jax.acco(INNER, mesh=mesh, gather_bits=bits, reduce_bits=reduce_bits)
        step = acco_jax.make_train_step(
            lambda w, x, rng: jnp.sum(x @ w), tx, microbatches=1
        )
        args = params, tx.init(params), np.ones((N, 64), np.float32)
        for half_round in (1, 2):
            estimate = half_round % 2
            now = bits if isinstance(bits, int) else bits[1 - estimate]
            gather = ("all_gather", "ui32", params.size * now // 32)
            reduce = ("reduce_scatter", "f32", params.size // N)
            if reduce_bits:
                reduce = ("all_to_all", "ui32", params.size // 4)
            found = sent(step.lower(*args, call=half_round))
            assert sorted(found) == sorted([gather, reduce])
