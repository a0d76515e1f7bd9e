"""Checkpoints of a loop of one's own: parameters and state, through orbax.

A checkpoint is a folder, which orbax renames once it is whole: the arrays, and a JSON
with the mesh's axes, the data axes, the parameters' specs, the state's type, the
arrays' shapes and `extra`.
"""

import itertools
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core import leaf_names
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree, axes_in
from acco_jax.core.state import State
from acco_jax.core.workers import place, without_mesh
from acco_jax.methods import method
from acco_jax.methods.reshard import reshard, saved

Path = str | os.PathLike[str]


def save(
    path: Path, state: State, params: PyTree, extra: dict[str, Any] | None = None
) -> None:
    """Save a loop's parameters and state, also between the half-rounds of a step.

    Returns once all is written. No argument is changed or donated. With several
    processes every process calls it, with a path that all of them can read.

    Args:
      path: the checkpoint's folder, new or empty; local or a bucket's.
      state: a method's state, as `start` and the train step return it.
      params: the parameters beside it, not the committed ones; of a local method rows.
      extra: JSON for `restore` to return, equal on every process, such as the step of
        the data iterator. JSON turns tuples into lists and keys into strings.

    Raises:
      FileExistsError: `path` is a file, or a folder that is not empty.
      TypeError: `extra` is not JSON.
      ValueError: `state` is not a method's, or `params` are not those beside it: of
        another structure, or of a local method without rows.

    Example:
      acco_jax.save("checkpoints/100", state, params, extra={"batches": 100})
    """
    ocp, folder = _orbax(path)
    if not method.is_state(state) or not _fits(state, params):
        raise ValueError(
            "state and params are not a method's: give what its train step returned."
        )
    params, state = jax.tree.map(leaf_names.array, (params, state))
    layout = state.layout
    if layout.mesh.is_multi_process:  # `start` leaves them in each process
        params = jax.tree.map(_everywhere, params, layout.params_shardings)
    about = _where(layout) | {"holds": _holds(params, state), "extra": extra or {}}
    json.dumps(about)  # raises before anything is written
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists: save to a new folder, or remove it.")
    arrays = ocp.args.PyTreeSave(leaf_names.named((params, state)))
    parts = ocp.args.Composite(arrays=arrays, about=ocp.args.JsonSave(about))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=parts, force=True)  # an empty folder, too


def restore(
    path: Path, tx: method.Method, params: PyTree, model_state: PyTree = None
) -> tuple[PyTree, Any, dict[str, Any]]:
    """Restore what `save` wrote onto tx's devices, as many as there are.

    On a mesh of the saved axes and sizes, with the saved `param_specs`, every array is
    bitwise the saved one. Otherwise `reshard` says what becomes of each worker's own
    arrays.

    Args:
      path: the checkpoint's folder.
      tx: the method it was saved with, of the same options and inner optimizer.
      params: arrays or ShapeDtypeStructs as for `start`, without rows; only read.
      model_state: likewise, if `start` was given one.

    Returns:
      (params, state, extra): `make_train_step(loss_fn, tx)` goes on with the first two.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: the folder is not a whole checkpoint of `save`, or it is of another
        method, other parameters, another optimizer or another model state.

    Example:
      params, state, extra = acco_jax.restore("checkpoints/100", tx, params)
    """
    ocp, folder = _orbax(path)
    if not isinstance(tx, method.Method):
        raise ValueError(f"tx is a {type(tx).__name__}: give a method of acco_jax.")
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: give a checkpoint's folder.")
    if not (ocp.utils.is_checkpoint_finalized(folder) and (folder / "about").exists()):
        raise ValueError(f"{folder} is not a whole checkpoint: give one of save's.")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        parts = ocp.args.Composite(about=ocp.args.JsonRestore())
        about = checkpointer.restore(folder, args=parts).about
        if "specs" not in about:
            raise ValueError(
                f"{folder} is of an earlier version, without the parameters' specs: "
                "restore it with that version."
            )
        like, target = _saved(about, tx, params, model_state)
        both = about["holds"], _holds(*like)
        for was, now in itertools.zip_longest(*both, fillvalue="nothing"):
            if was != now:
                raise ValueError(
                    f"{folder} has {was} where tx, params and model_state have {now}: "
                    "give the method and parameters that it was saved with."
                )
        named = leaf_names.named(like)
        how = ocp.checkpoint_utils.construct_restore_args(named)
        arrays = ocp.args.PyTreeRestore(named, restore_args=how)
        parts = ocp.args.Composite(arrays=arrays)
        found = checkpointer.restore(folder, args=parts).arrays
    leaves, treedef = jax.tree.flatten(like)
    leaves = list(map(leaf_names.as_key, leaves, map(found.get, named)))
    pair = jax.tree.unflatten(treedef, leaves)
    return *(pair if target is None else reshard(pair, target)), about["extra"]


def _fits(state: State, params: PyTree) -> bool:
    """Return whether these parameters are of a state, by structure and shapes."""
    layout = state.layout
    if jax.tree.structure(params) != layout.treedef:
        return False
    local = "residual" not in state._fields  # whose parameters are rows
    rows = (layout.workers,) if local else ()
    shapes = [(*rows, *leaf.shape) for leaf in layout.leaves]
    return list(map(jnp.shape, jax.tree.leaves(params))) == shapes


def _saved(
    about: dict[str, Any], tx: method.Method, params: PyTree, model_state: PyTree
) -> tuple[PyTree, method.Method | None]:
    """Return (params, state), abstract, as saved, and the method to reshard them to.

    That is tx with the specs of `params`, or None if tx has the saved mesh and specs.
    """
    like = method.abstract_start(tx, params, model_state)
    layout = like[1].layout
    where = _where(layout)
    if all(about[key] == where[key] for key in where):
        return like, None
    names, sizes = zip(*about["mesh"], strict=True)
    there = AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
    # a parameter that was not saved is refused later, by its name
    specs = [about["specs"].get(name, []) for name in where["specs"]]
    specs = [P(*(tuple(axes) or None for axes in spec)) for spec in specs]
    tx_there = tx.on(there, tuple(about["axis"]), layout.treedef.unflatten(specs))

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    begun = layout.tree(shape), tx.mesh, jax.tree.map(shape, model_state)
    with without_mesh():  # of the devices that there are now
        like = saved(tx_there, *begun)
    return like, tx.on(tx.mesh, tx.axis, layout.tree(lambda leaf: leaf.spec))


def _where(layout: Layout) -> dict[str, Any]:
    """Describe, as JSON has it, the mesh and how its axes split the parameters."""
    leaves = leaf_names.named(layout.tree(lambda leaf: leaf)).items()
    return {
        "mesh": [[name, size] for name, size in layout.mesh.shape.items()],
        "axis": list(layout.axis),
        "specs": {
            f"{name} {list(leaf.shape)}": [list(axes_in(axes)) for axes in leaf.spec]
            for name, leaf in leaves
        },
    }


def _everywhere(x: Any, home: NamedSharding) -> jax.Array:
    """Return x on all devices, if this process has it whole."""
    return place(x, home) if getattr(x, "is_fully_addressable", True) else x


def _holds(params: PyTree, state: State) -> list[str]:
    """Describe what must agree: the state's type and every array, also abstract."""
    named = leaf_names.named({"params": params, "state": state}).items()
    arrays = [f"{name[6:]} {x.dtype}{list(x.shape)}" for name, x in named]
    return [f"{type(state).__name__} in {type(state.layout).__name__}", *arrays]


def _orbax(path: Path) -> tuple[Any, Any]:
    """Return orbax and the folder, absolute."""
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as error:
        why = "save and restore need orbax: pip install orbax-checkpoint"
        raise ImportError(why) from error
    path = os.fspath(path)
    return ocp, epath.Path(path if "://" in path else os.path.abspath(path))
