"""Progress of a run: a bar on a terminal, else lines of the log."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import tqdm
from absl import logging

PERIOD = 60.0  # seconds between lines of the log


class Progress:
    """A bar of the terminal's width; without a terminal about a line a minute."""

    def __init__(
        self,
        steps: int,
        *,
        step: int = 0,
        log_every: int = 1,
        goodput: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Begin to show a run.

        Args:
          steps: optimizer steps of the whole run.
          step: steps done so far.
          log_every: steps between rows of metrics.
          goodput: returns the goodput so far, if it is known.
        """
        self._steps, self._goodput = steps, goodput
        self._last = steps - steps % log_every  # the step of the last row
        self._first: dict[str, Any] | None = None  # row
        self._newest: dict[str, Any] | None = None  # row
        self._reached: int | None = None  # step shown last
        self._text = "compiling"
        self._terminal = sys.stderr.isatty()
        self._shown: float | None = None if self._terminal else time.monotonic()
        self._bar = tqdm.tqdm(
            desc=self._text,
            total=steps,
            initial=step,
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}",
            dynamic_ncols=True,
            disable=not self._terminal,
        )

    def due(self) -> bool:
        """Return whether to show a call between two rows."""
        return self._shown is None or time.monotonic() - self._shown >= PERIOD

    def show(self, row: dict[str, Any], *, between: bool = False) -> None:
        """Show a row of metrics, or the metrics of a call `between` two rows.

        The log has the first and the last row, and of the others one a minute.
        """
        left = self._left(row)
        if not between:
            self._first = self._first or row
        if row["step"] < (self._reached or 0):
            return  # a row comes an interval late
        ends = self._reached is None or row["step"] >= self._last
        due = self.due() or (ends and not between)
        if self._terminal:
            self._newest, self._text = row, text(row, left)
            self._bar.set_description_str(self._text, refresh=False)
            self._bar.n = row["step"]
            self._bar.refresh()
        elif due:
            shown = text(row, left, goodput=self._goodput(), norm=True)
            logging.info("step %d of %d: %s", row["step"], self._steps, shown)
        if self._terminal or due:
            self._shown, self._reached = time.monotonic(), row["step"]

    @contextlib.contextmanager
    def doing(self, what: str, step: int | None = None) -> Iterator[None]:
        """Show what the run does instead of training, after a step if it ended one."""
        if step is not None:
            self._bar.n = step
        if step == self._steps and self._newest is not None:
            self._text = text(self._newest, 0)  # nothing is left to train
        self._bar.set_description_str(what)
        yield
        self._bar.set_description_str(self._text)

    def _left(self, row: dict[str, Any]) -> float | None:
        """Return the seconds left; None at the first row.

        Evaluations and checkpoints since that row count. Its compilation does not.
        """
        first = self._first or row
        done, seconds = (row[k] - first[k] for k in ("step", "seconds"))
        if done <= 0 or seconds <= 0:
            return None
        return float((self._steps - row["step"]) * seconds / done)

    def close(self) -> None:
        self._bar.close()


def text(
    row: dict[str, Any],
    left: float | None,
    *,
    goodput: float | None = None,
    norm: bool = False,
) -> str:
    """Return loss, tokens/s, MFU, time left and goodput where known.

    Args:
      row: of metrics.
      left: seconds to the end; 0 is left out.
      goodput: of the run so far.
      norm: whether to show the gradient norm.
    """
    parts = [f"loss {row['loss']:.3f}"]
    if norm:
        parts.append(f"gradient norm {row['grad_norm']:#.3g}")
    if (rate := row["tokens_per_second"]) is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if (utilization := row.get("model_flops_utilization")) is not None:
        parts.append(f"MFU {utilization:.1%}")
    if row.get("dropped"):
        parts.append(f"{row['dropped']} dropped")
    if left != 0:
        time_left = "?" if left is None else tqdm.tqdm.format_interval(left)
        parts.append(f"{time_left} left")
    if goodput is not None:
        parts.append(f"goodput {goodput:.1%}")
    return ", ".join(parts)
