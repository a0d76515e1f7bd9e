"""Figures of the chips that a run can be planned for.

Everything is per JAX device (a TPU7x chip is two devices), one way, in SI units:
FLOP/s, bytes, bytes/s, seconds. They are vendors' peaks, not measurements.

Sources:
    GPUs: NVIDIA's data sheets of the A100 80GB SXM, H100 SXM and H200 SXM (dense
        bf16; NVLink's 600, 900 and 1,800 GB/s are both ways), of the DGX B200 and the
        GB200 NVL72 (a rack is a host of 72), the H20, L40S and A10G, and of the DGX
        A100 and DGX H100/H200/B200 (one 200 or 400 Gbit/s adapter per GPU; the A10G's
        is Amazon's g5.48xlarge: 100 Gbit/s for 8; the L40S's an OVX server's: 400
        Gbit/s for 4). What is joined by PCIe 4.0 x16 has its 32 GB/s one way. AMD's
        data sheet of the MI300X: 7 links of 128 GB/s both ways. `Gpu`: XLA's
        xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200,gb200}
        .txtpb; of the L40S and A10G NVIDIA's Ada and Ampere GA102 white papers. The
        H20 is compiled for as an H100 of fewer cores. Of the MI300X there is no
        compiler without ROCm: its programs are compiled as an H200's.
    Watts: the most a device takes, of the same data sheets (TDP); TPUs' makers say
        none.
    TPUs: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x} (ICI is given there both
        ways; DCN per chip, for v5e per pod: 6.4 Tbit/s over 256 chips). Rings: v5p's
        page (a cube of 4 x 4 x 4 and larger), and for v5e and v6e the scaling book.
    Latencies: NCCL's src/graph/tuning.cc, ring, simple protocol, for NVLink and the
        network; about 1 us per ICI hop (jax-ml.github.io/scaling-book). For DCN no
        figure is published: NCCL's network latency stands in.
"""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from acco_jax.core.compiler import generation

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Fields of XLA's GpuTargetConfigProto for one GPU, beside the common figures."""

    capability: tuple[int, int]  # compute capability: (major, minor)
    accelerated: bool  # whether the compiler may use the "a" features (sm_90a)
    cores: int  # streaming multiprocessors
    fp32_lanes: int  # fp32 units per core
    clock_ghz: float  # boost clock
    matrix_clock_ghz: float  # of matmuls, where XLA has a figure for it
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
    platform: Literal["gpu", "tpu", "cpu"]
    flops: float  # peak dense bf16 FLOP/s
    memory_bytes: int  # HBM capacity
    memory_bandwidth: float  # HBM bytes/s
    fast_bandwidth: float  # bytes/s that a device sends over NVLink or ICI, all links
    slow_bandwidth: float  # bytes/s that a device sends over its NIC or DCN
    fast_latency: float  # seconds per step over NVLink or ICI
    slow_latency: float = 14e-6  # seconds per step over the network
    dimensions: int = 2  # of a shape: of a TPU's torus; GPU hosts x devices
    # Chips along a dimension of a TPU's slice from which on it is a ring, as are their
    # multiples: of all dimensions or none, if there are three.
    ring: int = 0
    devices_per_chip: int = 1  # JAX devices per chip of the shape
    gpu: Gpu | None = None  # figures for the GPU compiler
    watts: float | None = None  # most that a device takes, if a data sheet gives it
    link: str = "ICI"  # link between the devices of a domain
    # Parts of its links that lead to different devices; 1: all lead to a switch. On a
    # torus they are the dimensions: a compiler sends both ways along one at once.
    neighbours: int = 1
    # a chip whose programs represent this one's, if it has no compiler here
    compiled_as: str | None = None

    @property
    def source(self) -> str:
        """Source of its figures."""
        if self.platform == "tpu":
            return f"docs.cloud.google.com/tpu/docs/{self.name}"
        return f"{'AMD' if self.compiled_as else 'NVIDIA'}'s data sheet"


_A100 = Gpu(
    capability=(8, 0),
    accelerated=False,
    cores=108,
    fp32_lanes=64,
    clock_ghz=1.41,
    matrix_clock_ghz=1.41,
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
    matrix_clock_ghz=1.8295201,
    memory_clock_khz=2_619_000,
    l2_bytes=52_428_800,
    shared_bytes=233_472,
    shared_optin_bytes=232_448,
    nvlinks=18,
)
_H200 = dataclasses.replace(_H100, memory_clock_khz=3_750_000)

_H20 = dataclasses.replace(_H100, cores=78, l2_bytes=62_914_560)
_B200 = dataclasses.replace(
    _H100,
    capability=(10, 0),
    cores=148,
    clock_ghz=1.965,
    matrix_clock_ghz=1.8353101,
    memory_clock_khz=3_996_000,
    l2_bytes=132_644_864,
)
_GB200 = dataclasses.replace(
    _B200, cores=152, clock_ghz=2.062, matrix_clock_ghz=1.9259081, l2_bytes=135_528_448
)
_A10G = dataclasses.replace(
    _A100,
    capability=(8, 6),
    cores=80,
    fp32_lanes=128,
    clock_ghz=1.71,
    matrix_clock_ghz=1.71,
    memory_clock_khz=6_251_000,
    l2_bytes=6_291_456,
    shared_bytes=102_400,
    shared_optin_bytes=101_376,
    nvlinks=0,
)
_L40S = dataclasses.replace(
    _A10G,
    capability=(8, 9),
    cores=142,
    clock_ghz=2.52,
    matrix_clock_ghz=2.52,
    memory_clock_khz=9_001_000,
    l2_bytes=100_663_296,
)

# JAX devices of the largest slice: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}
LARGEST_SLICE = {"v5e": 256, "v5p": 8960, "v6e": 256, "tpu7x": 2 * 9216}


def _nvidia(
    name: str,
    title: str,
    flops: float,
    memory: tuple[int, float],
    network: tuple[float, float],
    gpu: Gpu,
    watts: float,
    link: str = "NVLink",
) -> Chip:
    """Return a GPU of memory (bytes, bytes/s) and network (fast, slow bytes/s)."""
    return Chip(
        name, title, "gpu", flops, *memory, *network, 3.4e-6, gpu=gpu, watts=watts,
        link=link,
    )  # fmt: skip


# Name, title, platform, FLOP/s; bytes of HBM; bytes/s of HBM, NVLink or ICI, NIC or
# DCN; latency of NVLink or ICI. A device of TPU7x is half a chip of 2307 TFLOP/s,
# 192 GiB, 7380 GB/s, 1200 GB/s and 100 Gbit/s.
# fmt: off
_CHIPS = (
    _nvidia("a100", "NVIDIA A100-SXM4-80GB", 312e12,
            (85_100_068_864, 2.03904e12), (300e9, 25e9), _A100, 400),
    _nvidia("h100", "NVIDIA H100 80GB HBM3", 989.4e12,
            (84_942_979_072, 3.35232e12), (450e9, 50e9), _H100, 700),
    _nvidia("h200", "NVIDIA H200 141GB HBM3e", 989.4e12,
            (151_397_597_184, 4.8e12), (450e9, 50e9), _H200, 700),
    _nvidia("b200", "NVIDIA B200", 2250e12,
            (191_514_411_008, 7.67232e12), (900e9, 50e9), _B200, 1000),
    _nvidia("gb200", "NVIDIA GB200", 2500e12,
            (197_897_748_480, 7.928064e12), (900e9, 50e9), _GB200, 1200),
    _nvidia("h20", "NVIDIA H20", 148e12,
            (96 * 10**9, 4.0e12), (450e9, 50e9), _H20, 400),
    _nvidia("l40s", "NVIDIA L40S", 362.05e12,
            (48 * 10**9, 864e9), (32e9, 12.5e9), _L40S, 350, link="PCIe"),
    _nvidia("a10g", "NVIDIA A10G", 70e12,
            (24 * 10**9, 600e9), (32e9, 1.5625e9), _A10G, 300, link="PCIe"),
    Chip("mi300x", "AMD Instinct MI300X", "gpu", 1307.4e12,
         192 * GIB, 5.3e12, 448e9, 50e9, 3.4e-6, gpu=_H200, watts=750,
         link="Infinity Fabric", neighbours=7, compiled_as="h200"),
    Chip("v5e", "TPU v5e", "tpu", 197e12,
         16 * GIB, 819e9, 200e9, 3.125e9, 1e-6, ring=16, neighbours=2),
    Chip("v5p", "TPU v5p", "tpu", 459e12,
         95 * GIB, 2.765e12, 600e9, 6.25e9, 1e-6, dimensions=3, ring=4,
         neighbours=3),
    Chip("v6e", "TPU v6e", "tpu", 918e12,
         32 * GIB, 1.638e12, 400e9, 12.5e9, 1e-6, ring=16, neighbours=2),
    Chip("tpu7x", "TPU7x", "tpu", 1153.5e12,
         96 * GIB, 3.69e12, 300e9, 6.25e9, 1e-6, dimensions=3, ring=4,
         neighbours=3, devices_per_chip=2),
)
# fmt: on
CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _CHIPS})


def of_kind(device_kind: str) -> Chip | None:
    """Return the chip of a `jax.Device.device_kind`, None if it is unknown.

    Cards of a chip's name with another peak (PCIe, NVL, parts of a chip) are unknown.
    """
    kind = device_kind.lower()
    if re.search(r"\b(pcie|nvl|mig)\b", kind):
        return None
    names = (generation(kind) or "", *re.split(r"[\s-]+", kind))
    return next((CHIPS[name] for name in names if name in CHIPS), None)


# Hopper's throughput per data type (keys: xla_data.proto's PrimitiveType), in units per
# core and operations per clock; Blackwell's products are twice as fast. Ampere and Ada
# have none: XLA then falls back to the fp32 lanes.
_SCALAR_UNITS = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1)}
_SCALAR_UNITS |= {12: (64, 1), 16: (128, 2)}
_MATRIX_OPS = {2: 1024, 6: 1024, 10: 512, 11: 256, 12: 32, 16: 512}
_MATRIX_OPS |= dict.fromkeys((19, 20, 23, 24, 25, 28, 29, 33, 35, 36), 1024)

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
    """Render XLA's GpuTargetConfigProto for a GPU, as protocol-buffer text.

    Only fields that jax 0.10.2's compiler supports are written (the later
    collective_memory_granularity, for one, is left out).

    Raises:
        ValueError: if the chip is not a GPU.
    """
    if chip.compiled_as:
        chip = CHIPS[chip.compiled_as]
    gpu = chip.gpu
    if gpu is None:
        raise ValueError(f"chip {chip.name!r} is not a GPU: it has no target config")
    rates = ""
    if gpu.accelerated:
        blackwell = gpu.capability[0] >= 10
        scalar = {
            k: (gpu.clock_ghz, units, 1 if blackwell else ops)
            for k, (units, ops) in _SCALAR_UNITS.items()
        }
        matrix = {  # fp64 products run at the boost clock, the others lower
            k: (gpu.clock_ghz, 4, ops // 2 if blackwell else ops)
            if k == 12
            else (gpu.matrix_clock_ghz, 4, 2 * ops if blackwell else ops)
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
