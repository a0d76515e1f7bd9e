"""streaming_diloco against NumPy loops written from its equations; what it sends."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.core.buffers import Outgoing
from acco_jax.core.leaves import Leaf
from acco_jax.core.quantize import dequantize, quantize
from acco_jax.methods.local import streaming
from tests.methods.local import problem
from tests.methods.local.test_rounds import HELD, run
from tests.reference import make_mesh
from tests.stablehlo import collectives

pytestmark = pytest.mark.usefixtures("x64")
ETA, MU, ALPHA = 0.7, 0.8, 0.4
OUTER = {"outer_learning_rate": ETA, "outer_momentum": MU}


def reference(theta, batches, counts, workers, steps, parts, tau, alpha=ALPHA):
    """theta_i and x after each call; parts: names of each fragment's leaves."""
    inner = [problem.AdamW() for _ in range(workers)]
    thetas, x = [theta] * workers, dict(theta)
    momentum = dict.fromkeys(theta, 0.0)
    weights, sent, points = np.zeros((workers, len(parts))), None, []

    def arrive(names, deltas, shares):
        if sum(shares) == 0:
            return
        for k in names:
            delta = sum(deltas[k]) / sum(shares)
            momentum[k] = MU * momentum[k] + delta
            x[k] = x[k] - ETA * (delta + MU * momentum[k])
        for i, share in enumerate(shares):
            keep = alpha if tau and share > 0 else 0.0
            mixed = {k: keep * thetas[i][k] + (1 - keep) * x[k] for k in names}
            thetas[i] = thetas[i] | mixed

    for call, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        p = call % len(parts)

        def work(first, end, batch=batch, count=count, p=p):
            for i in range(workers):
                thetas[i], w = problem.local_steps(
                    thetas[i], inner[i], batch, i, count[i], steps, HELD, (first, end)
                )
                weights[i] += w

        work(0, tau or steps)
        if tau and sent is not None:
            arrive(*sent)
        work(tau or steps, steps)
        shares = weights[:, p].copy()
        deltas = {k: [w * (x[k] - t[k]) for w, t in zip(shares, thetas, strict=True)]
                  for k in parts[p]}  # fmt: skip
        weights[:, p] = 0
        sent = parts[p], deltas, shares
        if not tau:
            arrive(*sent)
        points.append(([dict(t) for t in thetas], dict(x)))
    return points


CASES = [
    (1, 2, 1, "fused"),
    (2, 2, 1, "split"),
    (4, 2, 1, "fused"),
    (4, 2, 2, "split"),
    (2, 1, 2, "fused"),
    (4, 2, 0, "fused"),
    (2, 2, 0, "split"),
]


@pytest.mark.fast("1-*", "4-2-2-split", "2-1-2-*", "4-2-0-*")
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_follows_its_equations(case):
    workers, fragments, tau, form = case
    steps, calls = 2, 7
    tx = acco_jax.streaming_diloco(
        problem.adamw(), mesh=make_mesh(workers), local_steps=steps * fragments,
        fragments=fragments, overlap_steps=tau, mixing=ALPHA, **OUTER,
    )  # fmt: skip
    drawn = problem.draw(workers, steps, HELD, calls)
    drawn[2][2][-1] = drawn[2][3][-1] = 0  # out for both fragments' turns
    parts = [["w"], ["b"]] if fragments == 2 else [["b", "w"]]
    expected = reference(*drawn, workers, steps, parts, tau)
    points = run(tx, *drawn, form)
    for (rows, committed, _), (thetas, x) in zip(points, expected, strict=True):
        stack = {k: np.stack([t[k] for t in thetas]) for k in problem.SHAPES}
        problem.assert_close(rows, stack)
        problem.assert_close(committed, x)
    assert points[-1][2]["step"] == calls * steps


def test_one_fragment_without_overlap_is_diloco():
    mesh, drawn = make_mesh(4), problem.draw(4, 3, HELD, 3)
    tx = acco_jax.streaming_diloco(
        problem.adamw(), mesh=mesh, local_steps=3, fragments=1, overlap_steps=0, **OUTER
    )
    plain = acco_jax.diloco(problem.adamw(), mesh=mesh, local_steps=3, **OUTER)
    for (a, x, _), (b, y, _) in zip(run(tx, *drawn), run(plain, *drawn), strict=True):
        problem.assert_close(a, b, atol=1e-14)
        problem.assert_close(x, y, atol=1e-14)


def test_of_three_fragments_each_arrives_a_call_after_its_turn():
    """With two, the next one and the last one are the same."""
    tx = acco_jax.streaming_diloco(
        optax.sgd(0.1), mesh=make_mesh(2), local_steps=3, fragments=3, overlap_steps=1
    )
    params, state = acco_jax.start(tx, {name: jnp.ones(2) for name in "abc"})

    def loss(params, batch, rng):
        return sum(jnp.sum((x - batch.mean()) ** 2) for x in params.values())

    step = acco_jax.make_train_step(loss, tx, microbatches=1)
    sent, points = [], [acco_jax.committed_params(state, params)]
    for call in range(5):
        sent.append(list(state.anchor[call % 3]))
        params, state, _ = step(params, state, jnp.zeros(2))
        points.append(acco_jax.committed_params(state, params))
    moved = [
        [name for name in after if (after[name] != before[name]).any()]
        for before, after in itertools.pairwise(points)
    ]
    assert sorted(sent[:3]) == [["a"], ["b"], ["c"]]
    assert moved == [[], *sent[:4]]


@pytest.mark.slow
def test_another_process_continues_in_the_middle_of_a_turn():
    """A fresh step finds from the state whose turn it is."""
    tx = acco_jax.streaming_diloco(
        problem.adamw(), mesh=make_mesh(2), local_steps=4, fragments=2, overlap_steps=1
    )
    theta, batches, counts = problem.draw(2, 2, HELD, 4)
    whole = run(tx, theta, batches, counts)[-1]
    params, state = acco_jax.start(tx, problem.device(theta))
    for batch, count in zip(batches, counts, strict=True):
        step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
        params, state, _ = step(params, state, batch, count)
    for k in problem.SHAPES:
        np.testing.assert_array_equal(params[k], whole[0][k])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_low_precision_is_the_sum_of_what_each_sent(bits):
    """One fragment, tau = 0: a step on the mean of the workers' rounded differences."""
    workers, steps = 4, 2
    tx = acco_jax.streaming_diloco(
        problem.adamw(), mesh=make_mesh(workers), local_steps=steps, fragments=1,
        overlap_steps=0, bits=bits, weighted=False, outer=optax.sgd(1.0),
    )  # fmt: skip
    theta, batches, counts = problem.draw(workers, steps, HELD, 2)
    batches, counts = batches[:1], counts[:1]
    _, committed, _ = run(tx, theta, batches, counts)[0]
    state = jax.eval_shape(tx.start, problem.device(theta))[1]
    shape = state.outer[0].layout
    sums, bias, present = None, 0.0, 0  # the bias stays whole and is not rounded
    for i in range(workers):
        at, w = problem.local_steps(
            theta, problem.AdamW(), batches[0], i, counts[0][i], steps, HELD
        )
        delta = {k: np.zeros((workers, *x.shape)) for k, x in theta.items()}
        for k, x in theta.items():
            delta[k][i] = x - at[k]
        # the buffer that this worker sends: its rows get scales of their own
        placed = jax.device_put(delta, shape.grads_shardings)
        (buffer,) = shape.pack(placed, jnp.ones(workers)).buffers
        mine = buffer.addressable_shards[i].data
        sent = quantize(mine, bits, apart=True)
        got = np.asarray(dequantize(sent, bits, apart=True), np.float64)
        sums = got if sums is None else sums + got
        present, bias = present + (w > 0), bias + delta["b"][i]
    mean = jax.device_put(sums / present, jax.NamedSharding(tx.mesh, jax.P()))
    expected = shape.unpack(Outgoing((mean,), (jnp.asarray(bias / present),)))
    change = {k: theta[k] - committed[k] for k in theta}
    problem.assert_close(change, jax.tree.map(np.asarray, expected), atol=1e-7)
    exact = np.abs(np.concatenate([x.ravel() for x in change.values()])).max()
    assert exact > 1e-3  # far above the tolerance


@pytest.mark.parametrize("bits", [8, 4])
def test_parameters_that_do_not_move_stay_as_they_are(bits):
    """Without error feedback nothing would repair a 0 that arrives as another value."""
    inner = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)},
        {"a": "frozen", "b": "trained"},
    )
    tx = acco_jax.streaming_diloco(
        inner, mesh=make_mesh(2), local_steps=1, fragments=1, overlap_steps=0,
        bits=bits, weighted=False,
    )  # fmt: skip
    start = {"a": np.linspace(1, 2, 64), "b": np.ones(64)}

    def loss(params, batch, rng):
        return batch.mean() * sum(jnp.sum(x**2) for x in params.values())

    step = acco_jax.make_train_step(loss, tx, microbatches=1)
    params, state = acco_jax.start(tx, jax.tree.map(jnp.asarray, start))
    for _ in range(3):
        params, state, _ = step(params, state, np.ones(2))
        committed = acco_jax.committed_params(state, params)
        np.testing.assert_array_equal(committed["a"], start["a"])
        np.testing.assert_array_equal(params["a"], np.stack([start["a"]] * 2))
    assert np.all(np.asarray(committed["b"]) < 0.9)


@pytest.mark.parametrize("bits", [8, 4])
def test_outer_gradients_are_sent_as_integers(bits):
    """Four or eight to a word, and behind each row a word with its scale."""
    tx = acco_jax.streaming_diloco(
        optax.sgd(1.0), mesh=make_mesh(4), local_steps=2, fragments=1, overlap_steps=1,
        bits=bits, comm_dtype=jnp.bfloat16,
    )  # fmt: skip
    theta, batches, counts = problem.draw(4, 2, HELD, 1)
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    params, state = acco_jax.start(tx, problem.device(theta))
    (buffer,) = state.outer[0].in_flight.buffers
    rows, width = buffer.shape
    rows //= 4  # each worker's own buffer
    text = step.lower(params, state, batches[0], jnp.asarray(counts[0])).as_text()
    found = collectives(text)
    words = rows * (width * bits // 32 + 1)
    assert found == [
        ("all_to_all", "ui32", words, words),
        ("all_gather", "bf16", rows // 4 * width, rows * width),
    ]


def leaves(*paths_and_sizes):
    make = lambda path, size: Leaf(  # noqa: E731
        tuple(path.split("/")),
        (size,),
        np.dtype("f4"),
        np.dtype("f4"),
        jax.P(),
        (size,),
    )
    return [make(path, size) for path, size in paths_and_sizes]


def test_numbered_blocks_are_dealt_out_in_turn():
    found = leaves(
        ("emb/w", 10), ("h/0/a", 4), ("h/0/b", 1), ("h/1/a", 4), ("h/10/a", 4),
        ("h/2/a", 4), ("ln/w", 1),
    )  # fmt: skip
    # layers 0 and 2; 1 and 10; the embedding where there is less, then the last
    assert streaming.fragments_of(found, 2) == ((1, 2, 5, 6), (0, 3, 4))


def test_leaves_without_numbers_are_balanced():
    found = leaves(*((f"x{i}/w", s) for i, s in enumerate([1, 8, 3, 4])))
    named = leaves(*((f"{'abcd'[i]}/w", s) for i, s in enumerate([1, 8, 3, 4])))
    assert streaming.fragments_of(named, 2) == ((1,), (0, 2, 3))
    assert sum(map(len, streaming.fragments_of(found, 3))) == 4
    with pytest.raises(ValueError, match="fragments is 5, but there are only 4"):
        streaming.fragments_of(found, 5)


def test_a_model_axis_changes_no_fragment():
    whole = leaves(("a/w", 64), ("b/w", 48), ("c/w", 40))
    split = [dataclasses.replace(whole[0], local=(32,)), *whole[1:]]
    assert streaming.fragments_of(split, 2) == streaming.fragments_of(whole, 2)


REFUSED = [
    ({"local_steps": 5, "fragments": 2}, "local_steps is 5, no multiple of the 2"),
    ({"overlap_steps": 26}, "overlap_steps is 26: it must lie from 0 to .* = 25"),
    ({"mixing": 1.0}, "mixing is 1.0: it must lie from 0 to below 1"),
    ({"bits": 3}, "bits is 3: choose 8, 4 or None"),
    ({"fragments": 0}, "fragments is 0: it must be an integer"),
    ({"overlap_steps": 2.5}, "overlap_steps is 2.5: give an integer"),
]


def test_bits_over_two_data_axes():
    """Only what crosses the slower one is rounded: near the exact mean, not on it."""
    names, ends = ("slice", "chip"), []
    theta, batches, counts = problem.draw(4, 2, HELD, 1)
    for bits in (None, 8):
        tx = acco_jax.streaming_diloco(
            problem.adamw(), mesh=make_mesh(2, 2, names=names), axis_name=names,
            local_steps=2, fragments=1, overlap_steps=0, bits=bits,
            outer=optax.sgd(1.0),
        )  # fmt: skip
        _, committed, _ = run(tx, theta, batches, counts)[0]
        ends.append(np.concatenate([committed[k].ravel() for k in sorted(theta)]))
    start = np.concatenate([theta[k].ravel() for k in sorted(theta)])
    moved = np.abs(ends[0] - start).max()
    off = np.abs(ends[0] - ends[1]).max()
    assert 0 < off < moved / 40


@pytest.mark.parametrize("fragments", [1, 2])
def test_before_the_first_arrival_the_anchors_are_exact(fragments):
    """A rounded one would be taken for a difference that the workers made."""
    tx = acco_jax.streaming_diloco(
        optax.sgd(1e-3), mesh=make_mesh(2), local_steps=2 * fragments,
        fragments=fragments, overlap_steps=1, comm_dtype=jnp.bfloat16,
    )  # fmt: skip
    theta, (batch,), (count,) = problem.draw(2, 2, HELD, 1)
    params = {k: jnp.asarray(x, jnp.float32) for k, x in theta.items()}
    rows, state = acco_jax.start(tx, params)
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    _, state, _ = step(rows, state, batch, count)
    for part in state.anchor:
        for name, x in part.items():
            np.testing.assert_array_equal(x, theta[name].astype(np.float32))


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message) as error:
        acco_jax.streaming_diloco(optax.sgd(1.0), mesh=make_mesh(2), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bits", [None, 8])
def test_weighted_differences_in_float16_are_refused(bits):
    """They are float16 before they are quantized, too."""
    options = {"local_steps": 1, "fragments": 1, "overlap_steps": 0, "bits": bits}
    make = functools.partial(
        acco_jax.streaming_diloco, optax.sgd(1.0), mesh=make_mesh(2),
        comm_dtype=jnp.float16, **options,
    )  # fmt: skip
    with pytest.raises(ValueError, match="weighted differences overflow") as error:
        acco_jax.start(make(), {"w": jnp.ones(4)})
    assert "\n" not in str(error.value)
    acco_jax.start(make(weighted=False), {"w": jnp.ones(4)})


@pytest.mark.parametrize("tau", [0, 1])
def test_parameters_whose_names_are_equal_are_apart(tau):
    tx = acco_jax.streaming_diloco(
        optax.sgd(0.1),
        mesh=make_mesh(2),
        local_steps=2,
        fragments=2,
        overlap_steps=tau,
    )
    batch = np.random.default_rng(0).normal(size=(4, 3))
    found = []
    for name in ("a/b", "c"):

        def loss(p, x, rng, name=name):
            return jnp.mean((x @ p["a"]["b"] - 1) ** 2 + (x @ p[name] + 1) ** 2)

        step = acco_jax.make_train_step(loss, tx, microbatches=1)
        params = {"a": {"b": jnp.ones(3)}, name: 2 * jnp.ones(3)}
        params, state = acco_jax.start(tx, params)
        for _ in range(3):
            params, state, _ = step(params, state, batch)
        committed = acco_jax.committed_params(state, params)
        found.append(jax.tree.map(np.asarray, jax.tree.leaves((params, committed))))
    jax.tree.map(np.testing.assert_array_equal, *found)
