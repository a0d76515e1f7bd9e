"""The states of methods, as code that runs any method sees them."""

from typing import Any, Protocol, Self, TypeGuard, TypeVar

import jax

from acco_jax.core.buffers import InFlight
from acco_jax.core.codec import Residual
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree


class State(Protocol):
    """The state of a method: a NamedTuple with these and other fields."""

    @property
    def _fields(self) -> tuple[str, ...]: ...
    @property
    def layout(self) -> Layout: ...  # static
    @property
    def calls_done(self) -> jax.Array: ...  # int32 []: calls so far
    @property
    def steps(self) -> jax.Array: ...  # int32 []: steps of the inner optimizer so far

    def _replace(self, *args: Any, **changes: Any) -> Self:
        """Return the state with other values in these fields."""

    def shardings(self) -> Self:
        """Return a NamedSharding for every array of this, possibly abstract, state."""

    def committed(self, params: PyTree) -> PyTree:
        """Return the parameters to evaluate; see `committed_params`."""

    def theta(self, params: PyTree) -> PyTree:
        """Return the parameters of `committed`, inside jax.jit, on other devices.

        For states whose mesh is not available: the arrays may have any placement.
        """


StateT = TypeVar("StateT", bound=State)


class ShardedState(State, Protocol):
    """The state of a method whose optimizer state is sharded."""

    @property
    def master(self) -> PyTree: ...  # theta: shards, float32 or wider
    @property
    def inner(self) -> PyTree: ...  # the optimizer's state at theta, over the shards
    @property
    def residual(self) -> Residual | None: ...  # if communication is quantized
    @property
    def model_state(self) -> PyTree: ...  # mean over the workers; None: there is none


class DelayedState(ShardedState, Protocol):
    """The state of a sharded method that communicates while it computes."""

    @property
    def in_flight(self) -> InFlight: ...  # what the call before left to be sent


def is_delayed(state: ShardedState) -> TypeGuard[DelayedState]:
    """Return whether a state has a field for in-flight gradients."""
    return "in_flight" in state._fields
