"""Figures of the chips that a run can be planned for.

Everything is per JAX device (a TPU7x chip is two devices), one way, in SI units:
FLOP/s, bytes, bytes/s, seconds. They are vendors' peaks, not measurements.

Sources:
    GPUs: NVIDIA's data sheets of the A100 80GB SXM, H100 SXM and H200 SXM (dense
        bf16; NVLink's 600 and 900 GB/s are both ways) and of the DGX A100 and DGX
        H100/H200 (one 200 or 400 Gbit/s adapter per GPU). `Gpu`: XLA's
        xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200}.txtpb.
    TPUs: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x} (ICI is given there both
        ways; DCN per chip, for v5e per pod: 6.4 Tbit/s over 256 chips).
    Latencies: NCCL's src/graph/tuning.cc, ring, simple protocol, for NVLink and the
        network; about 1 us per ICI hop (jax-ml.github.io/scaling-book). For DCN no
        figure is published: NCCL's network latency stands in.
"""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from acco_jax.compiler import generation

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's GpuTargetConfigProto says of one GPU beside the common figures."""

    capability: tuple[int, int]  # compute capability: (major, minor)
    accelerated: bool  # whether the compiler may use the "a" features (sm_90a)
    cores: int  # streaming multiprocessors
    fp32_lanes: int  # fp32 units per core
    clock_ghz: float  # boost clock
    memory_clock_khz: int  # part of the model string
    l2_bytes: int
    shared_bytes: int  # shared memory per core
    shared_optin_bytes: int  # shared memory that one block may ask for
    nvlinks: int


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of one device."""

    name: str  # as in a topology, e.g. "h200"
    title: str  # the vendor's name
    platform: Literal["gpu", "tpu"]
    flops: float  # peak dense bf16 FLOP/s
    memory_bytes: int  # HBM capacity
    memory_bandwidth: float  # HBM bytes/s
    fast_bandwidth: float  # bytes/s that a device sends over NVLink or ICI, all links
    slow_bandwidth: float  # bytes/s that a device sends over its NIC or DCN
    fast_latency: float  # seconds per step over NVLink or ICI
    slow_latency: float = 14e-6  # seconds per step over the network
    dimensions: int = 2  # of a shape: of a TPU's torus; GPU hosts x devices
    devices_per_chip: int = 1  # JAX devices per chip of the shape
    gpu: Gpu | None = None  # what the GPU compiler needs


_A100 = Gpu(
    capability=(8, 0),
    accelerated=False,
    cores=108,
    fp32_lanes=64,
    clock_ghz=1.41,
    memory_clock_khz=1_593_000,
    l2_bytes=41_943_040,
    shared_bytes=167_936,
    shared_optin_bytes=166_912,
    nvlinks=12,
)
_H100 = Gpu(
    capability=(9, 0),
    accelerated=True,
    cores=132,
    fp32_lanes=128,
    clock_ghz=1.98,
    memory_clock_khz=2_619_000,
    l2_bytes=52_428_800,
    shared_bytes=233_472,
    shared_optin_bytes=232_448,
    nvlinks=18,
)
_H200 = dataclasses.replace(_H100, memory_clock_khz=3_750_000)

# Name, title, platform, FLOP/s; bytes of HBM; bytes/s of HBM, NVLink or ICI, NIC or
# DCN; latency of NVLink or ICI. A device of TPU7x is half a chip of 2307 TFLOP/s,
# 192 GiB, 7380 GB/s, 1200 GB/s and 100 Gbit/s.
# fmt: off
_CHIPS = (
    Chip("a100", "NVIDIA A100-SXM4-80GB", "gpu", 312e12,
         85_100_068_864, 2.03904e12, 300e9, 25e9, 3.4e-6, gpu=_A100),
    Chip("h100", "NVIDIA H100 80GB HBM3", "gpu", 989.4e12,
         84_942_979_072, 3.35232e12, 450e9, 50e9, 3.4e-6, gpu=_H100),
    Chip("h200", "NVIDIA H200 141GB HBM3e", "gpu", 989.4e12,
         151_397_597_184, 4.8e12, 450e9, 50e9, 3.4e-6, gpu=_H200),
    Chip("v5e", "TPU v5e", "tpu", 197e12,
         16 * GIB, 819e9, 200e9, 3.125e9, 1e-6),
    Chip("v5p", "TPU v5p", "tpu", 459e12,
         95 * GIB, 2.765e12, 600e9, 6.25e9, 1e-6, dimensions=3),
    Chip("v6e", "TPU v6e", "tpu", 918e12,
         32 * GIB, 1.638e12, 400e9, 12.5e9, 1e-6),
    Chip("tpu7x", "TPU7x", "tpu", 1153.5e12,
         96 * GIB, 3.69e12, 300e9, 6.25e9, 1e-6, dimensions=3, devices_per_chip=2),
)
# fmt: on
CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _CHIPS})


def of_kind(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`, None if it is not known."""
    kind = device_kind.lower()
    names = (generation(kind) or "", *re.split(r"[\s-]+", kind))
    return next((CHIPS[name] for name in names if name in CHIPS), None)


# Hopper's throughput per data type (keys: xla_data.proto's PrimitiveType), in units per
# core and operations per clock. Ampere has none: XLA then falls back to the fp32 lanes.
_SCALAR_UNITS = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1)}
_SCALAR_UNITS |= {12: (64, 1), 16: (128, 2)}
_MATRIX_OPS = {2: 1024, 6: 1024, 10: 512, 11: 256, 12: 32, 16: 512}
_MATRIX_OPS |= dict.fromkeys((19, 20, 23, 24, 25, 28, 29, 33, 35, 36), 1024)
_MATRIX_CLOCK_GHZ = 1.8295201


_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {gpu.shared_optin_bytes}
  core_count: {gpu.cores} fpus_per_core: {gpu.fp32_lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_memory_size: {chip.memory_bytes}
  memory_bandwidth: {chip.memory_bandwidth:.0f}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} \
feature_extension: {feature} }}
{rates}\
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {version}"
  model_str: "sm_{version} with {chip.memory_bytes}B RAM, {gpu.cores} cores, \
{clock_khz:.0f}KHz clock, {gpu.memory_clock_khz}KHz mem clock, {gpu.l2_bytes}B L2$"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  name: "{chip.title}"
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0" cub_version: "3.1.2"
  device_interconnect_info {{ active_links: {gpu.nvlinks} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.title}"
"""


def target_config(chip: Chip) -> str:
    """Renders XLA's GpuTargetConfigProto for a GPU, as protocol-buffer text.

    Only fields that the compiler of jax 0.10.2 knows are written (the later
    collective_memory_granularity, for one, is left out).

    Raises:
        ValueError: if the chip is not a GPU.
    """
    gpu = chip.gpu
    if gpu is None:
        raise ValueError(f"chip {chip.name!r} is not a GPU: it has no target config")
    rates = ""
    if gpu.accelerated:
        scalar = {k: (gpu.clock_ghz, *v) for k, v in _SCALAR_UNITS.items()}
        matrix = {  # fp64 products run at the boost clock, the others lower
            k: (gpu.clock_ghz if k == 12 else _MATRIX_CLOCK_GHZ, 4, ops)
            for k, ops in _MATRIX_OPS.items()
        }
        rates = _rates("scalar", scalar) + _rates("matrix", matrix)
    major, minor = gpu.capability
    return _TARGET.format(
        chip=chip,
        gpu=gpu,
        version=f"{major}.{minor}{'a' if gpu.accelerated else ''}",
        feature="ACCELERATED_FEATURES" if gpu.accelerated else "NONE",
        clock_khz=gpu.clock_ghz * 1e6,
        rates=rates,
    )


def _rates(kind: str, rates: Mapping[int, tuple[float, int, int]]) -> str:
    lines = (
        f"    rate_infos {{ key: {key} value {{ clock_rate_ghz: {clock} "
        f"units_per_core: {units} ops_per_clock: {ops} }} }}\n"
        for key, (clock, units, ops) in rates.items()
    )
    return f"  {kind}_unit_description {{\n{''.join(lines)}  }}\n"
