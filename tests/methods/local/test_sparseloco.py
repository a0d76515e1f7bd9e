"""sparseloco against a NumPy loop written from its equations, and what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.methods.local.sparse import Message, packed, unpacked
from acco_jax.schedule.footprint import bytes_sent
from tests.methods.local import problem
from tests.methods.local.test_cellm import flat, states, tree
from tests.methods.local.test_rounds import HELD
from tests.reference import make_mesh

STEPS, CALLS, CHUNK = 2, 5, 4096
ALPHA, BETA = 0.7, 0.9


@pytest.fixture
def wide(monkeypatch):
    """The problem with 4203 parameters: a chunk of 4096 and a part of one."""
    monkeypatch.setattr(problem, "INPUTS", 1400)
    monkeypatch.setattr(problem, "SHAPES", {"b": (3,), "w": (1400, 3)})
    monkeypatch.setattr(problem, "RATE", 1e-3)


def quantized(values, bits):
    """Q of the values that one chunk sends."""
    size, intervals = np.abs(values), 2 ** (bits - 1)
    ends = [size.min(), (size.max() - size.min()) / intervals]
    if size.min() == 0:  # the middle of the first interval
        ends[1] = size.max() / (intervals - 1)
    low, step = np.array(ends).astype(jnp.bfloat16).astype(float)
    low = low or -step / 2
    m = np.clip(np.floor((size - low) / step), 0, intervals - 1)
    return np.sign(values) * (low + (m + 0.5) * step)


def sent_of(error, k, bits):
    sent = np.zeros_like(error)
    for start in range(0, error.size, CHUNK):
        part = error[start : start + CHUNK]
        places = np.argsort(-np.abs(part), kind="stable")[:k]
        sent[start + places] = quantized(part[places], bits)
    return sent


def by_hand(drawn, workers, k, bits, *, weighted):
    """Every round's theta, and every worker's e_r."""
    theta, batches, counts = drawn
    inner = [problem.AdamW() for _ in range(workers)]
    theta, errors = flat(theta), [np.zeros(flat(theta).size) for _ in range(workers)]
    points = []
    for batch, count in zip(batches, counts, strict=True):
        total, weights = 0.0, 0.0
        for r in range(workers):
            at, w = problem.local_steps(
                tree(theta), inner[r], batch, r, count[r], STEPS, HELD
            )
            w = w if weighted else float(w > 0)
            if w > 0:
                error = BETA * errors[r] + w * (theta - flat(at))
                sent = sent_of(error, k, bits)
                errors[r] = error - sent
                total, weights = total + sent, weights + w
        if weights > 0:
            theta = theta - ALPHA * total / weights
        points.append((theta, list(errors)))
    return points


@pytest.mark.usefixtures("x64", "wide")
@pytest.mark.fast("2-2-True")
@pytest.mark.parametrize(
    ("workers", "bits", "weighted"), [(1, 3, True), (2, 2, True), (4, 4, False)]
)
def test_follows_its_equations(workers, bits, weighted):
    """Unequal counts; one worker drops out of the second round and comes back."""
    drawn = problem.draw(workers, STEPS, HELD, CALLS)
    assert drawn[2][1][-1] == 0
    tx = acco_jax.sparseloco(
        problem.adamw(), mesh=make_mesh(workers), local_steps=STEPS, keep=60,
        value_bits=bits, error_decay=BETA, outer_learning_rate=ALPHA,
        weighted=weighted,
    )  # fmt: skip
    expected = by_hand(drawn, workers, 60, bits, weighted=weighted)
    before = np.zeros((workers, flat(drawn[0]).size))
    for (rows, committed, error), (theta, errors), count in zip(
        states(tx, *drawn), expected, drawn[2], strict=True
    ):
        problem.assert_close(committed, tree(theta))
        for k in problem.SHAPES:  # everyone starts the next round from there
            np.testing.assert_array_equal(rows[k], np.stack([committed[k]] * workers))
        now = np.stack(
            [flat({k: e[i] for k, e in error.items()}) for i in range(workers)]
        )
        np.testing.assert_allclose(now, np.stack(errors), rtol=0, atol=1e-8)
        assert now[count > 0].any() or not count.any()
        np.testing.assert_array_equal(now[count == 0], before[count == 0])
        before = now


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_message(bits):
    """Places arrive, values are off by half an interval, for all devices alike."""
    draw = np.random.default_rng(bits)
    message, rows = Message(41, CHUNK, bits), 3
    places = np.stack([draw.permutation(CHUNK)[:41] for _ in range(rows)])
    values = draw.normal(size=(rows, 41)).astype(np.float32)
    values[1] = 0  # of a worker without weight, or padding
    values[2] = -1.5
    args = jnp.asarray(places, jnp.int32), jnp.asarray(values), jnp.float32

    def there_and_back():
        sent = message.encode(*args)
        for x, shape in zip(sent, message.shapes(rows, jnp.float32), strict=True):
            assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        return sent, message.decode(*sent, jnp.float32)

    sent, (at, found) = jax.jit(there_and_back)()
    np.testing.assert_array_equal(at, places)
    np.testing.assert_array_equal(found, message.decode(*sent, jnp.float32)[1])
    np.testing.assert_array_equal(found[1:], values[1:])
    assert (np.sign(found[0]) == np.sign(values[0])).all()
    size = np.abs(values[0])
    half = (size.max() - size.min()) / 2**bits
    assert np.abs(found[0] - values[0]).max() <= half + size.max() * 2.0**-7
    np.testing.assert_allclose(found[0], quantized(values[0], bits), rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_zeros_among_the_largest_are_sent_as_zeros(bits):
    """Of a chunk with fewer nonzero entries than are sent, for all devices alike."""
    message = Message(41, CHUNK, bits)
    values = np.zeros((2, 41), np.float32)
    values[0, :9] = np.random.default_rng(bits).normal(size=9)
    values[1, 3] = -0.3
    places = jnp.tile(jnp.arange(41), (2, 1))
    sent = message.encode(places, jnp.asarray(values), jnp.float32)
    for decode in (message.decode, jax.jit(message.decode, static_argnums=2)):
        found = np.asarray(decode(*sent, jnp.float32)[1])
        np.testing.assert_array_equal(found[values == 0], 0)
        for row, of in zip(found, values, strict=True):
            np.testing.assert_array_equal(row, quantized(of, bits))
        high = np.abs(values).max(1, keepdims=True)
        half = high / (2 ** (bits - 1) - 1) / 2
        assert np.all(np.abs(found - values) <= half + high * 2.0**-8)


@pytest.mark.parametrize("bits", [1, 14])
def test_packing(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 7))
    sent = packed(jnp.asarray(codes, jnp.int32), bits)
    assert sent.size == -(-35 * bits // 8)
    np.testing.assert_array_equal(unpacked(sent, bits, (5, 7)), codes)


def sent_by(make, workers, **options):
    """Bytes of one round for 1.05M bfloat16 parameters, with few inner steps."""
    tx = make(optax.adamw(1e-3), mesh=make_mesh(workers), local_steps=2, **options)
    step = acco_jax.make_train_step(
        lambda p, x, rng: jnp.mean((x @ p["w"]) ** 2), tx, microbatches=1
    )
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    state = acco_jax.abstract_start(tx, params)
    batch = jax.ShapeDtypeStruct((2 * workers, 1024), jnp.bfloat16)
    return bytes_sent(*step.lowered(*state, batch))


@pytest.mark.fast("2")
@pytest.mark.parametrize("workers", [2, 8])
def test_sends_216_over_n_times_fewer_bytes(workers):
    """Than diloco in bfloat16, at 1 % and 2 bits: 108 times between two workers."""
    sparse = sent_by(acco_jax.sparseloco, workers, keep=0.01, value_bits=2)
    chunk = 41 * (12 + 2) + 2 * 16  # bits
    assert sparse == (workers - 1) * 256 * chunk / 8
    dense = sent_by(acco_jax.diloco, workers)
    assert dense >= 4 * (workers - 1) / workers * 1024**2
    assert dense / sparse == pytest.approx(216.3 / workers, rel=0.01)


REFUSED = [
    ({"keep": 0}, "keep is 0: give the part"),
    ({"keep": 4097}, "keep is 4097: give the part"),
    ({"value_bits": 1}, "value_bits is 1: choose 2, 3 or 4"),
    ({"value_bits": 8}, "value_bits is 8: choose 2, 3 or 4"),
    ({"error_decay": 1.5}, "error_decay is 1.5: it must lie from 0 to 1"),
    ({"local_steps": 0}, "local_steps is 0"),
    ({"outer": "adam"}, "outer is a str: give a plain optax optimizer"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message) as error:
        acco_jax.sparseloco(optax.sgd(1.0), mesh=make_mesh(2), **options)
    assert "\n" not in str(error.value)
