"""The synchronous rival: zero1's numbers, reduced inside the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.models import transformer
from acco_jax.schedule import schedules
from tests.reference import AUTO, EXPLICIT, Unsharded, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64", "compiled_here")
LAYERS = 3
SHAPES = {
    "embed": (11, 6),
    "layers": {"b": (LAYERS, 6), "s": (LAYERS,), "w": (LAYERS, 6, 6)},
    "norm": (5,),
    "scale": (),
}


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"]) * p["s"]


def ends(params, batch, rng):
    """What comes before the layers, and what comes after them."""
    x = params["embed"][batch["token"]]
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.8, x.shape)

    def loss(x):
        error = (x[:, :5] * params["norm"] * params["scale"] - 1) ** 2
        weight = batch["mask"]
        aux = {"worst": error.max(), "rows": weight.sum()}
        return jnp.sum(error.sum(1) * weight), weight.sum(), aux

    return x, loss


def scanned(params, batch, rng, wrap=lambda f: f):
    x, loss = ends(params, batch, rng)
    body = wrap(lambda x, p: (layer(x, p), None))
    return loss(jax.lax.scan(body, x, params["layers"])[0])


def unrolled(params, batch, rng):
    x, loss = ends(params, batch, rng)
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda p, i=i: p[i], params["layers"]))
    return loss(x)


remat = functools.partial(scanned, wrap=jax.checkpoint)
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_batch(rng, rows):
    token, mask = rng.integers(0, 11, rows), rng.integers(0, 2, rows)
    return {"token": token.astype(np.int32), "mask": mask.astype(float)}


@functools.cache
def one_gradient():
    return jax.jit(jax.value_and_grad(lambda *a: unrolled(*a)[0]))


def by_hand(params, batch, counts, key, n, N):
    """Every worker's sum of gradients and weight, microbatch after microbatch."""
    rows = len(batch["mask"]) // (n * N)
    grads, weights, losses = [], [], 0.0
    for i in range(n):
        total, weight = jax.tree.map(np.zeros_like, params), 0.0
        for k in range(i * N, i * N + counts[i]):
            one = jax.tree.map(lambda x, k=k: x[k * rows : (k + 1) * rows], batch)
            loss, g = one_gradient()(params, one, jax.random.fold_in(key, k))
            total = jax.tree.map(np.add, total, g)
            weight, losses = weight + one["mask"].sum(), losses + loss
        grads.append(total)
        weights.append(weight)
    return jax.tree.map(lambda *g: np.stack(g), *grads), np.array(weights), losses


CASES = [
    (scanned, 1, 2, "fused", True, AUTO),
    (scanned, 2, 1, "fused", True, AUTO),
    (scanned, 4, 3, "fused", True, AUTO),
    (scanned, 4, 2, "fused", False, EXPLICIT),
    (remat, 2, 2, "split", True, EXPLICIT),
    (remat, 2, 3, "fused", False, AUTO),
    (unrolled, 2, 2, "fused", None, AUTO),
    (unrolled, 4, 1, "split", None, AUTO),
]


@pytest.mark.fast("loss4-*", "unrolled-2-*")
@pytest.mark.parametrize(("loss", "n", "N", "form", "pipelined", "types"), CASES)
def test_it_is_an_unsharded_loop(loss, n, N, form, pipelined, types):
    mesh = make_mesh(n, types=types)
    tx = acco_jax.fused_zero1(INNER, mesh=mesh, pipelined=pipelined)
    step = acco_jax.make_train_step(loss, tx, microbatches=N, form=form)
    params = jax.tree.map(jnp.asarray, parameters(SHAPES))
    reference = Unsharded(INNER)
    theta, inner = reference.start(params)
    state, rng, steps = tx.init(params), np.random.default_rng(0), 0
    for h in range(5):
        batch, key = make_batch(rng, n * N * 2), jax.random.key(h)
        counts = rng.integers(0, N + 1, n)
        counts[h % n] = 0  # a worker without a last microbatch
        if h == 3:
            counts[:] = 0
        grads, weights, losses = by_hand(theta, batch, counts, key, n, N)
        total, weight = reference.total(grads, weights)
        if weight > 0:
            theta, inner = reference.opt(theta, inner, total, weight, {})
            steps += 1
        if h == 0:  # of the same programs, also where shards do not divide evenly
            step.compile(params, state, batch, counts, key)
        params, state, metrics = step(params, state, batch, counts, key)
        for got, want in zip(
            jax.tree.leaves(params), jax.tree.leaves(theta), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
        assert float(metrics["weight"]) == weight
        assert float(metrics["aux"]["rows"]) == weight
        assert int(metrics["step"]) == steps
        mean = losses / weight if weight else np.nan
        np.testing.assert_allclose(metrics["loss"], mean, 1e-10)


@pytest.mark.parametrize("N", [1, 2])
def test_a_last_microbatch_without_weight_has_no_gradient(N):
    """Also where its loss has one, as a decay of the parameters has."""

    def loss(w, batch, rng):
        x, mask = batch
        return jnp.sum(mask * (x @ w) ** 2) + w @ w / 2, mask.sum(), None

    draw = np.random.default_rng(0)
    w, x = draw.normal(size=4), draw.normal(size=(2 * N, 4))
    mask = np.ones(2 * N)
    mask[-1] = 0
    tx = acco_jax.fused_zero1(optax.sgd(0.1), mesh=make_mesh(2), pipelined=True)
    step = acco_jax.make_train_step(loss, tx, microbatches=N)
    found, _, _ = step(*acco_jax.start(tx, jnp.asarray(w)), (x, mask))
    mean = sum(2 * row * (row @ w) + w for row in x[:-1]) / (2 * N - 1)
    np.testing.assert_allclose(found, w - 0.1 * mean, rtol=1e-12)


def run(method, mesh, loss, params, batches, N, counts=None, **options):
    tx = method(optax.sgd(0.5, momentum=0.9), mesh=mesh, **options)
    step = acco_jax.make_train_step(loss, tx, microbatches=N, form="fused")
    params = jax.tree.map(jnp.array, params)
    state = tx.init(params)
    for batch in batches:
        params, state, _ = step(params, state, batch, counts)
    return params, acco_jax.committed_params(state, params), tx, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "N"),
    [
        ("block", 2),
        *(
            pytest.param(*x, marks=pytest.mark.long)
            for x in (
                ("none", 1),
                ("none", 2),
                ("block", 1),
                ("elementwise", 1),
                ("elementwise", 2),
            )
        ),
    ],
)
def test_sixteen_bit_gpt_neo_is_zero1s(remat, N):
    config = transformer.Config(
        vocab_size=29,
        max_length=8,
        width=8,
        layers=4,
        heads=2,
        param_dtype=jnp.bfloat16,
        remat=remat,
    )
    params = transformer.init_params(config, jax.random.key(0))
    rng, mesh = np.random.default_rng(0), make_mesh(2)
    tokens = [rng.integers(0, 29, (4 * N, 9)).astype(np.int32) for _ in range(3)]
    go = functools.partial(
        run,
        mesh=mesh,
        loss=transformer.loss_fn(config),
        params=params,
        batches=[{"tokens": t} for t in tokens],
        N=N,
        accumulate_dtype=jnp.float32,
    )
    _, _, _, old = go(acco_jax.zero1)
    got, _, tx, new = go(acco_jax.fused_zero1, pipelined=True)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(got))
    first = tx.init(params).master
    moved = [jax.tree.map(np.subtract, s.master, first) for s in (new, old)]
    length = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(moved[1])))
    gap = jax.tree.leaves(jax.tree.map(np.subtract, *moved))
    assert np.sqrt(sum((x**2).sum() for x in gap)) < 0.02 * length


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_a_model_axis_inside(types):
    mesh = make_mesh(2, 2, types=types)
    shape = {"a": (2, 4, 8), "b": (2, 8), "c": (2, 8, 4), "d": (4, 2), "e": ()}
    specs = {
        "a": P(None, None, "model"),
        "b": P(None, "model"),
        "c": P(None, "model", None),
        "d": P(),
        "e": P(),
    }

    whole = P(None, None) if types == EXPLICIT else None

    def loss(params, batch, rng):
        def body(x, p):
            a, b, c = p
            hidden = jnp.tanh(x @ a + b)
            return x + jnp.dot(hidden, c, out_sharding=whole), None

        layers = tuple(params[k] for k in "abc")
        x, _ = jax.lax.scan(jax.checkpoint(body), batch, layers)
        return jnp.mean((x @ params["d"] - params["e"]) ** 2)

    placed = {
        k: jax.device_put(x, jax.NamedSharding(mesh, specs[k]))
        for k, x in parameters(shape).items()
    }
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(8, 4)) for _ in range(3)]
    expected = None
    for method in (acco_jax.zero1, acco_jax.fused_zero1):
        more = {} if expected is None else {"pipelined": True}
        got = run(method, mesh, loss, placed, batches, 2, param_specs=specs, **more)[:2]
        expected = got if expected is None else expected
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def compiled(loss, pipelined, N=2, n=4):
    mesh = make_mesh(n)
    tx = acco_jax.fused_zero1(INNER, mesh=mesh, pipelined=pipelined)
    step = acco_jax.make_train_step(loss, tx, microbatches=N, form="fused")
    params = jax.tree.map(jnp.asarray, parameters(SHAPES))
    args = (params, tx.init(params), make_batch(np.random.default_rng(0), 2 * n * N))
    return schedules.read(step.lower(*args).compile().as_text(), trip_counts=N - 1)


@pytest.mark.fast("True-remat", "False-")
@pytest.mark.parametrize("loss", [scanned, remat, unrolled], ids=["", "remat", "flat"])
@pytest.mark.parametrize("pipelined", [True, False])
def test_one_reduction_per_layer_inside_the_backward_loop(loss, pipelined):
    found = compiled(loss, pipelined).collectives
    inside = [c for c in found if c.where != "ENTRY"]
    scatters = [c for c in found if c.kind == "reduce-scatter" and c.where == "ENTRY"]
    if loss is unrolled:
        assert not inside
    else:
        assert [(c.kind, c.times) for c in inside] == [("reduce-scatter", LAYERS)]
    # the small leaves together, and what the pipeline holds last
    assert len(scatters) == 1 + (pipelined and loss is not unrolled)
    assert [c.kind for c in found if c.bytes > 1024].count("all-gather") == 1
    assert all(c.bytes <= 1024 for c in found if c.kind == "all-reduce")


def test_layers_stay_whole_and_the_layout_is_its_own():
    mesh = make_mesh(4)
    tx = acco_jax.fused_zero1(INNER, mesh=mesh)
    layout = tx.init(jax.tree.map(jnp.asarray, parameters(SHAPES))).layout
    split = {str(leaf): leaf.stored_spec(layout.reduce_order) for leaf in layout.leaves}
    assert split["layers/w"] == P(None, ("data",), None)
    assert split["layers/b"] == P(None, "data")
    assert split["layers/s"] == split["norm"] == P("data")
    assert split["scale"] == P()


def test_plain_updates_are_zero1s():
    mesh = make_mesh(4)
    params = jax.tree.map(jnp.asarray, parameters(SHAPES))
    rng = np.random.default_rng(0)
    rows = [
        jax.tree.map(lambda p: rng.integers(-8, 8, (4, *p.shape)) / 8.0, params)
        for _ in range(3)
    ]
    points = []
    for method in (acco_jax.zero1, acco_jax.fused_zero1):
        tx = method(INNER, mesh=mesh)
        here, state = params, tx.init(params)
        for grads in rows:
            updates, state = jax.jit(tx.update)(grads, state, here)
            here = optax.apply_updates(here, updates)
        points.append((here, acco_jax.committed_params(state, here)))
    for a, b in zip(*map(jax.tree.leaves, points), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)
