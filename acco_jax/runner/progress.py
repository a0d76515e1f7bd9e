"""Progress line of a run on a terminal."""

import sys
from typing import Any

import tqdm


class Progress:
    """A line of the terminal's width; nothing without a terminal."""

    def __init__(self, total: int, done: int) -> None:
        """Begin a line for a run that has done `done` of `total` half-rounds."""
        self._total = total
        self._first: dict[str, Any] | None = None  # row
        self._bar = tqdm.tqdm(
            total=total,
            initial=done,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def show(self, row: dict[str, Any]) -> None:
        """Show a row of metrics."""
        left = self._left(row)
        self._bar.set_description_str(text(row, left), refresh=False)
        self._bar.n = row["half_round"]
        self._bar.refresh()

    def _left(self, row: dict[str, Any]) -> float | None:
        """Return the seconds left; None at the first row.

        Evaluations and checkpoints since that row count. Its compilation does not.
        """
        first = self._first = self._first or row
        done, seconds = (row[k] - first[k] for k in ("half_round", "seconds"))
        if done <= 0 or seconds <= 0:
            return None
        return float((self._total - row["half_round"]) * seconds / done)

    def close(self) -> None:
        self._bar.close()


def text(row: dict[str, Any], left: float | None) -> str:
    """Return the line's text: loss, tokens/s, MFU and time left where known."""
    parts = [f"loss {row['loss']:.3f}"]
    if (rate := row["tokens_per_second"]) is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if (utilization := row.get("model_flops_utilization")) is not None:
        parts.append(f"MFU {utilization:.1%}")
    if row.get("dropped"):
        parts.append(f"{row['dropped']} dropped")
    parts.append(
        "? left" if left is None else f"{tqdm.tqdm.format_interval(left)} left"
    )
    return ", ".join(parts)
