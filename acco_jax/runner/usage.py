"""What `--help` of a command with many flags prints: groups, the needed ones first."""

import operator
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from acco_jax.runner.config import default_config

WIDTH = 79
INDENT = 20  # of a flag's description
ASKING = ("--help", "-help", "-h", "--helpshort", "-helpshort", "-?", "--?")
FULL = ("--helpfull", "-helpfull")  # all flags of all modules

# Fields that many runs change, each with a description; config.py has all of them.
FIELDS = {
    "method": "acco, zero1, fused_zero1, ddp, dpu, wp, diloco, ...",
    "steps": "optimizer steps; or say `tokens` or `epochs`",
    "devices": "CPU devices of each process",
    "microbatch_size": "rows of a microbatch",
    "microbatches_per_step": "of each worker in an optimizer step",
    "length": "targets of a row",
    "optimizer.name": "of optax or optax.contrib",
    "optimizer.learning_rate": "its peak",
    "optimizer.schedule": "cosine, linear, wsd, constant, or one of optax",
    "optimizer.warmup_steps": "before the schedule",
    "model.family": "gpt-neo, gpt2, llama, qwen3; or say `model.size`",
    "model.size": "a published size",
    "init_from": "a Hugging Face folder to start from",
    "data.name": "stdlib, text_folder, jsonl, parquet, huggingface, or of tfds",
    "data.path": "of text_folder, jsonl, parquet and huggingface",
    "log_every": "steps between rows of metrics",
    "eval_every": "steps between evaluations",
    "checkpoint_every": "steps between checkpoints",
    "profile": "START:STOP, half-rounds to trace",
}


def asked(argv: Sequence[str], words: Sequence[str] = ASKING) -> bool:
    """Return whether a command line asks for help in one of these words."""
    return any(word in words for word in argv[1:])


def text(doc: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return the page of --help.

    Args:
      doc: of the command.
      groups: titles, each with names of flags.
    """
    doc, _, codes = doc.strip().partition("\nExit codes:")
    lines = [doc.strip(), *_groups(groups)]
    lines += [
        "",
        "Fields of the config are flags, too: --config.method=zero1. Often changed,",
        "with their defaults (acco_jax/runner/config.py has all of them):",
    ]
    lines += _fields()
    lines += ["", f"Exit codes:{codes.rstrip()}", "", "Flags of absl: --helpfull"]
    return "\n".join(lines) + "\n"


def _groups(groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for title, names in groups.items():
        yield from ("", f"{title}:")
        for name in names:
            flag = flags.FLAGS[name]
            default = "" if flag.default in (None, False) else f" [{flag.default}]"
            yield from _entry(f"--{name}", f"{flag.help}{default}")


def _fields() -> Iterator[str]:
    config = default_config()
    for name, says in FIELDS.items():
        value: Any = operator.attrgetter(name)(config)
        default = "" if value is None else f" [{value}]"
        yield from _entry(f"--config.{name}", f"{says}{default}", indent=35)


def _entry(name: str, says: str, indent: int = INDENT) -> Iterator[str]:
    """Yield the lines of a flag: its name, and beside or below it its description."""
    width = WIDTH - indent
    lines = textwrap.wrap(says, width, break_on_hyphens=False)
    first = f"  {name}".ljust(indent)
    if len(first) > indent - 1 and not first.endswith(" "):
        yield first
        first = " " * indent
    yield first + lines[0]
    yield from (" " * indent + line for line in lines[1:])
