"""Collectives that the optimizer causes, told from those that the step asks for."""

import dataclasses

import jax
import optax
import pytest

import acco_jax
from acco_jax.methods import METHODS
from acco_jax.models import transformer
from acco_jax.plan import exports, planner, programs
from acco_jax.schedule import footprint, optimizer_collectives, topologies
from acco_jax.schedule.schedules import Collective

slow = pytest.mark.slow


def found(kind, size, dtype="bf16", group=8, times=1, hidden=True):
    return Collective(
        name=f"{kind}.{size}",
        kind=kind,
        bytes=size,
        dtype=dtype,
        asynchronous=hidden,
        start=0,
        done=1,
        where="ENTRY",
        times=times,
        groups=(tuple(range(group)),) if group else (),
        flops_between=int(hidden),
        flops_carried=None,
        whiles_between=(),
    )


def asked(kind, size, dtype="bf16", group=8, times=1):
    shape = (8 * size // footprint._bits(dtype),)
    return footprint.Transfer(kind, dtype, shape, group, times)


PAIR = [asked("reduce_scatter", 4096), asked("all_gather", 4096)]
LEAVES = [
    asked(kind, size)
    for kind in ("reduce_scatter", "all_gather")
    for size in (256, 1024, 4096)
]
SLICES = [
    asked("reduce_scatter", 4096, group=4),
    asked("reduce_scatter", 1024, group=2),
]
SLICES += [asked("all_gather", 1024, group=2), asked("all_gather", 4096, group=4)]


@pytest.mark.parametrize(
    ("wanted", "compiled", "own"),
    [
        (PAIR, [found("reduce-scatter", 4096), found("all-gather", 4096)], []),
        # v5e; a compiler that pads; one that sums in float32
        (PAIR, [found("all-reduce", 4096), found("all-gather", 4096)], []),
        (PAIR, [found("reduce-scatter", 4160), found("all-gather", 4160)], []),
        (PAIR, [found("reduce-scatter", 8192, "f32"), found("all-gather", 4096)], []),
        # one buffer instead of several leaves, and muon's gathers
        (
            LEAVES,
            [
                found("reduce-scatter", 5376),
                found("all-gather", 256),
                found("all-gather", 4096, "f32"),
                found("all-gather", 5376),
                found("all-reduce", 4, "f32"),
            ],
            [(1, 256), (2, 4096), (4, 4)],
        ),
        # leaves as they are, and one more gather of the same size
        (
            LEAVES,
            [
                *(found("reduce-scatter", size) for size in (256, 1024, 4096)),
                *(found("all-gather", size) for size in (256, 1024, 1024, 4096)),
            ],
            [(5, 1024)],
        ),
        # combined with one of the optimizer's
        (PAIR, [found("reduce-scatter", 4096), found("all-gather", 5120)], [(1, 1024)]),
        # in a loop
        (
            [asked("reduce_scatter", 512, times=12)],
            [found("reduce-scatter", 512, times=12), found("all-gather", 8, times=12)],
            [(1, 8)],
        ),
        # between slices the groups are unknown, and the smallest transfers padded
        (
            SLICES,
            [
                found("reduce-scatter", 4096, group=4),
                found("send-recv", 1024, group=0),
                found("send-recv", 512, "f32", group=0),
                found("send-recv", 2048, group=0),
                found("all-gather", 4096, group=4),
            ],
            [(2, 512)],
        ),
        # few bits
        (
            [asked("all_to_all", 1024, "ui32"), asked("all_gather", 2048, "ui8")],
            [found("all-to-all", 1024, "u32"), found("all-gather", 2048, "u8")],
            [],
        ),
        # the same groups of one device each are no communication
        ([asked("all_gather", 64, group=1)], [found("all-gather", 64)], [(0, 64)]),
    ],
)
def test_own(wanted, compiled, own):
    assert optimizer_collectives.own(compiled, wanted) == [
        (compiled[i], size) for i, size in own
    ]


MODEL = transformer.Config(512, 64, 256, 1, 4, pattern=("global",), dtype="bfloat16")
OPTIMIZERS = {
    "adamw": optax.adamw,
    "lamb": optax.lamb,
    "muon": optax.contrib.muon,
    "adafactor": optax.adafactor,
}


def own_of(name, machine="gpu:h200:1x8", slices=1):
    """Of acco around a clipped optimizer: kind -> number, bytes, hidden bytes."""
    topology = topologies.parse(machine, slices)
    mesh = programs.data_mesh(topology)
    params = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    inner = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[name](1e-3))
    program = programs.assemble(
        "acco",
        METHODS["acco"](inner, mesh=mesh, axis_name=mesh.axis_names),
        transformer.loss_fn(MODEL),
        params,
        microbatches=2,
        microbatch=(2, MODEL.max_length + 1),
    )
    own = planner.optimizers_own(program, program.compile(), topology)
    return own, exports.own_dict(own)


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_norms_are_a_few_bytes(name):
    own, kinds = own_of(name)
    assert kinds.keys() == {"all-reduce"}
    assert all(size <= 16 for _, size in own)
    assert kinds["all-reduce"]["number"] > (20 if name == "lamb" else 1)


@slow
def test_muon_gathers_each_matrix_once():
    """Its iterations read it whole; only the embeddings are matrices here."""
    own, kinds = own_of("muon")
    assert kinds["all-gather"]["bytes"] == 4 * 256 * (512 + 64)
    rest = [size for c, size in own if c.kind != "all-gather"]
    assert all(size <= 32 for size in rest)  # norms
    assert {c.dtype for c, _ in own} == {"f32"}  # the exchange's are bfloat16


@pytest.mark.long
def test_adafactor_reduces_rows_or_columns():
    own, kinds = own_of("adafactor")
    assert {c.kind for c, _ in own} <= {"all-reduce", "reduce-scatter", "all-gather"}
    # sums over what is split, of which each worker may need its own part alone
    reduced = [size for c, size in own if c.kind != "all-gather"]
    assert sum(reduced) >= 4 * 4 * 256
    total = sum(kind["bytes"] for kind in kinds.values())
    assert total < 4 * 4 * (512 + 64 + 12 * 256 + 4 * 1024)


@slow
def test_one_axis_over_slices_is_not_told():
    topology = topologies.parse("tpu:v6e:2x2", 2)
    mesh = programs.data_mesh(topology, domains=1)
    tx = acco_jax.zero1(optax.sgd(1.0), mesh=mesh)
    program = dataclasses.make_dataclass("Program", ["tx"])(tx)
    compiled = programs.Compiled("", None, None, 0.0, None, ())
    assert planner.optimizers_own(program, compiled, topology) is None
