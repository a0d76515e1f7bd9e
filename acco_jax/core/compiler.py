"""The options of each generation of compiler that let collectives overlap compute.

Found by compiling half-rounds and reading the schedules; `acco_jax.plan` shows them.
"""

import contextlib
import re
from collections.abc import Iterator

import jax

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
_SPARSE_CORE: dict[str, bool | int] = {
    _OFFLOAD + "all_gather": True,
    _OFFLOAD + "all_reduce": True,
    _OFFLOAD + "reduce_scatter": True,
    _OFFLOAD + "nd_reduce_scatter": True,
    _OFFLOAD + "2d_all_gather": True,
    "xla_tpu_offload_gather_to_sparsecore": False,
}

OPTIONS: dict[str, dict[str, bool | int]] = {
    # One asynchronous collective at a time is the rule; a model axis has its own
    # collectives inside the loops, each of which takes a place, and the data axis needs
    # one beside them: Llama 3 8B in groups of 8 overlaps it with 8 places, not with 4.
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
    },
    "v5e": {
        "xla_enable_async_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    },
    "v5p": _SPARSE_CORE | {_OFFLOAD + "3d_all_gather": True},
    "v6e": _SPARSE_CORE,
    # An embedding's lookup or its gradient, or a weight's change of layout inside the
    # loop, on the SparseCore would hold the place of the collectives.
    "tpu7x": {
        "xla_tpu_enable_offloading_copy_to_sparsecore": False,
        "xla_tpu_offload_gather_to_sparsecore": False,
        "xla_tpu_enable_offloading_scatter_to_sparsecore": False,
    },
    # xla_cpu_copy_insertion_use_region_analysis would spare copies of donated buffers,
    # but jax 0.10.2 then overwrites parameters that a loop has yet to read.
    "cpu": {},
}

# Beginnings of jax.Device.device_kind, most specific first.
_KINDS = {
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5p": "v5p",
    "tpu v5": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7x": "tpu7x",
    "tpu v7": "tpu7x",
    "nvidia": "gpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "cpu": "cpu",
}


def generation(device_kind_or_topology: str) -> str | None:
    """Return the key of `OPTIONS` for a device kind or a topology, None if unknown."""
    name = device_kind_or_topology.lower()
    parts = name.split(":")
    if parts[0] == "tpu" and len(parts) > 1:
        return parts[1] if parts[1] in OPTIONS else None
    if parts[0] in OPTIONS:
        return parts[0]
    return next((gen for kind, gen in _KINDS.items() if name.startswith(kind)), None)


def compiler_options(
    device_kind_or_topology: str, *, model_axis: bool = False
) -> dict[str, bool | int]:
    """Return the compiler options that let collectives run asynchronously.

    Args:
      device_kind_or_topology: `jax.devices()[0].device_kind` ("NVIDIA H200"), or a
        topology as `acco_jax.plan` takes it ("gpu:h200:4x8", "tpu:v5e:16x16").
      model_axis: whether a mesh axis other than the data axis splits the parameters;
        its collectives run inside the microbatch loops.

    Returns:
      Options for jax.jit(compiler_options=...), which make_train_step uses by default;
      empty for devices that need none or are not known.
    """
    chip = generation(device_kind_or_topology)
    options = dict(OPTIONS.get(chip or "", {}))
    if chip == "gpu" and model_axis:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 16
    tpu = chip in ("v5e", "v5p", "v6e", "tpu7x")
    if tpu and model_axis:  # of one array n - 1: `core.direct`
        options["xla_max_concurrent_async_collective_permutes"] = 1024
    return options


@contextlib.contextmanager
def naming_unknown_options() -> Iterator[None]:
    """Turn a compiler's error about an unknown option into one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        option = re.search(r"No such compile option: '(\w+)'", str(error))
        if option is None:
            raise
        raise ValueError(
            f"the compiler of jax {jax.__version__} on this device does not know the "
            f"option {option[1]!r}: pass compiler_options without it."
        ) from error
