"""Where else the rows of metrics.jsonl go: a function of the user's, or W&B."""

import importlib
import json
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from acco_jax.runner.metrics import Hook
from acco_jax.runner.names import named


def of(config: ConfigDict, workdir: Path) -> list[Hook]:
    """Returns what process 0 calls with each row; nothing for other processes.

    Raises:
      ValueError: Weights & Biases is asked for and not installed.
    """
    if jax.process_index():
        return []
    hooks = [named("metrics_hook", config.metrics_hook)]
    if config.wandb_project:
        hooks.append(_wandb(config, workdir))
    return [hook for hook in hooks if hook is not None]


def _wandb(config: ConfigDict, workdir: Path) -> Hook:
    """Returns a hook that logs rows to a run of Weights & Biases.

    The run has an id of the workdir's own, so that a continued run goes on in it.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"wandb_project is {config.wandb_project!r}, but wandb is not installed: "
            "pip install wandb, or leave it out."
        ) from error
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

    def log(row: dict[str, Any]) -> None:
        kind = row["kind"]
        values = {f"{kind}/{k}": v for k, v in row.items() if k != "kind"}
        run.log(values, step=row["half_round"])

    return log
