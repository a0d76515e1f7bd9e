"""JAX's methods for peers.py: plain JAX as others write it, and acco_jax's own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core.leaves import path_names
from acco_jax.methods import METHODS
from acco_jax.models import transformer
from benchmarks.peers_worker import Program

OWN = {  # method of peers.py -> method of acco_jax, its options
    "ddp": ("ddp", {}),
    "zero1": ("zero1", {}),
    "fused_zero1": ("fused_zero1", {}),
    "acco": ("acco", {}),
    "acco(recommended)": ("acco", {"extrapolation": 1.15}),
    "acco(8 bits)": ("acco", {"gather_bits": 8, "reduce_bits": 8}),
}


def config(model: dict[str, int]) -> transformer.Config:
    return transformer.Config(
        **transformer.FAMILIES["gpt2"], **model, dtype=jnp.float32
    )


def initial(model: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns initial parameters by path: GPT-2's distribution, drawn with NumPy."""
    draw, found = np.random.default_rng(0), {}
    shapes = transformer.shapes_of(config(model))
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        name = "/".join(path_names(path))
        if name.endswith(("kernel", "embedding")):
            found[name] = draw.normal(0, 0.02, x.shape).astype(np.float32)
        else:
            found[name] = np.full(x.shape, name.endswith("scale"), np.float32)
    return found


def build(spec: dict[str, Any]) -> Program:
    """Joins the processes and compiles the method's step."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_compilation_cache_dir", spec["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.distributed.initialize(
        spec["coordinator"], spec["processes"], spec["index"], initialization_timeout=60
    )
    with np.load(spec["file"]) as file:
        arrays = dict(file)
    tokens = arrays.pop("tokens")  # [steps, processes, microbatches, rows, length]
    job = Job(spec, arrays, tokens)
    if spec["method"] in OWN:
        steps = job.own(*OWN[spec["method"]])
    else:
        make = {"jit": job.jit, "shard_map": job.shard_map, "fsdp": job.fsdp}
        steps = make[spec["method"].removeprefix("jax/")]()
    return Program(steps, job.make_compute)


class Job:
    """The model, its data and its optimizer, on a mesh of all processes."""

    def __init__(
        self, spec: dict[str, Any], arrays: dict[str, np.ndarray], tokens: np.ndarray
    ) -> None:
        model = config(spec["model"])
        self.spec, self.arrays, self.tokens = spec, arrays, tokens
        self.mesh = jax.make_mesh(
            (spec["processes"],), ("data",), (jax.sharding.AxisType.Auto,)
        )
        self.shapes = transformer.shapes_of(model)
        self.loss = transformer.loss_fn(model)
        self.optimizer = optax.adamw(**spec["adamw"])
        self.whole = NamedSharding(self.mesh, P())
        self.rows = NamedSharding(self.mesh, P("data"))
        self.done = 0  # calls

    def params(self, place: Callable[[np.ndarray], jax.Array]) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: place(self.arrays["/".join(path_names(path))]), self.shapes
        )

    def placed(self, x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def batch(self, x: np.ndarray) -> jax.Array:
        """Returns tokens [processes, microbatches, rows, length] as rows, split."""
        return self.placed(x.reshape(-1, x.shape[-1]), self.rows)

    def mean_loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        total, weight, _ = self.loss(params, {"tokens": tokens}, None)
        return total / weight

    def accumulated(
        self, params: Any, tokens: jax.Array, microbatches: int
    ) -> tuple[jax.Array, Any]:
        """Returns the mean loss over microbatches, and its gradients."""

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            found = jax.value_and_grad(self.mean_loss)(params, part)
            return jax.tree.map(jnp.add, total, found), None

        parts = tokens.reshape(microbatches, -1, tokens.shape[-1])
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / microbatches, total)

    def updated(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # ---- plain JAX

    def jit(self) -> Any:
        """Data parallelism by shardings: parameters whole, rows split."""

        def step(params: Any, state: Any, tokens: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(self.mean_loss)(params, tokens)
            return *self.updated(params, state, grads), loss

        return self.plain(step, lambda x: self.whole)

    def shard_map(self) -> Any:
        """Data parallelism by hand: gradients accumulated, then one psum."""

        def step(params: Any, state: Any, tokens: jax.Array) -> Any:
            found = self.accumulated(params, tokens, self.spec["microbatches"])
            loss, grads = lax.pmean(found, "data")
            return *self.updated(params, state, grads), loss

        split = jax.shard_map(
            step, mesh=self.mesh, in_specs=(P(), P(), P("data")), out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        return self.plain(split, lambda x: self.whole)

    def fsdp(self) -> Any:
        """Parameters, gradients and optimizer split by shardings; one gather a step."""

        def step(params: Any, state: Any, tokens: jax.Array) -> Any:
            shardings = jax.tree.map(self.split, params)
            whole = lax.with_sharding_constraint(params, self.whole)
            loss, grads = jax.value_and_grad(self.mean_loss)(whole, tokens)
            grads = lax.with_sharding_constraint(grads, shardings)
            return *self.updated(params, state, grads), loss

        return self.plain(step, self.split)

    def split(self, x: Any) -> NamedSharding:
        """Returns how FSDP splits a parameter: along its last dimension."""
        spec = P(*[None] * (x.ndim - 1), "data") if x.ndim else P()
        return NamedSharding(self.mesh, spec)

    def plain(self, step: Any, sharding: Callable[[Any], NamedSharding]) -> Any:
        params = self.params(lambda x: self.placed(x, sharding(x)))
        abstract = jax.eval_shape(self.optimizer.init, params)
        init = jax.jit(
            self.optimizer.init, out_shardings=jax.tree.map(sharding, abstract)
        )
        held = [params, init(params)]
        shardings = jax.tree.map(lambda x: x.sharding, held)
        batches = [self.batch(x) for x in self.tokens]
        step = jax.jit(
            step, donate_argnums=(0, 1), out_shardings=(*shardings, self.whole)
        )
        step = step.lower(*held, batches[0]).compile()

        def run(steps: int, first: int) -> list[float]:
            del first
            losses = []
            for _ in range(steps):
                *held[:], loss = step(*held, batches[self.done % len(batches)])
                self.done += 1
                losses.append(loss)
            jax.block_until_ready(held)
            return [float(x) for x in losses]

        return run

    # ---- acco_jax

    def own(self, name: str, options: dict[str, Any]) -> Any:
        tx = METHODS[name](self.optimizer, mesh=self.mesh, **options)
        microbatches = self.spec["microbatches"]
        unequal = "recommended" in self.spec["method"]
        first = -(-microbatches // 4) if unequal else microbatches // tx.calls_per_step
        count: Any = first
        if unequal:
            count = acco_jax.Halves(first, microbatches - first)
        step: Any = acco_jax.make_train_step(self.loss, tx, microbatches=count)
        params = self.params(lambda x: self.placed(x, self.whole))
        held = list(acco_jax.start(tx, params))
        most = count.most if unequal else first
        step.compile(*held, {"tokens": self.batch(self.tokens[0][:, :most])})
        kept: dict[tuple[int, ...], Any] = {}

        def batch(half: int) -> dict[str, jax.Array]:
            """Returns what a call computes, and rows that it does not, up to `most`."""
            call, begin = self.done, 0
            if tx.calls_per_step == 2:  # the first call is a second half: pipeline fill
                call, second = divmod(self.done + 1, 2)
                begin = min(half, microbatches - most) if second else 0
            key = call % len(self.tokens), begin
            if key not in kept:
                part = self.tokens[key[0]][:, begin : begin + most]
                kept[key] = {"tokens": self.batch(part)}
            return kept[key]

        def run(steps: int, given: int) -> list[float]:
            half = given if unequal else first
            if unequal:
                step.alternate(acco_jax.Halves(half, microbatches - half))
            losses = []
            for _ in range(steps * tx.calls_per_step):
                *held[:], metrics = step(*held, batch(half))
                self.done += 1
                losses.append(metrics["loss"])
            jax.block_until_ready(held)
            return [float(x) for x in losses]

        return run

    # ---- one process

    def make_compute(self) -> Callable[[], None]:
        """Compiles one process's work: gradients, and AdamW on its own parameters."""
        device = jax.local_devices()[0]
        params = self.params(lambda x: jax.device_put(x, device))
        part = 1 / self.spec["processes"] if self.spec["sharded"] else 1
        cut = functools.partial(jax.tree.map, lambda x: x.ravel()[: int(x.size * part)])
        owned = jax.jit(cut)(params)
        state = jax.jit(self.optimizer.init)(owned)
        tokens = self.tokens[0, self.spec["index"]]
        tokens = jax.device_put(tokens.reshape(-1, tokens.shape[-1]), device)
        whole = self.spec["method"] in ("jax/jit", "jax/fsdp")
        microbatches = 1 if whole else self.spec["microbatches"]

        @jax.jit
        def step(params: Any, owned: Any, state: Any, tokens: jax.Array) -> Any:
            loss, grads = self.accumulated(params, tokens, microbatches)
            found = []
            for i in range(self.spec["updates"]):
                grads = jax.tree.map(lambda g: g * (1 + i), grads)  # noqa: B023
                found.append(self.updated(owned, state, cut(grads)))
            return loss, found

        def compute() -> None:
            jax.block_until_ready(step(params, owned, state, tokens))

        return compute
