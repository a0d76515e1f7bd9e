"""The interface of models that the runner trains: initial parameters and loss."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

PyTree = Any
Batch = Mapping[str, jax.Array]
Loss = Callable[[PyTree, Batch, Any], tuple[jax.Array, jax.Array, PyTree]]
Stacked = Callable[[PyTree], PyTree]  # parameters -> a bool for each leaf


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of tokens, from any library.

    A factory makes one, `factory(vocab_size=..., length=..., **options)`, and
    `config.model.factory = "package.module:factory"` names it.

    Attributes:
      init: key -> parameters, any tree of floating arrays. Compatible with jax.jit.
      loss: (params, batch, rng) -> (sum of the losses in nats [], number of targets [],
        aux). batch["tokens"] is int32 (b, length + 1); targets are all tokens but the
        first, weighted by batch["mask"], float (b, length), where that is there. With
        config.data.document_mask, batch["segments"], int32 (b, length), numbers the
        documents of the inputs, within which attention is to stay. rng is
        a key in training if `draws`, and None in evaluation.
      evaluation_loss: `loss` of held-out rows, without what only training adds to it;
        None: it is `loss`.
      flops_per_token: length -> model FLOPs of forward and backward pass per target,
        for the utilization that metrics and plan show; None: they leave it out.
      stacked: parameters -> which leaves stack layers on axis 0, so that an optimizer
        acts on each by itself (`acco_jax.per_layer`); None: none does.
      tensor: (parameters, size) -> how a mesh axis "tensor" of this size splits each, a
        tree of PartitionSpecs; raises a ValueError for an impossible size. None: the
        model cannot be split.
      draws: whether `loss` samples random numbers in training (dropout).
      apply: (parameters, tokens int32 (b, t)) -> logits (b, t, vocab), for `apply` of a
        loaded run; None: the model does not give them.
      dtype: of the matmuls, a floating dtype's name; plan times bfloat16's.
    """

    init: Callable[[jax.Array], PyTree]
    loss: Loss
    flops_per_token: Callable[[int], float] | None = None
    stacked: Stacked | None = None
    tensor: Callable[[PyTree, int], PyTree] | None = None
    draws: bool = False
    apply: Callable[[PyTree, jax.Array], jax.Array] | None = None
    dtype: str = "bfloat16"
    evaluation_loss: Loss | None = None

    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(x.size for x in jax.tree.leaves(self._shapes))

    def shapes(self) -> PyTree:
        """Return shapes and dtypes of the parameters."""
        return jax.tree.map(lambda x: x, self._shapes)  # of new containers

    @functools.cached_property
    def _shapes(self) -> PyTree:
        return jax.eval_shape(self.drawn, jax.random.key(0))

    @functools.cached_property
    def drawn(self) -> Callable[[jax.Array], PyTree]:
        """`init`, jitted: traced once, however often its shapes are asked for."""
        return jax.jit(self.init)
