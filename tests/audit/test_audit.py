"""The audit's library interface, on recorded texts and on small ones written here."""

import gzip
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax import audit as package
from acco_jax.audit import assert_hidden, audit
from acco_jax.audit.axes import axes_of, label, parse_mesh
from acco_jax.command.devices import has_accelerator
from acco_jax.schedule import costs, hlo, machines, schedules, topologies, verdict
from acco_jax.schedule.sources import Sources
from tests.schedule.recordings import reduced

DATA = pathlib.Path(__file__).parents[1] / "recorded"
PLACE = "gpu:h100:4x8"
MESH = {"data": 4, "fsdp": 8}


def text_of(name):
    return gzip.decompress((DATA / f"{name}.txt.gz").read_bytes()).decode()


# -------------------------------------------------------------------------- axes


def test_axes_of_groups():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    for axes in (("data",), ("fsdp",), ("data", "tensor"), tuple(sizes)):
        assert axes_of(hlo.axis_groups(sizes, *axes), sizes) == axes
    # a ring of half an axis is still of that axis; unknown groups are of none
    assert axes_of(((0, 4),), sizes) == ("data",)
    assert axes_of((), sizes) == axes_of(((0, 99),), sizes) == ()


def test_labels_without_a_mesh_name_the_groups():
    assert label((), {}, 8) == "?"
    assert label((tuple(range(8)),), {}, 8) == "all 8 devices"
    assert label(((0, 2, 4, 6), (1, 3, 5, 7)), {}, 8) == "2 groups of 4 (0,2,4,...)"
    found = audit(text_of("foreign/fsdp"), topology=PLACE)
    assert list(found.axes) == [
        "4 groups of 8 (0,1,2,...)", "all 32 devices", "8 groups of 4 (0,8,16,...)",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no axis 'fsdp'.*Known: 4 groups of 8"):
        found.verdict("fsdp")


@pytest.mark.parametrize(
    "text", ["", "data", "data:", ":4", "data:x", "data:0", "a:2,a:2"]
)
def test_a_mesh_that_is_none(text):
    with pytest.raises(ValueError, match="give each axis once with its size"):
        parse_mesh(text)


# ----------------------------------------------------------------------- results


def test_an_axis_is_judged_with_what_it_is_part_of():
    found = audit(text_of("foreign/fsdp"), topology=PLACE, mesh=MESH)
    assert list(found.axes) == ["fsdp", "data+fsdp", "data"]
    data = found.verdict("data")
    assert len(data.readings) == 1 + 3
    whole = found.verdict()
    assert whole.bytes == sum(v.bytes for v in found.axes.values())
    assert whole.exposed == pytest.approx(found.prediction.exposed)
    assert whole.seconds == pytest.approx(found.prediction.communication)
    with pytest.raises(ValueError, match="no axis 'dat': did you mean 'data'"):
        found.verdict("dat")


def test_table_json_and_picture(tmp_path):
    found = audit(text_of("foreign/fsdp"), topology=PLACE, mesh=MESH)
    table = str(found)
    for words in (
        "gpu:h100:4x8: 32 x NVIDIA H100",
        "mesh data 4 x fsdp 8",
        "is not shown by either",
        "axis fsdp: 2.975 ms exposed of ",
        "in 73 collectives; overlapped: 47.4% of the bytes (READ), 62.4% of the",
        "lines 14-28 of region_0.5_spmd",
        "EXPOSED, synchronous",
        "benchmarks/foreign.py:87 (_loss.<locals>.block)",
        "made synchronous by this compiler in the loop's body",
        "xla_gpu_enable_pipelined_reduce_scatter=True",
    ):
        assert words in re.sub(r"\n +", " ", table), words
    data = json.loads(found.to_json())
    assert data["mesh"] == MESH
    first = data["axes"]["fsdp"]["collectives"][2]
    assert (first["name"], first["status"]) == ("all-gather-start.5", "overlapped")
    assert first["beside"][0]["seconds"] > 0
    assert data["exposed_seconds"] == pytest.approx(found.prediction.exposed)
    assert data["slowing_seconds"] == found.prediction.slowing > 0
    assert "+ slowed by communication" in table
    parts = ("computation", "exposed", "slowing", "call")
    assert sum(data[f"{part}_seconds"] for part in parts) == pytest.approx(
        data["seconds"]
    )
    found.picture(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_a_compiled_program_and_its_text_say_the_same():
    class Compiled:
        def as_text(self):
            return text_of("foreign/plain_dp")

    given = audit(Compiled(), topology=PLACE, mesh={"data": 32})
    assert str(given) == str(
        audit(text_of("foreign/plain_dp"), topology=PLACE, mesh={"data": 32})
    )


def test_a_group_is_in_one_host_or_several_by_its_mesh():
    """A program numbers devices as its mesh has them, not as hosts hold them."""

    def found(groups, *order):
        mesh = Mesh(np.array(jax.devices())[list(order)].reshape(2, 4), ("a", "b"))
        return audit(reduced(8, groups), topology="gpu:h100:2x4", mesh=mesh)

    inside = found("{{0,1,2,3},{4,5,6,7}}", *range(8))
    across = found("{{0,2,4,6},{1,3,5,7}}", *range(8))
    assert across.prediction.exposed > 1.5 * inside.prediction.exposed
    turned = found("{{0,1,2,3},{4,5,6,7}}", 0, 2, 4, 6, 1, 3, 5, 7)
    assert turned.prediction.exposed == across.prediction.exposed
    assert list(turned.axes) == list(inside.axes) == ["b"]
    again = found("{{0,2,4,6},{1,3,5,7}}", 0, 4, 1, 5, 2, 6, 3, 7)
    assert again.prediction.exposed == inside.prediction.exposed


def test_a_mesh_by_sizes_leaves_the_devices_where_they_are():
    """Those of the program's own mesh."""
    order = 0, 2, 4, 6, 1, 3, 5, 7
    chips = package.devices("gpu:h100:2x4")
    own = Mesh(np.array(chips)[list(order)].reshape(2, 4), ("a", "b"))

    class Compiled:
        input_shardings = (NamedSharding(own, P()),), {}

        def as_text(self):
            return reduced(8, "{{0,1,2,3},{4,5,6,7}}")

    plain, named = (
        audit(Compiled(), topology="gpu:h100:2x4", mesh=mesh)
        for mesh in (None, {"a": 2, "b": 4})
    )
    assert plain.prediction.exposed == named.prediction.exposed
    blocks = audit(Compiled().as_text(), topology="gpu:h100:2x4", mesh=dict(own.shape))
    assert plain.prediction.exposed > 1.5 * blocks.prediction.exposed


def test_arguments_elsewhere_are_told_how_to_get_a_mesh_of_slices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x = jax.device_put(np.ones(2), NamedSharding(mesh, P("data")))
    place = topologies.parse("tpu:v5e:4x4", 2)
    with pytest.raises(ValueError, match=r"devices\((.*)\)\.$") as error:
        audit(jax.jit(jnp.sin), x, topology=place)
    assert "topologies.parse('tpu:v5e:4x4', 2))." in str(error.value)


def test_on_a_tpu_a_group_is_a_line_or_a_block_by_its_mesh():
    """`jax.make_mesh` lays an axis along the torus, not in the order of hosts."""
    text = reduced(16, 4)
    devices = package.devices("tpu:v5e:4x4")
    line = jax.make_mesh((4, 4), ("a", "b"), devices=devices)
    block = Mesh(np.array(devices).reshape(4, 4), ("a", "b"))
    exposed = [
        audit(text, topology="tpu:v5e:4x4", mesh=mesh).prediction.exposed
        for mesh in (line, block)
    ]
    assert exposed[0] > 1.5 * exposed[1]


def test_other_figures():
    slow, fast = (
        audit(text_of("foreign/fsdp"), topology=PLACE, mesh=MESH, figures=figures)
        for figures in ({"fast_bandwidth": 1e9}, {"fast_bandwidth": 1e13})
    )
    assert slow.prediction.exposed > 10 * fast.prediction.exposed
    hidden = [
        r
        for r in slow.axes["fsdp"].readings
        if r.status == "overlapped" and r.cause.text
    ]
    assert hidden and all(
        "too little compute beside it" in r.cause.text for r in hidden
    )


# ----------------------------------------------------------------- assert_hidden


def test_assert_hidden_for_other_suites():
    text = text_of("foreign/plain_dp")
    found = assert_hidden(text, (), PLACE, "data", mesh={"data": 32})
    assert found.verdict("data").share == 1.0
    text = text_of("foreign/fsdp_fine_remat")
    with pytest.raises(AssertionError, match=r"^data: .*EXPOSED"):
        assert_hidden(text, (), PLACE, "data", mesh=MESH)
    assert_hidden(text, (), PLACE, "fsdp", fraction=0.49, mesh=MESH)
    with pytest.raises(ValueError, match="the fraction 95 must be from 0 to 1"):
        assert_hidden(text, (), PLACE, "fsdp", fraction=95, mesh=MESH)


def test_nothing_communicated_is_not_hidden():
    text = text_of("foreign/plain_dp")
    text = re.sub(r"all-reduce-(start|done)\(", "copy(", text)
    found = audit(text, topology=PLACE, mesh={"data": 32})
    assert found.verdict().share is None
    assert "nothing is communicated" in str(found)
    with pytest.raises(AssertionError, match="nothing was overlapped"):
        assert_hidden(text, (), PLACE, "data", fraction=0, mesh={"data": 32})


# ------------------------------------------------------------ what is not known


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("all-reduce-start(", "collective-reduce-start("),  # of a compiler to come
        ("custom-call(", 'custom-call(), custom_call_target="nccl_all_reduce", x=('),
    ],
)
def test_an_unknown_form_is_never_hidden(old, new):
    text = text_of("foreign/plain_dp")
    if old not in text:
        line = "  %x = f32[] custom-call("
        text = text.replace("\nENTRY", f"\n%c () -> f32[] {{\n{line}\n}}\n\nENTRY")
    found = audit(text.replace(old, new), topology=PLACE, mesh={"data": 32})
    assert found.schedule.unknown
    assert "in a form not known here" in str(found)
    assert "unknown form" in found.verdict().objection(0)


def test_devices_that_the_text_does_not_say_count_against_every_axis():
    text = text_of("foreign/fsdp").replace("device_ids=(", "device_ids=(@")
    found = audit(text, topology=PLACE, mesh=MESH)
    unknown = found.axes["?"]
    assert {id(r) for r in unknown.readings} <= {
        id(r) for r in found.verdict("data").readings
    }
    assert found.verdict("data").objection()


def test_a_lost_end_is_unknown():
    text = text_of("foreign/plain_dp").replace(
        "all-reduce-done(%all-reduce-start.4)", "copy(%all-reduce-start.4)"
    )
    found = audit(text, topology=PLACE, mesh={"data": 32}).verdict()
    (lost,) = (r for r in found.readings if r.status == "unknown")
    assert lost.collective.name == "all-reduce-start.4"
    assert "does not say where it ends" in lost.cause.text
    assert lost in found.objections


# --------------------------------------------------------------- what is refused


def on_cpu():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.ShapeDtypeStruct(
        (2, 2), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )


REFUSED = [
    ((jax.jit(jnp.sum), 1.0), {}, "the arguments lie on no mesh: make their mesh of"),
    ((print, 1.0), {}, "cannot audit a builtin_function_or_method: give a jitted"),
    (("HloModule m",), {}, "not the text of a compiled, scheduled module"),
    (("",), {}, "not the text of a compiled, scheduled module"),
    (("TEXT", 1.0), {}, "compiled already: arguments and compiler_options are for"),
    (("TEXT",), {"topology": "gpu:h100:8x8"}, "is for 32 devices, gpu:h100:8x8 has 64"),
    (("TEXT",), {"topology": "gpu:h30:4x8"}, "did you mean 'h20'"),
    (("TEXT",), {"topology": "h100"}, "is not of the form"),
    (("TEXT",), {"mesh": {"data": 8}}, "the mesh data 8 has 8 devices, gpu:h100:4x8"),
    (("TEXT",), {"figures": {"flop": 1.0}}, "did you mean 'flops'"),
    (("TEXT",), {"figures": {"flops": -1.0}}, "the figure flops is -1: it must be"),
    (("TEXT",), {"trip_counts": {"while.0": 2}}, "trip count given for 'while.0'"),
]


@pytest.mark.parametrize(("arguments", "options", "said"), REFUSED)
def test_what_cannot_be_audited_is_one_line(arguments, options, said):
    program, *rest = arguments
    if program == "TEXT":
        program = text_of("foreign/plain_dp")
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        audit(program, *rest, **{"topology": PLACE, **options})
    assert "\n" not in str(error.value)


def test_arguments_on_other_devices_are_refused():
    with pytest.raises(ValueError, match=r"lie on cpu devices: .*devices\('gpu:h100"):
        audit(jax.jit(jnp.sum), on_cpu(), topology=PLACE)


def test_a_missing_compiler_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(topologies, "_installed", lambda module: False)
    with pytest.raises(RuntimeError, match=r"pip install 'acco-jax\[plan-gpu\]'"):
        package.devices(PLACE)


# ------------------------------------------------------------------------ causes


def judged(name, place="gpu:h200:2x8"):
    schedule = schedules.read(text_of(f"schedules/{name}"), trip_counts=2)
    topology = topologies.parse(place)
    machine = machines.Machine(topology, machines.figures(topology.chip))
    prediction = costs.predict(schedule, machine, topology.devices)
    found = verdict.judge(schedule, prediction, machine).readings
    return {r.collective.name: r for r in found if r.collective.bytes >= 2**20}


@pytest.mark.parametrize(
    ("name", "place", "causes"),
    [
        ("gpu_hidden", "gpu:h200:2x8", ["", ""]),
        (
            "gpu_synchronous",
            "gpu:h200:2x8",
            ["every product comes before it: it sends", "the last one: every product"],
        ),
        ("tpu_v6e_hidden", "tpu:v6e:4x4", ["", ""]),
        (
            "tpu_v5e_synchronous",
            "tpu:v5e:4x4",
            ["every product comes before it: it sends", "the last one: every product"],
        ),
    ],
)
def test_likely_causes(name, place, causes):
    found = [r.cause for r in judged(name, place).values()]
    for cause, said in zip(found, causes, strict=True):
        assert cause.text.startswith(said) and bool(cause.text) == bool(said)
        assert bool(cause.advice) == bool(said)


def test_a_slot_that_is_taken_has_a_name():
    """With one slot, the loops' own collectives make the data axis's synchronous."""
    found = judged("gpu_model2_limit1", "gpu:h200:1x8")
    for name in ("reduce_scatter.7.2", "all_gather.3.2"):
        cause = found[name].cause
        assert cause.text.startswith("the slot is taken by a smaller one in the loop's")
        assert "parallel_collective_overlap_limit" in cause.advice


# ----------------------------------------------------------------------- sources


TABLES = """HloModule m

FileNames
1 "a/own.py"
2 "lib/site-packages/jax/_src/x.py"

FunctionNames
1 "step"
2 "inner"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


def test_source_lines():
    sources = Sources(TABLES)
    assert sources.line('op_name="x" stack_frame_id=1') == "a/own.py:7 (step)"
    assert sources.line("stack_frame_id=2") == "a/own.py:7 (step)"  # its caller
    older = 'op_name="x" source_file="b.py" source_line=3'
    assert Sources("").line(older) == "b.py:3"
    assert sources.line("") == sources.line("stack_frame_id=99") == ""
    from_zero = Sources(TABLES.replace("_frame_id=1}", "_frame_id=0}").replace(
        "parent_frame_id=2", "parent_frame_id=1"))  # fmt: skip
    assert from_zero.line("stack_frame_id=2") == "a/own.py:7 (step)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "said"),
    [("", "8 devices"), ("jax.numpy.zeros(3)", "set JAX_PLATFORMS=cpu")],
)
def test_devices_are_described_where_jax_would_search_for_a_gpu(before, said):
    program = f"import jax\nfrom acco_jax import audit\n{before}\n"
    program += "print(len(audit.devices('gpu:h200:1x8')), 'devices')"
    said = "8 devices" if has_accelerator() else said
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert said in (done.stdout or done.stderr)
