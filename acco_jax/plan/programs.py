"""Train step of an experiment for target hardware, described and compiled.

mesh = programs.data_mesh(topologies.parse("gpu:h200:2x8"))
program = programs.describe(config, mesh)  # nothing is compiled yet
compiled = program.compile()  # its schedule, memory and text
"""

import contextlib
import dataclasses
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

import acco_jax
from acco_jax.core.groups import data_axes, members
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.loss import with_arrays
from acco_jax.core.microbatches import piece
from acco_jax.run.build import meshes, models, optimizers
from acco_jax.run.config import fields as configs
from acco_jax.run.weights import adapters
from acco_jax.schedule import footprint, hlo, program_cache, schedules, topologies
from acco_jax.schedule.compiled import Compiled, DoesNotFit, Memory, what_it_needs
from acco_jax.schedule.footprint import bytes_held
from acco_jax.schedule.machines import Machine
from acco_jax.schedule.topologies import Topology

# Fields of the methods' states.
_NAMES = {
    "master": "master weights",
    "inner": "optimizer state",
    "outer": "outer optimizer's state",
    "in_flight": "in-flight gradients",
    "carry": "carried gradient",
    "residual": "error feedback",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """One method's half-round on described devices; not compiled yet."""

    method: str
    tx: acco_jax.Method
    step: acco_jax.TrainStep  # single-program
    microbatches: int  # of each worker in a half-round
    counts: tuple[int, ...]  # microbatches that each worker computes; () for all
    # params, state, batch, counts, and a key if the loss samples; all abstract
    arguments: tuple[Any, ...]
    frozen: int = 0  # bytes on a device that the loss function holds beside them
    # Whether `counts` are plan's choice for an adaptive run: any up to
    # `microbatches`, and at least as many as here at first.
    adaptive: bool = False
    # Each worker's microbatches in acco's first and second half, if unequal.
    halves: tuple[int, ...] = ()
    half: int | None = None  # its index in them, 0 or 1; None: not one of `parts`

    @property
    def mesh(self) -> Mesh:
        return self.tx.mesh

    @property
    def workers(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.tx.axis)

    @property
    def parts(self) -> "tuple[Program, ...]":
        """Half-rounds that differ: this one, or each of unequal halves."""
        if not self.halves or self.half is not None:
            return (self,)
        return tuple(
            dataclasses.replace(self, half=k, counts=(count,) * self.workers)
            for k, count in enumerate(self.halves)
        )

    @property
    def half_name(self) -> str:
        """'first' or 'second'; '' unless it is one of unequal halves."""
        return "" if self.half is None else ("first", "second")[self.half]

    @property
    def repeats(self) -> float:
        """Occurrences of its parts per optimizer step; below 1: one in several."""
        if self.tx.steps_per_call > 1:
            return 1 / self.tx.steps_per_call
        return 1 if self.halves else self.tx.calls_per_step

    @property
    def single(self) -> bool:
        """True if each worker computes one microbatch, and the program knows it."""
        return max(self.counts if self.half is not None else (self.microbatches,)) == 1

    @property
    def per_step(self) -> int:
        """Microbatches of each worker in an optimizer step."""
        return sum(self.halves) or self.microbatches * self.tx.calls_per_step

    @property
    def rows(self) -> int:
        """Rows of a microbatch."""
        total = self.arguments[2]["tokens"].shape[0] // self.workers
        return total // (self.microbatches * self.tx.steps_per_call)

    @property
    def length(self) -> int:
        """Tokens of a row that are predicted."""
        return int(self.arguments[2]["tokens"].shape[1]) - 1

    @property
    def computed(self) -> int:
        """Microbatches that all workers compute in its parts."""
        whole = [self.microbatches] * self.workers
        counts = (sum(part.counts or whole) for part in self.parts)
        return sum(counts) * self.tx.steps_per_call

    @property
    def parameters(self) -> int:
        leaves = self.arguments[1].layout.leaves  # the arguments may be rows of them
        return sum(math.prod(leaf.shape) for leaf in leaves)

    @property
    def param_dtype(self) -> str:
        """Dtypes of the parameters, as text."""
        leaves = jax.tree.leaves(self.arguments[0])
        return ", ".join(sorted({x.dtype.name for x in leaves}))

    def of_data(
        self, schedule: schedules.Schedule, least: int = 1
    ) -> list[schedules.Collective]:
        """Return a schedule's collectives over data axes, of at least so many bytes.

        They are all that cross the boundary of a model-parallel group: over one data
        axis or several, and those whose groups the text lacks.
        """
        found = schedule.select(least)
        return [c for c in found if not self.in_group(c)]

    def in_group(self, c: schedules.Collective) -> bool:
        """Return whether a collective stays within a model-parallel group."""
        sizes = dict(self.mesh.shape)
        own = hlo.axis_groups(sizes, *(a for a in sizes if a not in self.tx.axis))
        places = topologies.places(self.mesh)
        of = {places[i]: k for k, group in enumerate(own) for i in group}
        within = (len({of[i] for i in group}) == 1 for group in c.groups)
        return len(own[0]) > 1 and bool(c.groups) and all(within)

    def compile(self, place: Topology | str = "these devices") -> Compiled:
        """Compile ahead of time, or load the compiled program, and read the schedule.

        For unequal halves, call it on each of its parts.

        Args:
          place: the devices that it is compiled for, or words for them in the log.

        Raises:
          DoesNotFit: if the chip has too little memory.
        """
        start = time.perf_counter()
        # acco's odd half-rounds are estimates, which a step's first half is
        number = None if self.half is None else 1 - self.half
        lowered = self.step.lower(*self.arguments, call=number)
        name = program_cache.key(lowered, self.step.compiler_options, self.mesh.devices)
        found = program_cache.load(name)
        if found is None:
            logging.info(
                "compiling %s for %s, microbatches of %d",
                self.method, place, self.rows,
            )  # fmt: skip
        entry = found or _compiled(lowered, self.mesh, place)
        if found is None:
            entry["seconds"] = time.perf_counter() - start
            program_cache.keep(name, entry)
        if reason := entry.get("does_not_fit"):
            raise DoesNotFit(reason)
        text, source = entry["text"], entry["source_collectives"]
        return Compiled(
            text,
            self.read(text),
            dataclasses.replace(self.held(), total=entry["peak"]),
            entry["seconds"],
            entry["bytes_accessed"],
            source and tuple(_source_collective(c) for c in source),
            found is not None,
        )

    def read(self, text: str) -> schedules.Schedule:
        """Read the program's compiled text; devices are numbered host after host."""
        schedule = schedules.read(text, trip_counts=self._trips(text))
        return schedule.placed(topologies.places(self.mesh))

    def _trips(self, text: str) -> dict[str, int]:
        """Return the iterations of the loops whose bounds the compiler cannot derive.

        They are the busiest worker's microbatches: in pieces, one beside each
        collective, or in a single loop. A method that reduces inside the backward pass
        has the last one after the loop.
        """
        loops = [x.name for x in schedules.read(text).loops if x.iterations is None]
        most, pieces = max(self.counts, default=self.microbatches), len(loops)
        if self.single or self.tx.local:
            return dict.fromkeys(loops, most)  # or an inner step's microbatches
        if pieces < 2:
            last = 0 if self.tx.round(self.tx.phase(0)).drops else 1
            return dict.fromkeys(loops, most - last)
        bounds = (piece(most, k, pieces) for k in range(pieces))
        return {x: end - start for x, (start, end) in zip(loops, bounds, strict=True)}

    def held(self) -> Memory:
        """Return the memory that stays between half-rounds; a program needs more."""
        params, state, batch, counts, *_ = self.arguments
        parts, shards = {"parameters": bytes_held(params)}, 0
        fields: tuple[str, ...] = ("outer",)  # of a local method: the rest are rows
        if not self.tx.local:
            fields = ("master", "inner", "carry")
        for field, value in zip(state._fields, state, strict=True):
            size, name = bytes_held(value), _NAMES.get(field, field)
            leaves = jax.tree.leaves(value if field in fields else ())
            split = [x for x in leaves if not x.sharding.is_fully_replicated]
            if split:
                shards, name = shards + bytes_held(split), f"{name} (shard)"
            if size > 64:  # not the counters
                parts[name] = size
        if self.frozen:
            parts["frozen model"] = self.frozen
        parts["batch"] = bytes_held((batch, counts))
        return Memory(parts, sum(parts.values()), shards)


def _compiled(
    lowered: jax.stages.Lowered, mesh: Mesh, place: Topology | str
) -> dict[str, Any]:
    """Compile; return a plan's data of the program, as JSON-ready values."""
    try:
        if isinstance(place, Topology):
            compiled = topologies.compiled(lowered, place)
        else:
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"does_not_fit": what_it_needs(str(error))}
    accessed, source = None, None
    # unimplemented where there is no device
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        accessed = (compiled.cost_analysis() or {}).get("bytes accessed")
    with contextlib.suppress(ValueError):
        source = [dataclasses.asdict(c) for c in footprint.collectives(lowered, mesh)]
    return {
        "text": compiled.as_text(),
        "peak": _peak(compiled.memory_analysis()),
        "bytes_accessed": accessed,
        "source_collectives": source,
    }


def _source_collective(entry: Mapping[str, Any]) -> footprint.Transfer:
    return footprint.Transfer(**{**entry, "shape": tuple(entry["shape"])})


def _peak(m: Any) -> int:
    """Return the most bytes that a program holds at once, its arguments included."""
    total = m.argument_size_in_bytes + m.output_size_in_bytes
    return total + m.temp_size_in_bytes - m.alias_size_in_bytes


def compile_within(program: Program, machine: Machine) -> tuple[Compiled, ...]:
    """Compile each part; raise DoesNotFit if it needs more memory than there is.

    Raises:
      DoesNotFit: with the bytes needed; before any compile if `held` is too large.
    """
    least = program.held().total
    if least > machine.usable_memory:
        raise DoesNotFit(
            f"holding parameters, state and batch {_needed(least, machine)}",
            compiled=False,
        )
    found: dict[bool, Compiled] = {}  # whether of one microbatch; others share theirs
    compiled = []
    for part in program.parts:
        if part.single in found:
            same = found[part.single]
            compiled.append(dataclasses.replace(same, schedule=part.read(same.text)))
            continue
        found[part.single] = part.compile(machine.topology)
        compiled.append(found[part.single])
        if compiled[-1].memory.total > machine.usable_memory:
            raise DoesNotFit(f"it {_needed(compiled[-1].memory.total, machine)}")
    return tuple(compiled)


def _needed(size: int, machine: Machine) -> str:
    text = (
        f"needs {size / 2**30:.1f}G of {machine.usable_memory / 2**30:.1f}G of memory"
    )
    if machine.topology.platform == "gpu" and size < machine.value("memory_bytes"):
        text += (
            ", JAX's share of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION and "
            "--set=memory_fraction=0.92 raise it)"
        )
    return text


def data_mesh(
    topology: Topology,
    domains: int | None = None,
    group: Mapping[str, int] = types.MappingProxyType({}),
) -> Mesh:
    """Return all devices of a topology along the data axes, as training has them.

    With `domains` 1 there is one data axis, with the number of hosts or slices there
    are two; None means two for several slices, else one. `group` is as for the
    runner's `data_mesh`.

    Raises:
      RuntimeError: if the compiler is not installed, with how to install it.
      ValueError: if `domains` is another number, `group` does not divide the devices,
        or the compiler lacks the topology.
    """
    total = topology.devices // topology.fast_domain
    domains = topology.slices if domains is None else domains
    if domains not in (1, total):
        raise ValueError(
            f"domains is {domains}, but {topology} has {total} "
            f"{topology.domain_name}s: give that or 1."
        )
    devices: Sequence[Any] = topology.description().devices
    return meshes.data_mesh(devices, domains, group)


def vocab_size(config: ConfigDict) -> int:
    """Return the tokenizer's number of tokens, without a corpus.

    Raises:
      ValueError: if the config does not determine it.
    """
    if config.data.tokenizer == "bytes":
        return models.BYTE_TOKENS
    if config.init_from is not None:
        return models.transformer_config(config, 1).vocab_size
    size = config.data.vocab_size or config.model.vocab_size
    if not size:
        raise ValueError(
            f"the tokenizer {config.data.tokenizer!r} is a file's or made from the "
            "corpus, which plan does not load: set model.vocab_size, or "
            "data.vocab_size of 'bpe'."
        )
    return int(size)


def describe(config: ConfigDict, mesh: Mesh) -> Program:
    """Describe the half-round of a valid config on a mesh of `data_mesh`'s form.

    Raises:
      ValueError: if the config cannot be planned, such as form 'split'.
    """
    model = models.model(config, vocab_size(config))

    def freeze(make: Callable[[], PyTree]) -> PyTree:
        shapes = jax.eval_shape(make)
        return jax.tree.map(
            lambda x, spec: x.update(sharding=NamedSharding(mesh, spec)),
            shapes,
            models.specs(model, shapes, mesh),
        )

    if config.lora.init_from is not None:
        config = adapters.applied(config, adapters.identity(config))
    loss_fn, init = models.trained(config, model, freeze)
    params, axes = jax.eval_shape(init), data_axes(mesh)
    specs = models.specs(model, params, mesh)
    tx = optimizers.method(config, config.method, mesh, axes, model.stacked, specs)
    data, workers = config.data, len(members(mesh))
    microbatches = configs.call_microbatches(config, tx.calls_per_step, workers)
    if config.form == "split":
        raise ValueError("form is 'split', which is for CPUs: plan needs 'auto'.")
    if config.microbatches not in ("fixed", "adaptive"):
        raise ValueError(
            f"microbatches is {config.microbatches!r}, which a run finds or has "
            "logged: plan needs 'fixed' or 'adaptive'."
        )
    halves: tuple[int, ...] = ()
    for first in configs.first_halves(config, tx.calls_per_step)[:1]:
        if 2 * first != config.microbatches_per_step:
            halves = first, config.microbatches_per_step - first
            microbatches = max(halves)
    counts, adaptive = tuple(config.counts), config.microbatches == "adaptive"
    if adaptive:
        least, microbatches = microbatches, config.most_microbatches
        if microbatches < least:
            raise ValueError(
                f"most_microbatches is {microbatches}, less than the {least} that "
                "microbatches_per_step gives a half-round: raise it."
            )
        counts = (least,) * workers
    return assemble(
        config.method,
        tx,
        loss_fn,
        params,
        microbatches=microbatches,
        counts=counts,
        adaptive=adaptive,
        halves=halves,
        microbatch=(config.microbatch_size, max(data.lengths or [config.length]) + 1),
        beside={
            **({"mask": jnp.float32} if data.task != "pretrain" else {}),
            **({"segments": jnp.int32} if data.document_mask else {}),
        },
        rng=jax.eval_shape(lambda: jax.random.key(0)) if model.draws else None,
        drop_nonfinite=optimizers.drops_nonfinite(config, tx),
    )


def assemble(
    method: str,
    tx: acco_jax.Method,
    loss_fn: Callable[..., Any],
    params: PyTree,
    *,
    microbatches: int,
    microbatch: tuple[int, int],
    counts: tuple[int, ...] = (),
    adaptive: bool = False,
    halves: tuple[int, ...] = (),
    beside: Mapping[str, Any] | None = None,
    rng: Rng = None,
    drop_nonfinite: bool = False,
) -> Program:
    """Describe the half-round of any model of tokens, int32 (rows, length) in a batch.

    Args:
      method: the method's name.
      tx: the method, made for a mesh of described devices.
      loss_fn: as for `acco_jax.make_train_step`.
      params: abstract arrays.
      microbatches: of each worker in a half-round.
      microbatch: rows and length of one microbatch's tokens.
      counts: microbatches that each worker computes; () for all.
      adaptive: whether a run finds the counts, of which `counts` are the least.
      halves: of each worker in acco's two half-rounds, if they differ; `microbatches`
        is the larger number.
      beside: dtypes of further arrays (rows, length - 1) in a batch, by their names.
      rng: an abstract key, if the loss samples.
      drop_nonfinite: as for `acco_jax.make_train_step`.
    """
    mesh, axes = tx.mesh, tx.axis
    step = acco_jax.make_train_step(
        loss_fn, tx, microbatches=acco_jax.Halves(*halves) if halves else microbatches,
        form="fused", drop_nonfinite=drop_nonfinite,
    )  # fmt: skip
    workers = math.prod(mesh.shape[a] for a in axes)
    rows = workers * microbatches * tx.steps_per_call * microbatch[0]
    split = NamedSharding(mesh, P(axes))
    tokens = jax.ShapeDtypeStruct((rows, microbatch[1]), jnp.int32, sharding=split)
    further = {
        name: jax.ShapeDtypeStruct((rows, microbatch[1] - 1), kind, sharding=split)
        for name, kind in (beside or {}).items()
    }
    arguments = (
        *acco_jax.abstract_start(tx, params),
        {"tokens": tokens, **further},
        jax.ShapeDtypeStruct((workers,), jnp.int32, sharding=split) if counts else None,
        *(() if rng is None else (rng,)),
    )
    frozen = bytes_held(with_arrays(loss_fn))
    return Program(
        method, tx, step, microbatches, counts, arguments, frozen, adaptive, halves
    )
