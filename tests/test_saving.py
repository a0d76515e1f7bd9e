"""save and restore: a run that goes on is the unbroken one, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core import leaf_names
from tests.reference import AUTO, EXPLICIT, make_mesh

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
STREAMING = {"local_steps": 2, "fragments": 2, "overlap_steps": 1}
LOCAL = {
    "diloco": {"local_steps": 2},
    "gossip": {},
    "cellm": {"local_steps": 2},
    "sparseloco": {"local_steps": 2},
    "streaming_diloco": STREAMING,
}


def begin(width=3):
    draw = np.random.default_rng(0).normal
    return {"w": jnp.array(draw(size=(8, width))), "v": jnp.array(draw(size=(width,)))}


def batch(call, rows=16):
    draw = np.random.default_rng(call).normal
    return draw(size=(rows, 8)), draw(size=(rows,))


def loss_fn(params, microbatch, rng):
    x, y = microbatch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def norm_loss(params, microbatch, rng, model_state):
    mean = 0.9 * model_state["mean"] + 0.1 * microbatch[0].mean(0)
    return loss_fn(params, microbatch, rng), 1.0, {}, {"mean": mean}


def method(name, workers=4, inner=INNER, types=AUTO, **options):
    return getattr(acco_jax, name)(
        inner, mesh=make_mesh(workers, types=types), **options
    )


def stepped(tx, params, state, calls, loss=loss_fn):
    step = acco_jax.make_train_step(loss, tx, microbatches=16 // tx.mesh.size // 2)
    for call in calls:
        params, state, _ = step(params, state, batch(call, 16 * tx.steps_per_call))
    return params, state


def bits(tree):
    """A copy on the host, leaf by leaf, of types and bytes."""
    leaves = jax.tree.leaves(jax.tree.map(leaf_names.data, tree))
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in leaves]


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", ["acco", "zero1"])
def test_a_resumed_run_is_bitwise_the_unbroken_one(name, types, tmp_path):
    """Saved after four calls: acco has sent an estimate and not committed it."""
    tx = method(name, types=types)
    params, state = stepped(tx, *acco_jax.start(tx, begin()), range(4))
    before, extra = bits((params, state)), {"batches": [4, None], "name": "ä"}
    (tmp_path / "4").mkdir()  # an empty folder will do
    acco_jax.save(tmp_path / "4", state, params, extra)
    assert bits((params, state)) == before

    again = method(name, types=types)
    *back, found = acco_jax.restore(tmp_path / "4", again, begin())
    assert found == extra
    assert bits(back) == before
    homes = jax.tree.map(lambda x: x.sharding, acco_jax.abstract_start(again, begin()))
    assert jax.tree.map(lambda x: x.sharding, tuple(back)) == homes
    ends = stepped(again, *back, range(4, 7))
    assert bits(ends) == bits(stepped(tx, params, state, range(4, 7)))


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", ["acco", "zero1"])
def test_on_fewer_devices_it_is_what_reshard_makes(name, types, tmp_path):
    tx, few = method(name, types=types), method(name, 2, types=types)
    pair = stepped(tx, *acco_jax.start(tx, begin()), range(4))
    acco_jax.save(str(tmp_path / "4"), *reversed(pair))
    *back, extra = acco_jax.restore(str(tmp_path / "4"), few, begin())
    assert extra == {}
    assert bits(back) == bits(acco_jax.reshard(pair, few))
    params, state = stepped(few, *back, range(4, 7))
    theta = acco_jax.committed_params(state, params)
    unbroken = acco_jax.committed_params(*stepped(tx, *pair, range(4, 7))[::-1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), theta, unbroken
    )


def test_onto_two_data_axes(tmp_path):
    pair = stepped(method("acco"), *acco_jax.start(method("acco"), begin()), range(3))
    acco_jax.save(tmp_path / "3", pair[1], pair[0])
    mesh = make_mesh(2, 2, names=("host", "chip"))
    tx = acco_jax.acco(INNER, mesh=mesh, axis_name=("host", "chip"))
    back = acco_jax.restore(tmp_path / "3", tx, begin())[:2]
    assert bits(back) == bits(acco_jax.reshard(pair, tx))


ROWS, COLUMNS = P("model"), P(None, "model")


@pytest.mark.parametrize(
    ("sizes", "specs", "to_sizes", "to_specs"),
    [
        ((4, 2), ROWS, (2, 4), COLUMNS),
        ((4, 2), ROWS, (4, 2), COLUMNS),
        ((8,), None, (4, 2), ROWS),
        ((4, 2), ROWS, (8,), None),
    ],
    ids=["groups", "specs", "to_groups", "from_groups"],
)
def test_onto_other_model_parallel_groups(sizes, specs, to_sizes, to_specs, tmp_path):
    """Arrays of the same shapes, whose in-flight gradients are packed differently."""
    draw = np.random.default_rng(0).normal
    params = {"w": jnp.array(draw(size=(6, 8)))}
    tx, then = (
        acco_jax.acco(INNER, mesh=make_mesh(*n), param_specs=spec)
        for n, spec in [(sizes, specs), (to_sizes, to_specs)]
    )
    params, state = acco_jax.start(tx, params)
    grads = {"w": jnp.array(draw(size=(sizes[0], 6, 8)))}
    _, state = tx.update(grads, state, params, weight=jnp.ones(sizes[0]))
    assert np.any(state.in_flight.buffers[0])
    acco_jax.save(tmp_path / "1", state, params)
    back = acco_jax.restore(tmp_path / "1", then, {"w": jnp.zeros((6, 8))})[:2]
    same = acco_jax.reshard((params, state), then)
    assert bits(back) == bits(same)
    assert back[1].layout == same[1].layout


def test_specs_that_explicit_axes_show(tmp_path):
    """The state is split as the parameters that restore is given."""
    mesh = make_mesh(2, 2, types=EXPLICIT)
    rows, columns = (
        jax.device_put({"w": begin(4)["w"]}, jax.NamedSharding(mesh, spec))
        for spec in (ROWS, COLUMNS)
    )
    tx = acco_jax.acco(INNER, mesh=mesh)
    params, state = acco_jax.start(tx, rows)
    grads = {"w": jnp.array(np.random.default_rng(1).normal(size=(2, 8, 4)))}
    _, state = tx.update(grads, state, params, weight=jnp.ones(2))
    acco_jax.save(tmp_path / "1", state, params)
    back = acco_jax.restore(tmp_path / "1", tx, columns)[:2]
    homes = jax.tree.map(lambda x: x.sharding, acco_jax.abstract_start(tx, columns))
    assert jax.tree.map(lambda x: x.sharding, back) == homes
    then = acco_jax.acco(INNER, mesh=mesh, param_specs=COLUMNS)
    assert bits(back) == bits(acco_jax.reshard((params, state), then))


@pytest.mark.fast("diloco")
@pytest.mark.parametrize("name", LOCAL)
def test_local_methods_onto_no_groups(name, tmp_path):
    tx, then = (
        getattr(acco_jax, name)(
            optax.sgd(0.1), mesh=make_mesh(*n), param_specs=spec, **LOCAL[name]
        )
        for n, spec in [((2, 2), {"w": ROWS, "v": P()}), ((4,), None)]
    )
    pair = acco_jax.start(tx, begin())
    acco_jax.save(tmp_path / "0", pair[1], pair[0])
    back = acco_jax.restore(tmp_path / "0", then, begin())[:2]
    assert bits(back) == bits(acco_jax.reshard(pair, then))


@pytest.mark.fast("diloco-*")
@pytest.mark.parametrize("workers", [4, 2])
@pytest.mark.parametrize("name", LOCAL)
def test_local_methods(name, workers, tmp_path):
    tx, then = (method(name, n, optax.adamw(1e-2), **LOCAL[name]) for n in (4, workers))
    pair = stepped(tx, *acco_jax.start(tx, begin()), range(2))
    acco_jax.save(tmp_path / "2", pair[1], pair[0])
    back = acco_jax.restore(tmp_path / "2", then, begin())[:2]
    same = pair if workers == 4 else acco_jax.reshard(pair, then)
    assert bits(back) == bits(same)
    stepped(then, *back, [2])


@pytest.mark.parametrize("workers", [4, 2])
def test_a_model_state_comes_back(workers, tmp_path):
    tx, then = method("acco"), method("acco", workers)
    statistics = {"mean": jnp.zeros(8)}
    start = acco_jax.start(tx, begin(), statistics)
    params, state = stepped(tx, *start, range(4), norm_loss)
    acco_jax.save(tmp_path / "4", state, params)
    *back, _ = acco_jax.restore(tmp_path / "4", then, begin(), statistics)
    want, found = map(acco_jax.committed_model_state, (state, back[1]))
    assert bits(found) == bits(want)
    assert np.any(found["mean"])
    stepped(then, *back, range(4, 6), norm_loss)
    with pytest.raises(
        ValueError, match=r"has state\..*model_state.mean float.* where"
    ):
        acco_jax.restore(tmp_path / "4", then, begin())


def test_keys_in_the_optimizer_state_come_back(tmp_path):
    inner = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(0.1))
    tx = method("zero1", 2, inner)
    pair = stepped(tx, *acco_jax.start(tx, begin()), range(2))
    acco_jax.save(tmp_path / "2", pair[1], pair[0])
    back = acco_jax.restore(tmp_path / "2", tx, begin())[:2]
    assert bits(stepped(tx, *back, [2])) == bits(stepped(tx, *pair, [2]))


# ------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "0"
    params, state = acco_jax.start(method("acco"), begin())
    acco_jax.save(path, state, params)
    return path


@pytest.mark.parametrize("workers", [4, 2])
@pytest.mark.parametrize(
    ("tx", "width", "why"),
    [
        (("zero1",), 3, "has AccoState in Layout where .* have Zero1State in Layout: "),
        (
            ("acco",),
            5,
            r"has params\.v float32\[3\] where .* have params\.v float32\[5\]",
        ),
        (
            ("acco", optax.sgd(0.1)),
            3,
            r"has state.inner\S+ \S+ where .* have state\.\S+",
        ),
    ],
    ids=["method", "parameters", "optimizer"],
)
def test_another_run_is_refused(tx, width, why, workers, saved):
    name, *inner = tx
    tx = method(name, workers, *inner)
    with pytest.raises(ValueError, match=why) as raised:
        acco_jax.restore(saved, tx, begin(width))
    assert "\n" not in str(raised.value)


def test_what_is_no_checkpoint_is_refused(saved, tmp_path):
    tx = method("acco")
    with pytest.raises(FileNotFoundError, match="does not exist: give a checkpoint's"):
        acco_jax.restore(tmp_path / "none", tx, begin())
    with pytest.raises(
        ValueError, match="is not a whole checkpoint: give one of save's"
    ):
        acco_jax.restore(tmp_path, tx, begin())
    with pytest.raises(ValueError, match=r"tx is a GradientTransf.*: give a method of"):
        acco_jax.restore(saved, optax.sgd(0.1), begin())


def test_a_record_without_specs_is_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "0")
    record = tmp_path / "0" / "about" / "metadata"
    about = json.loads(record.read_text())
    del about["specs"]
    record.write_text(json.dumps(about))
    why = "is of an earlier version, without the parameters' specs: restore it with"
    with pytest.raises(ValueError, match=why) as raised:
        acco_jax.restore(tmp_path / "0", method("acco"), begin())
    assert "\n" not in str(raised.value)


def test_what_cannot_be_saved_is_refused(saved, tmp_path):
    params, state = acco_jax.start(method("acco"), begin())
    with pytest.raises(
        FileExistsError, match="exists: save to a new folder, or remove"
    ):
        acco_jax.save(saved, state, params)
    (tmp_path / "file").touch()
    with pytest.raises(
        FileExistsError, match="exists: save to a new folder, or remove"
    ):
        acco_jax.save(tmp_path / "file", state, params)
    for wrong in [(params, state), ((state,), params), (state, {"w": params["w"]})]:
        with pytest.raises(ValueError, match="are not a method's: give what its"):
            acco_jax.save(tmp_path / "0", *wrong)
    rows, local = acco_jax.start(method("diloco", inner=optax.sgd(0.1)), begin())
    with pytest.raises(ValueError, match="are not a method's: give what its"):
        acco_jax.save(tmp_path / "0", local, acco_jax.committed_params(local, rows))
    with pytest.raises(TypeError, match="JSON"):
        acco_jax.save(tmp_path / "0", state, params, {"batch": np.ones(1)})
    assert not (tmp_path / "0").exists()


def test_an_interrupted_save_is_not_restored(tmp_path):
    """The process ends before the folder is renamed; a later save takes the path."""
    killed = """
import os, sys, jax, orbax.checkpoint as ocp
from orbax.checkpoint._src.path import atomicity
import acco_jax
from tests.test_saving import begin, method
async def end(*_, **__): os._exit(9)
atomicity.AtomicRenameTemporaryPath.finalize = end
params, state = acco_jax.start(method("zero1", 2), begin())
acco_jax.save(sys.argv[1], state, params)
"""
    root, path = Path(__file__).resolve().parents[1], tmp_path / "7"
    done = subprocess.run([sys.executable, "-c", killed, path], cwd=root)
    assert done.returncode == 9
    (left,) = tmp_path.iterdir()
    tx = method("zero1", 2)
    for folder, kind in [(path, FileNotFoundError), (left, ValueError)]:
        with pytest.raises(kind, match=r"does not exist|not a whole checkpoint"):
            acco_jax.restore(folder, tx, begin())
    params, state = acco_jax.start(tx, begin())
    acco_jax.save(path, state, params)
    assert bits(acco_jax.restore(path, tx, begin())[:2]) == bits((params, state))


def test_without_orbax_one_line_says_what_to_install(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"^save and restore need orbax: pip install"):
        acco_jax.restore(saved, method("acco"), begin())


def test_numbers_that_are_not_arrays_of_jax(tmp_path):
    """float64 of NumPy before the first step, and a rate set as optax has it."""
    inner = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    tx = method("acco", inner=inner)
    params, state = acco_jax.start(tx, {"w": np.ones((8, 3)), "v": np.ones(3)})
    state.inner.hyperparams["learning_rate"] = 0.5
    acco_jax.save(tmp_path / "0", state, params)
    params, state, _ = acco_jax.restore(tmp_path / "0", tx, params)
    assert params["w"].dtype == np.float32
    assert float(state.inner.hyperparams["learning_rate"]) == 0.5
    state.inner.hyperparams["learning_rate"] = 0.25
    fewer = method("acco", 2, inner=inner)
    _, state = acco_jax.reshard((params, state), fewer)
    assert float(state.inner.hyperparams["learning_rate"]) == 0.25
