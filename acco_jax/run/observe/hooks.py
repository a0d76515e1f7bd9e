"""Further receivers of metrics.jsonl's rows: TensorBoard, W&B, a user's function.

A run outlives them: one that raises is named in a warning and not called again.
"""

import contextlib
import importlib
import inspect
import json
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
from acco_jax.core.names import named

Row = dict[str, Any]
Hook = Callable[[Row], None]  # takes a row of metrics.jsonl
BOARD = "TensorBoard's writer"


class Hooks:
    """Functions that are called beside training, and may fail without ending it."""

    def __init__(self, *, strict: bool = False) -> None:
        """Begin without hooks. If `strict`, a hook that raises ends the run."""
        self._strict = strict
        self._functions: dict[str, Hook] = {}
        self._board: Board | None = None
        self._broken: set[str] = set()

    def add(self, name: str, make: Callable[[], Hook]) -> None:
        """Add the hook that `make` returns; `make` may fail as a hook may."""
        if (hook := self.call(name, "its start", make)) is not None:
            self._functions[name] = hook

    def open_board(self, workdir: Path, done: int) -> None:
        """Begin a file for TensorBoard, of rows after half-round `done`."""
        self.close_board()
        self._board = self.call(BOARD, "its start", Board, workdir, done)

    def close_board(self) -> None:
        if self._board is not None:
            with contextlib.suppress(Exception):  # it has raised before
                self._board.close()
        self._board = None

    def row(self, row: Row) -> None:
        """Pass every hook its own copy of a row.

        Raises:
          exits.Failed: if hooks are strict, and one of them raised.
        """
        where = f"the {row['kind']} row of half-round {row['half_round']}"
        board = {} if self._board is None else {BOARD: self._board}
        for name, hook in (self._functions | board).items():
            self.call(name, where, hook, dict(row))

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


class Board:
    """Writer of TensorBoard rows, unthreaded: a dead thread would block training."""

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
                f"a row alone ({error}): name a function of one argument."
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
        hooks.add(name, lambda: _wandb(wandb, config, workdir))
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


def _wandb(wandb: types.ModuleType, config: ConfigDict, workdir: Path) -> Hook:
    """Return a hook that logs rows to a run of Weights & Biases.

    The run's id belongs to the workdir, so that a continued run goes on in it.
    """
    path = workdir / "wandb_id.txt"
    if not path.exists():
        path.write_text(wandb.util.generate_id())
    run = wandb.init(
        project=config.wandb_project,
        id=path.read_text(),
        resume="allow",
        dir=str(workdir),
        config=json.loads(config.to_json_best_effort()),
    )

    def log(row: Row) -> None:
        kind = row["kind"]
        values = {f"{kind}/{k}": v for k, v in row.items() if k != "kind"}
        run.log(values, step=row["half_round"])

    return log
