"""diloco and local_rounds against NumPy loops written from the equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import acco_jax
from tests.methods.local import problem
from tests.reference import make_mesh
from tests.stablehlo import collectives

pytestmark = pytest.mark.usefixtures("x64")
STEPS, HELD, ROUNDS = 3, 2, 4
ETA, MU = 0.6, 0.8


def diloco(theta, batches, counts, workers, *, weighted=True, eta=ETA, mu=MU):
    """Where every worker is after each round."""
    inner = [problem.AdamW() for _ in range(workers)]
    momentum = dict.fromkeys(theta, 0.0)
    points = []
    for batch, count in zip(batches, counts, strict=True):
        done = [
            problem.local_steps(theta, inner[i], batch, i, count[i], STEPS, HELD)
            for i in range(workers)
        ]
        weights = [w if weighted else float(w > 0) for _, w in done]
        delta = problem.mean_difference(theta, [t for t, _ in done], weights)
        if delta is not None:
            momentum = {k: mu * momentum[k] + delta[k] for k in theta}
            theta = {k: theta[k] - eta * (delta[k] + mu * momentum[k]) for k in theta}
        points.append(theta)
    return points


def run(tx, theta, batches, counts, form="fused", held=HELD, axis_name="data"):
    """(rows, committed parameters, metrics) after each call."""
    params, state = acco_jax.start(tx, problem.device(theta))
    step = acco_jax.make_train_step(
        problem.loss_fn, tx, microbatches=held,
        form=form,
    )  # fmt: skip
    points = []
    for batch, count in zip(batches, counts, strict=True):
        params, state, metrics = step(params, state, batch, count)
        committed = acco_jax.committed_params(state, params)
        points.append(jax.tree.map(np.asarray, (params, committed, metrics)))
    return points


@pytest.mark.fast("1-True-fused", "2-False-split", "4-True-*")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_diloco_follows_its_equations(workers, weighted, form):
    tx = acco_jax.diloco(
        problem.adamw(),
        mesh=make_mesh(workers),
        local_steps=STEPS,
        outer_learning_rate=ETA,
        outer_momentum=MU,
        weighted=weighted,
    )
    drawn = problem.draw(workers, STEPS, HELD, ROUNDS)
    expected = diloco(*drawn, workers, weighted=weighted)
    points = run(tx, *drawn, form)
    for t, (rows, committed, metrics) in enumerate(points):
        problem.assert_close(committed, expected[t])
        for k in problem.SHAPES:  # everyone starts the next round from there
            np.testing.assert_array_equal(rows[k], np.stack([committed[k]] * workers))
        assert metrics["step"] == (t + 1) * STEPS


def test_the_metrics_are_means_of_the_round():
    theta, batches, counts = problem.draw(2, STEPS, HELD, 2)
    tx = acco_jax.diloco(problem.adamw(), mesh=make_mesh(2), local_steps=STEPS)
    batch, count = batches[0], counts[0]
    _, _, metrics = run(tx, theta, [batch], [count])[0]
    loss = weight = norm = taken = 0.0
    for i in range(2):
        at, inner = theta, problem.AdamW()
        for h in range(STEPS):
            start = (i * STEPS + h) * HELD
            numbers = range(start, start + count[i])
            g, w = problem.gradient(at, batch, numbers)
            for number in numbers:
                rows = slice(number * problem.ROWS, (number + 1) * problem.ROWS)
                x, y, used = (a[rows] for a in batch)
                error = (x @ at["w"] + at["b"] - y) * used[:, None]
                loss += (error**2).sum()
            weight += w
            if w > 0:
                norm += np.sqrt(sum((x**2).sum() for x in g.values())) / w
                taken += 1
                at = inner.step(at, {k: x / w for k, x in g.items()})
    assert taken > 2
    np.testing.assert_allclose(metrics["loss"], loss / weight, rtol=1e-12)
    np.testing.assert_allclose(metrics["weight"], weight, rtol=1e-12)
    np.testing.assert_allclose(metrics["grad_norm"], norm / taken, rtol=1e-6)


def test_one_step_without_momentum_is_averaging():
    drawn = theta, batches, counts = problem.draw(4, 1, HELD, 3)
    tx = acco_jax.diloco(
        optax.sgd(problem.RATE), mesh=make_mesh(4), local_steps=1,
        outer_learning_rate=1.0, outer_momentum=0.0, weighted=False,
    )  # fmt: skip
    for (_, committed, _), batch, count in zip(
        run(tx, *drawn), batches, counts, strict=True
    ):
        moved = []
        for i in range(4):
            at, w = problem.local_steps(
                theta, problem.Sgd(), batch, i, count[i], 1, HELD
            )
            moved += [at] if w > 0 else []
        theta = {k: np.mean([m[k] for m in moved], 0) for k in theta}
        problem.assert_close(committed, theta)


def test_one_worker_and_one_step_are_zero1():
    mesh = make_mesh(1)
    drawn = problem.draw(1, 1, HELD, 3)
    tx = acco_jax.diloco(
        problem.adamw(), mesh=mesh, local_steps=1,
        outer_learning_rate=1.0, outer_momentum=0.0,
    )  # fmt: skip
    plain = run(acco_jax.zero1(problem.adamw(), mesh=mesh), *drawn)
    for (_, a, m), (_, b, k) in zip(run(tx, *drawn), plain, strict=True):
        problem.assert_close(a, b, atol=1e-14)
        np.testing.assert_allclose(m["grad_norm"], k["grad_norm"], rtol=1e-6)


@pytest.mark.parametrize("form", ["fused", "split"])
def test_any_outer_method(form):
    """acco outside: estimates and commits of rounds instead of gradients."""
    workers, calls, mesh = 2, 5, make_mesh(2)
    theta, batches, counts = problem.draw(workers, STEPS, HELD, calls)
    outer = acco_jax.acco(optax.sgd(ETA), mesh=mesh)
    tx = acco_jax.local_rounds(optax.sgd(problem.RATE), outer, local_steps=STEPS)
    points = run(tx, theta, batches, counts, form)
    zero = dict.fromkeys(theta, 0.0), 0.0
    committed, at, in_flight, carry = theta, theta, zero, zero
    plus = lambda a, b: ({k: a[0][k] + b[0][k] for k in theta}, a[1] + b[1])  # noqa: E731
    for t, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        done = [
            problem.local_steps(at, problem.Sgd(), batch, i, count[i], STEPS, HELD)
            for i in range(workers)
        ]
        new = {k: sum(w * (at[k] - x[k]) for x, w in done) for k in theta}
        commit = t % 2 == 0
        total, weight = plus(in_flight, carry) if commit else in_flight
        to = committed
        if weight > 0:
            to = {k: committed[k] - ETA * total[k] / weight for k in theta}
        committed, carry = (to if commit else committed), in_flight
        at, in_flight = to, (new, sum(w for _, w in done))
        problem.assert_close({k: points[t][0][k][-1] for k in theta}, at)
        problem.assert_close(points[t][1], committed)


def test_16_bit_parameters_move_in_float32_within_a_round():
    """Steps too small for bfloat16 add up; between rounds the exact point is kept."""
    mesh = make_mesh(2)
    tx = acco_jax.diloco(
        optax.sgd(1.0), mesh=mesh, local_steps=4,
        outer_learning_rate=1.0, outer_momentum=0.0, comm_dtype=jnp.float32,
    )  # fmt: skip
    params, state = acco_jax.start(tx, {"x": jnp.ones(3, jnp.bfloat16)})
    step = acco_jax.make_train_step(
        lambda p, b, rng: (p["x"].astype(jnp.float32) * b).sum() * 2.0**-12,
        tx, microbatches=1,
    )  # fmt: skip
    for _ in range(2):
        params, state, _ = step(params, state, np.ones((8, 3), np.float32))
    assert params["x"].dtype == jnp.bfloat16
    exact = jax.tree.leaves(state.outer.master)[0].ravel()[:3]
    np.testing.assert_allclose(exact, 1 - 8 * 2.0**-12, rtol=1e-7)


REFUSED = [
    ({"local_steps": 0}, "local_steps is 0: it must be an integer"),
    ({"local_steps": 2.5}, "local_steps is 2.5: it must be an integer"),
    ({"axis_name": "model"}, "axis_name 'model' is not an axis"),
]


def test_numbers_of_steps_may_be_numpys():
    mesh = make_mesh(2)
    tx = acco_jax.diloco(optax.sgd(0.1), mesh=mesh, local_steps=np.int64(3))
    assert tx.steps_per_call == 3 and type(tx.steps_per_call) is int
    tx = acco_jax.streaming_diloco(
        optax.sgd(0.1), mesh=mesh, local_steps=np.int32(6), fragments=np.int64(2),
        overlap_steps=np.int8(1),
    )  # fmt: skip
    assert (tx.period, tx.steps_per_call) == (2, 3)
    acco_jax.sparseloco(optax.sgd(0.1), mesh=mesh, local_steps=2, keep=np.int64(9))
    acco_jax.dpu(optax.sgd(0.1), mesh=mesh, warmup_steps=np.int64(2))
    few = {"gather_bits": 8, "resync_every": np.int64(4)}
    assert acco_jax.acco(optax.sgd(0.1), mesh=mesh, **few).period == 4
    with pytest.raises(ValueError, match="local_steps is True: it must be an integer"):
        acco_jax.diloco(optax.sgd(0.1), mesh=mesh, local_steps=True)


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_diloco_refuses(options, message):
    with pytest.raises(ValueError, match=message) as error:
        acco_jax.diloco(optax.sgd(1.0), mesh=make_mesh(2), **options)
    assert "\n" not in str(error.value)


def test_what_cannot_be_local_is_refused():
    mesh = make_mesh(2)
    zero1 = acco_jax.zero1(optax.sgd(1.0), mesh=mesh)
    rounds = functools.partial(acco_jax.local_rounds, local_steps=2)
    for inner, outer, message in (
        (zero1, zero1, "inner is a ShardedMethod.*cannot share shards"),
        (optax.sgd(1.0), optax.sgd(1.0), "outer is a GradientTransformation"),
        (
            optax.sgd(1.0),
            acco_jax.dpu(optax.sgd(1.0), mesh=mesh, warmup_steps=2),
            "outer has 2 synchronous steps of warm-up",
        ),
        (
            optax.sgd(1.0),
            acco_jax.fused_zero1(optax.sgd(1.0), mesh=mesh),
            "inside the backward pass",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            rounds(inner, outer)
    tx = rounds(optax.sgd(1.0), zero1)
    make = functools.partial(acco_jax.make_train_step, problem.loss_fn)
    with pytest.raises(ValueError, match="a round of local steps"):
        make(tx, microbatches=acco_jax.Adaptive())
    with pytest.raises(ValueError, match="steps is 5, no multiple of the 2 inner"):
        tx.calls(5)
    step = make(tx, microbatches=HELD)
    theta, (batch,), (count,) = problem.draw(2, 2, HELD, 1)
    params, state = acco_jax.start(tx, problem.device(theta))
    with pytest.raises(ValueError, match="params are not the rows"):
        step(problem.device(theta), state, batch, count)
    with pytest.raises(ValueError, match="the state is Zero1State"):
        step(params, zero1.init(problem.device(theta)), batch, count)
    with pytest.raises(ValueError, match="2 workers x 4 microbatches"):
        step(params, state, tuple(x[:12] for x in batch), count)


def test_abstract_start_says_where_things_are():
    tx = acco_jax.diloco(problem.adamw(), mesh=make_mesh(4), local_steps=2)
    theta, batches, counts = problem.draw(4, 2, HELD, 1)
    params, state = acco_jax.start(tx, problem.device(theta))
    abstract = acco_jax.abstract_start(tx, problem.device(theta))
    homes = jax.tree.map(lambda x: x.sharding, abstract)
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    step.compile(params, state, batches[0], counts[0])
    for found in ((params, state), step(params, state, batches[0], counts[0])[:2]):
        jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)),
            found,
            homes,
        )
    again = acco_jax.state_shardings(tx, problem.device(theta))
    assert jax.tree.leaves(again) == jax.tree.leaves(homes[1])


MODEL = {"b": P(), "w": P(None, "model")}


def test_a_split_model_s_optimizer_state_is_split_too():
    mesh = make_mesh(2, 2)
    params = {"b": np.zeros(4, np.float32), "w": np.zeros((6, 4), np.float32)}
    for make in (
        acco_jax.diloco,
        acco_jax.gossip,
        functools.partial(acco_jax.streaming_diloco, fragments=1, overlap_steps=1),
        acco_jax.cellm,
        acco_jax.sparseloco,
    ):
        tx = make(problem.adamw(), mesh=mesh, local_steps=2, param_specs=MODEL)
        _, state = acco_jax.start(tx, params)
        homes = acco_jax.state_shardings(tx, params)
        jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)),
            state,
            homes,
        )
        moments = state.inner[0].mu
        assert moments["w"].sharding.shard_shape((2, 6, 4)) == (1, 6, 2)
        assert moments["b"].sharding.shard_shape((2, 4)) == (1, 4)


def test_two_data_axes_are_one():
    drawn = problem.draw(4, STEPS, HELD, 3)
    flat = acco_jax.diloco(problem.adamw(), mesh=make_mesh(4), local_steps=STEPS)
    names = ("slice", "chip")
    mesh = make_mesh(2, 2, names=names)
    both = acco_jax.diloco(
        problem.adamw(), mesh=mesh, axis_name=names, local_steps=STEPS
    )
    expected, found = (run(tx, *drawn, axis_name=tx.axis) for tx in (flat, both))
    for (_, a, _), (_, b, _) in zip(found, expected, strict=True):
        problem.assert_close(a, b, atol=1e-12)


@pytest.mark.fast("zero1-split", "acco-fused")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("name", ["zero1", "dpu", "acco"])
def test_two_data_axes_of_which_one_is_crossed_in_few_bits(name, form):
    """The sum over a host's workers is rounded, and nothing else."""
    theta, batches, counts = problem.draw(4, 2, HELD, 5)
    committed = []
    for sizes, bits in (((2, 2), 8), ((2, 2), None), ((4,), None)):
        names = ("host", "gpu")[-len(sizes) :]
        outer = getattr(acco_jax, name)(
            optax.sgd(0.7),
            mesh=make_mesh(*sizes, names=names),
            axis_name=names,
            reduce_bits=bits,
        )
        tx = acco_jax.local_rounds(problem.adamw(), outer, local_steps=2)
        rounds = run(tx, theta, batches, counts, form, axis_name=names)
        committed.append(rounds[-1][1])
    few, plain, one = committed
    problem.assert_close(plain, one)
    problem.assert_close(few, plain, atol=3e-3)
    assert any(np.any(few[k] != plain[k]) for k in few)


def test_what_does_not_fit_the_outer_method_is_refused():
    mesh = make_mesh(2)
    outer = acco_jax.zero1(optax.sgd(1.0), mesh=mesh)
    with pytest.raises(ValueError, match="the optimizer is a ShardedMethod"):
        acco_jax.diloco(optax.sgd(1.0), mesh=mesh, outer=outer)
    half = acco_jax.diloco(optax.sgd(1.0), mesh=mesh, comm_dtype=jnp.float16)
    params = {"w": np.zeros(4, np.float32)}
    with pytest.raises(ValueError, match="weighted differences overflow"):
        acco_jax.start(half, params)
    with pytest.raises(ValueError, match="accumulate_dtype"):
        acco_jax.diloco(optax.sgd(1.0), mesh=mesh, accumulate_dtype=jnp.int8)
    with pytest.raises(ValueError, match="accumulate_dtype"):
        acco_jax.local_gradients(
            problem.loss_fn, mesh=mesh, microbatches=1, accumulate_dtype=jnp.int8
        )
    outer = acco_jax.zero1(optax.sgd(1.0), mesh=mesh, accumulate_dtype=jnp.float32)
    rounds = acco_jax.local_rounds(optax.sgd(1.0), outer, local_steps=2)
    assert rounds.accumulate_dtype == jnp.float32


def test_another_method_s_state_is_refused():
    mesh = make_mesh(2)
    theta, (batch,), (count,) = problem.draw(2, 2, HELD, 1)
    sgd, same = optax.sgd(1.0), {"outer_learning_rate": 0.5, "outer_momentum": 0.5}
    diloco = acco_jax.diloco(sgd, mesh=mesh, local_steps=2, **same)
    late = acco_jax.local_rounds(
        sgd, acco_jax.dpu(optax.sgd(0.5, 0.5, nesterov=True), mesh=mesh), local_steps=2
    )
    gossip = acco_jax.gossip(sgd, mesh=mesh, local_steps=2)
    two, one = (
        acco_jax.streaming_diloco(
            sgd, mesh=mesh, local_steps=2 * f, fragments=f, overlap_steps=0, **same
        )
        for f in (2, 1)
    )
    same = {"mesh": mesh, "local_steps": 2}
    cellm, sparse = (getattr(acco_jax, x)(sgd, **same) for x in ("cellm", "sparseloco"))
    for tx, other, message in (
        (cellm, sparse, "the state is SparseLocoState"),
        (sparse, cellm, "the state is SparseState"),
        (diloco, late, "the state is DpuState"),
        (late, diloco, "the state is Zero1State"),
        (diloco, gossip, "the state is GossipState"),
        (two, one, "the state has 1 fragments and tx 2"),
    ):
        step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
        params, state = acco_jax.start(other, problem.device(theta))
        with pytest.raises(ValueError, match=message) as error:
            step(params, state, batch, count)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (lambda m: acco_jax.gossip(optax.sgd(1.0, m), mesh=make_mesh(2)), "inner"),
        (lambda m: acco_jax.diloco(optax.sgd(1.0, m), mesh=make_mesh(2)), "inner"),
        (
            lambda m: acco_jax.cellm(
                optax.sgd(1.0), mesh=make_mesh(2), outer_momentum=m or 0.0
            ),
            "outer",
        ),
    ],
    ids=["gossip", "diloco", "cellm"],
)
@pytest.mark.parametrize("momentum", [(0.9, None), (None, 0.9)])
def test_a_state_of_another_optimizer_is_refused(make, of, momentum):
    tx, other = map(make, momentum)
    theta, (batch,), (count,) = problem.draw(2, tx.steps_per_call, HELD, 1)
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    params, state = acco_jax.start(other, problem.device(theta))
    with pytest.raises(ValueError, match=f"of another {of} optimizer than tx's"):
        step(params, state, batch, count)


def test_all_phases_are_compiled_ahead():
    tx = acco_jax.gossip(optax.sgd(1.0), mesh=make_mesh(4), local_steps=2)
    theta, (batch,), (count,) = problem.draw(4, 2, HELD, 1)
    params, state = acco_jax.start(tx, problem.device(theta))
    for form in ("fused", "split"):
        step = acco_jax.make_train_step(
            problem.loss_fn, tx, microbatches=HELD, form=form
        )
        step.compile(params, state, batch, count)
        assert sorted(phase for _, phase, _ in step._programs) == [0, 1]


def test_a_round_sends_what_a_step_of_zero1_sends():
    """One reduce-scatter and one all-gather in the wire dtype, whatever H is."""
    mesh = make_mesh(4)
    theta, batches, counts = problem.draw(4, STEPS, HELD, 1)
    sent = []
    for make in (
        functools.partial(acco_jax.diloco, local_steps=STEPS),
        acco_jax.zero1,
    ):
        tx = make(optax.sgd(1.0), mesh=mesh, comm_dtype=jnp.bfloat16)
        params, state = acco_jax.start(tx, problem.device(theta))
        step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
        lowered = step.lower(params, state, batches[0], jnp.asarray(counts[0]))
        text = lowered.as_text()
        sent.append(sorted(collectives(text)))
    assert sent[0] == sent[1]
    assert [c.kind for c in sent[0]] == ["all_gather", "reduce_scatter"]
    assert all(c.dtype == "bf16" for c in sent[0])


def test_a_schedule_free_optimizer_is_rejected():
    """Its state has an average of the parameters, which a round would not move."""
    inner = optax.chain(
        optax.clip_by_global_norm(1.0), optax.contrib.schedule_free_sgd(0.1)
    )
    tx = acco_jax.diloco(inner, mesh=make_mesh(2), local_steps=2)
    with pytest.raises(
        ValueError, match=r"inner is schedule-free: .* a sharded method"
    ):
        acco_jax.start(tx, {"w": jnp.ones(2)})


@pytest.mark.parametrize("began", [4, 1, 3])
def test_workers_draw_noise_of_their_own(began):
    """The mean of n workers' noise has 1 / n of its variance, also of copied ones."""
    workers, size = 4, 2**12

    def diloco(n):
        return acco_jax.diloco(
            optax.noisy_sgd(1.0, eta=1.0, gamma=0.0, key=0),
            mesh=make_mesh(n), local_steps=1,
            outer_learning_rate=1.0, outer_momentum=0.0,
        )  # fmt: skip

    tx = diloco(workers)
    made = acco_jax.start(diloco(began), {"w": jnp.zeros(size)})
    params, state = acco_jax.reshard(made, tx) if began < workers else made
    loss = lambda p, batch, rng: 0 * p["w"].sum() + 0 * batch.sum()  # noqa: E731
    step = acco_jax.make_train_step(loss, tx, microbatches=1)
    params, state, _ = step(params, state, np.ones((workers, 1)))
    w = acco_jax.committed_params(state, params)["w"]
    assert float(jnp.var(w)) == pytest.approx(1 / workers, rel=0.1)
