"""The interface of a method that train steps, loops and checkpoints use."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, Self, TypedDict, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from acco_jax.core.half_round import Round
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree, check_floating
from acco_jax.core.model_state import check_trained
from acco_jax.core.state import State, StateT
from acco_jax.core.workers import axis_names, check_compiled


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that all methods share.

    Attributes:
      axis_name: the mesh axis (or axes, slowest first) of the n data-parallel workers;
        "data" unless given.
      comm_dtype: what collectives carry; None means each parameter's own dtype. With
        float32 parameters and bfloat16 here, the model sees the gathered, rounded
        values (held in float32); `committed_params` gives the master
        weights.
      accumulate_dtype: of the gradient accumulator; None means each parameter's own.
      param_specs: PartitionSpecs of the parameters over the mesh's other axes; needed
        where such an axis is Auto.
    """

    axis_name: str | tuple[str, ...]
    comm_dtype: DTypeLike | None
    accumulate_dtype: DTypeLike | None
    param_specs: PyTree | None


@runtime_checkable
class Method(Protocol):
    """The interface that a train step and a loop need from a method."""

    mesh: Mesh  # the devices
    axis: tuple[str, ...]  # the data axes, slowest first
    accumulate_dtype: (
        DTypeLike | None
    )  # of the gradient accumulator; None: each parameter's own
    delayed: bool  # communication overlaps the computation of later gradients
    local: bool  # each worker takes optimizer steps of its own, on its own row
    calls_per_step: (
        int  # calls of the train step that share the microbatches of one step
    )
    steps_per_call: int  # steps whose microbatches one call computes
    warmup: int  # how many first calls differ from all later ones

    @property
    def period(self) -> int:
        """The number of calls after which those beyond the warm-up repeat in order."""

    @property
    def changes(self) -> str:
        """The option that makes calls differ, so that steps count them; '' for none."""

    def on(
        self, mesh: Mesh | AbstractMesh, axis: tuple[str, ...], specs: PyTree | None
    ) -> Self:
        """Return the method, of the same other options, on another mesh.

        `axis` are the mesh's data axes, and `specs` the method's `param_specs`.
        """

    def start(self, params: PyTree, model_state: PyTree = None) -> tuple[PyTree, State]:
        """Return the parameters of the loop and the initial state.

        Raises:
          ValueError: the method cannot carry a model state.
        """

    def abstract_start(
        self, params: PyTree, model_state: PyTree = None
    ) -> tuple[PyTree, State]:
        """Return ShapeDtypeStructs, with shardings, of what `start` returns."""

    def phase(self, call: int) -> Hashable:
        """Return the phase of a call."""

    def round(self, phase: Any) -> Round:
        """Return the round of a call in the given phase."""

    def calls(self, steps: int) -> int:
        """Return the number of calls that make `steps` steps, pipeline fill included.

        Raises:
          ValueError: the steps are not a whole number of calls.
        """

    def steps_done(self, calls: int) -> int | None:
        """Return the steps done after `calls` calls; None in the middle of a step."""

    def place(self, params: PyTree, state: State) -> PyTree:
        """Return the parameters of the loop on their devices.

        Raises:
          ValueError: the parameters, or the state, are not this method's.
        """

    def arguments(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return the extra arguments of the optimizer, beside gradients.

        Raises:
          ValueError: the optimizer does not take such arguments.
        """

    def check(self, params: PyTree) -> None:
        """Raise what the optimizer raises for such parameters; compute nothing."""


def common_attributes(
    mesh: Mesh, options: Mapping[str, Any], known: type
) -> dict[str, Any]:
    """Return the attributes of a method that its common options determine.

    The options are the user's; `known` is the TypedDict of the options that exist.

    Raises:
      TypeError: an option is unknown.
      ValueError: the mesh lacks the axis, or a dtype is not floating point.
    """
    for name in options:
        if name not in known.__optional_keys__:  # type: ignore[attr-defined]
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    dtypes = {name: options.get(name) for name in ("comm_dtype", "accumulate_dtype")}
    for name, dtype in dtypes.items():
        check_floating(name, dtype)
    return {
        "mesh": mesh,
        "axis": axis_names(mesh, options.get("axis_name", "data")),
        "param_specs": options.get("param_specs"),
        **dtypes,
    }


def layout_of(
    params: PyTree, common: Mapping[str, Any], layout_type: type[Layout] = Layout
) -> Layout:
    """Return the layout of parameters that a method's common attributes determine."""
    check_trained(params)
    names = ("mesh", "axis", "comm_dtype", "param_specs")
    return layout_type.of(params, **{name: common[name] for name in names})


def check_method(tx: object) -> None:
    """Raise a ValueError unless tx is a method of this library, as it was made."""
    if not isinstance(tx, Method):
        raise ValueError(
            f"tx is a {type(tx).__name__}, not a method of this library: pass "
            "acco_jax.acco(inner, ...) itself and put wrappers inside, around inner."
        )


def is_state(x: object) -> TypeGuard[State]:
    """Return whether x is the state of a method of this library."""
    return isinstance(getattr(x, "layout", None), Layout)


def find_state(state: PyTree) -> State:
    """Return the state of the one method in an optimizer state, wrapped or not.

    Raises:
      ValueError: there is none, or more than one.
    """
    states = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    if len(states) != 1:
        raise ValueError(
            f"the state holds {len(states)} states of sharding methods instead of one: "
            "pass what tx.init or tx.update returned."
        )
    return states[0]


def placed_state(
    make: Callable[[PyTree], StateT], params: PyTree, layout: Layout
) -> StateT:
    """Return the state make(params), every array placed as its `shardings` say."""
    check_compiled()
    params = jax.device_put(params, layout.params_shardings)
    return compiled_state(make, layout)(params)


def compiled_state(
    make: Callable[[PyTree], StateT], layout: Layout
) -> Callable[[PyTree], StateT]:
    """Compile `make` for parameters in their places; its results are in theirs."""
    params = layout.tree(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=layout.sharding(*leaf.spec)
        )
    )
    like = jax.jit(make).eval_shape(params)  # traced once for both
    return jax.jit(make, out_shardings=like.shardings())


@functools.partial(jax.jit, static_argnums=0)
def gather_exact(layout: Layout, master: PyTree) -> PyTree:
    return layout.gather_exact(master)


def assembled(layout: Layout, master: PyTree) -> PyTree:
    """Return the result of `gather_exact` by whole-array operations, on any devices."""
    return layout.map(lambda leaf, x: x.astype(leaf.dtype), layout.view(master))


def committed_params(state: PyTree, params: PyTree) -> PyTree:
    """Return theta, the committed parameters: to evaluate, export and checkpoint.

    Args:
      state: the optimizer state, also inside optax.chain or inject_hyperparams.
      params: the parameters of the loop (theta, theta~ or rows); for their structure,
        or, where the state has no other copy (gossip in float32), their values.

    Returns:
      The master weights, gathered and rounded to each parameter's own dtype (whatever
      the communication dtype is); replicated over the data axis. For a method without a
      common copy (gossip): the mean over the workers. On a mesh with Auto axes they can
      be used in eager code and in jax.jit; with Explicit axes some of JAX's functions
      raise in eager code unless jax.set_mesh(mesh) is called.

    Raises:
      ValueError: `state` holds no sharding method's state, or `params` is of another
        structure, or lacks rows whose values are needed.
    """
    ours = find_state(state)
    if jax.tree.structure(params) != ours.layout.treedef:
        raise ValueError(
            "params has another tree structure than the optimizer state's."
        )
    return ours.committed(params)


def committed_model_state(state: PyTree) -> PyTree:
    """Return the model state to evaluate and export `committed_params` with.

    Args:
      state: the optimizer state, of a method that was started with a model state.

    Returns:
      The mean over the workers, weighted as their gradients are, of each one's state
      after its last microbatch whose gradients have been communicated; replicated. A
      copy, which later steps do not change.

    Raises:
      ValueError: `state` carries no model state.
    """
    found = getattr(find_state(state), "model_state", None)
    if found is None:
        raise ValueError(
            "the state carries no model state: start with acco_jax.start(tx, params, "
            "model_state)."
        )
    return jax.tree.map(jnp.copy, found)


def start(
    tx: Method, params: PyTree, model_state: PyTree = None
) -> tuple[PyTree, State]:
    """Return the parameters and the state from which a train step starts.

    Args:
      tx: a method of this library.
      params: arrays.
      model_state: floating arrays that the model carries along and that are not
        differentiated, such as the running statistics of batch norm. The train step's
        loss function is then loss_fn(params, microbatch, rng, model_state) -> (loss,
        weight, aux, model_state), and `committed_model_state` gives their mean over
        the workers. Not of methods whose workers have parameters of their own.

    Returns:
      (params, state). Where each worker keeps parameters of its own they are rows,
      (n, *param.shape), row i on worker i and all equal; else `params` as they are.

    Raises:
      ValueError: the parameters cannot be trained, or the model state not carried.
    """
    check_method(tx)
    return tx.start(params, model_state)


def abstract_start(
    tx: Method, abstract_params: PyTree, model_state: PyTree = None
) -> tuple[PyTree, PyTree]:
    """Return what `start` returns as ShapeDtypeStructs, and compute nothing.

    They are what a checkpoint is restored like, and what a step is compiled for on
    devices that are not there:

        params, state = acco_jax.abstract_start(tx, shapes)
        lowered = step.lower(params, state, batch)

    Args:
      tx: a method of this library.
      abstract_params: arrays or ShapeDtypeStructs, without rows.
      model_state: likewise; None: the model has none.

    Returns:
      (params, state), every array with its NamedSharding.

    Raises:
      ValueError: as `start` does.
    """
    check_method(tx)
    return tx.abstract_start(abstract_params, model_state)


def state_shardings(
    tx: Method | optax.GradientTransformation, abstract_params: PyTree
) -> PyTree:
    """Return a NamedSharding for every array of tx's state.

    Args:
      tx: a method of this library, or an optax transformation around one.
      abstract_params: arrays or ShapeDtypeStructs.

    Returns:
      The state's tree with NamedShardings: for jit, restore and planning. What
      flax.serialization.from_bytes has read belongs there, too: jax.device_put(state,
      shardings).
    """
    if isinstance(tx, Method):
        state = tx.abstract_start(abstract_params)[1]
        return jax.tree.map(lambda x: x.sharding, state)
    shapes = jax.eval_shape(tx.init, abstract_params)
    replicated = find_state(shapes).layout.sharding()
    return jax.tree.map(
        lambda x: x.shardings() if is_state(x) else replicated,
        shapes,
        is_leaf=is_state,
    )
