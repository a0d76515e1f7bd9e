"""cellm against a NumPy loop written from its equations, and what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core.gradients import Sums
from acco_jax.methods.local.local_method import LocalProgress
from acco_jax.methods.local.sparse import entries
from acco_jax.models import lora, transformer
from acco_jax.schedule import footprint
from tests.methods.local import problem
from tests.methods.local.test_rounds import HELD, run
from tests.reference import make_mesh

pytestmark = pytest.mark.usefixtures("x64")
STEPS, CALLS = 2, 5
ETA, MU = 0.7, 0.6


@pytest.fixture
def wide(monkeypatch):
    """The problem with 303 parameters: a row of 256 and a part of one."""
    monkeypatch.setattr(problem, "INPUTS", 100)
    monkeypatch.setattr(problem, "SHAPES", {"b": (3,), "w": (100, 3)})
    monkeypatch.setattr(problem, "RATE", 1e-3)


def flat(tree):
    return np.concatenate([tree[k].ravel() for k in problem.SHAPES])


def tree(vector):
    b, w = np.split(vector, [3])
    return {"b": b, "w": w.reshape(problem.SHAPES["w"])}


def top(u, k):
    """The k largest magnitudes of each 256 entries, zero elsewhere."""
    sent = np.zeros_like(u)
    for start in range(0, u.size, 256):
        part = u[start : start + 256]
        for place in np.argsort(-np.abs(part), kind="stable")[:k]:
            sent[start + place] = part[place]
    return sent


def by_hand(theta, batches, counts, workers, k, *, weighted=True, eta=ETA, mu=MU):
    """Every round's x, and every worker's e."""
    inner = [problem.AdamW() for _ in range(workers)]
    x, errors = flat(theta), [np.zeros(flat(theta).size)] * workers
    momentum, points = 0.0, []
    for batch, count in zip(batches, counts, strict=True):
        total, weights, kept = 0.0, 0.0, []
        for i, error in enumerate(errors):
            at, w = problem.local_steps(
                tree(x), inner[i], batch, i, count[i], STEPS, HELD
            )
            w = w if weighted else float(w > 0)
            u = w * (x - flat(at)) + error
            sent = top(u, k) if w > 0 else 0.0
            kept.append(u - sent)
            total, weights = total + sent, weights + w
        errors = kept
        if weights > 0:
            delta = total / weights
            momentum = mu * momentum + delta
            x = x - eta * (delta + mu * momentum)
        points.append((x, errors))
    return points


def method(n, **options):
    rates = {"outer_learning_rate": ETA, "outer_momentum": MU}
    options = {"keep": 20} | ({} if "outer" in options else rates) | options
    return acco_jax.cellm(
        problem.adamw(), mesh=make_mesh(n), local_steps=STEPS, **options
    )


def states(tx, theta, batches, counts):
    """(rows, committed parameters, state) after each call."""
    params, state = acco_jax.start(tx, problem.device(theta))
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    found = []
    for batch, count in zip(batches, counts, strict=True):
        params, state, _ = step(params, state, batch, count)
        committed = acco_jax.committed_params(state, params)
        found.append(jax.tree.map(np.asarray, (params, committed, state.error)))
    return found


@pytest.mark.fast("2-False", "4-True")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_follows_its_equations(wide, workers, weighted):
    """Unequal counts; one worker drops out of the second round and comes back."""
    drawn = problem.draw(workers, STEPS, HELD, CALLS)
    assert drawn[2][1][-1] == 0
    expected = by_hand(*drawn, workers, 20, weighted=weighted)
    found = states(method(workers, weighted=weighted), *drawn)
    before = np.zeros((workers, 303))
    for (rows, committed, error), (x, errors), count in zip(
        found, expected, drawn[2], strict=True
    ):
        problem.assert_close(committed, tree(x))
        for k in problem.SHAPES:  # everyone starts the next round from there
            np.testing.assert_array_equal(rows[k], np.stack([committed[k]] * workers))
        now = np.stack(
            [flat({k: e[i] for k, e in error.items()}) for i in range(workers)]
        )
        np.testing.assert_allclose(now, np.stack(errors), rtol=0, atol=1e-8)
        assert now.any()
        np.testing.assert_array_equal(now[count == 0], before[count == 0])
        before = now


@pytest.mark.parametrize("keep", [256, 1.0])
def test_all_of_them_are_dense_averaging(wide, keep):
    drawn = problem.draw(4, STEPS, HELD, 3)
    plain = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    dense = acco_jax.diloco(
        problem.adamw(), mesh=make_mesh(4), local_steps=STEPS, **plain
    )
    sparse = states(method(4, keep=keep, **plain), *drawn)
    for (_, a, error), (_, b, _) in zip(sparse, run(dense, *drawn), strict=True):
        problem.assert_close(a, b, atol=1e-12)
        assert not any(e.any() for e in error.values())


def test_another_outer_optimizer_sees_whole_leaves(wide):
    drawn = problem.draw(2, STEPS, HELD, 2)
    tx = method(2, outer=optax.scale_by_trust_ratio(), keep=256)
    (_, first, _), _ = states(tx, *drawn)
    theta, batches, counts = drawn
    done = [
        problem.local_steps(theta, problem.AdamW(), batches[0], i, c, STEPS, HELD)
        for i, c in enumerate(counts[0])
    ]
    delta = problem.mean_difference(theta, *zip(*done, strict=True))
    norm = np.linalg.norm
    moved = {k: theta[k] + d * norm(theta[k]) / norm(d) for k, d in delta.items()}
    problem.assert_close(first, moved)


EXCHANGES = [
    (jnp.float32, (300, 5, 1), 3),
    (jnp.bfloat16, (17, 2), 1),
    (jnp.float16, (256, 256, 130), 201),
]


@pytest.mark.parametrize(("wire", "sizes", "k"), EXCHANGES)
def test_what_is_sent_and_what_is_kept_are_what_moved(wire, sizes, k):
    """To the bit, for each of two workers, through the words that cross the network."""
    mesh = make_mesh(2)
    tx = acco_jax.cellm(
        optax.sgd(1.0), mesh=mesh, local_steps=1, keep=k, comm_dtype=wire,
        weighted=wire != jnp.float16,
    )  # fmt: skip
    params = {f"x{i}": jnp.zeros(size, jnp.float32) for i, size in enumerate(sizes)}
    state, sparse = acco_jax.start(tx, params)[1], tx.round(0)

    @jax.jit
    def exchange(theta, error, weight):
        nothing = Sums(None, None, weight, None)
        progress = LocalProgress(theta, None, nothing, None, None)
        in_flight = sparse.outgoing(None, state._replace(error=error), progress)
        layout, words, kept, total = sparse._gather(sparse.send(in_flight, (), {}))
        sent = [sparse._sum(layout, words[i : i + 1]) for i in range(2)]
        return words, kept, sent, total

    def worker(rows, i):
        return np.concatenate([np.asarray(x[i]) for x in rows.values()])

    for seed in range(5):
        draw = np.random.default_rng(seed)
        theta, error = (
            {
                name: draw.normal(size=(2, *x.shape)).astype(np.float32)
                for name, x in params.items()
            }
            for _ in range(2)
        )
        weight = np.float32([1, seed % 2])
        rows = NamedSharding(mesh, P("data"))
        words, kept, sent, total = exchange(
            *jax.device_put((theta, error, weight), rows)
        )
        assert total == weight.sum()
        entries = -(-sum(sizes) // 256) * k
        assert words.size == 2 * -(-entries * (1 + jnp.dtype(wire).itemsize) // 4)
        for i in range(2):
            crossed = np.concatenate([np.asarray(x) for x in sent[i].values()])
            u = worker(error, i) - weight[i] * worker(theta, i)
            np.testing.assert_array_equal(crossed + worker(kept, i), u)
            expected = top(u, k) if weight[i] else np.zeros_like(u)
            rounded = expected.astype(jnp.dtype(wire)).astype(np.float32)
            np.testing.assert_array_equal(crossed, rounded)


def test_16_bit_parameters_keep_an_exact_point_and_what_rounding_left():
    """Steps too small for bfloat16 add up, within a round and over rounds."""
    rate, drift = 1 + 2.0**-9, 2.0**-12
    tx = acco_jax.cellm(optax.sgd(rate), mesh=make_mesh(2), local_steps=2, keep=1)
    params, state = acco_jax.start(tx, {"x": jnp.ones(3, jnp.bfloat16)})
    step = acco_jax.make_train_step(
        lambda p, b, rng: (p["x"].astype(jnp.float32) * b).sum() * drift,
        tx, microbatches=1,
    )  # fmt: skip
    for _ in range(3):
        params, state, _ = step(params, state, np.ones((4, 3), np.float32))
    assert params["x"].dtype == jnp.bfloat16
    assert acco_jax.committed_params(state, params)["x"].dtype == jnp.bfloat16
    assert state.master["x"].dtype == jnp.float32
    # each worker weighs 2; without what rounding left, 6 * 2^-21 would be missing
    master, error = (np.asarray(tree["x"]) for tree in (state.master, state.error))
    np.testing.assert_allclose(
        1 - master + error.sum(0) / 4, 6 * drift * rate, atol=3e-7
    )
    assert np.all(master < 1)  # one of three entries a round


# What it sends. "Plainly sparsified" is a top 10 % as it is usually sent: a float32
# value and an int32 place for each, gathered from all workers.

MODEL = transformer.Config(
    vocab_size=64, max_length=8, width=64, layers=2, heads=2, window=4
)


def adapters(dtype):
    params = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    ranks = {"attn/(q|v)_proj/kernel": 4, "mlp/.*kernel": 8}
    made = jax.eval_shape(lambda: lora.init(params, jax.random.key(1), ranks))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), made)


def lowered(make, dtype, n=8):
    """The program of one round on adapters, with few inner steps."""
    base = transformer.init_params(MODEL, jax.random.key(0))
    tx = make(optax.adamw(1e-3), mesh=make_mesh(n), local_steps=2)
    step = acco_jax.make_train_step(
        lora.loss_fn(transformer.loss_fn(MODEL), base, 1.0),
        tx,
        microbatches=1,
    )
    tokens = {"tokens": np.zeros((2 * n, 9), np.int32)}
    return step.lowered(*acco_jax.start(tx, adapters(dtype)), tokens)


def plain_bytes(n, size):
    """Sent by each worker that sends a top 10 % plainly."""

    def local(values, places):
        gather = lambda x: jax.lax.all_gather(x, "data")  # noqa: E731
        return gather(values), gather(places)

    run = jax.shard_map(
        local, mesh=make_mesh(n), in_specs=P("data"), out_specs=P(), check_vma=False
    )
    shape = (n * (size // 10),)
    arrays = (jax.ShapeDtypeStruct(shape, t) for t in (jnp.float32, jnp.int32))
    return footprint.bytes_sent(jax.jit(run).lower(*arrays))


@pytest.mark.fast(slow=("bfloat16",))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sends_10_and_5_times_fewer_bytes(dtype):
    """Than dense averaging in the same dtype, and than plainly sparsified adapters."""
    n = 8
    size = sum(x.size for x in jax.tree.leaves(adapters(dtype)))
    sparse = lowered(acco_jax.cellm, dtype, n)
    sent = footprint.bytes_sent(*sparse)
    message = -(-size // 256) * 4 * (1 + jnp.dtype(dtype).itemsize)  # 4 of every 256
    assert sent == (n - 1) * message
    (words,) = [c for p in sparse for c in footprint.collectives(p) if c.whole > 1000]
    assert (words.kind, words.dtype, words.group) == ("all_gather", "ui32", n)
    dense = footprint.bytes_sent(*lowered(acco_jax.diloco, dtype, n))
    assert dense >= 2 * (n - 1) / n * size * jnp.dtype(dtype).itemsize
    assert dense >= 10 * sent
    assert plain_bytes(n, size) >= 5 * sent


# ----------------------------------------------------------- refused, and other meshes


REFUSED = [
    ({"keep": 0}, "keep is 0: give the part"),
    ({"keep": 257}, "keep is 257: give the part"),
    ({"keep": 1.5}, "keep is 1.5: give the part"),
    ({"keep": True}, "keep is True: give the part"),
    ({"local_steps": 0}, "local_steps is 0"),
    ({"outer": "adam"}, "outer is a str: give a plain optax optimizer"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message) as error:
        acco_jax.cellm(optax.sgd(1.0), mesh=make_mesh(2), **options)
    assert "\n" not in str(error.value)


def test_a_small_part_is_at_least_one_entry():
    assert [entries(k, 256) for k in (1e-9, 1 / 64, 0.5, 1.0, 1)] == [
        1, 4, 128, 256, 1,
    ]  # fmt: skip


def test_a_sharded_model_chooses_alike_what_it_replicates(wide):
    """w split over the model axis, b not: two groups of rows, as on a mesh without."""
    drawn = problem.draw(2, STEPS, HELD, 3)
    specs = {"b": P(), "w": P("model")}
    found = []
    for mesh, param_specs in ((make_mesh(2), None), (make_mesh(2, 2), specs)):
        tx = acco_jax.cellm(
            problem.adamw(), mesh=mesh, local_steps=STEPS, keep=256,
            param_specs=param_specs,
        )  # fmt: skip
        found.append(states(tx, *drawn))
    for (_, a, _), (_, b, _) in zip(*found, strict=True):
        problem.assert_close(a, b, atol=1e-12)
    tx = acco_jax.cellm(
        problem.adamw(), mesh=mesh, local_steps=STEPS, keep=1, param_specs=specs
    )
    before = drawn[0]
    for _, now, _ in states(tx, *drawn):
        changed = {k: np.sum(now[k] != before[k]) for k in now}
        assert changed["b"] <= 2  # one entry of each worker
        assert 2 <= changed["w"] <= 4  # and one of each half
        before = now


def test_abstract_start_says_where_things_are(wide):
    tx = method(4)
    theta, batches, counts = problem.draw(4, STEPS, HELD, 1)
    params, state = acco_jax.start(tx, problem.device(theta))
    abstract = acco_jax.abstract_start(tx, problem.device(theta))
    homes = jax.tree.map(lambda x: x.sharding, abstract)
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    before = acco_jax.committed_params(state, params)
    for found in ((params, state), step(params, state, batches[0], counts[0])[:2]):
        jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)),
            found,
            homes,
        )
    problem.assert_close(before, theta, atol=0)  # they are the caller's to keep


@jax.enable_x64(False)
def test_arrays_of_numpys_float64_become_float32():
    tx = acco_jax.cellm(optax.sgd(0.1), mesh=make_mesh(2), local_steps=1, keep=3)
    step = acco_jax.make_train_step(
        lambda w, x, rng: jnp.mean((x @ w) ** 2), tx, microbatches=1
    )
    batch, w = np.ones((4, 8), np.float32), np.linspace(-1, 1, 8)
    found = []
    for given in (w, w.astype(np.float32)):
        params, state, _ = step(*acco_jax.start(tx, given), batch)
        found.append(acco_jax.committed_params(state, params))
    np.testing.assert_array_equal(*found)
