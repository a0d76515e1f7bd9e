"""Small modules written by hand: products, loops, collectives and groups."""

import pytest

from acco_jax.audit import audit
from acco_jax.schedule import hlo, schedules

MIB = 2**20


SUM = """
    %sum (a: f32[], b: f32[]) -> f32[] {
      %a = f32[] parameter(0)
      %b = f32[] parameter(1)
      ROOT %c = f32[] add(%a, %b)
    }
"""


def module(entry: str, computations: str = "") -> str:
    """A module for 8 devices; lines may be indented as the test likes."""
    lines = ["HloModule m, is_scheduled=true, num_partitions=8"]
    lines += (SUM + computations).splitlines()
    lines += ["ENTRY %main (p: f32[8]) -> f32[8] {", *entry.splitlines(), "}"]
    lines = [line.strip() for line in lines]
    outer = [line.endswith("{") or line in ("", "}") for line in lines]
    outer[0] = True
    return "\n".join(
        line if o else f"  {line}" for line, o in zip(lines, outer, strict=True)
    )


BUFFER = "f32[1024,1024]{1,0}"
START = """
    %p = f32[1024,1024]{1,0} parameter(0)
    %q = bf16[64,32]{1,0} parameter(1)
    %s = f32[1024,1024]{1,0} all-reduce-start(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
"""  # noqa: E501
DONE = "%d = f32[1024,1024]{1,0} all-reduce-done(%s)"


def between(lines: str, computations: str = "") -> schedules.Collective:
    """The all-reduce of a module with these lines between its launch and its end."""
    text = module(START + lines.strip() + "\n" + DONE, computations)
    (found,) = schedules.read(text).select()
    return found


@pytest.mark.parametrize(
    ("lines", "flops"),
    [
        (
            "%x = bf16[32,16]{1,0} dot(%q, %r), lhs_contracting_dims={0}, "
            "rhs_contracting_dims={0}, "
            'metadata={op_name="a{b}(\\"dot\\")" source_line=3}',
            2 * 32 * 16 * 64,
        ),
        (
            "%x = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%q, %r), "
            'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
            '"rhs_contracting_dimensions":["0"]}}}',
            2 * 64 * 16 * 32,
        ),
        (
            "%x = (bf16[2,64,4,32]{3,1,2,0}, u8[0]{0}) custom-call(%a, %a, %a), "
            'custom_call_target="__cudnn$fmhaSoftmax", backend_config={'
            '"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":'
            '"BF16","dimensions":["2","4","64","64"],"tuple_shapes":[]}}}',
            2 * 2 * 2 * 4 * 64 * 64 * 32,
        ),
        (
            "%x = (bf16[2,64,4,32]{3,1,2,0}, u8[0]{0}) custom-call(%a, %a, %a), "
            'custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={'
            '"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":'
            '"BF16","dimensions":["2","4","64","64"],"tuple_shapes":[]}}}',
            5 * 2 * 2 * 4 * 64 * 64 * 32,
        ),
        # kernels of attention, of which the scope says how much they compute
        (
            "%x = (bf16[2,64,128]{2,1,0}, f32[2,4,64]{2,1,0}) custom-call(%a, %a, %a), "
            'custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/'
            'attention_64x64/attention_forward/pallas_call" source_line=3}',
            2 * 2 * (2 * 4 * 32) * (64 * 65 // 2),
        ),
        (
            "%x = (f32[16,64]{1,0}, bf16[2,4,64,32]{3,2,1,0}) custom-call(%s, %a, %a), "
            'custom_call_target="tpu_custom_call", frontend_attributes={meta={\n'
            '"blocks":"{16}"\n}}, metadata={op_name="attention_64x10/vmap(splash)/'
            'splash_mha_dkv_no_residuals/pallas_call"}',
            2 * 4 * (2 * 4 * 32) * (sum(range(10)) + 55 * 10),
        ),
        (
            "%x = bf16[2,64,4,32]{3,2,1,0} custom-call(%a, %a), "
            'custom_call_target="__gpu$xla.gpu.triton", '
            'metadata={op_name="jit(f)/another_kernel/pallas_call"}',
            0,
        ),
        (
            '%x = f32[8]{0} custom-call(%q), custom_call_target="AllocateBuffer", '
            'metadata={op_name="attention_64x64/attention_forward/x"}',
            0,
        ),
        # an image convolution with padding: a 3x3 window over 8x8, 1 pixel around
        (
            "%x = f32[1,8,8,4]{3,2,1,0} convolution(%i, %k), "
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 4 * 2 * 22 * 22,
        ),
        # cuDNN's: a 5x5 kernel in strides of 2, and both of its gradients
        *(
            (
                f"%x = {result} custom-call({operands}), "
                "window={size=5x5 stride=2x2}, dim_labels=b01f_o01i->b01f, "
                f'custom_call_target="__cudnn$conv{name}"',
                2 * 3 * 4 * 7 * 2 * 2 * 5 * 5,
            )
            for name, result, operands in (
                ("Forward", "(f32[3,2,2,7]{3,2,1,0}, u8[0]{0})", "%ci, %ck"),
                ("BackwardInput", "(f32[3,7,7,4]{3,2,1,0}, u8[0]{0})", "%co, %ck"),
                ("BackwardFilter", "(f32[7,5,5,4]{3,2,1,0}, u8[0]{0})", "%ci, %co"),
            )
        ),
        ("%x = bf16[64,32]{1,0} add(%q, %q)", 0),
        (
            '%x = bf16[64,32]{1,0} custom-call(%q), custom_call_target="__other"',
            0,
        ),
    ],
)
def test_products(lines, flops):
    operands = """
        %r = bf16[64,16]{1,0} parameter(2)
        %a = bf16[2,64,4,32]{3,2,1,0} parameter(3)
        %s = s8[1,2,2]{2,1,0} parameter(6)
        %i = f32[1,8,8,2]{3,2,1,0} parameter(4)
        %k = f32[3,3,2,4]{3,2,1,0} parameter(5)
        %ci = f32[3,7,7,4]{3,2,1,0} parameter(7)
        %ck = f32[7,5,5,4]{3,2,1,0} parameter(8)
        %co = f32[3,2,2,7]{3,2,1,0} parameter(9)
    """
    found = between(operands + lines)
    assert (found.flops_between, found.hidden) == (flops, flops > 0)


PRODUCT = """
    %product (a: bf16[64,32]) -> bf16[64,64] {
      %a = bf16[64,32]{1,0} parameter(0)
      ROOT %x = bf16[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
    }

    %sum.of (a: bf16[64,32]) -> bf16[64,32] {
      %a = bf16[64,32]{1,0} parameter(0)
      ROOT %y = bf16[64,32]{1,0} add(%a, %a)
    }

    %test (t: (s32[], bf16[64,32])) -> pred[] {
      %t = (s32[], bf16[64,32]{1,0}) parameter(0)
      %c = s32[] constant(7)
      %i = s32[] get-tuple-element(%t), index=0
      ROOT %lt = pred[] compare(%i, %c), direction=LT
    }

    %body (t: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
      %t = (s32[], bf16[64,32]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %b = bf16[64,32]{1,0} get-tuple-element(%t), index=1
      %two = s32[] constant(2)
      %j = s32[] add(%i, %two)
      %x = bf16[64,64]{1,0} fusion(%b), kind=kOutput, calls=%product
      ROOT %r = (s32[], bf16[64,32]{1,0}) tuple(%j, %b)
    }
"""  # noqa: E501
ONE = 2 * 64 * 64 * 32


@pytest.mark.parametrize(
    ("lines", "flops"),
    [
        ("%x = bf16[64,64]{1,0} fusion(%q), kind=kCustom, calls=%product", ONE),
        ("%x = bf16[64,64]{1,0} call(%q), to_apply=%product", ONE),
        (  # started on another stream, counted once
            "%x = ((bf16[64,32]), bf16[64,64]) async-start(%q), calls=%product\n"
            "%y = bf16[64,64]{1,0} async-done(%x)",
            ONE,
        ),
        (  # the branch without a product may be taken
            "%x = bf16[64,32]{1,0} conditional(%b, %q, %q), "
            "true_computation=%product, false_computation=%sum.of",
            0,
        ),
        (
            "%x = bf16[64,32]{1,0} conditional(%b, %q, %q), "
            "branch_computations={%product, %product}",
            ONE,
        ),
        (  # 1, 3, 5
            "%one = s32[] constant(1)\n"
            "%t = (s32[], bf16[64,32]{1,0}) tuple(%one, %q)\n"
            "%w = (s32[], bf16[64,32]{1,0}) while(%t), condition=%test, body=%body",
            3 * ONE,
        ),
        (  # what the compiler says comes first
            "%one = s32[] constant(1)\n"
            "%t = (s32[], bf16[64,32]{1,0}) tuple(%one, %q)\n"
            "%w = (s32[], bf16[64,32]{1,0}) while(%t), condition=%test, body=%body, "
            'backend_config={"known_trip_count":{"n":"5"}}',
            5 * ONE,
        ),
        (  # started at an unknown number
            "%n = s32[] parameter(2)\n"
            "%t = (s32[], bf16[64,32]{1,0}) tuple(%n, %q)\n"
            "%w = (s32[], bf16[64,32]{1,0}) while(%t), condition=%test, body=%body",
            ONE,
        ),
    ],
)
def test_products_inside_computations(lines, flops):
    assert between(lines, PRODUCT).flops_between == flops


def test_collective_inside_an_asynchronous_computation():
    computation = """
        %gather (a: f32[128,1024]) -> f32[1024,1024] {
          %a = f32[128,1024]{1,0} parameter(0)
          ROOT %g = f32[1024,1024]{1,0} all-gather(%a), replica_groups=[1,8]<=[8], dimensions={0}
        }
    """  # noqa: E501
    text = module(
        """
        %p = f32[128,1024]{1,0} parameter(0)
        %q = bf16[64,32]{1,0} parameter(1)
        %s = ((f32[128,1024]), f32[1024,1024]) async-start(%p), calls=%gather
        %x = bf16[64,64]{1,0} fusion(%q), kind=kCustom, calls=%product
        %d = f32[1024,1024]{1,0} async-done(%s)
        """,
        computation + PRODUCT,
    )
    (found,) = schedules.read(text).select()
    assert (found.kind, found.bytes, found.dtype) == ("all-gather", 4 * MIB, "f32")
    assert (found.start, found.done, found.flops_between) == (2, 4, ONE)


NESTED = """
    %reduce (a: f32[1024,1024]) -> f32[1024,1024] {
      %a = f32[1024,1024]{1,0} parameter(0)
      ROOT %r = f32[1024,1024]{1,0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%sum
    }

    %started (a: f32[1024,1024]) -> f32[1024,1024] {
      %a = f32[1024,1024]{1,0} parameter(0)
      %s = f32[1024,1024]{1,0} all-reduce-start(%a), replica_groups=[1,8]<=[8], to_apply=%sum
      ROOT %d = f32[1024,1024]{1,0} all-reduce-done(%s)
    }

    %none (a: f32[1024,1024]) -> f32[1024,1024] {
      ROOT %a = f32[1024,1024]{1,0} parameter(0)
    }

    %outer (a: f32[1024,1024], b: pred[]) -> f32[1024,1024] {
      %a = f32[1024,1024]{1,0} parameter(0)
      %b = pred[] parameter(1)
      LINES
    }
"""  # noqa: E501


@pytest.mark.parametrize(
    "lines",
    [
        "ROOT %x = f32[1024,1024]{1,0} call(%a), to_apply=%reduce",
        "ROOT %x = f32[1024,1024]{1,0} call(%a), to_apply=%started",
        "ROOT %x = f32[1024,1024]{1,0} conditional(%b, %a, %a), "
        "true_computation=%reduce, false_computation=%none",
        "%s1 = ((f32[1024,1024]), f32[1024,1024]) async-start(%a), calls=%reduce\n"
        "ROOT %d1 = f32[1024,1024]{1,0} async-done(%s1)",
    ],
)
def test_a_collective_deeper_inside_an_asynchronous_computation(lines):
    """As a second GPU stream has it."""
    text = module(
        """
        %p = f32[1024,1024]{1,0} parameter(0)
        %b = pred[] parameter(1)
        %s = ((f32[1024,1024], pred[]), f32[1024,1024]) async-start(%p, %b), calls=%outer
        %d = f32[1024,1024]{1,0} async-done(%s)
        """,  # noqa: E501
        NESTED.replace("LINES", lines),
    )
    (found,) = schedules.read(text).collectives
    assert (found.kind, found.bytes) == ("all-reduce", 4 * MIB)


def test_a_collective_in_a_loop_takes_no_time_of_the_memory():
    loop = """
        %test (t: (s32[], f32[1024,1024])) -> pred[] {
          %t = (s32[], f32[1024,1024]{1,0}) parameter(0)
          %c = s32[] constant(3)
          %i = s32[] get-tuple-element(%t), index=0
          ROOT %lt = pred[] compare(%i, %c), direction=LT
        }

        %body (t: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
          %t = (s32[], f32[1024,1024]{1,0}) parameter(0)
          %i = s32[] get-tuple-element(%t), index=0
          %b = f32[1024,1024]{1,0} get-tuple-element(%t), index=1
          %one = s32[] constant(1)
          %j = s32[] add(%i, %one)
          %r = f32[1024,1024]{1,0} all-reduce(%b), replica_groups=[1,8]<=[8], to_apply=%sum
          ROOT %n = (s32[], f32[1024,1024]{1,0}) tuple(%j, %r)
        }
    """  # noqa: E501
    text = module(
        """
        %z = s32[] constant(0)
        %p = f32[1024,1024]{1,0} parameter(0)
        %t = (s32[], f32[1024,1024]{1,0}) tuple(%z, %p)
        %w = (s32[], f32[1024,1024]{1,0}) while(%t), condition=%test, body=%body
        """,
        loop,
    )
    schedule = schedules.read(text)
    (found,) = schedule.collectives
    assert (found.times, found.bytes) == (3, 4 * MIB)
    (size,) = (x.bytes for x in schedule.operations if x.name == "w")
    assert size <= 3 * 16  # the counter's


RAGGED = """
    %r = bf16[64,32]{1,0} parameter(2)
    %e = bf16[8,32,16]{2,1,0} parameter(3)
    %g = s32[8]{0} parameter(4)
    %m = s32[8]{0} custom-call(%g), custom_call_target="tpu_custom_call"
    %NAME = bf16[64,16]{1,0} custom-call(%g, %r, %e), \
      custom_call_target="tpu_custom_call"
"""


@pytest.mark.parametrize(
    ("name", "flops"),
    [("ragged-dot-none.1", 2 * 64 * 32 * 16), ("ragged-dot-metadata.2", 0), ("x", 0)],
)
def test_a_tpu_s_kernel_for_ragged_products(name, flops):
    """Each row is multiplied by the matrix of its group alone."""
    assert between(RAGGED.replace("NAME", name)).flops_between == flops


SLICES = """
    %fused (a: bf16[64,32], b: bf16[2048]) -> (bf16[4,8], bf16[2048]) {
      %a = bf16[64,32]{1,0} parameter(0)
      %b = bf16[2048]{0} parameter(1)
      %zero = s32[] constant(0)
      %flat = bf16[8,256]{1,0} bitcast(%a)
      %most = bf16[8,64]{1,0} slice(%flat), slice={[0:8], [0:64]}
      %less = bf16[4,8]{1,0} slice(%most), slice={[0:4], [0:8]}
      %row = bf16[32]{0} bitcast(%less)
      %new = bf16[2048]{0} dynamic-update-slice(%b, %row, %zero)
      ROOT %both = (bf16[4,8], bf16[2048]) tuple(%less, %new)
    }
"""


def test_a_fusion_reads_and_writes_slices_alone():
    text = module(
        """
        %p = bf16[64,32]{1,0} parameter(0)
        %q = bf16[2048]{0} custom-call(), custom_call_target="AllocateBuffer"
        %f = (bf16[4,8], bf16[2048]) fusion(%p, %q), kind=kLoop, calls=%fused
        %s = ((bf16[64,32]), bf16[8,32], s32[]) slice-start(%p), slice={[0:8], [0:32]}
        %d = bf16[8,32]{1,0} slice-done(%s)
        %c = bf16[8,32]{1,0} custom-call(%d), custom_call_target="ConcatBitcast"
        """,
        SLICES,
    )
    sizes = {x.name: x.bytes for x in schedules.read(text).operations}
    # f reads a slice and writes two; s reads and writes one
    assert sizes == {"q": 0, "f": 3 * 2 * 32, "s": 2 * 2 * 256, "d": 0, "c": 0}
    whole = text.replace("tuple(%less, %new)", "tuple(%flat, %new)")
    _, fusion, *_ = schedules.read(whole).operations
    assert fusion.bytes == 2 * (2048 + 2048 + 32)


@pytest.mark.parametrize(
    ("kind", "operand", "result", "shape"),
    [
        ("reduce-scatter", "bf16[4096,1024]", "bf16[512,1024]", "(({}), {})"),
        ("all-gather", "bf16[512,1024]", "bf16[4096,1024]", "({}, {})"),
        ("all-reduce", "bf16[4096,1024]", "bf16[4096,1024]", "{1}"),
    ],
)
def test_what_waits_where_it_starts_is_no_larger(kind, operand, result, shape):
    """Its start's result repeats the operand."""
    text = module(
        f"""
        %p = {operand}{{1,0}} parameter(0)
        %s = {shape.format(operand, result)} {kind}-start(%p), \
          replica_groups=[1,8]<=[8], backend_config={{"is_sync":true}}
        %d = {result}{{1,0}} {kind}-done(%s)
        """
    )
    (found,) = schedules.read(text).select()
    assert (found.kind, found.bytes, found.dtype) == (kind, 8 * MIB, "bf16")
    assert not found.asynchronous and found.start == found.done == 1


def test_a_ragged_exchange_has_its_data_s_bytes():
    text = module(
        """
        %p = bf16[1024,1024]{1,0} parameter(0)
        %o = bf16[1024,1024]{1,0} parameter(1)
        %i = s32[8]{0} parameter(2)
        %r = bf16[1024,1024]{1,0} ragged-all-to-all(%p, %o, %i, %i, %i, %i), \
          replica_groups=[1,8]<=[8]
        """
    )
    assert [c.bytes for c in schedules.read(text).select()] == [2 * MIB]


SENDS = """
    %near (a: f32[1024,1024]) -> f32[1024,1024] {
      %a = f32[1024,1024]{1,0} parameter(0)
      ROOT %n = f32[1024,1024]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
    }

    %far (a: f32[1024,1024]) -> f32[1024,1024] {
      %a = f32[1024,1024]{1,0} parameter(0)
      %one = f32[1024,1024]{1,0} collective-permute(%a), source_target_pairs={{0,4},{4,0}}
      ROOT %two = f32[1024,1024]{1,0} collective-permute(%one), source_target_pairs={{0,4},{4,0}}
    }

    %none (a: f32[1024,1024]) -> f32[1024,1024] {
      ROOT %a = f32[1024,1024]{1,0} parameter(0)
    }
"""  # noqa: E501


@pytest.mark.parametrize(
    ("branches", "names"),
    [
        ("near, %near, %near", ["n"]),
        ("near, %far, %none", ["one", "two"]),
        ("none, %near, %none", ["n"]),
        ("none, %none, %none", []),
    ],
)
def test_one_branch_of_a_conditional_communicates(branches, names):
    """The one that sends the most."""
    text = module(
        """
        %i = s32[] parameter(0)
        %p = f32[1024,1024]{1,0} parameter(1)
        %c = f32[1024,1024]{1,0} conditional(%i, %p, %p, %p), \
          branch_computations={%BRANCHES}
        """.replace("BRANCHES", branches),
        SENDS,
    )
    found = schedules.read(text).collectives
    assert [c.name for c in found] == names
    assert all(c.times == 1 for c in found)


@pytest.mark.parametrize("inside", [False, True])
def test_a_collective_of_a_branch_has_a_cause(inside):
    """Also one in a loop there: a branch is neither ENTRY nor a loop's body."""
    branches = """
    %none (p: f32[1024,1024]) -> f32[1024,1024] {
      ROOT %p = f32[1024,1024]{1,0} parameter(0)
    }

    %sends (p: f32[1024,1024]) -> f32[1024,1024] {
      %p = f32[1024,1024]{1,0} parameter(0)
      ROOT %ar = f32[1024,1024]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], \
        to_apply=%sum
    }

    %body (t: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
      %t = (s32[], f32[1024,1024]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %x = f32[1024,1024]{1,0} get-tuple-element(%t), index=1
      %s = f32[1024,1024]{1,0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%sum
      ROOT %o = (s32[], f32[1024,1024]{1,0}) tuple(%i, %s)
    }

    %asks (t: (s32[], f32[1024,1024])) -> pred[] {
      %t = (s32[], f32[1024,1024]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      ROOT %lt = pred[] compare(%i, %i), direction=LT
    }

    %loops (p: f32[1024,1024]) -> f32[1024,1024] {
      %p = f32[1024,1024]{1,0} parameter(0)
      %zero = s32[] constant(0)
      %t = (s32[], f32[1024,1024]{1,0}) tuple(%zero, %p)
      %w = (s32[], f32[1024,1024]{1,0}) while(%t), condition=%asks, body=%body, \
        backend_config={"known_trip_count":{"n":"3"}}
      ROOT %x = f32[1024,1024]{1,0} get-tuple-element(%w), index=1
    }
"""
    text = module(
        """
        %i = s32[] parameter(0)
        %p = f32[1024,1024]{1,0} parameter(1)
        %c = f32[1024,1024]{1,0} conditional(%i, %p, %p), \
          branch_computations={%none, %ONE}
        """.replace("ONE", "loops" if inside else "sends"),
        branches,
    )
    (reading,) = audit(text, topology="gpu:h100:1x8").verdict().readings
    assert ("in the loop's body" in reading.cause.text) == inside


def test_a_loop_s_condition_communicates_before_each_iteration_and_after_the_last():
    condition = """
    %asks (t: (s32[], f32[1024,1024])) -> pred[] {
      %t = (s32[], f32[1024,1024]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %x = f32[1024,1024]{1,0} get-tuple-element(%t), index=1
      %ar = f32[1024,1024]{1,0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%sum
      ROOT %lt = pred[] compare(%i, %i), direction=LT
    }

    %body (t: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
      ROOT %t = (s32[], f32[1024,1024]{1,0}) parameter(0)
    }
"""
    text = module(
        """
        %zero = s32[] constant(0)
        %p = f32[1024,1024]{1,0} parameter(0)
        %t = (s32[], f32[1024,1024]{1,0}) tuple(%zero, %p)
        %w = (s32[], f32[1024,1024]{1,0}) while(%t), condition=%asks, body=%body, \
          backend_config={"known_trip_count":{"n":"5"}}
        """,
        condition,
    )
    (found,) = schedules.read(text).select()
    assert (found.kind, found.where, found.times) == ("all-reduce", "asks", 6)
    assert not found.hidden


@pytest.mark.parametrize(
    "line",
    [
        '%k = f32[8]{0} custom-call(%p), custom_call_target="ncclAllReduce"',
        '%k = f32[8]{0} custom-call-start(%p), custom_call_target="nccl_all_reduce"',
        # a kernel of Pallas that writes to another device
        '%k = f32[8]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2", '
        'uses_xla_collective_metadata = true, xla_replica_ids = "0,1"',
    ],
)
def test_what_may_communicate_is_named(line):
    text = module("%p = f32[8]{0} parameter(0)\n" + line)
    (found,) = schedules.read(text).unknown
    assert found.startswith("k: custom-call")
    quiet = line.replace("nccl", "nothing").replace("= true", "= false")
    quiet = quiet.replace("AllReduce", "").replace("_all_reduce", "")
    assert not schedules.read(text.replace(line, quiet)).unknown


def test_end_inside_a_loop_counts_what_runs_before_it():
    state = "(f32[1024,1024]{1,0}, s32[])"
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    gather = (
        "%g = f32[1024,1024]{1,0} all-gather(%a), replica_groups=[1,8]<=[8], "
        'dimensions={0}, frontend_attributes={chain_id="0"}, ' + config
    )
    computations = f"""
        %begin (a: f32[128,1024]) -> {state} {{
          %a = f32[128,1024]{{1,0}} parameter(0)
          {gather}
          ROOT %c = {state} custom-call(%g), custom_call_target="AsyncCollectiveStart"
        }}

        %carry (a: f32[128,1024], b: bf16[64,32]) -> {state} {{
          %a = f32[128,1024]{{1,0}} parameter(0)
          %b = bf16[64,32]{{1,0}} parameter(1)
          {gather}
          %x = bf16[64,64]{{1,0}} dot(%b, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
          ROOT %c = {state} tuple(%a, %x)
        }}

        %end (a: f32[128,1024]) -> f32[1024,1024] {{
          %a = f32[128,1024]{{1,0}} parameter(0)
          {gather}
          ROOT %c = f32[1024,1024]{{1,0}} custom-call(%g), custom_call_target="AsyncCollectiveDone"
        }}

        %once (t: ({state}, bf16[64,32])) -> ({state}, bf16[64,32]) {{
          %t = (f32[1024,1024]{{1,0}}, bf16[64,32]{{1,0}}) parameter(0)
          %a = f32[1024,1024]{{1,0}} get-tuple-element(%t), index=0
          %b = bf16[64,32]{{1,0}} get-tuple-element(%t), index=1
          %f = {state} fusion(%a, %b), kind=kOutput, output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%carry
          %e = f32[1024,1024]{{1,0}} get-tuple-element(%f), index=0
          %d = f32[1024,1024]{{1,0}} fusion(%e), kind=kCustom, calls=%end
          %x = bf16[64,64]{{1,0}} fusion(%b), kind=kOutput, calls=%product
          ROOT %r = (f32[1024,1024]{{1,0}}, bf16[64,32]{{1,0}}) tuple(%d, %b)
        }}
    """  # noqa: E501
    text = module(
        f"""
        %p = f32[128,1024]{{1,0}} parameter(0)
        %q = bf16[64,32]{{1,0}} parameter(1)
        %s = {state} fusion(%p), kind=kCustom, calls=%begin
        %g0 = f32[1024,1024]{{1,0}} get-tuple-element(%s), index=0
        %x = bf16[64,64]{{1,0}} fusion(%q), kind=kOutput, calls=%product
        %t = (f32[1024,1024]{{1,0}}, bf16[64,32]{{1,0}}) tuple(%g0, %q)
        %w = (f32[1024,1024]{{1,0}}, bf16[64,32]{{1,0}}) while(%t), condition=%test, body=%once
        """,  # noqa: E501
        computations + PRODUCT,
    )
    (found,) = schedules.read(text).select()
    assert (found.kind, found.start, found.done) == ("all-gather", 2, 6)
    assert (found.flops_between, found.flops_carried) == (2 * ONE, ONE)
    assert found.hidden


@pytest.mark.parametrize(
    ("attribute", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups={{}}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['data'=2,'m.1'=4] {'m.1'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "replica_groups=mesh['a'=4], device_ids=(3,2,1,0) {'a':(2)2}",
            ((3, 2), (1, 0)),
        ),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ()),
        ("replica_groups=mesh['a'=8], device_ids=(@x) {'a'}", ()),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", ((0, 1), (2, 3))),
    ],
)
def test_groups(attribute, groups):
    text = module(
        f"""
        %p = {BUFFER} parameter(0)
        %s = {BUFFER} all-to-all(%p), channel_id=1, {attribute}, dimensions={{0}}
        """
    )
    (found,) = schedules.read(text).select()
    assert (found.kind, found.groups, found.hidden) == ("all-to-all", groups, False)


def test_axis_groups_name_an_unknown_axis():
    assert hlo.axis_groups({"a": 2, "b": 2}, "a") == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match="no axis 'c'"):
        hlo.axis_groups({"a": 2}, "c")


def test_text_that_is_no_schedule_is_refused():
    for text in (
        "",
        "module @jit_f {",
        "HloModule m\n\nENTRY %main () -> f32[] {\n}\n",
    ):
        with pytest.raises(ValueError, match="not the text of a compiled"):
            schedules.read(text)
    whole = module("%p = f32[8]{0} parameter(0)\n%q = f32[8]{0} negate(%p)")
    for cut in (whole.rstrip().rstrip("}"), whole[: whole.index("negate")]):
        with pytest.raises(ValueError, match="ends inside main: give the whole"):
            schedules.read(cut)
    with pytest.raises(ValueError, match="names without %"):
        schedules.read(whole.replace("%", ""))
    for wrong in (-3, {"w": -1}):
        with pytest.raises(ValueError, match=r"trip_counts is .* a number of iter"):
            schedules.read(whole, trip_counts=wrong)
    with pytest.raises(ValueError, match="no ENTRY"):
        schedules.read("HloModule m, is_scheduled=true\n")


def test_a_window_longer_than_the_row_is_the_row():
    assert hlo._seen(1024, 4096) == hlo._seen(1024, 1024) == 1024 * 1025 // 2
