"""A step is given its arrays to keep: arrays that share memory are copied first."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.methods import origins
from tests.compiling import optimized
from tests.methods.test_contract import LOCAL
from tests.reference import make_mesh

METHODS = ("acco", "zero1", "fused_zero1", "ddp", "dpu", "wp", *LOCAL)


def loss_fn(params, batch, rng):
    y = batch["x"] @ params["w"] + params["b1"][None, :] + 2 * params["b2"][None, :]
    return jnp.mean(y**2)


def method(name, n=2):
    options = {"local_steps": 2} if name in LOCAL else {}
    if name == "streaming_diloco":
        options |= {"fragments": 1, "overlap_steps": 1}
    return getattr(acco_jax, name)(optax.sgd(0.1), mesh=make_mesh(n), **options)


def batch_for(tx):
    rows = 2 * tx.mesh.size * tx.steps_per_call
    return {"x": np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)}


def separate():
    return {"w": jnp.ones((3, 2)), "b1": jnp.zeros(2), "b2": jnp.zeros(2)}


def tied():
    z = jnp.zeros(2)
    return {"w": jnp.ones((3, 2)), "b1": z, "b2": z}


def tied_on_the_mesh(mesh):
    """Other objects, of one memory: what device_put makes of the same array."""
    return jax.device_put(tied(), NamedSharding(mesh, P()))


def tied_of_numpy():
    z = np.zeros(2, np.float32)
    return {"w": np.ones((3, 2), np.float32), "b1": z, "b2": z}


def run(step, params, state, batch, calls=2, **named):
    for _ in range(calls):
        params, state, metrics = step(params, state, batch, **named)
    return acco_jax.committed_params(state, params), metrics["loss"]


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.fast("acco-fused", "zero1-fused", "*diloco-fused", "gossip-fused")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("name", METHODS)
def test_one_array_twice(name, form):
    """Two leaves of one array are two parameters, each with a gradient of its own."""
    tx = method(name)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form)
    batch = batch_for(tx)
    expected = run(step, *acco_jax.start(tx, separate()), batch)
    trees = [tied(), tied_on_the_mesh(tx.mesh), tied_of_numpy()]
    for params in trees:
        same(run(step, *acco_jax.start(tx, params), batch), expected)
    # rows of a local method, tied after they were made
    params, state = acco_jax.start(tx, separate())
    params["b2"] = params["b1"]
    same(run(step, params, state, batch), expected)
    # tied again between two calls
    params, state, _ = step(*acco_jax.start(tx, separate()), batch)
    params["b2"] = params["b1"]
    step(params, state, batch)


def test_one_device():
    """There what is put on the mesh is what was given."""
    tx = method("acco", n=1)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    batch = batch_for(tx)
    expected = run(step, *acco_jax.start(tx, separate()), batch)
    same(run(step, *acco_jax.start(tx, tied()), batch), expected)


@pytest.mark.parametrize("n", [1, 2])
def test_parameters_in_the_batch(n):
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng) + jnp.sum(batch["w"]) * jnp.sum(params["w"])

    def trained(w, other):
        tx = method("zero1", n)
        step = acco_jax.make_train_step(loss, tx, microbatches=1)
        batch = {"x": np.ones((6, 6), np.float32), "w": other}
        return run(step, *acco_jax.start(tx, separate() | {"w": w}), batch, calls=1)

    w = np.arange(12, dtype=np.float32).reshape(6, 2)
    shared = jnp.asarray(w)
    same(trained(shared, shared), trained(jnp.asarray(w), w))


def test_parameters_in_the_loss_function():
    """A teacher that starts as the student."""

    def loss(teacher, params, batch, rng):
        return loss_fn(params, batch, rng) + jnp.sum(params["w"] * teacher["w"])

    def trained(teacher, student):
        tx = method("acco")
        partial = jax.tree_util.Partial(loss, teacher)
        step = acco_jax.make_train_step(partial, tx, microbatches=1)
        return run(step, *acco_jax.start(tx, student), batch_for(tx), calls=3)

    params = separate()
    same(trained(params, params), trained(separate(), separate()))


def test_parameters_in_the_state_and_the_extra_arguments():
    def update(updates, state, params, *, anchor, **extra):
        moved = jax.tree.map(lambda g, a: -0.1 * (g + a), updates, anchor)
        return moved, state

    inner = optax.GradientTransformationExtraArgs(lambda params: params, update)
    tx = acco_jax.ddp(inner, mesh=make_mesh(2))
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)

    def trained(share):
        params = jax.device_put(separate(), NamedSharding(tx.mesh, P()))
        state = tx.init(params)
        apart = lambda tree: tree if share else jax.tree.map(jnp.copy, tree)  # noqa: E731
        state = state._replace(inner=apart(state.master))
        return run(
            step, params, state, batch_for(tx), 1, extra={"anchor": apart(params)}
        )

    same(trained(share=True), trained(share=False))


def test_what_a_step_returned_is_not_copied(monkeypatch):
    tx = method("acco")
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    params, state, _ = step(*acco_jax.start(tx, separate()), batch_for(tx))
    monkeypatch.setattr(jnp, "copy", None)
    monkeypatch.setattr(acco_jax.step.fused, "_memory", None)
    step(params, state, batch_for(tx))


@pytest.mark.parametrize(
    ("form", "old", "leaf"),
    [
        ("fused", "params", r"\['b1'\]"),
        ("fused", "state", r"\..*"),
        ("split", "state", r"\..*"),
    ],
)
def test_what_was_donated_is_named_with_the_remedy(form, old, leaf):
    """On several devices JAX 0.10.2 crashes where it is given such an array."""
    tx = method("acco")
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form)
    first = step(*acco_jax.start(tx, separate()), batch_for(tx))[:2]
    params, state, _ = step(*first, batch_for(tx))
    given = (first[0], state) if old == "params" else (params, first[1])
    with pytest.raises(ValueError, match=f"^{old}{leaf} was given to an ear") as error:
        step(*given, batch_for(tx))
    said = str(error.value)
    assert "\n" not in said and "params, state, metrics = step(params, state" in said
    step(params, state, batch_for(tx))


@pytest.mark.parametrize("microbatches", [1, acco_jax.Adaptive(1, 1)])
def test_a_loss_that_raises_leaves_the_state(microbatches):
    """In two threads, too, where the exchange takes it beside the computation."""
    tx = method("acco")
    step = acco_jax.make_train_step(
        loss_fn, tx, microbatches=microbatches, form="split"
    )
    batch = batch_for(tx)
    params, state, _ = step(*acco_jax.start(tx, separate()), batch)
    with pytest.raises(TypeError, match="contracting dimensions"):
        step(params, state, {"x": batch["x"][:, :2]})
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))
    expected = run(step, *acco_jax.start(tx, separate()), batch)
    same(run(step, params, state, batch, calls=1), expected)


@pytest.mark.parametrize("form", ["fused", "split"])
def test_what_a_failed_call_took_is_named(form, monkeypatch):
    """On one device: on several JAX may crash where the step gives it such arrays."""
    tx = method("acco", n=1)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form)
    params, state, _ = step(*acco_jax.start(tx, separate()), batch_for(tx))
    work = step._run

    def failing(*args):
        work(*args)
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(step, "_run", failing)
        step(params, state, batch_for(tx))
    with pytest.raises(ValueError, match="was given to an earlier call"):
        step(params, state, batch_for(tx))


@pytest.mark.parametrize("form", ["fused", "split"])
def test_what_another_step_took_is_named(form):
    """The arrays are those that this step has returned last."""
    tx = method("acco")
    one, other = (
        acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form) for _ in "ab"
    )
    params, state, _ = one(*acco_jax.start(tx, separate()), batch_for(tx))
    other(params, state, batch_for(tx))
    with pytest.raises(ValueError, match="was given to an earlier call"):
        one(params, state, batch_for(tx))


@pytest.mark.parametrize("method", ["acco", "dpu"])
@pytest.mark.parametrize("microbatches", [2, 3])
def test_parameters_are_read_before_they_are_overwritten(method, microbatches):
    """As users compile it, in one program: one worker's exchange could come first."""

    def loss_fn(params, batch, rng):
        return jnp.sum((params["x"] - batch[0]) ** 2) / 2

    batches = np.random.default_rng(0).normal(size=(6, microbatches, 2))

    def losses(form):
        tx = getattr(acco_jax, method)(optax.sgd(1.4), mesh=make_mesh(1))
        step = acco_jax.make_train_step(
            loss_fn, tx, microbatches=microbatches, form=form
        )
        params, state = acco_jax.start(tx, {"x": jnp.array([-3.0, 2.0])})
        found = []
        for batch in batches.astype(np.float32):
            params, state, metrics = step(params, state, batch)
            found.append(float(metrics["loss"]))
        return found

    with optimized():
        np.testing.assert_allclose(losses("fused"), losses("split"), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "form"), [("acco", "fused"), ("acco", "split"), ("diloco", "fused")]
)
def test_edited_parameters(name, form):
    """The state has a copy, to which an edit would not arrive."""
    tx = method(name)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form)
    batch = batch_for(tx)
    params, state, _ = step(*acco_jax.start(tx, separate()), batch)
    edited = jax.tree.map(jax.nn.relu, params)
    with pytest.raises(ValueError, match="begin from other parameters"):
        step(edited, state, batch)
    with pytest.raises(ValueError, match="begin from other parameters"):
        step(params | {"w": edited["w"]}, state, batch)
    params, state, _ = step(params, state, batch)  # nothing is lost
    run(step, *acco_jax.start(tx, edited), batch)
    copies = jax.tree.map(jnp.copy, (params, state))  # as after a restore
    run(step, *copies, batch)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "fused") for name in METHODS),
        *((name, "split") for name in METHODS if name not in LOCAL),
    ],
)
def test_the_first_call_is_given_what_the_state_was_begun_from(name, form):
    """Gradients at other parameters would be a step of the state's."""
    tx = method(name)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, form=form)
    batch = batch_for(tx)
    params, state = acco_jax.start(tx, separate())
    edited = params | {"b2": params["b2"] + 1}
    if getattr(state, "master", getattr(state, "outer", None)) is None:
        step(edited, state, batch)  # gossip: the state has no other copy
        return
    with pytest.raises(ValueError, match=r"params\['b2'\] has other values") as error:
        step(edited, state, batch)
    assert "\n" not in str(error.value)
    same = jax.tree.map(jnp.array, params)  # other arrays of these values
    params, state, _ = step(same, state, batch)
    step(params, state, batch)
    again = acco_jax.start(tx, separate())
    with pytest.raises(ValueError, match=r"params\['b1'\] has other values"):
        step(jax.tree.map(lambda x: x + 1, again[0]), again[1], batch)


@pytest.mark.parametrize("name", ["acco", "diloco"])
def test_the_first_call_after_a_restore_is_given_what_was_stored(name):
    tx = method(name)
    params, state = jax.tree.map(jnp.copy, acco_jax.start(tx, separate()))
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    with pytest.raises(ValueError, match="has other values"):
        step(jax.tree.map(lambda x: x + 1, params), state, batch_for(tx))
    step(params, state, batch_for(tx))


def test_the_first_call_notices_what_changed_in_place():
    tx = acco_jax.zero1(optax.sgd(0.1), mesh=make_mesh(2))
    params = jax.tree.map(np.array, separate())
    params["b1"][0] = np.nan  # which is itself, here
    state = tx.init(params)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    params["w"] += 1
    with pytest.raises(ValueError, match=r"params\['w'\] has other values"):
        step(params, state, batch_for(tx))
    params["w"] -= 1
    step(params, state, batch_for(tx))


def test_a_known_beginning_is_not_compared(monkeypatch):
    tx = method("acco")
    compared = monkeypatch.setattr(origins, "check", None)  # it would not be callable
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    run(step, *acco_jax.start(tx, separate()), batch_for(tx))
    run(step, *acco_jax.start(tx, separate()), batch_for(tx))
    assert compared is None


def test_parameters_that_are_edited_with_the_rate():
    tx = acco_jax.zero1(optax.inject_hyperparams(optax.sgd)(0.1), mesh=make_mesh(4))
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    batch = batch_for(tx)
    params, state, _ = step(*acco_jax.start(tx, separate()), batch)
    rate = {"learning_rate": jnp.float32(0.2)}
    state = state._replace(inner=state.inner._replace(hyperparams=rate))
    with pytest.raises(ValueError, match="begin from other parameters"):
        step(jax.tree.map(jax.nn.relu, params), state, batch)
    step(params, state, batch)


@pytest.mark.parametrize("name", ["gossip", "streaming_diloco"])
def test_edited_parameters_of_which_the_state_has_no_copy(name):
    tx = method(name)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    batch = batch_for(tx)
    params, state, _ = step(*acco_jax.start(tx, separate()), batch)
    step(jax.tree.map(jax.nn.relu, params), state, batch)
