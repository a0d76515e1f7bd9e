"""What hides behind what, in programs compiled for machines that are not here.

The model has GPT-2-small's sizes (width 768, 12 heads, 12 layers, vocabulary 50304,
sequences of 1024 tokens), RMSNorm and no biases: the fewer leaves, the fewer kernels a
GPU's compiler makes, which is what its time goes to. Its layers are a loop, so that
their number costs no compile time, but in one case, as on GPUs by default. Every
machine's program is compiled once and all that must hold of it is asserted together. A
chip that the installed compiler does not know is skipped. `make test` holds one GPU
machine, `make test-all` more and a TPU's with a smaller model, `make test-long` the
rest.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.methods import METHODS
from acco_jax.models import transformer
from acco_jax.plan import programs
from acco_jax.run.config.fields import default_config
from acco_jax.schedule import schedules, topologies
from acco_jax.schedule.footprint import bytes_held
from acco_jax.schedule.schedules import hidden_share

MODEL = transformer.Config(
    vocab_size=50304,
    max_length=1024,
    width=768,
    layers=12,
    heads=12,
    pattern=("global",),
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
    scan_layers=True,
    norm="rms",
    biases=(),
)
ROWS = 2  # of a microbatch
slow, long = pytest.mark.slow, pytest.mark.long

# A method's hidden fraction of the data axis's bytes: lowest and highest.
HIDDEN = {"acco": (1.0, 1.0), "zero1": (0.0, 0.01)}


def case(method, machine, microbatches, *, model=1, dynamic=False, marks=slow):
    name = f"{method}-{machine}-{microbatches}"
    name += ("-dynamic" if dynamic else "") + (f"-model{model}" if model > 1 else "")
    return pytest.param(
        method,
        machine,
        microbatches,
        model,
        dynamic,
        id=name,
        marks=marks,
    )


CASES = [
    case("acco", "gpu:h200:2x8", 4, marks=()),
    case("zero1", "gpu:h200:2x8", 4),
    case("acco", "gpu:h200:2x8", 1, marks=long),
    case("acco", "gpu:h200:2x8", 2, marks=long),
    case("acco", "gpu:h200:2x8", 3, dynamic=True),
    case("acco", "gpu:h200:1x8", 4, marks=long),
    case("acco", "gpu:h200:16x8", 4, marks=long),
    case("acco", "gpu:h200:2x8", 4, model=2, marks=long),
    case("acco", "tpu:v6e:4x4", 4, marks=long),
    case("zero1", "tpu:v6e:4x4", 4, marks=long),
    case("acco", "tpu:v6e:4x4", 1, marks=long),
    case("acco", "tpu:v6e:4x4", 3, dynamic=True, marks=long),
    case("acco", "tpu:v5e:4x4", 4, marks=long),
    case("zero1", "tpu:v5e:4x4", 4, marks=long),
    case("acco", "tpu:v5e:4x4", 3, dynamic=True, marks=long),
    case("acco", "tpu:v5p:2x2x2", 4, marks=long),
    case("acco", "tpu:tpu7x:2x2x2", 4, marks=long),
]

# What a compiler makes of a collective that it was not asked for.
INSTEAD = {("v5e", "reduce-scatter"): "all-reduce"}


def specs(params):
    """Tensor parallelism: columns of a product, then rows of the next."""

    def of(path, x):
        name = jax.tree_util.keystr(path)
        if "wte" in name:
            return P(None, "model")
        if "kernel" in name:
            rows = "c_proj" in name or "out_proj" in name
            return P(None, "model", None) if rows else P(None, None, "model")
        return P()

    return jax.tree_util.tree_map_with_path(of, params)


def described(method, machine, microbatches, model, dynamic, **further):
    topology = topologies.parse(machine)
    modules = topologies._PLUGINS[topology.platform]
    assert any(map(topologies._installed, modules)), (
        f"no {topology.platform} compiler: pip install 'acco-jax[plan]'"
    )
    try:
        mesh = topologies.mesh(topology, model=model)
    except ValueError as error:  # this libtpu does not know the chip
        pytest.skip(str(error))
    params = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    options = {"param_specs": specs(params)}
    if model == 1:
        mesh, options = programs.data_mesh(topology), {}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    workers = topology.devices // model
    return programs.assemble(
        method,
        METHODS[method](inner, mesh=mesh, **options),
        transformer.loss_fn(MODEL),
        params,
        microbatches=microbatches,
        microbatch=(ROWS, MODEL.max_length + 1),
        # workers of unequal speed: all but the first compute all
        counts=(microbatches - 1, *[microbatches] * (workers - 1)) if dynamic else (),
        **further,
    )


@pytest.mark.parametrize(
    ("method", "machine", "microbatches", "model", "dynamic"), CASES
)
def test_hidden(method, machine, microbatches, model, dynamic):
    program = described(method, machine, microbatches, model, dynamic)
    check(program, method, machine, microbatches, model)


@pytest.mark.slow
def test_hidden_on_a_tpu(monkeypatch):
    """A small model: for GPT-2's sizes a TPU's compiler takes minutes."""
    small = {"vocab_size": 2048, "max_length": 128, "width": 128, "heads": 2}
    monkeypatch.setitem(globals(), "MODEL", dataclasses.replace(MODEL, **small))
    program = described("acco", "tpu:v6e:4x4", 4, 1, dynamic=False)
    check(program, "acco", "tpu:v6e:4x4", 4, 1)


@pytest.mark.slow
def test_layers_with_code_of_their_own(monkeypatch):
    """As on GPUs by default: no loop over layers, the same bytes beside the same."""
    own = dataclasses.replace(MODEL, scan_layers=None, layers=3)
    monkeypatch.setitem(globals(), "MODEL", own)
    program = described("acco", "gpu:h200:2x8", 4, 1, dynamic=False)
    loops = check(program, "acco", "gpu:h200:2x8", 4, 1).loops
    assert all(x.iterations != MODEL.layers for x in loops)


@pytest.mark.parametrize(
    ("form", "microbatches"),
    [("lowered", 1), ("lowered", 2), pytest.param("compiled", 1, marks=long)],
)
def test_loops_that_run_once_stay_loops_of_known_length(form, microbatches):
    """An unknown length makes the host wait for the device before each of them."""
    program = described("acco", "gpu:h200:1x8", microbatches, 1, dynamic=False)
    if form == "lowered":
        text = program.step.lower(*program.arguments).as_text()
        loops = [x for x in text.splitlines() if "stablehlo.while" in x]
        assert sum("trip-count-one" in x for x in loops) == 2 < len(loops)
        return
    loops = schedules.read(program.compile().text).loops
    assert all(x.iterations is not None for x in loops)
    once = [x for x in loops if x.iterations == 1 and x.where == "ENTRY"]
    assert len(once) == 2  # a microbatch's forward and backward pass, or two of them


def test_one_worker_has_one_loop():
    """Nothing is sent: pieces would be a second copy of the model to compile."""
    found = []
    for machine in "gpu:h200:1x1", "gpu:h200:1x8":
        program = described("acco", machine, 4, 1, dynamic=False)
        text = program.step.lower(*program.arguments).as_text()
        found.append(text.count("stablehlo.while"))
    layers = 2  # forward and backward, in a function that the pieces share
    assert found == [1 + layers, 2 + layers]


def check(program, method, machine, microbatches, model):
    """Assert what must hold of a program's schedule, and return it."""
    compiled = program.compile()
    schedule = compiled.schedule
    found = program.of_data(schedule, 1 << 20)
    print(f"\n{compiled.seconds:.0f} s to compile\n{schedule.summary()}")

    # One reduce-scatter and one all-gather of the parameters' size, nothing else.
    chip = machine.split(":")[1]
    asked = ("reduce-scatter", "all-gather")
    assert [c.kind for c in found] == [INSTEAD.get((chip, k), k) for k in asked]
    split = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(program.arguments[0])
    )
    for c in found:
        assert split <= c.bytes <= 1.02 * split
        assert (c.where, c.times, c.dtype) == ("ENTRY", 1, "bf16")

    lowest, highest = HIDDEN[method]
    hidden = hidden_share(program.of_data(schedule, 1 << 20))
    assert lowest <= hidden <= highest
    if method == "acco":  # behind the microbatches' own products, a half behind each
        total = sum(c.flops_between for c in found)
        assert all(c.flops_between >= 0.3 * schedule.flops for c in found)
        assert total >= 0.95 * schedule.flops

    # What the trip counts come to: the busiest worker's microbatches, counted whole.
    one = schedule.flops / microbatches
    tokens = ROWS * MODEL.max_length
    want = transformer.flops_per_token(MODEL, MODEL.max_length) * tokens / model
    assert one == pytest.approx(want, rel=0.1)
    return schedule


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine",
    [
        "gpu:h200:2x8",
        pytest.param("tpu:v6e:4x4", marks=long),
        pytest.param("tpu:v5p:2x2x2", marks=long),
    ],
)
def test_a_first_half_of_one_microbatch_hides_both(machine):
    """Its collectives are as well hidden as those of the half with three."""
    program = described("acco", machine, 3, 1, dynamic=False, halves=(1, 3))
    first, second = (part.compile().schedule for part in program.parts)
    for schedule in first, second:
        kinds = [c.kind for c in program.of_data(schedule, 1 << 20)]
        assert kinds == ["reduce-scatter", "all-gather"]
        assert hidden_share(program.of_data(schedule, 1 << 20)) == 1.0
        beside = [c.flops_between for c in program.of_data(schedule, 1 << 20)]
        assert min(beside) >= 0.3 * schedule.flops
    assert second.flops == pytest.approx(3 * first.flops, rel=0.02)


FSDP = "gpu:h100:8x8", {"mesh.fsdp": 8}, {"all-gather", "reduce-scatter"}
TENSOR = "gpu:h100:2x8", {"mesh.tensor": 2}, {"all-reduce"}
GROUPS = [pytest.param(*FSDP, marks=slow), pytest.param(*TENSOR, marks=long)]


@pytest.mark.parametrize(("machine", "group", "kinds"), GROUPS)
def test_groups(machine, group, kinds):
    """The data axis's bytes are hidden while each group's collectives run in loops."""
    c = default_config()
    c.model.size, c.model.vocab_size = "gpt-neo-125m", 50264
    c.microbatch_size, c.microbatches_per_step, c.length = 16, 8, 512
    c.update_from_flattened_dict(group)
    mesh = programs.data_mesh(topologies.parse(machine), None, c.mesh)
    program = programs.describe(c, mesh)
    schedule = program.compile().schedule
    assert hidden_share(program.of_data(schedule, 1 << 20)) == 1.0
    own = [x for x in schedule.select() if program.in_group(x)]
    assert {x.kind for x in own} >= kinds and any(x.times > 1 for x in own)
    data = program.of_data(schedule, 1 << 20)
    assert [x.kind for x in data] == ["reduce-scatter", "all-gather"]
    split = bytes_held(program.arguments[0])  # what a device has of the parameters
    assert all(split <= x.bytes <= 1.02 * split for x in data)


@pytest.mark.long
@pytest.mark.parametrize(
    "machine", ["tpu:v5e:4x4", "tpu:v6e:4x4", "tpu:v5p:2x2x4", "tpu:tpu7x:2x2x2"]
)
@pytest.mark.parametrize("group", [{"fsdp": 4}, {"tensor": 2}], ids=str)
def test_groups_of_chips(machine, group):
    """A chip sends what it has of the parameters, beside loops with collectives."""
    c = default_config()
    c.model.width, c.model.heads, c.model.vocab_size = 256, 4, 1024
    c.microbatch_size, c.microbatches_per_step, c.length = 8, 4, 128
    c.model.dtype = c.model.param_dtype = "bfloat16"
    c.mesh.update(group)
    mesh = programs.data_mesh(topologies.parse(machine), None, c.mesh)
    program = programs.describe(c, mesh)
    schedule = program.compile().schedule
    assert any(program.in_group(x) and x.times > 1 for x in schedule.select(1))
    data, n = program.of_data(schedule, 1 << 16), program.arguments[1].layout.workers
    assert [x.kind for x in data] == ["collective-permute"] * 2 * (n - 1)
    split = bytes_held(program.arguments[0])  # what a chip has of the parameters
    assert all(split <= n * x.bytes <= 1.05 * split for x in data)
    assert hidden_share(data) == 1.0


FEW = {"gather_bits": 8, "reduce_bits": 8}
DOMAINS = {  # topology, slices, options: kinds and dtypes, and parts of all bytes
    "slices": (
        "tpu:v6e:2x2",
        2,
        {},
        ["reduce-scatter bf16", "send-recv bf16", "send-recv bf16", "all-gather bf16"],
        [1, 1 / 4, 1 / 4, 1],
    ),
    "slices in few bits": (
        "tpu:v6e:2x2",
        2,
        FEW,
        ["reduce-scatter bf16", "send-recv u32", "send-recv u32", "all-gather u32"],
        [1, 1 / 8, 1 / 8, 1 / 2],
    ),
    "hosts": (
        "gpu:h200:2x8",
        1,
        {},
        ["reduce-scatter bf16", "reduce-scatter bf16"] + 2 * ["all-gather bf16"],
        [1, 1 / 8, 1 / 8, 1],
    ),
    "hosts in few bits": (
        "gpu:h200:2x8",
        1,
        FEW,
        ["reduce-scatter bf16", "all-to-all u32", "all-gather u32", "all-gather u32"],
        [1, 1 / 16, 1 / 16, 1 / 2],
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=slow if n == "hosts" else long) for n in DOMAINS],
)
def test_two_data_axes(name):
    """Each network has its own collectives, and each of the four its own products."""
    machine, slices, options, kinds, parts = DOMAINS[name]
    topology = topologies.parse(machine, slices=slices)
    mesh = programs.data_mesh(topology, domains=2)
    params = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    program = programs.assemble(
        "acco",
        METHODS["acco"](
            optax.adamw(1e-3), mesh=mesh, axis_name=mesh.axis_names, **options
        ),
        transformer.loss_fn(MODEL),
        params,
        microbatches=8,
        microbatch=(ROWS, MODEL.max_length + 1),
    )
    schedule = program.compile().schedule
    print(f"\n{schedule.summary()}")
    found = program.of_data(schedule, 1 << 20)
    assert [f"{c.kind} {c.dtype}" for c in found] == kinds
    whole = 2 * program.parameters
    shares = [c.bytes / whole for c in found]
    # a transfer between slices is counted whole: what a chip's own slice left it
    assert shares == pytest.approx(parts, rel=0.02)
    assert hidden_share(program.of_data(schedule, 1 << 20)) == 1.0
    assert all(c.flops_between >= 0.2 * schedule.flops for c in found)


@long
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_memory(microbatches):
    """Beside activations: (10 + (K + 4) / n) bytes for each of Psi parameters.

    Ten are parameters, in-flight gradients, accumulated ones, those of the microbatch
    under way and gathered parameters; (K + 4) / n are master copy, moments and carry.
    Activations are what one microbatch's value_and_grad needs beyond its parameters
    and gradients.
    """
    program = described("acco", "gpu:h200:1x8", microbatches, 1, False)
    params, _, batch, _ = program.arguments
    tokens = batch["tokens"]
    shape = (tokens.shape[0] // microbatches, tokens.shape[1])
    one = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=tokens.sharding)}

    def gradients(params, batch):  # each worker's own
        loss = lambda params: transformer.loss_fn(MODEL)(params, batch, None)[0]  # noqa: E731
        return jax.tree.map(lambda g: g[None], jax.value_and_grad(loss)(params))

    alone = jax.shard_map(
        gradients,
        mesh=program.mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    m = jax.jit(alone).lower(params, one).compile().memory_analysis()
    psi, n = program.parameters, program.workers
    needed = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    activations = needed - m.alias_size_in_bytes - 4 * psi
    beside = (program.compile().memory.total - activations) / psi
    print(f"\n{beside:.2f} bytes per parameter beside the activations")
    assert beside <= 10 + (12 + 4) / n


@long
def test_fused_zero1_lies_in_between():
    """Most of its reduce-scatters hide, the embedding's and the all-gather do not."""
    program = described("fused_zero1", "gpu:h200:2x8", 2, 1, False)
    schedule = program.compile().schedule
    print(f"\n{schedule.summary()}")
    found = program.of_data(schedule, 1 << 20)
    assert {c.kind for c in found} == {"reduce-scatter", "all-gather"}
    assert any(c.hidden and c.times > 1 for c in found)  # inside the backward loop
    assert 0.1 < hidden_share(program.of_data(schedule, 1 << 20)) < 0.9


LOCAL = {
    "co2": ({"local_steps": 4}, ["reduce-scatter", "all-gather"]),
    "streaming_diloco": (
        {"local_steps": 24, "fragments": 4, "overlap_steps": 4, "bits": 8},
        ["all-to-all", "all-gather"],
    ),
    "gossip": ({"topology": "exponential"}, ["collective-permute"]),
}


@long
@pytest.mark.parametrize("method", LOCAL)
def test_exchanges_hide_behind_inner_steps(method):
    (options, kinds), machine = LOCAL[method], topologies.parse("gpu:h200:2x8")
    params = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    program = programs.assemble(
        method,
        METHODS[method](optax.adamw(1e-3), mesh=programs.data_mesh(machine), **options),
        transformer.loss_fn(MODEL),
        params,
        microbatches=2,
        microbatch=(ROWS, MODEL.max_length + 1),
    )
    schedule = program.compile().schedule
    print(f"\n{schedule.summary()}")
    found = program.of_data(schedule, 1 << 20)
    assert [c.kind for c in found] == kinds
    assert [c.dtype for c in found if c.kind == "all-to-all"] == (
        ["u32"] if "bits" in options else []
    )
    assert hidden_share(program.of_data(schedule, 1 << 20)) == 1
    assert program.parameters == transformer.count_params(MODEL)


@pytest.mark.long
def test_what_does_not_fit_says_so():
    program = described("acco", "tpu:v6e:4x4", 1, 1, False)
    tokens = program.arguments[2]["tokens"]
    huge = jax.ShapeDtypeStruct(
        (2048 * 16, tokens.shape[1]), tokens.dtype, sharding=tokens.sharding
    )
    arguments = (*program.arguments[:2], {"tokens": huge}, None)
    program = dataclasses.replace(program, arguments=arguments)
    with pytest.raises(programs.DoesNotFit, match=r"needs .*[GT] of 31.25G of memory"):
        program.compile()


@slow
def test_a_model_state_leaves_both_collectives_hidden():
    """Batch-norm statistics travel with the weights, before the first microbatch."""
    mesh, width, rows = programs.data_mesh(topologies.parse("gpu:h200:1x8")), 2048, 512

    def loss_fn(params, x, rng, state):
        new = {}
        for name, w in params.items():
            x = x @ w
            mean, var = x.mean(0), x.var(0)
            new[name] = state[name] + 0.1 * (jnp.stack([mean, var]) - state[name])
            x = jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5))
        return jnp.sum(x.astype(jnp.float32) ** 2), 1.0, {}, new

    abstract = jax.ShapeDtypeStruct
    params = {k: abstract((width, width), jnp.bfloat16) for k in "abcd"}
    state = {k: abstract((2, width), jnp.float32) for k in "abcd"}
    tx = METHODS["acco"](optax.adamw(1e-3), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=4, form="fused")
    args = acco_jax.abstract_start(tx, params, state)
    batch = abstract(
        (mesh.size * 4 * rows, width),
        jnp.bfloat16,
        sharding=jax.NamedSharding(mesh, jax.P("data")),
    )
    schedule = schedules.read(step.lower(*args, batch).compile().as_text())
    assert [x.kind for x in schedule.select()] == ["reduce-scatter", "all-gather"]
    assert schedule.hidden_fraction() == 1.0
    statistics = 4 * 2 * width * 4
    small = [x.bytes for x in schedule.select(min_bytes=0) if x.bytes < 1 << 20]
    assert statistics <= max(small) <= statistics + 64
