"""Bytes of an optimizer step, and what packing them costs, read off GPU programs."""

import functools

import jax
import optax
import pytest

from acco_jax import acco
from acco_jax.models import transformer
from acco_jax.plan import programs
from acco_jax.schedule import costs, machines, topologies
from tests.schedule.test_hidden import MODEL, ROWS

slow, long = pytest.mark.slow, pytest.mark.long
MACHINE = topologies.parse("gpu:h200:1x8")


@functools.cache
def compiled(gather_bits, reduce_bits):
    """(schedule, memory, prediction) of a half-round of bf16 GPT-2 small."""
    mesh = programs.data_mesh(MACHINE)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    made = programs.assemble(
        "acco",
        acco(inner, mesh=mesh, gather_bits=gather_bits, reduce_bits=reduce_bits),
        transformer.loss_fn(MODEL),
        jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0))),
        microbatches=2,
        microbatch=(ROWS, MODEL.max_length + 1),
    ).compile()
    machine = machines.Machine(MACHINE, machines.figures(MACHINE.chip))
    prediction = costs.predict(made.schedule, machine, MACHINE.devices)
    print(f"\n{gather_bits} {reduce_bits}\n{made.schedule.summary()}\n{made.memory}")
    for field in ("computation", "communication", "exposed"):
        print(f"{field} {1e3 * getattr(prediction, field):.3f} ms")
    return made.schedule, made.memory, prediction


@pytest.mark.parametrize(
    ("gather_bits", "reduce_bits", "share"),
    [
        pytest.param(8, 8, 0.5, marks=slow),
        *(
            pytest.param(*case, marks=long)
            for case in ((8, None, 0.75), (4, None, 0.65), (4, 8, 0.40))
        ),
    ],
)
def test_bytes_of_plain_bf16(gather_bits, reduce_bits, share):
    schedule, memory, _ = compiled(gather_bits, reduce_bits)
    found = schedule.select()
    reduce = ("all-to-all", "u32") if reduce_bits else ("reduce-scatter", "bf16")
    assert [(c.kind, c.dtype) for c in found] == [reduce, ("all-gather", "u32")]
    assert all((c.where, c.times, c.asynchronous) == ("ENTRY", 1, True) for c in found)
    plain = 1.01 * 2 * memory.parts["parameters"]  # both of their size, with padding
    assert sum(c.bytes for c in found) <= share * plain
    assert schedule.hidden_fraction() == 1


@long
@pytest.mark.parametrize(
    ("gather_bits", "reduce_bits"), [(8, 8), (8, None), (4, None), (4, 8)]
)
def test_what_packing_costs(gather_bits, reduce_bits):
    plain, whole, before = compiled(None, None)
    _, memory, after = compiled(gather_bits, reduce_bits)
    sent = 2 * memory.parts["parameters"]
    assert sum(c.bytes for c in plain.select()) == pytest.approx(sent, rel=0.02)
    # What it waits for is what plain acco waits for: scalars. The quicker a collective,
    # the later XLA starts it, maybe beside operations that hold no matrix product.
    assert after.exposed <= before.exposed + 0.02 * after.communication
    # what encoding and decoding read and write, in bytes a parameter: 31 here, whatever
    # the model computes (1.036 times a half-round of 28.2 ms, 1.079 times one of 12.8)
    machine = machines.Machine(MACHINE, machines.figures(MACHINE.chip))
    rate = machine.value("memory_bandwidth") * machine.value("memory_efficiency")
    parameters = memory.parts["parameters"] / 2
    moved = (after.computation - before.computation) * rate / parameters
    assert 0 < moved <= 33
    # at most a byte per parameter more: what arrives in 8 bits, before it is added up
    assert memory.temporaries <= whole.temporaries + memory.parts["parameters"] / 2
