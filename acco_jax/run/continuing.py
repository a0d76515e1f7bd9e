"""What earlier starts have left in a workdir, and whether a run can continue it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.command.files import is_number, read_object
from acco_jax.run.config import fields as configs
from acco_jax.run.config.identity import differing_field
from acco_jax.run.observe import goodput, metrics
from acco_jax.run.prepared import Experiment
from acco_jax.run.state import counts, worlds
from acco_jax.run.trained.trained_runs import checkpoint_folder
from acco_jax.step.adaptive import AdaptiveStep
from acco_jax.step.balanced import BalancedStep


def first_workers(
    config: ConfigDict, workdir: Path, workers: int, again: bool, replay: Path | None
) -> int:
    """Return how many workers a run began with; `workers` if none has begun.

    Their microbatches are the batch, whichever workers compute them later. A run has
    begun once it has saved, or if it is started `again` by the same command. Another
    one begins as the one that it repeats.
    """
    folder, path = checkpoint_folder(config, workdir), workdir / "config.json"
    begun = path.exists() and (again or bool(saved_calls(folder)))
    if replay and not begun:
        path = replay / "config.json"
    first = read_object(path).get("workers") if begun or replay else workers
    return first if type(first) is int and 0 < first <= worlds.MOST else workers


def saved_calls(checkpoints: epath.Path) -> list[int]:
    """Return the calls at which checkpoints were saved in a folder, sound or not."""
    return [int(path.name) for path in checkpoints.glob("*") if path.name.isdigit()]


def with_recorded_half(
    config: ConfigDict, record: Path, workdir: Path, mesh: Mesh
) -> ConfigDict:
    """Return the config with the first half that a record has for these devices."""
    if config.first_half != "auto":
        return config
    done = max(saved_calls(checkpoint_folder(config, workdir)), default=0)
    same = [
        world.first_half
        for call, world in worlds.recorded(record)
        if (call <= done or record == workdir) and world.axes == dict(mesh.shape)
    ]
    found = next((x for x in reversed(same) if x), 0)
    return configs.with_first_half(config, found) if found else config


def check_workdir(
    workdir: Path, identity: dict[str, Any], but: Sequence[str] = ()
) -> None:
    """Raise a ValueError if the workdir's run has another config, workers or corpus.

    The fields `but` may differ.
    """
    path = workdir / "config.json"
    if not path.exists():
        return
    old = read_object(path) | {name: identity[name] for name in but}
    field = differing_field(old, old | identity)
    if field.startswith("corpus.documents"):
        fields = identity["data"]
        raise ValueError(
            f"the documents of data.name={fields['name']!r}, data.path="
            f"{fields['path']!r} are not those of the run in workdir {workdir} "
            f"({field}): restore them, or use another workdir."
        )
    if field:
        raise ValueError(
            f"workdir {workdir} belongs to a run with {field}: use another workdir, "
            "or the same config."
        )


def check_checkpoint(
    experiment: Experiment, first: data.Batches, but: Sequence[str]
) -> None:
    """Raise a ValueError for a checkpoint of another run or with invalid host data.

    The fields `but` may differ.
    """
    checkpoints, identity = experiment.checkpoints, experiment.identity
    if (latest := checkpoints.latest()) is None:
        return
    path = experiment.checkpoint_folder / str(latest)
    old = checkpoints.host(latest).get("identity")
    if not isinstance(old, dict):
        raise ValueError(
            f"{path} does not say which run it is of: use another workdir."
        )
    old |= {name: identity[name] for name in but}
    if field := differing_field(old, old | identity):
        raise ValueError(
            f"{path} is of a run with {field}: use another workdir, or the same config."
        )
    if experiment.logged:
        counts.kept(experiment.workdir, latest)
    if not _continues(checkpoints.host(latest), first):
        raise ValueError(
            f"{path / 'host'} is damaged, or of another version: restore it, or use "
            "another workdir."
        )


def _continues(host: dict[str, Any], first: data.Batches) -> bool:
    """Return whether a run of these batches can continue from such host data."""
    loss = host.get("held_out_loss", "")
    if not worlds.is_axes(axes := host.get("axes")):
        return False
    workers = worlds.workers_of(axes)
    dropped = host.get("dropped") or {
        "in_a_row": [0] * workers,
        "nobody": 0,
        "since": 0,
    }
    try:
        first.set_state(host["batches"])
        numbers = [dropped["nobody"], dropped["since"], *dropped["in_a_row"]]
    except (KeyError, TypeError, ValueError):
        return False
    numbers += [host.get("seconds"), 0 if loss is None else loss]
    return all(map(is_number, numbers)) and len(numbers) == workers + 4


def repeating(experiment: Experiment, folder: Path) -> worlds.WorldsReplay:
    """Return the record that an experiment repeats; give its step the counts.

    Args:
      experiment: from `prepare`.
      folder: the workdir of the run to repeat.

    Raises:
      ValueError: if this experiment cannot go on with that record.
    """
    replay, done = worlds.WorldsReplay(folder), experiment.checkpoints.latest() or 0
    replay.check(experiment.identity, done, experiment.world)
    if goodput.rolled_back(goodput.read(folder)):
        raise ValueError(
            f"--replay={folder} is of a run that was rolled back after a spike of its "
            "loss, of which no record has the half-rounds that it lost: start another "
            "run instead."
        )
    if isinstance(experiment.step, AdaptiveStep | BalancedStep):
        log, last = folder / counts.FILE, repeats_to(experiment, replay, done)
        experiment.step.repeat(acco_jax.Replay(log, experiment.capacity, done, last))
    return replay


def repeats_to(
    experiment: Experiment, replay: worlds.WorldsReplay, done: int
) -> int | None:
    """Return the half-round up to which a record can be repeated; None: to its end."""
    end = replay.end(done)
    if not isinstance(experiment.step, AdaptiveStep | BalancedStep):
        return end
    logged = max(counts.logged(replay.folder), done)
    return logged if end is None else min(end, logged)


def check_whole(workdir: Path, checkpoints: Path | epath.Path) -> None:
    """Raise a ValueError if the checkpoints are missing, or rows are damaged."""
    goodput.read(workdir)
    metrics.read(workdir)
    worlds.recorded(workdir)
    check_present(workdir, checkpoints)


def check_present(workdir: Path, checkpoints: Path | epath.Path) -> None:
    """Raise a ValueError for a workdir with metrics but without its checkpoints."""
    if not (workdir / metrics.FILE).exists():
        return
    before = checkpoints
    if (workdir / "config.json").exists():
        said = read_object(workdir / "config.json").get("checkpoints")
        said = said if isinstance(said, str) else None
        before = checkpoint_folder(ConfigDict({"checkpoints": said}), workdir)
    if before == checkpoints:
        if not checkpoints.exists():
            raise ValueError(
                f"{workdir} has {metrics.FILE}, but its folder {checkpoints} is gone: "
                "restore it, or use another workdir."
            )
        return
    if saved_calls(checkpoints):
        return
    if saved_calls(before) or not before.exists():
        raise ValueError(
            f"{checkpoints} has no checkpoint, but the run in {workdir} saves to "
            f"{before}: move that folder's content there, or use another workdir."
        )
