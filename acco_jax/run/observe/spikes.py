"""Spikes of the training loss: finite, far above its past, over a window."""

import collections
import math
from typing import Any, NamedTuple

import jax

DIVERGES = (
    "lower optimizer.learning_rate and use a new workdir, or allow it with "
    "spike.policy='off'"
)


class LossSpike(FloatingPointError):
    """A loss is finite, and far above earlier ones."""


class Call(NamedTuple):
    """Result of a half-round."""

    half_round: int
    tokens: int  # of all workers
    loss: float  # mean
    weight: float  # of that mean


class Spikes:
    """Judge of the training loss, a window of calls at a time.

    A window is the newest calls, at least `calls` of them with at least `tokens` tokens
    together: the batch of a single call may be tiny, or hold one odd row. A window is
    a spike if its mean loss is more than `threshold` above the lowest mean of a window
    before it, and so are the losses of more than half of its calls.
    """

    def __init__(
        self,
        threshold: float,
        calls: int,
        tokens: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Begin with an empty window.

        Args:
          threshold: in nats; infinity: nothing is a spike.
          calls: least number of calls in a window.
          tokens: least number of tokens in a window.
          state: of a checkpoint; None: no window is known.
        """
        self._threshold, self._calls, self._tokens = threshold, calls, tokens
        lowest, self._at = (state or {}).get("lowest", (None, 0))
        self._lowest = math.inf if lowest is None else lowest
        self._window: collections.deque[Call] = collections.deque()
        self._unread: list[tuple[int, int, tuple[jax.Array, jax.Array]]] = []

    def add(self, half_round: int, tokens: int, metrics: dict[str, Any]) -> None:
        """Take a call's metrics, possibly not computed yet."""
        if self._threshold < math.inf:
            arrays = metrics["loss"], metrics["weight"]
            self._unread.append((half_round, tokens, arrays))

    def read(self, half_round: int) -> None:
        """Judge all calls up to this one; wait for it.

        Raises:
          LossSpike: if a window of them is one.
        """
        ready = [x for x in self._unread if x[0] <= half_round]
        del self._unread[: len(ready)]
        found = jax.device_get([arrays for *_, arrays in ready])
        for (number, tokens, _), (loss, weight) in zip(ready, found, strict=True):
            self.see(Call(number, tokens, float(loss), float(weight)))

    def see(self, call: Call) -> None:
        """Judge the window that ends with a call.

        A call that counted for nobody, or whose loss is not finite, is left out.
        Other code handles the latter.

        Raises:
          LossSpike: if the window is one.
        """
        if not call.weight or not math.isfinite(call.loss):
            return
        window = self._window
        window.append(call)
        tokens = sum(c.tokens for c in window)
        while len(window) > self._calls and tokens - window[0].tokens >= self._tokens:
            tokens -= window.popleft().tokens
        if len(window) < self._calls or tokens < self._tokens:
            return
        mean = sum(c.loss * c.weight for c in window) / sum(c.weight for c in window)
        limit = self._lowest + self._threshold
        high = sum(c.loss > limit for c in window)
        if mean > limit and 2 * high > len(window):
            raise LossSpike(self._seen(mean, tokens, high))
        if mean < self._lowest:
            self._lowest, self._at = mean, call.half_round

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state, JSON-able and equal in all processes."""
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return {"lowest": [lowest, self._at]}

    def _seen(self, mean: float, tokens: int, high: int) -> str:
        first, last = self._window[0].half_round, self._window[-1].half_round
        return (
            f"the training loss rose: its mean over {tokens:,} tokens, half-rounds "
            f"{first} to {last}, is {mean:.3f}, {mean - self._lowest:.3f} above the "
            f"lowest such mean ({self._lowest:.3f} up to half-round {self._at}), and "
            f"{high} of these {len(self._window)} losses are as high: {DIVERGES}; the "
            f"checkpoints were written before half-round {last}."
        )
