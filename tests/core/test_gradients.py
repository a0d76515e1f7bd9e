"""Each worker's sums, from its own microbatches alone."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.core import microbatches
from acco_jax.core.microbatches import piece
from tests.reference import AUTO, EXPLICIT, make_mesh

pytestmark = pytest.mark.usefixtures("x64")
N, B = 3, 2
THETA = {
    "b": np.linspace(-1, 1, 4),
    "w": np.random.default_rng(0).normal(size=(5, 4)),
}


def data(n, seed=0, N=N):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n * N * B, 5)), "y": rng.normal(size=(n * N * B, 4))}


def errors(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]


def loss_mean(params, batch, rng):
    return jnp.mean(errors(params, batch) ** 2)


def loss_aux(params, batch, rng):
    e = errors(params, batch)
    return jnp.mean(e**2), {
        "rows": jnp.int32(len(e)),
        "abs": jnp.abs(e).sum(0),
        "one": 1.0,
    }


def loss_weight(params, batch, rng):
    e = errors(params, batch)
    keep = batch["y"][:, 0] > 0  # targets that count
    return jnp.sum(e**2 * keep[:, None]), keep.sum(), {"kept": keep.sum()}


def loss_rng(params, batch, rng):
    return jnp.mean(errors(params, batch) ** 2 * jax.random.uniform(rng))


def per_worker(loss, params, batch, counts, rng=None):
    """[(gradient, weight, aux)] worker by worker, microbatch by microbatch."""
    n, rows = len(counts), len(batch["x"]) // (len(counts) * N)
    out = []
    for i, count in enumerate(counts):
        total = jax.tree.map(np.zeros_like, params), 0.0, None
        for k in range(i * N, i * N + count):
            one = jax.tree.map(lambda x, k=k: x[k * rows : (k + 1) * rows], batch)
            key = None if rng is None else jax.random.fold_in(rng, k)
            value = lambda p, one=one, key=key: loss(p, one, key)  # noqa: E731
            result = value(params)
            first = lambda p, value=value: jax.tree.leaves(value(p))[0]  # noqa: E731
            if isinstance(result, tuple):
                first = lambda p, value=value: value(p)[0]  # noqa: E731
            g = jax.grad(first)(params)
            weight = result[1] if isinstance(result, tuple) and len(result) == 3 else 1
            aux = result[-1] if isinstance(result, tuple) else result
            total = (
                jax.tree.map(np.add, total[0], g),
                total[1] + float(weight),
                aux if total[2] is None else jax.tree.map(np.add, total[2], aux),
            )
        out.append(total)
    del n
    return out


@functools.cache
def gradients(loss, n, types=AUTO, N=N):
    return acco_jax.local_gradients(
        loss, mesh=make_mesh(n, types=types), microbatches=N
    )


@pytest.mark.fast("*-explicit")
@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("loss", [loss_mean, loss_aux, loss_weight, loss_rng])
def test_rows_are_each_workers_own(loss, types):
    n, rng = 4, jax.random.key(7)
    for counts in (None, [3, 0, 1, 2], np.array([0, 0, 0, 1]), jnp.array([3, 3, 2, 3])):
        batch = data(n)
        used = [N] * n if counts is None else [int(c) for c in counts]
        expected = per_worker(loss, THETA, batch, used, rng)
        # what is beyond a worker's count is never looked at
        for i, count in enumerate(used):
            for x in batch.values():
                x[(i * N + count) * B : (i + 1) * N * B] = np.nan
        grads, weight, aux = gradients(loss, n, types)(THETA, batch, counts, rng)
        for i, (g, w, _) in enumerate(expected):
            mine = jax.tree.map(lambda x, i=i: np.asarray(x)[i], grads)
            chex.assert_trees_all_close(mine, g, rtol=1e-12, atol=1e-14)
            assert float(np.asarray(weight)[i]) == w
        sums = [a for _, _, a in expected if a is not None]
        total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), sums)
        chex.assert_trees_all_close(aux, total, rtol=1e-12)
        for g in jax.tree.leaves(grads):
            assert {s.data.shape for s in g.addressable_shards} == {(1, *g.shape[1:])}


def test_the_key_of_a_microbatch_does_not_depend_on_the_number_of_workers():
    def draw(params, batch, rng):
        index = batch["k"][0, 0]  # which microbatch of all 8 this is
        here = jnp.zeros(8).at[index].set(jax.random.uniform(rng))
        return jnp.mean(params["b"]), here

    batch = {"k": np.repeat(np.arange(8), 2).reshape(16, 1)}
    seen = []
    for n in (1, 2, 4, 8):
        run = acco_jax.local_gradients(draw, mesh=make_mesh(n), microbatches=8 // n)
        seen.append(np.asarray(run(THETA, batch, rng=jax.random.key(3))[2]))
    for other in seen[1:]:
        np.testing.assert_array_equal(other, seen[0])
    assert len(set(seen[0])) == 8


@pytest.mark.parametrize("n", [1, 2, 8])
def test_microbatches_add_up_to_the_full_batch(n):
    """openxla/xla#49143: accumulation in a loop, miscompiled."""
    N = 8 // n
    batch = data(1, N=8)
    grads, weight, loss = acco_jax.local_gradients(
        loss_mean, mesh=make_mesh(n), microbatches=N
    )(THETA, batch)
    full = jax.grad(loss_mean)(THETA, batch, None)
    mean = jax.tree.map(lambda g: g.sum(0) / weight.sum(), grads)
    chex.assert_trees_all_close(mean, full, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(loss / 8, loss_mean(THETA, batch, None), rtol=1e-12)


def test_no_communication_but_the_small_sum_of_aux():
    n = 8
    fn = jax.jit(lambda p, b, c: gradients(loss_aux, n)(p, b, c))
    text = fn.lower(THETA, data(n), np.full(n, 2)).compile().as_text()
    found = re.findall(
        r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|"
        r"collective-permute)(?:-start)?\(",
        text,
    )
    assert all(kind == "all-reduce" for _, kind in found), found
    largest = max(
        int(np.prod([int(d) for d in dims.split(",") if d]))
        for shape, _ in found
        for dims in re.findall(r"\[([\d,]*)\]", shape)
    )
    assert largest <= 4  # aux's; a gradient has 20


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_accumulator_dtype(dtype):
    theta = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), THETA)
    run = acco_jax.local_gradients(
        lambda p, b, r: (p["b"].sum() + p["w"].sum()) * jnp.mean(b),
        mesh=make_mesh(2),
        microbatches=3,
        accumulate_dtype=dtype,
    )
    batch = jnp.asarray([256, 1, 1, 2, 4, 8], jnp.bfloat16)[:, None]
    grads, _, _ = run(theta, batch)
    g = grads["b"][:, 0]
    assert g.dtype == (dtype or jnp.bfloat16)
    # 257 is no bfloat16: 256 + 1 + 1 stays 256 there
    np.testing.assert_array_equal(g, [258.0 if dtype else 256.0, 14.0])


def test_counts_above_the_batch_are_cut():
    """Arrays are not waited for, so their values cannot be refused."""
    whole = gradients(loss_mean, 2)(THETA, data(2))
    cut = gradients(loss_mean, 2)(THETA, data(2), jnp.array([9, 3]))
    chex.assert_trees_all_equal(whole, cut)
    none, weight, _ = gradients(loss_mean, 2)(THETA, data(2), jnp.array([-1, 0]))
    assert not weight.any() and not any(g.any() for g in jax.tree.leaves(none))


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1], "one count per worker"),
        ([1, 4], "between 0 and microbatches = 3"),
        (np.array([-1, 0]), "between 0 and"),
        ([0.5, 1.0], "must be integers"),
        (2, "one count per worker"),
    ],
)
def test_bad_counts(counts, words):
    with pytest.raises(ValueError, match=words) as error:
        gradients(loss_mean, 2)(THETA, data(2), counts)
    assert "\n" not in str(error.value)


def test_bad_batches_and_arguments():
    run = gradients(loss_mean, 2)
    batch = data(2)
    for bad in (
        jax.tree.map(lambda x: x[:-1], batch),
        batch | {"y": np.float64(1)},
        jax.tree.map(lambda x: x[:0], batch),
    ):
        with pytest.raises(ValueError, match="a multiple of 6") as error:
            run(THETA, bad)
        assert "\n" not in str(error.value) and "['" in str(error.value)
    local = acco_jax.local_gradients
    with pytest.raises(ValueError, match="not an axis of the mesh"):
        local(loss_mean, mesh=make_mesh(2), microbatches=1, axis_name="model")
    with pytest.raises(ValueError, match="at least 1"):
        local(loss_mean, mesh=make_mesh(2), microbatches=0)
    with pytest.raises(ValueError, match="at least 1"):
        local(loss_mean, mesh=make_mesh(2), microbatches=True)
    four = local(lambda p, b, r: (0.0, 1, 2, 3), mesh=make_mesh(2), microbatches=1)
    with pytest.raises(ValueError, match="tuple of 4"):
        four(THETA, data(2))


@pytest.mark.parametrize("parts", [1, 2, 4, 6])
@pytest.mark.parametrize("count", range(12))
def test_pieces_cover_all_microbatches_once(count, parts):
    spans = [piece(count, k, parts) for k in range(parts)]
    assert [i for first, end in spans for i in range(first, end)] == [*range(count)]
    assert parts == 1 or spans[parts // 2 - 1][1] == count // 2
    sizes = [end - first for first, end in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[parts // 2] == max(sizes)  # beside the slowest network


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b, r: (b @ p) ** 2, r"a loss of shape \(2, 3\)"),
        (lambda p, b, r: jnp.int32(1), "dtype int32"),
        (lambda p, b, r: (jnp.sum(p), jnp.ones(2), None), r"a weight of shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("whole", ["local_gradients", "make_train_step"])
def test_a_loss_that_is_no_scalar_is_refused(N, loss, message, whole):
    """Not differentiated as its sum, with the weight of a mean."""
    mesh = make_mesh(1)
    batch, params = np.ones((2 * N, 4)), jnp.ones((4, 3))
    with pytest.raises(ValueError, match=message):
        if whole == "local_gradients":
            made = acco_jax.local_gradients(loss, mesh=mesh, microbatches=N)
            made(params, batch)
        else:
            tx = acco_jax.acco(optax.sgd(0.1), mesh=mesh)
            step = acco_jax.make_train_step(loss, tx, microbatches=N)
            step(params, tx.init(params), batch)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_aux_is_summed_in_32_bits(microbatches):
    """Booleans are counted, and a sum in bfloat16 would stay at 256."""

    def loss(params, batch, rng):
        aux = {
            "right": batch[0, 0] > 0,
            "many": jnp.bfloat16(255),
            "few": jnp.int8(100),
        }
        return jnp.sum(params), aux

    made = acco_jax.local_gradients(loss, mesh=make_mesh(2), microbatches=microbatches)
    _, _, aux = made(jnp.ones(2), np.ones((2 * microbatches, 1)))
    n = 2 * microbatches
    assert {k: float(v) for k, v in aux.items()} == {
        "right": n, "many": 255 * n, "few": 100 * n
    }  # fmt: skip


@pytest.mark.parametrize("N", [1, 3])
def test_aux_of_microbatches_without_weight_counts_for_nothing(N):
    def loss(params, batch, rng):
        weight = batch.sum()
        return (params * batch).sum(), weight, {"share": weight / batch.sum()}

    made = acco_jax.local_gradients(loss, mesh=make_mesh(2), microbatches=N)
    batch = np.ones(2 * N, np.float32)
    batch[-1] = 0  # 0 / 0
    _, weight, aux = made(jnp.float32(1), batch)
    assert weight.tolist() == [N, N - 1] and float(aux["share"]) == 2 * N - 1


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("weight", [0, 0.0, np.float32(0), False])
def test_a_loss_whose_weight_is_always_0_counts_for_nothing(weight, N):
    def loss(params, batch, rng):
        return jnp.log(params * batch).sum(), weight, {"mean": batch / 0}

    made = acco_jax.local_gradients(loss, mesh=make_mesh(2), microbatches=N)
    grads, weights, aux = made(jnp.float32(0), np.zeros(2 * N, np.float32))
    assert not grads.any() and not weights.any() and not aux["mean"].any()


def test_a_weight_that_is_computed_is_checked_and_another_is_not():
    mesh = make_mesh(2)

    def selects(loss):
        made = acco_jax.local_gradients(loss, mesh=mesh, microbatches=2)
        traced = jax.make_jaxpr(made)(jnp.ones(3), np.ones((4, 3), np.float32))
        return str(traced).count("select_n")

    mean = lambda p, b, rng: jnp.sum(p * b)  # noqa: E731
    known = lambda p, b, rng: (mean(p, b, rng), 3, None)  # noqa: E731
    computed = lambda p, b, rng: (mean(p, b, rng), b.sum(), None)  # noqa: E731
    assert selects(mean) == selects(known) < selects(computed)


def test_a_complex_weight_and_no_axis_are_refused():
    mesh = make_mesh(2)

    def loss(params, batch, rng):
        return jnp.sum(params * batch.mean()), 1 + 1j, {}

    with pytest.raises(ValueError, match=r"dtype complex.*: return a real scalar"):
        made = acco_jax.local_gradients(loss, mesh=mesh, microbatches=1)
        made(jnp.float32(1), np.ones((2, 3), np.float32))
    for axis in ((), ("data", "data")):
        with pytest.raises(ValueError, match="name at least one axis of the mesh"):
            acco_jax.zero1(optax.sgd(0.1), mesh=mesh, axis_name=axis)


def test_counts_on_the_devices_are_clipped_and_integers():
    mesh = make_mesh(2)
    made = acco_jax.local_gradients(loss_mean, mesh=mesh, microbatches=N)
    wide = made(THETA, data(2), counts=jnp.array([7, -3]))
    chex.assert_trees_all_equal(wide, made(THETA, data(2), counts=[N, 0]))
    assert microbatches._clip(jnp.array([100, -3], jnp.int8), 300).tolist() == [100, 0]
    for counts in ([1.0, 2.0], jnp.array([1.9, 0.5])):
        with pytest.raises(ValueError, match=r"counts are float.*: they must be integ"):
            made(THETA, data(2), counts=counts)
    with pytest.raises(ValueError, match=r"PRNGKey are: give a key\s+as rng"):
        made(THETA, data(2), jax.random.PRNGKey(0))  # where counts are
