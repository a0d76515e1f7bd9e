"""Chips' figures, and what the GPU compiler is told of them."""

import pytest

from acco_jax.schedule import machines
from acco_jax.schedule.chips import CHIPS, LARGEST_SLICE, of_kind, target_config


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_figure_has_a_source(chip):
    for name, figure in machines.figures(chip).items():
        assert figure.value > 0 or name in ("call_seconds", "contention")
        assert figure.source
        assert figure.unit or name.endswith(("_efficiency", "_fraction", "contention"))
        if figure.range is not None:
            assert 0 < figure.value < figure.range[1] <= 1
            assert figure.range[0] < figure.value
            assert figure.range[0] > 0 or name == "contention"
    assert chip.platform == "gpu" or chip.name in LARGEST_SLICE


def test_figures_are_of_one_device_and_plausible():
    for name, chip in CHIPS.items():
        assert chip.name == name
        assert 5e13 < chip.flops < 3e15
        assert 10 * 2**30 < chip.memory_bytes < 200 * 2**30
        # a device sends more slowly than it reads memory, and over networks still more
        assert chip.memory_bandwidth > chip.fast_bandwidth > chip.slow_bandwidth
        assert 0 < chip.fast_latency < chip.slow_latency < 1e-4
        assert (chip.gpu is not None) == (chip.platform == "gpu")


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_target_config_is_complete_text(name):
    chip = CHIPS[name]
    text = target_config(chip)
    assert text.count("{") == text.count("}")
    assert f"device_memory_size: {chip.memory_bytes}\n" in text
    assert f"memory_bandwidth: {chip.memory_bandwidth:.0f}\n" in text
    # an older compiler refuses what it does not know
    assert "collective_memory_granularity" not in text
    # tensor cores' rates are given for Hopper alone
    assert ("matrix_unit_description" in text) == (name != "a100")


def test_target_config_of_a100_and_h200():
    assert "{ major: 8 minor: 0 feature_extension: NONE }" in target_config(
        CHIPS["a100"]
    )
    text = target_config(CHIPS["h200"])
    assert "{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "sm_9.0a with 151397597184B RAM, 132 cores, 1980000KHz clock" in text
    dense = (
        "key: 16 value { clock_rate_ghz: 1.8295201 units_per_core: 4 ops_per_clock: 512"
    )
    assert dense in text
    # those rates are the data sheet's bf16 peak, a multiplication and an addition each
    peak = 132 * 4 * 512 * 2 * 1.8295201e9
    assert CHIPS["h200"].flops == pytest.approx(peak, rel=1e-3)


def test_target_config_refuses_a_tpu():
    with pytest.raises(ValueError, match="chip 'v5e' is not a GPU"):
        target_config(CHIPS["v5e"])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),  # of less memory, and the same peak
        ("TPU v5 lite", "v5e"),
        # cards of another peak, and parts of one
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L4", None),
    ],
)
def test_a_device_has_the_peak_of_its_own_card(kind, name):
    assert of_kind(kind) == (name and CHIPS[name])
