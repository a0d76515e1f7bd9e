"""gossip against NumPy loops written from its equations, and what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.methods.local.gossip import matchings
from tests.methods.local import problem
from tests.methods.local.test_rounds import HELD, run
from tests.reference import make_mesh
from tests.stablehlo import collectives

pytestmark = pytest.mark.usefixtures("x64")
CALLS = 5


def weights_of(topology, n, call, seed=0):
    """W(t), rows what worker i takes of each."""
    W = np.zeros((n, n))
    for i in range(n):
        if n == 1:
            shares = {0: 1.0}.items()
        elif topology == "ring":
            shares = [(i, 1 / 3), ((i + 1) % n, 1 / 3), ((i - 1) % n, 1 / 3)]
        elif topology == "exponential":
            k = call % int(np.ceil(np.log2(n)))
            shares = [(i, 1 / 2), ((i - 2**k) % n, 1 / 2)]
        elif topology == "random":
            key = jax.random.fold_in(jax.random.key(seed), call)
            pairs = matchings(n)
            partner = pairs[int(jax.random.randint(key, (), 0, len(pairs)))][i]
            shares = [(i, 1 / 2), (partner, 1 / 2)]
        else:
            shares = [(j, 1 / n) for j in range(n)]
        for j, share in shares:
            W[i, j] += share
    np.testing.assert_allclose([W.sum(0), W.sum(1)], 1, rtol=1e-12)
    return W


def gossip(theta, batches, counts, workers, topology, steps):
    inner = [problem.AdamW() for _ in range(workers)]
    thetas, points = [theta] * workers, []
    for t, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        W = weights_of(topology, workers, t)
        done = [
            problem.local_steps(thetas[i], inner[i], batch, i, count[i], steps, HELD)[0]
            for i in range(workers)
        ]
        thetas = [
            {
                k: sum(W[i, j] * thetas[j][k] for j in range(workers))
                + done[i][k] - thetas[i][k]
                for k in theta
            }
            for i in range(workers)
        ]  # fmt: skip
        points.append(thetas)
    return points


CASES = [
    ("ring", 1, 1, "fused"),
    ("ring", 2, 1, "fused"),
    ("ring", 4, 1, "split"),
    ("exponential", 1, 1, "fused"),
    ("exponential", 2, 1, "split"),
    ("exponential", 4, 2, "fused"),
    ("exponential", 3, 1, "split"),
    ("random", 1, 1, "fused"),
    ("random", 2, 1, "fused"),
    ("random", 4, 1, "split"),
    ("random", 5, 2, "fused"),
    ("complete", 1, 1, "fused"),
    ("complete", 2, 2, "split"),
    ("complete", 4, 1, "fused"),
]


@pytest.mark.fast("ring-4-*", "exponential-3-*", "random-5-*", "complete-2-*")
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_follows_its_equations(case):
    topology, workers, steps, form = case
    tx = acco_jax.gossip(
        problem.adamw(), mesh=make_mesh(workers), topology=topology, local_steps=steps
    )
    drawn = problem.draw(workers, steps, HELD, CALLS)
    expected = gossip(*drawn, workers, topology, steps)
    points = run(tx, *drawn, form)
    for (rows, committed, _), thetas in zip(points, expected, strict=True):
        stack = {k: np.stack([t[k] for t in thetas]) for k in problem.SHAPES}
        problem.assert_close(rows, stack)
        problem.assert_close(committed, {k: x.mean(0) for k, x in stack.items()})
    assert points[-1][2]["step"] == CALLS * steps


def test_the_mean_of_rows_is_not_taken_of_parameters_without_rows():
    tx = acco_jax.gossip(problem.adamw(), mesh=make_mesh(2))
    plain = {k: np.ones(shape, np.float32) for k, shape in problem.SHAPES.items()}
    rows, state = acco_jax.start(tx, plain)
    problem.assert_close(acco_jax.committed_params(state, rows), plain)
    with pytest.raises(ValueError, match="not the rows of this method"):
        acco_jax.committed_params(state, plain)


@pytest.mark.parametrize("n", range(2, 9))
def test_matchings_let_each_pair_meet_once(n):
    pairs = matchings(n)
    assert len(pairs) == n - 1 + n % 2
    met = [(i, int(p)) for partner in pairs for i, p in enumerate(partner) if p != i]
    assert sorted(met) == [(i, j) for i in range(n) for j in range(n) if i != j]
    for partner in pairs:
        np.testing.assert_array_equal(partner[partner], np.arange(n))


def test_all_random_matchings_occur():
    n, key = 6, jax.random.key(0)
    drawn = {
        int(jax.random.randint(jax.random.fold_in(key, t), (), 0, n - 1))
        for t in range(64)
    }
    assert drawn == set(range(n - 1))


def test_the_complete_graph_is_averaging():
    """Everyone's mean after the exchange is the mean of all, to which each adds its
    own step: averaged once more it is the averaged step."""
    drawn = theta, batches, counts = problem.draw(4, 1, HELD, 2)
    tx = acco_jax.gossip(
        optax.sgd(problem.RATE), mesh=make_mesh(4), topology="complete"
    )
    points = run(tx, *drawn)
    moved = [
        problem.local_steps(theta, problem.Sgd(), batches[0], i, c, 1, HELD)[0]
        for i, c in enumerate(counts[0])
    ]
    mean = {k: np.mean([m[k] for m in moved], 0) for k in theta}
    problem.assert_close(points[0][1], mean)
    own = [
        problem.local_steps(m, problem.Sgd(), batches[1], i, c, 1, HELD)[0]
        for i, (m, c) in enumerate(zip(moved, counts[1], strict=True))
    ]
    for k in theta:
        expected = [mean[k] + o[k] - m[k] for o, m in zip(own, moved, strict=True)]
        np.testing.assert_allclose(points[1][0][k], expected, atol=1e-12)


@pytest.mark.parametrize("topology", ["ring", "exponential"])
def test_neighbours_are_in_the_order_of_the_axes_given(topology):
    """Whatever the order of the mesh's axes: workers are numbered by axis_name."""
    drawn, ends = problem.draw(4, 1, HELD, 3), []
    for names in ("host", "chip"), ("chip", "host"):
        tx = acco_jax.gossip(
            problem.adamw(), mesh=make_mesh(2, 2, names=names),
            axis_name=("host", "chip"), topology=topology,
        )  # fmt: skip
        ends.append(run(tx, *drawn)[-1])
    for one, other in zip(*(jax.tree.leaves(end) for end in ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_16_bits_keep_the_mean_and_what_is_too_small_for_them():
    """A drift of 2^-12 a step on one worker is in the mean, as float32 has it."""
    tx = acco_jax.gossip(optax.sgd(1.0), mesh=make_mesh(4), topology="ring")
    params, state = acco_jax.start(tx, {"x": jnp.ones(3, jnp.bfloat16)})
    step = acco_jax.make_train_step(
        lambda p, b, rng: (p["x"].astype(jnp.float32) * b).sum() * 2.0**-12,
        tx, microbatches=1,
    )  # fmt: skip
    batch = np.zeros((4, 3), np.float32)
    batch[1] = 1
    for _ in range(8):
        params, state, _ = step(params, state, batch)
    assert params["x"].dtype == jnp.bfloat16
    mean = np.asarray(state.master["x"]).mean(0)
    np.testing.assert_allclose(mean, 1 - 8 * 2.0**-12 / 4, rtol=1e-6)


SENT = {"ring": ["collective_permute"] * 2, "exponential": ["collective_permute"],
        "random": ["collective_permute"] * 3, "complete": ["all_reduce"]}  # fmt: skip


@pytest.mark.parametrize("topology", SENT)
def test_what_it_sends(topology):
    """Copies of the 27 parameters in bfloat16; of the random three, one is taken."""
    tx = acco_jax.gossip(
        optax.sgd(1.0), mesh=make_mesh(4), topology=topology, comm_dtype=jnp.bfloat16
    )
    theta, batches, counts = problem.draw(4, 1, HELD, 1)
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    started = acco_jax.start(tx, problem.device(theta))
    text = step.lower(*started, batches[0], jnp.asarray(counts[0])).as_text()
    found = [(c.kind, c.dtype, c.operand) for c in collectives(text)]
    assert found == [(name, "bf16", 27) for name in SENT[topology]]


REFUSED = [
    ({"topology": "star"}, "topology is 'star': choose one of ring"),
    ({"local_steps": 0}, "local_steps is 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message) as error:
        acco_jax.gossip(optax.sgd(1.0), mesh=make_mesh(2), **options)
    assert "\n" not in str(error.value)
