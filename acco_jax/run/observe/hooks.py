"""Further receivers of metrics.jsonl's rows: TensorBoard, W&B, a user's function.

A run outlives them, and does not wait for them: each has a thread of its own. One that
raises is named in a warning and not called again. One that is slow misses rows.
"""

import contextlib
import copy
import importlib
import inspect
import json
import queue
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from acco_jax.command import exits
from acco_jax.command.files import write_whole
from acco_jax.core.names import named

Row = dict[str, Any]
Hook = Callable[[Row], None]  # takes a row of metrics.jsonl
BOARD = "TensorBoard's writer"
WAITING = 1000  # rows that a hook may be behind
CLOSE_SECONDS = 10.0  # that a hook has at the end for the rows that wait
UPLOAD_SECONDS = 300.0  # that W&B has to send them


class Hooks:
    """Functions that are called beside training, and may fail without ending it."""

    def __init__(self, *, strict: bool = False) -> None:
        """Begin without hooks.

        If `strict`, the loop itself calls the hooks, and one that raises ends the run.
        """
        self._strict = strict
        self._receivers: dict[str, _Receiver] = {}
        self._broken: set[str] = set()

    def add(
        self, name: str, make: Callable[[], Hook], seconds: float | None = None
    ) -> None:
        """Add the hook that `make` returns; `make` may fail as a hook may.

        It has `seconds` at the end for the rows that wait; None: CLOSE_SECONDS.
        """
        self._receivers[name] = _Receiver(
            name, make, self.call, seconds or CLOSE_SECONDS, beside=not self._strict
        )

    def open_board(self, workdir: Path, done: int) -> None:
        """Begin a file for TensorBoard, of rows after half-round `done`."""
        self.close_board()
        self.add(BOARD, lambda: Board(workdir, done))

    def close_board(self) -> None:
        if (board := self._receivers.pop(BOARD, None)) is not None:
            board.close()

    def row(self, row: Row) -> None:
        """Pass every hook its own copy of a row.

        Raises:
          exits.Failed: if hooks are strict, and one of them raised.
        """
        for receiver in self._receivers.values():
            receiver.row(copy.deepcopy(row))

    def close(self) -> None:
        """Wait a while until the hooks have taken all rows."""
        for receiver in self._receivers.values():
            receiver.close()

    def call(
        self, name: str, where: str, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Return a function's result, None if it raises or has raised before.

        Args:
          name: of the function; a warning names it once.
          where: the row, in words.
          function: to call.
          *arguments: of the function.

        Raises:
          exits.Failed: if hooks are strict, and the function raised.
        """
        if name in self._broken:
            return None
        try:
            return function(*arguments)
        except Exception as error:  # another's program: it may raise anything
            why = " ".join(f"{type(error).__name__}: {error}".split())
            what = f"{name} raised at {where}: {why}"
            if self._strict:
                raise exits.Failed(
                    f"{what}: mend it, or leave out --strict_hooks; the same command "
                    "continues from its checkpoint."
                ) from error
            logging.warning(
                "%s: training goes on without it (--strict_hooks ends the run)", what
            )
            self._broken.add(name)
            return None


class _Receiver:
    """A hook, and the rows that wait for it."""

    def __init__(
        self, name: str, make: Callable[[], Hook], call: Callable[..., Any],
        seconds: float, *, beside: bool,
    ) -> None:  # fmt: skip
        """Make the hook, `beside` the loop in a thread of its own if so."""
        self._name, self._call, self._late = name, call, False
        self._seconds, self._fails = seconds, False
        self._hook: Hook | None = None
        self._rows: queue.Queue[Row | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        if beside:
            self._thread = threading.Thread(
                target=self._work, args=(make,), daemon=True, name=name
            )
            self._thread.start()
        else:
            self._hook = call(name, "its start", make)

    def row(self, row: Row) -> None:
        if self._thread is None:
            self._take(row)
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._late:
                logging.warning(
                    "%s is %d rows behind: it misses rows from half-round %d on",
                    self._name, WAITING, row["half_round"],
                )  # fmt: skip
            self._late = True

    def close(self) -> None:
        self._fails = sys.exc_info()[0] is not None
        if self._thread is None:
            self._close()
            return
        end = time.monotonic() + self._seconds
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=self._seconds)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            logging.warning(
                "%s has not taken all rows after %.0f s: the rest is left out",
                self._name, self._seconds,
            )  # fmt: skip

    def _work(self, make: Callable[[], Hook]) -> None:
        self._hook = self._call(self._name, "its start", make)
        while (row := self._rows.get()) is not None:
            self._take(row)
        self._close()

    def _take(self, row: Row) -> None:
        if self._hook is not None:
            where = f"the {row['kind']} row of half-round {row['half_round']}"
            self._call(self._name, where, self._hook, row)

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # it has raised before
            if isinstance(self._hook, Board):
                self._hook.close()
            elif isinstance(self._hook, _Wandb):
                self._hook.close(fails=self._fails)


class Board:
    """Writer of TensorBoard rows, whose own writer would have a thread."""

    def __init__(self, workdir: Path, done: int) -> None:
        """Begin a file; TensorBoard drops other files' rows after `done`."""
        folder = workdir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}"  # the name has whole seconds
        self._file = event_file_writer.EventsWriter(str(folder / "events"), suffix)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(done + 1, session_log=start)

    def __call__(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "half_round":
                tag = f"{row['kind']}/{name}"
                self._add(row["half_round"], summary=summary.scalar(tag, value))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, **what: Any) -> None:
        event = event_pb2.Event(wall_time=time.time(), step=step, **what)
        self._file.write_event(event)


def check(config: ConfigDict) -> None:
    """Raise a ValueError for a metrics_hook without a row argument, or missing W&B.

    Raises:
      ValueError: with the field and its value.
    """
    hook = named("metrics_hook", config.metrics_hook)
    if hook is not None:
        try:
            inspect.signature(hook).bind({})
        except TypeError as error:
            raise ValueError(
                f"metrics_hook is {config.metrics_hook!r}, which cannot be called with "
                f"only a row ({error}): name a function of one argument."
            ) from error
        except ValueError:  # a C function has no signature
            pass
    if config.wandb_project:
        _package(config)


def of(config: ConfigDict, workdir: Path, *, strict: bool = False) -> Hooks:
    """Return the hooks of an experiment; only process 0 calls them with rows.

    Raises:
      ValueError: if Weights & Biases is asked for and not installed, or there is no
        such metrics_hook.
    """
    hooks = Hooks(strict=strict)
    if jax.process_index():
        return hooks
    if (hook := named("metrics_hook", config.metrics_hook)) is not None:
        hooks.add(f"metrics_hook {config.metrics_hook}", lambda: hook)
    if config.wandb_project:
        wandb = _package(config)
        name = f"wandb (wandb_project={config.wandb_project})"
        hooks.add(name, lambda: _Wandb(wandb, config, workdir), UPLOAD_SECONDS)
    return hooks


def _package(config: ConfigDict) -> types.ModuleType:
    """Return the module wandb; raise a ValueError if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"wandb_project is {config.wandb_project!r}, but wandb is not installed: "
            "pip install wandb, or leave it out."
        ) from error


class _Wandb:
    """Writer of rows to a run of Weights & Biases.

    The run's id belongs to the workdir, so that a continued run goes on in it.
    """

    def __init__(
        self, wandb: types.ModuleType, config: ConfigDict, workdir: Path
    ) -> None:
        path = workdir / "wandb_id.txt"
        if not path.exists() or not path.read_text().strip():
            write_whole(path, wandb.util.generate_id())
        self._run = wandb.init(
            project=config.wandb_project,
            id=path.read_text(),
            resume="allow",
            dir=str(workdir),
            config=json.loads(config.to_json_best_effort()),
        )
        # not W&B's own step, which cannot go back: a run that does repeats half-rounds
        self._run.define_metric("*", step_metric="half_round")

    def __call__(self, row: Row) -> None:
        kind = row["kind"]
        values = {f"{kind}/{k}": v for k, v in row.items() if k != "kind"}
        self._run.log(values | {"half_round": row["half_round"]})

    def close(self, *, fails: bool) -> None:
        """Send what waits; at the process's end a supervisor would not let it."""
        self._run.finish(exit_code=int(fails))
