"""Trained runs: their parameters, loaded onto the available devices.

    run = load_run("runs/quickstart")
    logits = run.apply(tokens)

Nothing of the workdir changes, and the data are not needed.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import ArrayLike
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.command.files import read_object, read_text
from acco_jax.command.paths import expanded
from acco_jax.core.groups import data_axes
from acco_jax.models import lora, transformer
from acco_jax.models.model import Model
from acco_jax.run.build import meshes, models, optimizers
from acco_jax.run.config import field_checks
from acco_jax.run.config import fields as configs
from acco_jax.run.state import worlds
from acco_jax.run.state.checkpoints import Checkpoints
from acco_jax.run.weights import adapters, pretrained

PyTree = Any


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run's trained model, as of one of its checkpoints."""

    workdir: Path
    config: ConfigDict
    model: Model
    params: PyTree  # committed, to evaluate; adapters are merged into their model
    tokenizer: data.Tokenizer
    half_round: int  # of the checkpoint
    architecture: transformer.Config | None  # of the model; None: a factory's
    mesh: Mesh  # that holds params, split by `models.specs`

    def apply(self, tokens: ArrayLike) -> jax.Array:
        """Return the logits (batch, time, vocabulary) of tokens (batch, time).

        Raises:
          ValueError: if tokens are no such integers, there are more in a row than the
            model has positions, or a factory's model gives no logits.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens are {tokens.dtype}{list(tokens.shape)}: give integers of "
                "shape (batch, time)."
            )
        if (logits := self.model.apply) is None:
            raise ValueError(
                f"model.factory {self.config.model.factory} makes a Model that gives "
                "no logits: set its field `apply`."
            )
        most = tokens.shape[1]
        if self.architecture is not None and most > self.architecture.max_length:
            raise ValueError(
                f"tokens have rows of {most}, but the model has "
                f"{self.architecture.max_length} positions: give shorter ones."
            )
        if self.architecture is not None and tokens.size:
            size, found = self.architecture.vocab_size, (tokens.min(), tokens.max())
            if not 0 <= int(found[0]) <= int(found[1]) < size:
                raise ValueError(
                    f"tokens are from {found[0]} to {found[1]}, but the model has "
                    f"{size}: give 0 to {size - 1}."
                )
        return jax.jit(logits)(self.params, tokens)


def load_run(
    workdir: str | Path,
    devices: Sequence[jax.Device] | None = None,
    group: Mapping[str, int] | None = None,
    half_round: int | None = None,
) -> TrainedRun:
    """Load the model that a run has trained, on any devices.

    Args:
      workdir: of the run, finished or not.
      devices: to hold the parameters; None: all.
      group: sizes of the axes "fsdp" and "tensor", over which each group of them splits
        the parameters, as config.mesh. None: the run's sizes; if these do not
        divide the devices, all of these over "fsdp".
      half_round: of the checkpoint; None: the newest.

    Raises:
      ValueError: if there is no such run or checkpoint, it is damaged, or the
        model that it adapts is gone.
    """
    devices = jax.devices() if devices is None else list(devices)
    saved = Saved(expanded(workdir), half_round, len(devices))
    if group is None:
        group = saved.config.mesh.to_dict()
        if len(devices) % math.prod(group.values()):
            group = {"fsdp": len(devices)}
    mesh = meshes.data_mesh(devices, 1, group)
    return TrainedRun(
        saved.workdir, saved.config, saved.model, saved.params(mesh), saved.tokenizer,
        saved.half_round, saved.architecture, mesh,
    )  # fmt: skip


class Saved:
    """Folder of a run, of which no array has been read yet."""

    def __init__(
        self, workdir: Path, half_round: int | None = None, devices: int = 1
    ) -> None:
        """Open a workdir, for a model on so many devices; errors are `load_run`'s."""
        self.workdir = workdir
        identity = read_object(workdir / "config.json")
        try:
            config = configs.from_json(identity)
            self.config = adapters.applied(config, identity.get("adapters") or {})
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{workdir / 'config.json'} is not a run's ({error}): restore it."
            ) from error
        config.metrics_hook = self.config.metrics_hook = None  # maybe not importable
        field_checks.check(config)
        if self.config.model.attention != "xla":
            # not the kernel of the devices that trained it; compilers split none
            self.config.model.attention = None if devices == 1 else "xla"
        self._pretrained = identity.get("pretrained") or {}
        self._frozen = identity.get("frozen")
        self.tokenizer = data.kept_tokenizer(self.config.data, workdir)
        arguments = self.config, self.tokenizer.vocab_size
        described = self._pretrained.get("model")
        self.model = models.model(*arguments, described)
        self.architecture = None
        if self.config.model.factory is None:
            self.architecture = models.transformer_config(*arguments, described)
        folder = checkpoint_folder(self.config, workdir)
        self._checkpoints = Checkpoints(folder, keep=1, repair=False)
        self.half_round = self._chosen(half_round)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the checkpoint from others: half-round, digest of checksums."""
        folder = checkpoint_folder(self.config, self.workdir)
        sums = read_text(folder / f"{self.half_round}.checksums")
        digest = hashlib.sha256(sums.encode()).hexdigest()[:16]
        return {"half_round": self.half_round, "checksums": digest}

    def _chosen(self, half_round: int | None) -> int:
        """Return a checkpoint that exists and is sound, by default the newest."""
        known = self._checkpoints.saved_calls
        if not known:
            raise ValueError(f"{self.workdir} has no checkpoint: train it.")
        half_round = known[-1] if half_round is None else half_round
        if half_round not in known:
            raise ValueError(
                f"{self.workdir} has no checkpoint of half-round {half_round}: choose "
                f"one of {', '.join(map(str, known))}."
            )
        if problem := self._checkpoints.problem(half_round):
            raise ValueError(
                f"{self.workdir} has a damaged checkpoint {half_round} ({problem}): "
                "restore it, or choose another one."
            )
        return half_round

    def params(self, mesh: Mesh) -> PyTree:
        """Read the model's committed parameters; adapters are merged into it.

        Args:
          mesh: the devices to hold them, of `meshes.data_mesh`'s form.

        Raises:
          ValueError: as `load_run`.
        """
        trained, make = self.trained(mesh)
        if make is None:
            return trained
        self._check_adapted()
        adapted = start(self.config, make, self.model, mesh)
        merge = functools.partial(lora.merge, scale=self.config.lora.scale)
        shardings = jax.tree.map(lambda x: x.sharding, adapted)
        return jax.jit(merge, out_shardings=shardings)(adapted, trained)

    def trained(self, mesh: Mesh) -> tuple[PyTree, Callable[[], PyTree] | None]:
        """Read the committed trained parameters: the model's, or adapters.

        Arguments and errors are those of `params`. The second result makes the
        model that adapters adapt, with random parameters.
        """
        base: list[Callable[[], PyTree]] = []

        def freeze(make: Callable[[], PyTree]) -> PyTree:
            base.append(make)
            return jax.eval_shape(make)

        _, init = models.trained(self.config, self.model, freeze)
        theta = self._theta(jax.eval_shape(init), mesh)
        return theta, base[0] if base else None

    def _check_adapted(self) -> None:
        """Raise a ValueError if adapters' folder holds another model by now."""
        if self.config.base and base_identity(self.config) != self._frozen:
            raise ValueError(
                f"base is {self.config.base}, whose newest checkpoint is not the one "
                f"that {self.workdir} has adapted: restore that one."
            )
        path = self.config.init_from
        if path is None:
            return
        if pretrained.identity(path, self.config.ignore_weights) != self._pretrained:
            raise ValueError(
                f"init_from is {path}, which is not the model that {self.workdir} has "
                "adapted: restore it."
            )

    def _theta(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Read only the parameters to evaluate, of the trained parameters and state.

        Args:
          params: their shapes.
          mesh: the devices to hold them.
        """
        axes = self._checkpoints.host(self.half_round).get("axes")
        if not worlds.is_axes(axes):
            raise ValueError(
                f"{self.workdir} has a checkpoint {self.half_round} that does not say "
                "of which devices it is: choose another one."
            )
        was = meshes.described(axes)
        like = as_stored(self.config, self.model, params, was, mesh)
        leaves, treedef = jax.tree.flatten(like)

        def theta(arrays: dict[int, Any]) -> PyTree:
            every = [arrays.get(i, x) for i, x in enumerate(leaves)]
            loop_params, state = jax.tree.unflatten(treedef, every)
            return optimizers.evaluated(state).theta(loop_params)

        read = _arguments_read(theta, dict(enumerate(leaves)))
        found = self._checkpoints.restore_some(self.half_round, like, read)
        specs = models.specs(self.model, params, mesh)
        return jax.jit(theta, out_shardings=shardings(specs, mesh))(found)


def _arguments_read(fn: Callable[[Any], Any], arguments: dict[int, Any]) -> list[int]:
    """Return the indices of the arguments that a function reads."""
    traced = jax.make_jaxpr(fn)(arguments).jaxpr
    used = {id(v) for equation in traced.eqns for v in equation.invars}
    used |= {id(v) for v in traced.outvars}
    return [i for i, v in zip(arguments, traced.invars, strict=True) if id(v) in used]


def as_stored(
    config: ConfigDict,
    model: Model,
    params: PyTree,
    was: AbstractMesh,
    mesh: Mesh,
) -> tuple[PyTree, Any]:
    """Return shapes of parameters and state that a run on another mesh has saved.

    Args:
      config: of the run.
      model: of the run.
      params: shapes of the trained parameters.
      was: the mesh of the run.
      mesh: of devices that are there, over which each array is split anyhow.
    """
    tx = optimizers.method(
        config, config.method, was, data_axes(was), model.stacked,
        models.specs(model, params, was),
    )  # fmt: skip
    return acco_jax.saved(tx, params, mesh)


def checkpoint_folder(config: ConfigDict, workdir: Path) -> epath.Path:
    """Return the folder of the checkpoints: in the workdir, or the config's."""
    if folder := config.checkpoints:
        return epath.Path(folder).expanduser()
    return epath.Path(workdir) / "checkpoints"


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
    """Return the NamedShardings of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def check_tokens(config: ConfigDict, corpus: data.Corpus) -> None:
    """Raise a ValueError for tokens of a corpus that the model of init_from lacks.

    It may lack special tokens that no conversation has.

    Args:
      config: of the experiment.
      corpus: of the experiment.

    Raises:
      ValueError: with the number of tokens, or a conversation's token.
    """
    if config.init_from is None:
        return
    known = models.transformer_config(config, vocab_size=1).vocab_size
    tokenizer = corpus.tokenizer
    model = f"the model of init_from={config.init_from!r} knows {known}"
    if tokenizer.text_vocab_size > known:
        raise ValueError(
            f"the tokenizer has {tokenizer.text_vocab_size} tokens, but {model}: "
            + (
                "restore that folder's files."
                if config.data.tokenizer == "init_from"
                else "set data.tokenizer='init_from'."
            )
        )
    if corpus.train_targets is None or tokenizer.vocab_size <= known:
        return
    splits = corpus.train_tokens, corpus.validation_tokens
    largest = max(np.asarray(tokens).max() for tokens in splits)
    if largest >= known:
        spelled = tokenizer.decode(np.array([largest]))
        raise ValueError(
            f"a conversation has token {largest}, {spelled!r}, but {model} tokens: "
            "leave the conversation out."
        )


def base_identity(config: ConfigDict) -> dict[str, Any]:
    """Return which checkpoint of `base` is the newest.

    Raises:
      ValueError: if `base` holds no run.
    """
    folder = expanded(config.base)
    try:
        return Saved(folder).identity
    except (OSError, ValueError) as error:
        raise ValueError(f"base is {folder}, which holds no run: {error}") from error


def start(
    config: ConfigDict,
    make: Callable[[], PyTree],
    model: Model,
    mesh: Mesh,
    tokenizer: data.Tokenizer | None = None,
) -> PyTree:
    """Return the parameters of init_from, of the finished run `base`, or `make`'s.

    Args:
      config: of the experiment.
      make: the initialization of its model.
      model: of the experiment.
      mesh: the devices to hold them.
      tokenizer: of a new run, which has to have the model and the tokenizer of `base`;
        None: the run has begun, and only the shapes are compared.

    Raises:
      ValueError: if init_from or `base` holds no such model.
    """
    shapes = jax.eval_shape(make)
    homes = shardings(models.specs(model, shapes, mesh), mesh)
    if config.init_from is not None:
        architecture = models.transformer_config(config, vocab_size=1)
        files = pretrained.folder_of(config.init_from)
        return pretrained.load(architecture, files, homes)
    if config.base is None:
        return jax.jit(make, out_shardings=homes)()
    base = base_of(config, shapes, tokenizer)
    try:
        return base.params(mesh)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base is {base.workdir}, which cannot be read: {error}"
        ) from error


def base_of(
    config: ConfigDict, shapes: PyTree, tokenizer: data.Tokenizer | None
) -> Saved:
    """Return the run `base`, whose model has these parameters.

    Raises:
      ValueError: if it holds no run, or one of another model or tokenizer.
    """
    folder = expanded(config.base)
    try:
        base = Saved(folder)
        other = "" if base.model.shapes() == shapes else "its parameters' shapes"
        if tokenizer is not None and not other:
            other = _difference(base, config, tokenizer)
        if not other:
            return base
    except (OSError, ValueError) as error:
        raise ValueError(f"base is {folder}, which holds no run: {error}") from error
    raise ValueError(
        f"base is {folder}, which holds another model ({other}): set the same model.*, "
        "length and tokenizer, or export it and set init_from."
    )


def _difference(base: Saved, config: ConfigDict, tokenizer: data.Tokenizer) -> str:
    """Return what of a run's model or tokenizer is not that of a config, '' if none."""
    if base.tokenizer.fingerprint != tokenizer.fingerprint:
        return f"its tokenizer is {base.tokenizer.fingerprint}"
    if (factory := base.config.model.factory) != config.model.factory:
        return f"model.factory={factory!r}"
    if base.architecture is None:
        return ""
    own = models.transformer_config(config, tokenizer.vocab_size).computed
    theirs = base.architecture.computed
    return ", ".join(f"{n}={x!r}" for n, x in theirs.items() if x != own[n])
