"""Fused, split and plain are one half-round."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.compiling import optimized
from tests.reference import AUTO, EXPLICIT, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"b": (13,), "s": (), "v": (13, 3), "w": (5, 13)}
METHODS = {"acco": acco_jax.acco, "zero1": acco_jax.zero1}


def loss_fn(params, batch, rng):
    x, y = batch
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.8, x.shape)
    out = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] * params["s"]
    error = (out - y) ** 2
    return error.sum(), y.size, {"largest": jnp.max(error), "rows": len(x)}


class Setup:
    """One method, its step in every form, and the plain update; compiled once."""

    def __init__(self, name, n, types, N):
        self.mesh, self.N, self.n = make_mesh(n, types=types), N, n
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        self.tx = METHODS[name](inner, mesh=self.mesh)
        make = functools.partial(
            acco_jax.make_train_step, loss_fn, self.tx, microbatches=N
        )
        self.steps = {form: make(form=form) for form in ("fused", "split")}
        self.gradients = acco_jax.local_gradients(
            loss_fn, mesh=self.mesh, microbatches=N
        )
        self.update = jax.jit(self.tx.update)

    def start(self):
        params = jax.tree.map(jnp.array, parameters(SHAPES))
        return params, self.tx.init(params)

    def plain(self, params, state, batch, counts=None, rng=None):
        grads, weight, aux = self.gradients(params, batch, counts, rng)
        updates, state = self.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state, {"aux": aux}

    def half_round(self, form, *args):
        return (self.plain if form == "plain" else self.steps[form])(*args)

    def batch(self, seed):
        rng = np.random.default_rng(seed)
        rows = self.n * self.N * 2
        return rng.normal(size=(rows, 5)), rng.normal(size=(rows, 3))

    def run(self, forms):
        params, state = self.start()
        points = []
        rng = np.random.default_rng(0)
        for h, form in enumerate(forms):
            counts = rng.integers(0, self.N + 1, self.n)
            key = jax.random.key(h)
            params, state, metrics = self.half_round(
                form, params, state, self.batch(h), counts, key
            )
            held = acco_jax.committed_params(state, params)
            points.append(jax.tree.map(np.asarray, (params, held, metrics["aux"])))
        return points


setup = functools.cache(Setup)
CASES = [
    ("acco", 4, AUTO, 3),
    ("acco", 8, AUTO, 2),
    ("acco", 4, EXPLICIT, 3),
    ("acco", 4, EXPLICIT, 1),
    ("acco", 1, AUTO, 2),
    ("acco", 2, AUTO, 1),
    ("zero1", 4, AUTO, 3),
    ("zero1", 2, EXPLICIT, 1),
]


@pytest.mark.fast("acco-2-*", slow=("acco-8-*", "*-AxisType.Explicit-3", "zero1-4-*"))
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@optimized()  # the forms' float32 bits
def test_all_forms_agree(case):
    made = setup(*case)
    calls = 7
    plain = made.run(["plain"] * calls)
    assert np.any(plain[0][0]["w"] != plain[-1][0]["w"])
    fused = None
    for forms in (
        ["fused"] * calls,
        ["split"] * calls,
        ["plain", "fused", "split", "fused", "plain", "split", "plain"],
        ["split", "plain", "fused", "plain", "split", "plain", "fused"],
    ):
        # parameters, committed parameters and aux
        points = made.run(forms)
        if "plain" not in forms:
            fused = fused or points
            chex.assert_trees_all_equal(points, fused)
        # XLA:CPU may contract a product and a sum in one program and not in another
        chex.assert_trees_all_close(points, plain, rtol=1e-14, atol=1e-15)


@pytest.mark.fast("acco-*", "zero1-fused")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("name", METHODS)
def test_one_compilation_per_program(name, form, caplog):
    made = setup(name, 4, AUTO, 3)
    step = acco_jax.make_train_step(loss_fn, made.tx, microbatches=made.N, form=form)
    params, state = made.start()
    params, state, _ = step(params, state, made.batch(0))
    with jax.log_compiles():
        jax.jit(lambda: 0)()  # the log works
        assert "Compiling jit(" in caplog.text
        caplog.clear()
        for h in range(1, 4):
            params, state, _ = step(params, state, made.batch(h))
    text = caplog.text
    assert (text.count("Compiling jit("), len(step._programs)) == (0, 1)


@pytest.mark.fast("*-fused")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("name", METHODS)
def test_metrics(name, form):
    made = setup(name, 4, AUTO, 3)
    params, state = made.start()
    losses = jax.jit(loss_fn)
    counts = np.array([3, 1, 0, 2])
    for h in range(3):
        before, batch = jax.tree.map(np.asarray, params), made.batch(h)
        params, state, metrics = made.steps[form](params, state, batch, counts)
        total, weight, largest, rows = 0.0, 0.0, 0.0, 0
        for i, count in enumerate(counts):
            for k in range(3 * i, 3 * i + count):
                one = tuple(x[2 * k : 2 * k + 2] for x in batch)
                loss, w, aux = losses(before, one, None)
                total, weight = total + loss, weight + w
                largest, rows = largest + aux["largest"], rows + aux["rows"]
        np.testing.assert_allclose(metrics["loss"], total / weight, rtol=1e-12)
        np.testing.assert_allclose(metrics["aux"]["largest"], largest, rtol=1e-12)
        assert float(metrics["weight"]) == float(weight)
        assert int(metrics["aux"]["rows"]) == rows
        np.testing.assert_array_equal(metrics["counts"], counts)
        assert int(metrics["step"]) == (h // 2 if name == "acco" else h + 1)
        assert (float(metrics["grad_norm"]) > 0) == (name == "zero1" or h > 0)


def test_gradient_norm_is_that_of_the_mean_gradient():
    made = setup("zero1", 4, AUTO, 3)
    params, state = made.start()
    grads, weight, _ = made.gradients(params, made.batch(0))
    mean = jax.tree.map(lambda g: g.sum(0) / weight.sum(), grads)
    _, _, metrics = made.steps["fused"](params, state, made.batch(0))
    expected = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(mean)))
    np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-12)


def test_the_key_matters_and_only_it():
    made = setup("acco", 4, AUTO, 3)
    outs = []
    for seed in (0, 0, 1):
        params, state = made.start()
        for h in range(2):
            key = jax.random.key(seed)
            params, state, m = made.steps["fused"](
                params, state, made.batch(h), None, key
            )
        outs.append(float(m["loss"]))
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize("form", ["fused", "split"])
def test_state_is_donated_and_nothing_else(form):
    made = setup("acco", 4, AUTO, 3)
    params, state = made.start()
    params, state, _ = made.steps[form](params, state, made.batch(0))
    batch = jax.device_put(made.batch(1)[0]), jax.device_put(made.batch(1)[1])
    counts, held = jnp.full(4, 2), state
    old = params
    params, state, metrics = made.steps[form](params, state, batch, counts)
    for x in jax.tree.leaves((held.master, held.inner, held.carry)):
        assert x.is_deleted()
    if form == "fused":
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
    for x in jax.tree.leaves((batch, counts, params, state, metrics)):
        assert not x.is_deleted()


def test_all_counts_zero_is_an_idle_half_round():
    made = setup("acco", 4, AUTO, 3)
    params, state = made.start()
    first = jax.tree.map(np.asarray, params)
    for h in range(3):
        params, state, m = made.steps["fused"](
            params, state, made.batch(h), np.zeros(4, int)
        )
        assert np.isnan(m["loss"]) and float(m["weight"]) == 0
        chex.assert_trees_all_equal(params, first)
    assert int(state.steps) == 0


def test_what_does_not_fit_is_refused_in_one_line():
    made = setup("acco", 4, AUTO, 3)
    params, state = made.start()
    step, make = made.steps["fused"], acco_jax.make_train_step
    cases = [
        ("multiple of 12", lambda: step(params, state, (np.ones((3, 5)),) * 2)),
        ("another tree", lambda: step({"w": params["w"]}, state, made.batch(0))),
        ("init saw", lambda: step(
            params | {"b": jnp.ones(3)}, state, made.batch(0))),
        ("between 0", lambda: step(params, state, made.batch(0), [9, 1, 1, 1])),
        ("choose one of", lambda: make(
            loss_fn, made.tx, microbatches=1, form="both")),
        ("at least 1", lambda: make(loss_fn, made.tx, microbatches=0)),
        ("at least 1", lambda: make(loss_fn, made.tx, microbatches=True)),
        ("not an axis", lambda: acco_jax.acco(
            optax.sgd(0.1), mesh=made.mesh, axis_name="x")),
    ]  # fmt: skip
    for words, call in cases:
        with pytest.raises(ValueError, match=words) as error:
            call()
        assert "\n" not in str(error.value)
    # nothing was donated by a call that was refused
    step(params, state, made.batch(0))


@pytest.mark.fast("acco-*", "zero1-fused")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("method", [acco_jax.acco, acco_jax.zero1])
def test_compiled_ahead_is_not_compiled_again(method, form, caplog):
    mesh = make_mesh(2)
    tx = method(optax.adam(1e-2), mesh=mesh)

    def loss_fn(params, microbatch, rng):
        return jnp.mean((microbatch @ params) ** 2)

    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form)
    params = jax.device_put(jnp.full((3, 2), 1.0), jax.NamedSharding(mesh, jax.P()))
    assert params.weak_type  # which no step returns
    state = tx.init(params)
    batch = np.ones((4, 3), np.float32)
    step.compile(params, state, batch)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        jax.jit(lambda x: x + 1)(batch)  # the log works
        for _ in range(3):
            params, state, _ = step(params, state, batch)
    ours = ("run_call", "computed", "exchanged")
    done = [m for m in caplog.messages if "Finished XLA compilation" in m]
    assert any("lambda" in m for m in done)
    assert not [m for m in done if any(name in m for name in ours)]
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params))


@pytest.mark.fast("acco", "zero1", "diloco")
@pytest.mark.parametrize("name", ["acco", "zero1", "dpu", "diloco"])
def test_a_scan_over_steps_is_the_loop(name):
    """Inside a caller's jit, where no compiler options may be given."""
    mesh = make_mesh(2, types=EXPLICIT if name == "zero1" else AUTO)
    options = {"local_steps": 2} if name == "diloco" else {}
    tx = getattr(acco_jax, name)(optax.adam(1e-2), mesh=mesh, **options)

    def loss_fn(params, microbatch, rng):
        return jnp.mean((microbatch @ params["w"]) ** 2)

    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    rows = 4 * tx.steps_per_call
    batches = np.random.default_rng(0).normal(size=(4, rows, 5))
    params, state = acco_jax.start(tx, {"w": jnp.ones((5, 3))})
    begin = jax.tree.map(jnp.copy, (params, state))
    losses = []
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        losses.append(metrics["loss"])

    @jax.jit
    def scanned(begin, batches):
        def body(carry, batch):
            params, state, metrics = step(*carry, batch)
            return (params, state), metrics["loss"]

        return jax.lax.scan(body, begin, batches)

    end, found = scanned(begin, batches)
    chex.assert_trees_all_close(end, (params, state), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    for a, b in zip(
        jax.tree.leaves(end), jax.tree.leaves((params, state)), strict=True
    ):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    # abstractly, and with arrays that the caller's function closes over
    shapes = jax.eval_shape(step, *end, batch)
    like = jax.eval_shape(lambda: step(params, state, batch))
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, like)
    step(params, state, batch)  # nothing traced was kept


def recording(keep=8):
    """Subtracts gradients; its state is the values that it was given."""

    def update(grads, state, params=None, *, value, scale=1.0, **extra):
        grads = jax.tree.map(lambda g: -0.1 * scale * g, grads)
        return grads, jnp.roll(state, 1).at[0].set(value)

    def init(params):
        return jnp.zeros(keep)

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.fast("acco-*", "fused_zero1-fused")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("name", ["acco", "zero1", "dpu", "fused_zero1"])
def test_value_is_the_loss_of_the_gradients_applied(name, form):
    """Not of the half-round that computes meanwhile; unequal weights, one worker 0."""
    mesh, N = make_mesh(4), 2
    tx = getattr(acco_jax, name)(recording(), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=N, form=form)
    params = jax.tree.map(jnp.array, parameters(SHAPES))
    state = tx.init(params)
    rng, sums = np.random.default_rng(0), []
    for h in range(7):
        batch = rng.normal(size=(16, 5)), rng.normal(size=(16, 3))
        counts = np.array([[1, 2, 0, 2], [2, 2, 2, 1]][h % 2])
        at = jax.tree.map(jnp.copy, params)
        loss = weight = 0.0
        for i, count in enumerate(counts):
            for k in range(count):
                rows = slice(2 * (N * i + k), 2 * (N * i + k) + 2)
                one, w, _ = loss_fn(at, (batch[0][rows], batch[1][rows]), None)
                loss, weight = loss + float(one), weight + w
        sums.append((loss, weight))
        params, state, _ = step(params, state, batch, counts)
    if name == "acco":  # commits of the half-rounds (0, 1), (2, 3), (4, 5)
        sums = [tuple(map(sum, zip(*sums[h : h + 2], strict=True))) for h in (0, 2, 4)]
    elif name == "dpu":
        sums = sums[:-1]
    expected = [loss / weight for loss, weight in reversed(sums)]
    np.testing.assert_allclose(state.inner[: len(sums)], expected, rtol=1e-12)


@pytest.mark.fast("fused")
@pytest.mark.parametrize("form", ["fused", "split"])
def test_extra_arguments_of_a_step(form):
    mesh = make_mesh(2)
    tx = acco_jax.zero1(recording(), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form)
    params = parameters(SHAPES)
    batch = np.ones((4, 5)), np.ones((4, 3))
    moved = []
    for extra in (None, {"scale": jnp.float64(2)}, {"scale": 2.0, "value": 7.0}):
        start = jax.tree.map(jnp.array, params)
        after, state, _ = step(start, tx.init(start), batch, extra=extra)
        moved.append(jax.tree.map(lambda a, b: np.asarray(a) - b, after, params))
    chex.assert_trees_all_close(moved[1], jax.tree.map(lambda x: 2 * x, moved[0]))
    chex.assert_trees_all_close(moved[2], moved[1])
    assert float(state.inner[0]) == 7
    start = jax.tree.map(jnp.array, params)
    with pytest.raises(ValueError, match="update got value_fn, a function"):
        step(start, tx.init(start), batch, extra={"value_fn": sum})
    plain = acco_jax.zero1(optax.GradientTransformation(*optax.sgd(0.1)), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, plain, microbatches=1)
    with pytest.raises(ValueError, match="inner takes no extra arguments"):
        step(start, plain.init(start), batch, extra={"scale": 2.0})
    local = acco_jax.diloco(optax.sgd(0.1), mesh=mesh, local_steps=2)
    step = acco_jax.make_train_step(loss_fn, local, microbatches=1)
    with pytest.raises(ValueError, match="given only gradients"):
        step(*acco_jax.start(local, start), batch, extra={"scale": 2.0})


@pytest.mark.parametrize("form", ["fused", "split"])
def test_the_optimizer_is_traced_with_the_callers_settings(form):
    """They are of one thread, and the exchange may run in another."""
    names = "enable_x64", "default_matmul_precision", "numpy_dtype_promotion"
    values = False, "highest", "strict"
    seen = []

    def update(grads, state, params=None):
        seen.append(tuple(getattr(jax.config, f"jax_{name}") for name in names))
        return grads, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = acco_jax.acco(inner, mesh=make_mesh(2))
    step = acco_jax.make_train_step(
        lambda p, x, rng: jnp.mean(x @ p), tx, microbatches=1, form=form
    )
    with contextlib.ExitStack() as stack:
        for name, value in zip(names, values, strict=True):
            stack.enter_context(getattr(jax, name)(value))
        params, state = acco_jax.start(tx, jnp.ones(3))
        seen.clear()
        step(params, state, np.ones((2, 3), np.float32))
    assert set(seen) == {values}


def test_reduce_on_plateau():
    """It needs `value`, which the step has."""
    inner = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    )
    mesh = make_mesh(2)
    tx = acco_jax.acco(inner, mesh=mesh)
    step = acco_jax.make_train_step(
        lambda p, x, rng: jnp.mean(x) + 0 * p["w"].sum(), tx, microbatches=1
    )
    params = {"w": jnp.ones((4, 2))}
    tx.check(params)
    state = tx.init(params)
    for _ in range(9):
        params, state, _ = step(params, state, np.ones((2, 1)))
    assert float(state.inner[-1].scale) < 1


@optimized()  # an approximate operation would differ here alone
def test_zero1_in_float32_is_ddp_as_users_compile_it():
    draw = np.random.default_rng(0).normal
    theta = {"w": draw(size=(16, 32)), "v": draw(size=(32, 8))}
    theta = {k: x.astype(np.float32) for k, x in theta.items()}
    batches = draw(size=(4, 4 * 2 * 3, 16)).astype(np.float32)

    def loss(p, x, rng):
        return jnp.mean(jnp.square(jnp.tanh(x @ p["w"]) @ p["v"]))

    found = []
    for method in (acco_jax.ddp, acco_jax.zero1):
        tx = method(optax.adamw(1e-2), mesh=make_mesh(4))
        step = acco_jax.make_train_step(loss, tx, microbatches=2)
        params, state = acco_jax.start(tx, theta)
        for x in batches:
            params, state, _ = step(params, state, x)
        found.append(jax.device_get(acco_jax.committed_params(state, params)))
    chex.assert_trees_all_close(*found, rtol=0, atol=3e-7)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_new_step_reads_what_the_loss_reads_by_then(microbatches):
    scale = [1.0]

    def loss_fn(params, batch, rng):
        return scale[0] * jnp.mean(batch @ params)

    def loss():
        tx = acco_jax.zero1(optax.sgd(0.1), mesh=make_mesh(2))
        step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches)
        params, state = acco_jax.start(tx, jnp.ones(3))
        return float(step(params, state, np.ones((4, 3), np.float32))[2]["loss"])

    def gradients():
        run = acco_jax.local_gradients(
            loss_fn, mesh=make_mesh(2), microbatches=microbatches
        )
        return float(run(jnp.ones(3), np.ones((4, 3), np.float32))[0].sum())

    found = [loss(), gradients()]
    scale[0] = 2.0
    assert [loss(), gradients()] == [2 * x for x in found]
    assert found[0] == 3.0
