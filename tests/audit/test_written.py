"""Schedules written by hand, of what no recording has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.audit import audit
from acco_jax.schedule import schedules
from tests.schedule.recordings import text_of
from tests.schedule.test_hlo import module

HOST = "gpu:h100:1x8"
MATRIX = "bf16[8192,8192]{1,0}"
SIDES = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
PRODUCT = f"""
    %product (a: bf16[8192,8192], b: bf16[8192,8192]) -> bf16[8192,8192] {{
      %a = {MATRIX} parameter(0)
      %b = {MATRIX} parameter(1)
      ROOT %x = {MATRIX} dot(%a, %b), {SIDES}
    }}
"""
OVER = "replica_groups=[1,8]<=[8], to_apply=%sum"


def product(name, of="%q"):
    return f"%{name} = {MATRIX} fusion({of}, {of}), kind=kCustom, calls=%product"


# A loop whose body exposes an all-reduce of 1 MiB
STATE = "(s32[], f32[256,1024]{1,0})"
EXPOSED = f"""
    %body (t: {STATE}) -> {STATE} {{
      %t = {STATE} parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %x = f32[256,1024]{{1,0}} get-tuple-element(%t), index=1
      %s = f32[256,1024]{{1,0}} all-reduce(%x), {OVER}
      ROOT %o = {STATE} tuple(%i, %s)
    }}
    %asks (t: {STATE}) -> pred[] {{
      %t = {STATE} parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      ROOT %c = pred[] compare(%i, %i), direction=LT
    }}
"""


def test_a_gate_does_not_pass_on_a_count_that_it_does_not_know():
    products = "\n".join(product(f"x{i}") for i in range(40))
    text = module(
        f"""
        %z = s32[] parameter(0)
        %p = f32[256,1024]{{1,0}} parameter(1)
        %q = {MATRIX} parameter(2)
        %s = {MATRIX} all-reduce-start(%q), {OVER}
        {products}
        %d = {MATRIX} all-reduce-done(%s)
        %t = {STATE} tuple(%z, %p)
        %w = {STATE} while(%t), condition=%asks, body=%body
        """,
        PRODUCT + EXPOSED,
    )
    # in the loop's condition, which runs once more than its body
    asking = EXPOSED.replace("%body", "%other").replace("%asks", "%body")
    asking = asking.replace("%other", "%asks")
    for loop in (EXPOSED, asking):
        found = audit(text.replace(EXPOSED, loop), topology=HOST)
        why = found.verdict().objection(0.5)
        assert "is exposed each time that w runs" in why
        assert "give its trip count" in why
        assert '"uncounted_loops": [\n    "w"' in found.to_json()
    found = audit(text, topology=HOST)
    few, many = (audit(text, topology=HOST, trip_counts=n) for n in (1, 256))
    assert not few.verdict().objection(0.9)
    assert "33.3% of the bytes" in many.verdict().objection(0.9)


LOOPED = f"(s32[], {MATRIX}, bf16[16384,8192]{{1,0}})"


def inner(i):
    """A collective of 256 MiB beside a product of its own."""
    return f"""
      %s{i} = bf16[16384,8192]{{1,0}} all-reduce-start(%y), {OVER}
      {product(f"m{i}")}
      %d{i} = bf16[16384,8192]{{1,0}} all-reduce-done(%s{i})"""


def outer(rows, inside):
    return f"""
      %p = bf16[{rows},8192]{{1,0}} parameter(0)
      %q = {MATRIX} parameter(1)
      %y = bf16[16384,8192]{{1,0}} parameter(2)
      %z = s32[] constant(0)
      %s = bf16[{rows},8192]{{1,0}} all-reduce-start(%p), {OVER}
      {inside}
      %d = bf16[{rows},8192]{{1,0}} all-reduce-done(%s)
    """


@pytest.mark.parametrize("rows", [16384, 131072])
def test_a_collective_over_a_loop_shares_its_link_with_the_loop_s_own(rows):
    body = f"""
    %body (t: x) -> y {{
      %t = {LOOPED} parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %q = {MATRIX} get-tuple-element(%t), index=1
      %y = bf16[16384,8192]{{1,0}} get-tuple-element(%t), index=2
      {inner("")}
      ROOT %o = {LOOPED} tuple(%i, %m, %d)
    }}
    %asks (t: x) -> pred[] {{
      %t = {LOOPED} parameter(0)
      ROOT %k = pred[] constant(true)
    }}
    """
    loop = f"""
      %t = {LOOPED} tuple(%z, %q, %y)
      %w = {LOOPED} while(%t), condition=%asks, body=%body,
        backend_config={{"known_trip_count":{{"n":"8"}}}}
    """.replace(",\n       ", ",")
    looped = audit(module(outer(rows, loop), PRODUCT + body), topology=HOST)
    text = outer(rows, "".join(map(inner, range(8))))
    unrolled = audit(module(text, PRODUCT), topology=HOST)
    one, other = looped.prediction, unrolled.prediction
    assert one.communication == pytest.approx(other.communication)
    # not before the one link could have carried all; unrolled, the first one first
    least = one.communication - one.computation
    assert least - 1e-9 <= one.exposed <= max(least, other.exposed) + 1e-5


@pytest.mark.parametrize(
    ("target", "communicates"),
    [
        *((x, True) for x in ("mpi_allreduce_ffi", "te_collective_gemm_ffi")),
        *((x, True) for x in ("AllToAll", "my_shmem_put", "ncclAllGather")),
        *((x, False) for x in ("__cublas$lt$matmul", "AsyncCollectiveStart")),
        *((x, False) for x in ("__cudnn$fmhaSoftmax", "AssumeGatherIndicesInBound")),
    ],
)
def test_a_custom_call_is_known_by_its_name(target, communicates):
    call = f'%k = f32[8]{{0}} custom-call(%p), custom_call_target="{target}"'
    text = module(f"%p = f32[8]{{0}} parameter(0)\n{call}")
    assert bool(schedules.read(text).unknown) == communicates


BRANCHES = f"""
    %beside (a: bf16[8192,8192]) -> bf16[8192,8192] {{
      %q = {MATRIX} parameter(0)
      %s = {MATRIX} all-reduce-start(%q), {OVER}
      {product("x1")}
      {product("x2", "%x1")}
      ROOT %d = {MATRIX} all-reduce-done(%s)
    }}
    %after (a: bf16[8192,8192]) -> bf16[8192,8192] {{
      %q = {MATRIX} parameter(0)
      {product("x1")}
      ROOT %e = {MATRIX} all-reduce(%x1), {OVER}
    }}
"""


@pytest.mark.parametrize("order", ["%beside, %after", "%after, %beside"])
def test_of_a_conditional_the_branch_that_exposes_counts(order):
    call = f"conditional(%i, %p, %p), branch_computations={{{order}}}"
    text = f"""
      %i = pred[] parameter(0)
      %p = {MATRIX} parameter(1)
      %c = {MATRIX} {call}
    """
    found = audit(module(text, PRODUCT + BRANCHES), topology=HOST)
    (reading,) = found.verdict().readings
    assert reading.collective.name == "e" and found.verdict().objection()
    # a host's link, which no network's rate changes
    assert found.verdict().network == "NVLink"


STARTED = "(bf16[131072,1024]{1,0}, s32[])"
CARRIED = "(bf16[131072,1024]{1,0}, bf16[64,32]{1,0}, bf16[16384,16384]{1,0})"
WOVEN = """%g = bf16[131072,1024]{1,0} all-gather(%a), replica_groups=[1,8]<=[8],
    dimensions={0}, frontend_attributes={chain_id="0"},
    backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
""".replace(",\n   ", ",")


def woven(after):
    """A one-trip loop where a v5e's all-gather ends before what comes `after`."""
    large, wide = "bf16[16384,16384]{1,0}", "bf16[131072,1024]{1,0}"
    call, both = "custom-call(%g), custom_call_target=", f"({wide}, bf16[64,64]{{1,0}})"
    alias = "output_to_operand_aliasing={{0}: (0, {})}"
    once = 'backend_config={"known_trip_count":{"n":"1"}}'
    computations = f"""
        %begin (a: bf16[16384,1024]) -> {STARTED} {{
          %a = bf16[16384,1024]{{1,0}} parameter(0)
          {WOVEN}
          ROOT %c = {STARTED} {call}"AsyncCollectiveStart"
        }}
        %carry (a: x, b: y) -> (bf16[131072,1024], bf16[64,64]) {{
          %a = {wide} parameter(0)
          %b = bf16[64,32]{{1,0}} parameter(1)
          {WOVEN}
          %x = bf16[64,64]{{1,0}} dot(%b, %b), {SIDES[:-2]}1}}
          ROOT %c = {both} tuple(%a, %x)
        }}
        %end (a: bf16[131072,1024]) -> bf16[131072,1024] {{
          %a = {wide} parameter(0)
          {WOVEN}
          ROOT %c = {wide} {call}"AsyncCollectiveDone"
        }}
        %multiplied (a: x, b: x) -> x {{
          %a = {large} parameter(0)
          %b = {large} parameter(1)
          ROOT %x = {large} dot(%a, %b), {SIDES}
        }}
        %once (t: x) -> y {{
          %t = {CARRIED} parameter(0)
          %a = {wide} get-tuple-element(%t), index=0
          %b = bf16[64,32]{{1,0}} get-tuple-element(%t), index=1
          %c = {large} get-tuple-element(%t), index=2
          %f = {both} fusion(%a, %b), kind=kOutput, {alias}, calls=%carry
          %e = {wide} get-tuple-element(%f), index=0
          %d = {wide} fusion(%e), kind=kCustom, calls=%end
          {after}
          ROOT %r = {CARRIED} tuple(%d, %b, %c)
        }}
        %test (t: x) -> pred[] {{
          %t = {CARRIED} parameter(0)
          ROOT %k = pred[] constant(true)
        }}
    """
    return module(
        f"""
        %p = bf16[16384,1024]{{1,0}} parameter(0)
        %q = bf16[64,32]{{1,0}} parameter(1)
        %z = {large} parameter(2)
        %s = {STARTED} fusion(%p), kind=kCustom, calls=%begin
        %a = {wide} get-tuple-element(%s), index=0
        %t = {CARRIED} tuple(%a, %q, %z)
        %w = {CARRIED} while(%t), condition=%test, body=%once, {once}
        """,
        computations,
    )


def test_what_follows_an_end_inside_a_loop_covers_nothing():
    large = (
        "%h = bf16[16384,16384]{1,0} fusion(%c, %c), kind=kOutput, calls=%multiplied"
    )
    found = [audit(woven(x), topology="tpu:v5e:2x4") for x in ("", large)]
    short, long = (f.verdict() for f in found)
    assert long.exposed == pytest.approx(short.exposed, rel=1e-3)
    assert long.exposed > 0.99 * long.seconds > 0
    (beside,) = long.readings[0].beside
    assert beside.seconds < 1e-6 < found[1].prediction.computation


@pytest.mark.parametrize(
    ("name", "topology"),
    [("tpu_v6e_hidden", "gpu:h200:2x8"), ("gpu_hidden", "tpu:v6e:4x4")],
)
def test_a_program_for_another_platform_is_refused(name, topology):
    with pytest.raises(ValueError, match=r"is compiled for [GT]PUs, not for .*: give"):
        audit(text_of(name), topology=topology, trip_counts=2)


def test_a_program_that_was_compiled_for_cpus_is_refused():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(jnp.sum).lower(x).compile()
    with pytest.raises(ValueError, match="arguments lie on cpu devices: make their"):
        audit(compiled, topology="gpu:h100:1x2")
