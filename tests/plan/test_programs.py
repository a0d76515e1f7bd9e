"""The program that is planned is that of training; nothing is compiled here."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core.groups import of_chips
from acco_jax.methods import METHODS
from acco_jax.plan import programs
from acco_jax.run.build import models
from acco_jax.run.config.fields import default_config
from acco_jax.schedule import program_cache, topologies
from tests.schedule.recordings import recorded, reduced, text_of


@pytest.mark.parametrize(
    ("name", "slices", "domains", "said"),
    [
        ("gpu:h200:2x8", 1, 4, "domains is 4, but gpu:h200:2x8 has 2 hosts: give that"),
        ("tpu:v5e:4x4", 2, 3, "has 2 slices: give that or 1"),
        ("gpu:h200:2x8", 1, 0, "domains is 0"),
    ],
)
def test_domains_are_hosts_or_slices(name, slices, domains, said):
    with pytest.raises(ValueError, match=said):
        programs.data_mesh(topologies.parse(name, slices), domains)


def test_groups_lie_on_a_torus_as_training_lays_them():
    """A row of four chips is one, where the hosts count a square."""
    topology = topologies.parse("tpu:v5e:4x4")
    config = default_config()
    config.mesh.fsdp = 4
    mesh = programs.data_mesh(topology, None, config.mesh)
    program = programs.describe(config, mesh)
    (own,) = program.read(reduced(16, 4)).collectives
    assert program.in_group(own)
    for group in own.groups:
        assert len({topology.coordinates[i][1] for i in group}) == 1


def test_a_group_may_be_a_part_of_an_axis_of_the_torus():
    """Of a v6e's 4 x 4 chips `jax.make_mesh` has no pairs."""
    topology = topologies.parse("tpu:v6e:4x4")
    mesh = programs.data_mesh(topology, None, {"tensor": 2})
    assert dict(mesh.shape) == {"data": 8, "tensor": 2}
    places = np.array(topologies.places(mesh)).reshape(8, 2)
    for one, other in places:  # of neighbours
        at = np.array([topology.coordinates[one], topology.coordinates[other]])
        assert np.abs(at[0] - at[1]).sum() == 1


@pytest.mark.parametrize(
    ("machine", "group", "chips", "permutes"),
    [
        ("tpu:v5e:2x4", 2, True, True),
        ("tpu:v5e:4x4", 4, True, True),
        ("tpu:v5e:4x8", 4, True, False),  # whose chips send only so far
        ("tpu:v6e:4x8", 4, True, True),
        ("tpu:v5e:2x4", 1, False, False),
        ("gpu:h100:2x4", 2, False, False),
    ],
)
def test_workers_that_are_groups_of_chips(machine, group, chips, permutes):
    """There the methods that overlap exchange by permutes."""
    topology = topologies.parse(machine)
    mesh = programs.data_mesh(topology, None, {"fsdp": group})
    assert of_chips(mesh, ("data",)) == chips
    assert not of_chips(mesh.abstract_mesh, ("data",))
    for name in "acco", "dpu", "zero1", "ddp":
        tx = METHODS[name](optax.sgd(1.0), mesh=mesh, param_specs={"w": P()})
        _, state = acco_jax.abstract_start(
            tx, {"w": jax.ShapeDtypeStruct((8, 8), "f4")}
        )
        assert state.layout.permutes == (permutes and name in ("acco", "dpu"))


def test_one_data_axis_over_slices():
    mesh = programs.data_mesh(topologies.parse("tpu:v5e:4x4", 2), 1)
    assert dict(mesh.shape) == {"data": 32}
    assert [d.slice_index for d in mesh.devices] == [0] * 16 + [1] * 16
    assert sorted(topologies.places(mesh)[16:]) == list(range(16, 32))


def test_what_more_devices_divide(stand_in):
    mesh, config = programs.data_mesh(None), default_config()
    sizes = {}
    for name in ("acco", "ddp", "diloco"):
        config.method = name
        program = programs.describe(config, mesh)
        memory = program.held()
        assert memory.total == sum(memory.parts.values()) and not memory.temporaries
        sizes[name] = memory
    psi = 4 * program.parameters  # bytes of one float32 copy
    whole = sizes["acco"].parts
    assert sizes["acco"].shards == pytest.approx(4 * psi / 8, rel=0.02)
    assert {"master weights (shard)", "optimizer state (shard)"} <= set(whole)
    assert sizes["ddp"].shards == 0 and "optimizer state" in sizes["ddp"].parts
    assert sizes["diloco"].shards == pytest.approx(2 * psi / 8, rel=0.02)
    assert sizes["diloco"].parts["optimizer state"] == pytest.approx(2 * psi, rel=0.02)


def test_the_program_is_that_of_training(stand_in):
    """The same step, model and microbatches as training's preparation has."""
    mesh = programs.data_mesh(None)
    config = default_config()
    config.microbatches_per_step, config.counts = 6, (1, 2, 3, 3, 3, 3, 3, 3)
    program = programs.describe(config, mesh)
    params, state, batch, counts = program.arguments
    assert (program.microbatches, program.computed, program.workers) == (3, 21, 8)
    assert batch["tokens"].shape == (8 * 3 * config.microbatch_size, 257)
    assert counts.shape == (8,)
    assert params["wte"]["embedding"].shape == (models.BYTE_TOKENS, 128)
    assert params["wte"]["embedding"].sharding.is_fully_replicated
    assert {f for f in state._fields if "in_flight" in f} == {"in_flight"}
    program.step.lower(*program.arguments)  # traces


def test_a_frozen_model_is_held_beside_the_adapters(stand_in):
    mesh, config = programs.data_mesh(None), default_config()
    config.microbatches_per_step = 4
    whole = programs.describe(config, mesh)
    config.lora.rank = 4
    program = programs.describe(config, mesh)
    assert (whole.frozen, program.frozen) == (0, 2 * whole.parameters)  # bfloat16
    assert program.parameters < whole.parameters / 20
    assert len(program.step.lower(*program.arguments).as_text()) < 1_000_000


def method(drops=True):
    kind = types.SimpleNamespace(drops=drops)
    return types.SimpleNamespace(local=False, phase=lambda _: 0, round=lambda _: kind)


@pytest.mark.parametrize(("drops", "expected"), [(True, 3), (False, 2)])
def test_trips_of_one_dynamic_loop(monkeypatch, drops, expected):
    """One worker's, or zero1's: all microbatches, or those before the reduction."""
    loop = types.SimpleNamespace(name="while", iterations=None)
    found = types.SimpleNamespace(loops=[loop])
    monkeypatch.setattr(programs.schedules, "read", lambda _: found)
    step, tx = type("Step", (), {})(), method(drops)
    second = programs.Program("acco", tx, step, 3, (3,), (None,) * 4, halves=(1, 3))
    assert dataclasses.replace(second, half=1)._trips("") == {"while": expected}


def test_trips_of_dynamic_loops_are_the_busiest_workers():
    step, tx = type("Step", (), {})(), method()
    program = programs.Program("acco", tx, step, 5, (2, 5), (None,) * 4)
    iterations = program._trips(text_of("gpu_hidden"))
    assert list(iterations.values()) == [2, 3]
    single = programs.Program("acco", tx, step, 1, (), (None,) * 4)
    assert list(single._trips(text_of("gpu_hidden")).values()) == [1, 1]
    idle = programs.Program("acco", tx, step, 2, (0, 1), (None,) * 4)
    assert list(idle._trips(text_of("gpu_hidden")).values()) == [0, 1]
    every = programs.Program("acco", tx, step, 4, (), (None,) * 4)
    assert list(every._trips(text_of("gpu_hidden")).values()) == [2, 2]


@pytest.mark.parametrize(
    ("tokenizer", "data", "model", "expected"),
    [("bytes", None, None, 257), ("bpe", 10000, None, 10000), ("bpe", None, 512, 512)],
)
def test_vocabulary_without_a_corpus(tokenizer, data, model, expected):
    config = default_config()
    config.data.tokenizer, config.data.vocab_size = tokenizer, data
    config.model.vocab_size = model
    assert programs.vocab_size(config) == expected


def test_bytes_are_those_of_the_tokenizer():
    from acco_jax.data.tokenizers import ByteTokenizer

    assert ByteTokenizer.vocab_size == models.BYTE_TOKENS


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
            "memory space hbm. Used 40.00G of 31.25G hbm. Exceeded by 8.75G.",
            "it needs 40.00G of 31.25G of memory",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (3.76T) exceeds available HBM (31.25G).",
            "it needs 3.76T of 31.25G of memory",
        ),
        ("RESOURCE_EXHAUSTED: too much\nand more", "RESOURCE_EXHAUSTED: too much"),
    ],
)
def test_what_a_compiler_says_of_memory(message, said):
    assert programs.what_it_needs(message) == said


def test_a_group_s_collectives_are_told_from_the_data_axes():
    """Over one data axis, over all of them, between slices: each is the data axes'."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("domain", "data", "fsdp"))
    tx = types.SimpleNamespace(axis=("domain", "data"), mesh=mesh)
    program = programs.Program("acco", tx, None, 1, (), (None,) * 4)
    whole = recorded("gpu_hidden")
    groups = {
        "data": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "domain": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "both": ((0, 2, 4, 6), (1, 3, 5, 7)),
        "between slices": (),
        "fsdp": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "of a slice": ((0, 1), (2, 3)),
    }
    like = whole.select()[0]
    found = tuple(
        dataclasses.replace(like, name=name, groups=g) for name, g in groups.items()
    )
    schedule = dataclasses.replace(whole, collectives=found)
    data = ["data", "domain", "both", "between slices"]
    assert [c.name for c in program.of_data(schedule)] == data
    assert [c.name for c in found if program.in_group(c)] == ["fsdp", "of a slice"]
    # whatever the axes' names and order
    mesh = jax.sharding.Mesh(devices.reshape(2, 4), ("model", "data"))
    program = dataclasses.replace(
        program, tx=types.SimpleNamespace(axis=("data",), mesh=mesh)
    )
    groups = {"data": ((0, 1, 2, 3), (4, 5, 6, 7)), "model": ((0, 4), (1, 5))}
    for name, own in groups.items():
        c = dataclasses.replace(like, groups=own)
        assert program.in_group(c) is (name == "model")


def test_compilers_flags_have_entries_of_their_own(monkeypatch):
    lowered = jax.jit(jnp.sin).lower(1.0)
    devices = np.array(jax.devices()[:1])

    def key(flags, variable="XLA_FLAGS"):
        monkeypatch.setenv(variable, flags)
        return program_cache.key(lowered, {}, devices)

    plain = key("--xla_force_host_platform_device_count=8")
    assert key("") == key("--xla_cpu_parallel_codegen_split_count=1") == plain
    assert key("--xla_gpu_enable_triton_gemm=false") != plain
    assert key("") == plain
    assert key("--xla_jf_spmd_threshold=1", "LIBTPU_INIT_ARGS") != plain


def test_settings_of_jax_have_entries_of_their_own():
    lowered, devices = jax.jit(jnp.sin).lower(1.0), np.array(jax.devices()[:1])
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    found = []
    try:
        for value in (True, False):
            jax.config.update(name, value)
            found.append(program_cache.key(lowered, {}, devices))
    finally:
        jax.config.update(name, before)
    assert found[0] != found[1]


def test_a_cache_that_cannot_be_written_costs_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACCO_PLAN_CACHE", str(tmp_path / "file"))
    program_cache.keep("x", {"text": ""})
    assert program_cache.load("x") is None
    monkeypatch.setenv("ACCO_PLAN_CACHE", str(tmp_path))
    program_cache.keep("x", {"text": "y"})

    def forbidden(path):
        raise PermissionError(path)

    monkeypatch.setattr(program_cache.Path, "touch", forbidden)  # others fill it
    assert program_cache.load("x") == {"text": "y"}


def test_what_was_compiled_before_is_not_said_to_be_compiled(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("ACCO_PLAN_CACHE", str(tmp_path))
    entry = {"text": reduced(8, 8), "peak": 1, "bytes_accessed": None,
             "source_collectives": None}  # fmt: skip
    monkeypatch.setattr(programs, "_compiled", lambda *_: dict(entry))
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    program = programs.describe(default_config(), mesh)
    with caplog.at_level(logging.INFO, "absl"):
        first = program.compile("a place")
        assert [r.getMessage() for r in caplog.records] == [
            f"compiling acco for a place, microbatches of {program.rows}"
        ]
        caplog.clear()
        again = program.compile("a place")
    assert not caplog.records
    assert (first.cached, again.cached) == (False, True)
    assert again.text == first.text and again.seconds == first.seconds
