"""Every optimizer of tests.optimizers, and generated ones, against the unsharded loop.

Compiling is what takes the time, and a program that runs a dozen optimizers and adds
their updates compiles in a quarter of what they take one by one. So the fast tests run
sums, and where a sum is wrong each of its terms, to name those that are; the long one
runs every optimizer by itself.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import acco_jax
from tests.examples import examples
from tests.handwritten import CAPTURED, TREES
from tests.optimizers import EXCLUDED, OPTIMIZERS
from tests.reference import (
    AUTO,
    EXPLICIT,
    Unsharded,
    draw,
    make_mesh,
    parameters,
)

METHODS = ("acco", "zero1")
KINDS = {  # sizes of the data axes, their names
    "1": ((1,), ("data",)),
    "2": ((2,), ("data",)),
    "4": ((4,), ("data",)),
    "2 x 2": ((2, 2), ("a", "b")),
}
WEIGHTS = np.array(  # of up to 4 workers in every call
    [
        [1, 1, 0, 2],
        [2, 0, 1, 1],
        [1, 0, 0, 3],
        [3, 1, 2, 1],
        [1, 0, 0, 0],
        [2, 2, 0, 1],
        [1, 2, 0, 2],
        [1, 1, 1, 1],
        [2, 0, 0, 1],
    ]
)
CALLS = {"acco": 9, "zero1": 5}  # 4 commits, each after an estimate; 5 steps
TOGETHER = 12  # optimizers in a sum


pytestmark = pytest.mark.usefixtures("x64")


def make(method, inner, mesh, axis):
    return getattr(acco_jax, method)(inner, mesh=mesh, axis_name=axis)


def data(shapes, method, kind, seed=0):
    """Parameters, and the gradients and weights of all calls."""
    n, calls = int(np.prod(KINDS[kind][0])), CALLS[method]
    gradients = draw(shapes, n, calls, seed)
    return parameters(shapes, seed), gradients, WEIGHTS[:calls, :n]


def data_of(tree, method, kind):
    theta, gradients, weights = data(TREES[tree], method, kind)
    if tree == "nan":
        gradients[2]["m"][0, 3] = np.nan
    if tree == "large":  # the sums were multiples of 2**-6
        for x in jax.tree.leaves(gradients):
            x[0] += 2.0**-8
    return theta, gradients, weights


def run(tx, theta, gradients, weights, between=lambda call, state: state):
    """The parameters after each call, as NumPy arrays."""
    params, state, update = theta, tx.init(theta), jax.jit(tx.update)
    for call, (g, weight) in enumerate(zip(gradients, weights, strict=True)):
        state = between(call, state)
        updates, state = update(g, state, params, weight=weight)
        new = jax.tree.map(lambda p, u: p + np.asarray(u), params, updates)
        params = jax.tree.map(np.asarray, new)
        yield params


def same(points, expected):
    for call, (params, here) in enumerate(zip(points, expected, strict=True)):
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(here), strict=True):
            where = f"call {call}, shape {a.shape}"
            assert np.isfinite(b).all(), where
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=where)


def check(method, inner, kind, arguments, reference=None, types=AUTO):
    sizes, axis = KINDS[kind]
    mesh = make_mesh(*sizes, names=axis, types=types)
    points = getattr(reference or Unsharded(inner), method)(*arguments)
    tx = make(method, inner, mesh, axis if len(axis) > 1 else axis[0])
    same(run(tx, *arguments), [here for here, _ in points])


# ------------------------------------------------------------------- which there are


def optax_functions():
    """The public functions that make transformations, or do not say what they make."""
    for module in (optax, optax.contrib):
        for name, fn in inspect.getmembers(module, inspect.isfunction):
            made = fn.__annotations__.get("return", "a GradientTransformation?")
            if "GradientTransformation" in str(made) and not name.startswith("_"):
                yield name, fn


def test_nothing_of_optax_is_missing():
    """An entry's first word is the function it calls; that one calls its parts."""
    functions = dict(optax_functions())
    entries = {re.split("[ ,]", name)[0] for name in OPTIMIZERS} & set(functions)
    parts = {part for name in entries for part in functions[name].__code__.co_names}
    assert not set(functions) - entries - parts - set(EXCLUDED)
    assert not entries & set(EXCLUDED)


# ---------------------------------------------------------------------- as unsharded


@functools.cache
def build(name):
    return OPTIMIZERS[name].build()


def added(names):
    """The sum of several optimizers' updates, each with a state of its own."""
    inners = [optax.with_extra_args_support(build(name)) for name in names]

    def update(g, states, params=None):
        pairs = [i.update(g, s, params) for i, s in zip(inners, states, strict=True)]
        updates, states = zip(*pairs, strict=True)
        return jax.tree.map(lambda *u: functools.reduce(jnp.add, u), *updates), states

    return optax.GradientTransformation(
        lambda params: tuple(inner.init(params) for inner in inners), update
    )


def check_sum(names, tree, method, kind, inner, reference=None, types=AUTO):
    arguments = data_of(tree, method, kind)
    try:
        check(method, inner, kind, arguments, reference, types)
    except Exception as error:
        wrong = {}
        for name in names:
            try:
                check(method, build(name), kind, arguments, types=types)
            except Exception as its:
                wrong[name] = f"{type(its).__name__}: {its}"[:500]
        what = wrong or f"only together: {names}"
        raise AssertionError(f"{method} on {kind}: {what}") from error


def sums():
    """(tree, names) of a dozen each."""
    for tree in TREES:
        names = [name for name, case in OPTIMIZERS.items() if case.tree == tree]
        for k in range(0, len(names), TOGETHER):
            yield tree, names[k : k + TOGETHER]


SUMS = {f"{tree}: {names[0]} ... {names[-1]}": (tree, names) for tree, names in sums()}


@pytest.mark.fast("odd: adabelief*")
@pytest.mark.parametrize("some", SUMS)
def test_as_unsharded(some):
    tree, names = SUMS[some]
    inner = added(names)
    reference, turn = Unsharded(inner), list(SUMS).index(some)
    # methods and meshes in turn; test_each_as_unsharded has all of each
    method, kind = METHODS[turn % 2], ("4", "2 x 2")[turn // 2 % 2]
    check_sum(names, tree, method, kind, inner, reference)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_as_unsharded(name):
    inner, reference = build(name), Unsharded(build(name))
    for kind in KINDS:
        for method in METHODS:
            arguments = data_of(OPTIMIZERS[name].tree, method, kind)
            check(method, inner, kind, arguments, reference)


@pytest.mark.parametrize("method", METHODS)
def test_a_part_of_a_gradient(method):
    """XLA sliced what a manual region returns wrongly, with no operation between."""
    arguments = data_of(OPTIMIZERS["last row"].tree, method, "4")
    check(method, build("last row"), "4", arguments)


@pytest.mark.parametrize("method", METHODS)
def test_captured_arrays_where_axes_are_explicit(method):
    names = list(CAPTURED)
    check_sum(names, "one", method, "2", added(names), types=EXPLICIT)


# ----------------------------------------------------- hyperparameters that are changed


def injected(learning_rate, max_norm, b1):
    return optax.chain(
        optax.clip_by_global_norm(max_norm),
        optax.masked(optax.scale_by_adam(b1), {"a": True, "mu/a": True, "s": False}),
        optax.scale_by_learning_rate(learning_rate),
    )


CHANGES = {  # before which step
    1: {"learning_rate": 0.02},
    2: {"max_norm": 0.05, "b1": 0.5},
    3: {"learning_rate": 0.3, "max_norm": 10.0},
}


def changed(state, values):
    """The state of inject_hyperparams with some of its values replaced."""
    values = {k: jnp.asarray(v, state.hyperparams[k].dtype) for k, v in values.items()}
    return state._replace(hyperparams=state.hyperparams | values)


def steps_by_hand(inner, method, theta, gradients, weights):
    """The recurrence of zero1 or acco, with the changes between steps."""
    reference = Unsharded(inner)
    theta, state = reference.start(theta)
    sums = [reference.total(*both) for both in zip(gradients, weights, strict=True)]
    if method == "acco":
        yield theta
    for step in range(CALLS[method] // {"acco": 2, "zero1": 1}[method]):
        state = changed(state, CHANGES.get(step, {}))
        if method == "acco":
            first, second = sums[2 * step : 2 * step + 2]
            yield reference.opt(theta, state, *first, {})[0]
            mean_of = jax.tree.map(np.add, first, second)
        else:
            mean_of = sums[step]
        theta, state = reference.opt(theta, state, *mean_of, {})
        yield theta


@pytest.mark.fast("acco-2 x 2", "zero1-4")
@pytest.mark.parametrize("kind", ["4", "2 x 2"])
@pytest.mark.parametrize("method", METHODS)
def test_hyperparameters_changed_on_the_way(method, kind):
    inner = optax.inject_hyperparams(injected)(0.1, 0.5, 0.9)
    sizes, axis = KINDS[kind]
    mesh = make_mesh(*sizes, names=axis)

    def between(call, state):
        step = (call - 1) / 2 if method == "acco" else call
        return state._replace(inner=changed(state.inner, CHANGES.get(step, {})))

    arguments = data_of("odd", method, kind)
    expected = steps_by_hand(inner, method, *arguments)
    same(run(make(method, inner, mesh, axis), *arguments, between), expected)


# -------------------------------------------------------------------------- generated


def along(x, k):
    """A dimension of x: the k-th, counted round and round."""
    return k % x.ndim


def whole(fn):
    return lambda x, y, k, others: jnp.broadcast_to(fn(x), x.shape)


def reducing(fn):
    def of(x, y, k, others):
        if not x.ndim:
            return fn(x)
        return jnp.broadcast_to(fn(x, axis=along(x, k), keepdims=True), x.shape)

    return of


def placing(fn):
    return lambda x, y, k, others: fn(x, along(x, k)) if x.ndim else x


def constant(shape, k):
    return np.cos(np.arange(np.prod(shape, dtype=int)) + k).reshape(shape)


def factor(x, y, k, others):
    """A constant vector along one dimension."""
    if not x.ndim:
        return k * x
    shape = [d if i == along(x, k) else 1 for i, d in enumerate(x.shape)]
    return x * constant(shape, k)


def product(x, y, k, others):
    return x @ jnp.swapaxes(y, -1, -2) @ x / x.size if x.ndim > 1 else x * y


def branch(x, y, k, others):
    return lax.cond(jnp.mean(x) > 0.2718, lambda: x, lambda: y - x)


def recurrence(x, axis):
    x = jnp.moveaxis(x, axis, 0)
    step = lambda c, row: (0.5 * c + row, c * row)  # noqa: E731
    return jnp.moveaxis(lax.scan(step, jnp.ones_like(x[0]), x)[1], 0, axis)


OPERATIONS = {  # fn(x, y, k, others): of a shape, to the same shape
    "add": lambda x, y, k, others: x + y,
    "multiply": lambda x, y, k, others: x * y,
    "divide": lambda x, y, k, others: x / (0.5 + y**2),
    "select": lambda x, y, k, others: jnp.where(x > 0.2718, x, y),
    "largest": lambda x, y, k, others: jnp.maximum(x, y),
    "cosine": lambda x, y, k, others: jnp.cos(x + k),
    "root": lambda x, y, k, others: jnp.sqrt(0.01 + x**2),
    "logarithm": lambda x, y, k, others: jnp.log(0.1 + jnp.abs(x)),
    "sum all": whole(jnp.sum),
    "mean all": whole(jnp.mean),
    "max all": whole(jnp.max),
    "norm all": whole(lambda x: jnp.sqrt(0.01 + jnp.sum(x**2))),
    "product all": whole(jnp.prod),
    "sum": reducing(jnp.sum),
    "mean": reducing(jnp.mean),
    "min": reducing(jnp.min),
    "deviation": reducing(lambda x, **how: jnp.sqrt(0.01 + jnp.var(x, **how))),
    "cumsum": placing(jnp.cumsum),
    "sort": placing(jnp.sort),
    "flip": placing(jnp.flip),
    "roll": placing(lambda x, axis: jnp.roll(x, 1, axis)),
    "softmax": placing(jax.nn.softmax),
    "recurrence": placing(recurrence),
    "transpose": lambda x, y, k, others: x.T.reshape(x.shape),
    "matrix product": product,
    "branch": branch,
    "constant": lambda x, y, k, others: x * constant(x.shape, k),
    "constant vector": factor,
    "noise": lambda x, y, k, others: (
        x + jax.random.normal(jax.random.key(k), x.shape, x.dtype)
    ),
    "others' mean": lambda x, y, k, others: x * (1 + others[k % len(others)].mean()),
}

HOLDING = {  # how state is held: (there, back)
    "as it is": (lambda x: x, lambda x, shape: x),
    "transposed": (lambda x: x.T, lambda x, shape: x.T),
    "flattened": (jnp.ravel, jnp.reshape),
    "between others": (lambda x: jnp.stack([x, x + 1, x]), lambda x, shape: x[1] - 1),
}


def interpreted(program, holding):
    """The optimizer whose direction is the last value and whose state the one before.

    Args:
      program: (operation, one of the last three values, one of all values, k), ...;
        before them there are the state, the parameter and the gradient.
      holding: a key of HOLDING.
    """
    there, back = HOLDING[holding]

    def one(g, state, p, others):
        held, count = back(state["x"], g.shape), state["count"] + 1
        values = [held, p, g]
        for name, i, j, k in program:
            x, y = values[-1 - i], values[j % len(values)]
            # between -1 and 1, where whatever follows is well conditioned
            values.append(jnp.tanh(OPERATIONS[name](x, y, k, others)))
        held = 0.7 * held + values[-2] / count
        return -0.1 * values[-1], {"x": there(held), "count": count}

    def update(g, state, params=None):
        leaves, treedef = jax.tree.flatten(g)
        states, at = treedef.flatten_up_to(state), jax.tree.leaves(params)
        pairs = [one(*x, leaves) for x in zip(leaves, states, at, strict=True)]
        updates, states = zip(*pairs, strict=True)
        return treedef.unflatten(updates), treedef.unflatten(states)

    def init(params):
        start = lambda p: {"x": there(jnp.cos(p)), "count": jnp.int32(0)}  # noqa: E731
        return jax.tree.map(start, params)

    return optax.GradientTransformation(init, update)


instruction = st.tuples(
    st.sampled_from(list(OPERATIONS)),
    st.integers(0, 2),
    st.integers(0, 9),
    st.integers(0, 5),
)
shape = st.lists(st.integers(1, 9), max_size=3).map(tuple)


# all operations and shapes differ: hypothesis likes to repeat what it drew
@pytest.mark.slow
@examples(12)
@given(
    program=st.lists(instruction, min_size=5, max_size=9, unique_by=lambda x: x[0]),
    shapes=st.lists(shape, min_size=2, max_size=3, unique=True),
    holding=st.sampled_from(list(HOLDING)),
    method=st.sampled_from(METHODS),
    kind=st.sampled_from(["2", "4", "2 x 2"]),
    seed=st.integers(0, 2**16),
)
def test_generated_optimizers_as_unsharded(
    program, shapes, holding, method, kind, seed
):
    tree = dict(zip(("a", "mu/a", "w"), shapes, strict=False))
    check(method, interpreted(program, holding), kind, data(tree, method, kind, seed))
