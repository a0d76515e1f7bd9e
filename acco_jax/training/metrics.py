"""Metrics of a run: metrics.jsonl, TensorBoard, and a progress bar on a terminal."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import tensorboardX
import tqdm

FILE = "metrics.jsonl"


class Recorder:
    """Writes metrics one logging interval late, so that fetching never waits.

    Only process 0 writes; the others fetch nothing.
    """

    def __init__(self, workdir: Path, total: int, done: int) -> None:
        self._held: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / FILE
        kept = [row for row in read(workdir) if row["half_round"] <= done]
        self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a")
        self._board = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=done + 1
        )
        self._bar = tqdm.tqdm(
            total=total,
            initial=done,
            unit="half-round",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )
        self._clock = (time.perf_counter(), kept[-1]["tokens"] if kept else 0)

    def train(self, known: dict[str, Any], device: dict[str, jax.Array]) -> None:
        """Takes this interval's metrics and writes the last one's.

        Args:
          known: host values: half_round, tokens, ...
          device: scalars on the device, possibly not computed yet.
        """
        if self._writes:
            held, self._held = self._held, (known, device)
            self._write_train(held)

    def flush(self) -> None:
        """Writes what is held back."""
        if self._writes:
            held, self._held = self._held, None
            self._write_train(held)
            self._file.flush()

    def evaluation(self, row: dict[str, Any]) -> None:
        self.flush()
        if self._writes:
            self._write(row)
            self._file.flush()

    def close(self) -> None:
        self.flush()
        if self._writes:
            self._bar.close()
            self._board.close()
            self._file.close()

    def _write_train(self, held: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
        if held is None:
            return
        known, device = held
        values = {k: v.item() for k, v in jax.device_get(device).items()}
        before, tokens = self._clock
        now = time.perf_counter()
        rate = (known["tokens"] - tokens) / (now - before)
        self._clock = (now, known["tokens"])
        row = known | values | {"tokens_per_second": rate}
        self._write(row)
        self._bar.update(known["half_round"] - self._bar.n)
        self._bar.set_postfix(loss=f"{row['loss']:.3f}", tokens_s=f"{rate:,.0f}")

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if isinstance(value, int | float) and name != "half_round":
                self._board.add_scalar(name, value, row["half_round"])


def read(workdir: Path) -> list[dict[str, Any]]:
    """The rows of a run so far; a line that a killed process left cut is dropped."""
    path = workdir / FILE
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
