"""Bytes that operations move through a chip's memory, of texts that were compiled.

The TPU's are from a half-round of acco compiled for v5e (jax 0.10.2), shortened.
"""

import re

import pytest

from acco_jax.schedule import costs, hlo, schedules, topologies
from acco_jax.schedule.machines import Machine, figures
from acco_jax.schedule.module import Module
from tests.schedule.recordings import text_of

# A product in the backward pass of a layer's loop, that carries an all-gather on: its
# left side is a layer's part of what six layers kept, its right side lies in vector
# memory, and the all-gather's buffers pass through.
CARRIES = """\
HloModule carries, is_scheduled=true, num_partitions=16

%kept (p.0: bf16[6,12,1024,3072], p.1: s32[]) -> bf16[12,1024,3072] {
  %p.0 = bf16[6,12,1024,3072]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice = bf16[1,12,1024,3072]{3,2,1,0:T(8,128)(2,1)} dynamic-slice(%p.0, %p.1, \
%zero, %zero, %zero), dynamic_slice_sizes={1,12,1024,3072}
  ROOT %bitcast.1 = bf16[12,1024,3072]{2,1,0:T(8,128)(2,1)} bitcast(%slice)
}

%carrying (q.0: bf16[7600,1024], q.1: bf16[121600,1024], q.2: bf16[12,1024,768], \
q.3: bf16[6,12,1024,3072], q.4: s32[]) -> (bf16[3072,768], bf16[7600,1024], \
bf16[121600,1024], bf16[121600,1024]) {
  %q.3 = bf16[6,12,1024,3072]{3,2,1,0:T(8,128)(2,1)} parameter(3)
  %q.4 = s32[]{:T(128)S(6)} parameter(4)
  %left = bf16[12,1024,3072]{2,1,0:T(8,128)(2,1)} fusion(%q.3, %q.4), kind=kLoop, \
calls=%kept
  %q.2 = bf16[12,1024,768]{2,1,0:T(8,128)(2,1)S(1)} parameter(2)
  %convolution = bf16[3072,768,1]{1,0,2:T(8,128)(2,1)} convolution(%left, %q.2), \
window={size=12}, dim_labels=0fb_0io->bf0
  %bitcast.2 = bf16[3072,768]{1,0:T(8,128)(2,1)} bitcast(%convolution)
  %q.0 = bf16[7600,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %q.1 = bf16[121600,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather = bf16[121600,1024]{1,0:T(8,128)(2,1)} all-gather(%q.0), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, dimensions={0}
  ROOT %tuple = (bf16[3072,768]{1,0:T(8,128)(2,1)}, \
bf16[7600,1024]{1,0:T(8,128)(2,1)}, bf16[121600,1024]{1,0:T(8,128)(2,1)}, \
bf16[121600,1024]{1,0:T(8,128)(2,1)}) \
tuple(%bitcast.2, %q.0, %q.1, %all-gather)
}

ENTRY %main (a: bf16[7600,1024], b: bf16[121600,1024], c: bf16[12,1024,768], \
d: bf16[6,12,1024,3072], e: s32[]) -> bf16[3072,768] {
  %a = bf16[7600,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[121600,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %c = bf16[12,1024,768]{2,1,0:T(8,128)(2,1)} parameter(2)
  %d = bf16[6,12,1024,3072]{3,2,1,0:T(8,128)(2,1)} parameter(3)
  %e = s32[]{:T(128)} parameter(4)
  %copy-start = (bf16[12,1024,768]{2,1,0:T(8,128)(2,1)S(1)}, \
bf16[12,1024,768]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%c)
  %slice-start = ((bf16[12,1024,768]{2,1,0:T(8,128)(2,1)}), \
bf16[1,1024,768]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%c), \
slice={[0:1], [0:1024], [0:768]}
  %copy-done = bf16[12,1024,768]{2,1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %index = s32[]{:T(128)S(6)} copy(%e)
  %inside = bf16[12,1024,768]{2,1,0:T(8,128)(2,1)S(1)} add(%copy-done, %copy-done)
  %fusion = (bf16[3072,768]{1,0:T(8,128)(2,1)}, bf16[7600,1024]{1,0:T(8,128)(2,1)}, \
bf16[121600,1024]{1,0:T(8,128)(2,1)}, bf16[121600,1024]{1,0:T(8,128)(2,1)}) \
fusion(%a, %b, %inside, %d, %index), kind=kOutput, \
output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%carrying
  ROOT %out = bf16[3072,768]{1,0:T(8,128)(2,1)} get-tuple-element(%fusion), index=0
}
"""
ROWS = 12 * 1024 * 2  # bytes of a column of a microbatch


def counted(text):
    module = Module(text, None)
    return {x.name: module.bytes(x) for x in module.entry.instructions}


def test_a_tpu_s_bytes_are_those_of_its_hbm():
    found = counted(CARRIES)
    # the layer's slice is read and the product written: the rest passes through, or
    # lies in vector memory
    assert found["fusion"] == ROWS * 3072 + 3072 * 768 * 2
    assert found["inside"] == 0
    assert found["copy-start"] == ROWS * 768  # read, written to vector memory
    assert found["slice-start"] == ROWS * 768 // 12
    assert found["copy-done"] == 0


def test_a_gpu_s_memory_spaces_are_all_in_its_memory():
    """There S(1) is memory for collectives."""
    text = CARRIES.replace(":T(8,128)(2,1)", ":").replace(":T(128)", ":")
    found = counted(text)
    assert found["inside"] == 2 * ROWS * 768 + ROWS * 768
    assert found["copy-start"] == 2 * ROWS * 768 + 4  # and its flag
    assert found["fusion"] == ROWS * 3072 + ROWS * 768 + 3072 * 768 * 2 + 4


# -------------------------------------------------------------- cuDNN's attention


@pytest.mark.parametrize("form", ["JAX's", "XLA's", "escaped"])
def test_cudnn_s_attention_has_its_products(form):
    """Compiled for an H100 that was not there: 8 rows of 1,024 tokens, 12 heads of 64.

    Of the scores, the causal half; 2 products forward and 5 backward.
    """
    text = text_of("gpu_cudnn_jax0102")
    if form == "XLA's":
        text = text.replace('": ', '":')
    elif form == "escaped":
        text = re.sub(
            r"backend_config=(\{.operation_queue_id.*\})$",
            lambda m: 'backend_config="' + m[1].replace('"', '\\"') + '"',
            text,
            flags=re.M,
        )
    module = Module(text, None)
    calls = [x for x in module.entry.instructions if "__cudnn$fmha" in x.attributes]
    assert ["Backward" in x.attributes for x in calls] == [False, True]
    scores = 8 * 12 * 1024 * 1025 // 2
    assert [module.flops(x) for x in calls] == [4 * scores * 64, 10 * scores * 64]


def test_a_window_leaves_fewer_scores():
    text = text_of("gpu_cudnn_jax0102")
    text = text.replace('"sliding_window_length": 0', '"sliding_window_length": 256')
    call = next(
        x for x in Module(text, None).entry.instructions if "fmha" in x.attributes
    )
    seen = sum(min(i + 1, 256) for i in range(1024))
    assert hlo.product_flops(call) == 4 * 8 * 12 * seen * 64


# XLA of jax 0.11 and later launches some fusions of a GPU and waits for them later.
LAUNCHED = """\
HloModule launched, is_scheduled=true, num_partitions=8

%one_layer (p.0: bf16[8,2048,2048], p.1: s32[]) -> bf16[1,2048,2048] {
  %p.0 = bf16[8,2048,2048]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,2048,2048]{2,1,0} dynamic-slice(%p.0, %p.1, %zero, %zero), \
dynamic_slice_sizes={1,2048,2048}
}

ENTRY %main (a: bf16[8,2048,2048], b: s32[]) -> bf16[1,2048,2048] {
  %a = bf16[8,2048,2048]{2,1,0} parameter(0)
  %b = s32[] parameter(1)
  %fusion-start = ((bf16[8,2048,2048]{2,1,0}, s32[]), bf16[1,2048,2048]{2,1,0}, \
u32[]) fusion-start(%a, %b), kind=kLoop, calls=%one_layer
  ROOT %fusion-done = bf16[1,2048,2048]{2,1,0} fusion-done(%fusion-start)
}
"""


def test_a_launched_fusion_moves_what_a_fusion_does():
    module = Module(LAUNCHED, None)
    layer = 2048 * 2048 * 2
    assert module.bytes_in(module.entry) == 2 * layer + 4  # read, written; the index
    topology = topologies.parse("gpu:h100:1x8")
    machine = Machine(topology, figures(topology.chip))
    found = costs.predict(schedules.read(LAUNCHED), machine, 8)
    rate = machine.value("memory_bandwidth") * machine.value("memory_efficiency")
    assert found.memory == pytest.approx((2 * layer + 4) / rate)
