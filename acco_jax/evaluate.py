"""Evaluate a model on texts: loss, perplexities and bits per byte.

python -m acco_jax.evaluate --workdir=runs/quickstart
python -m acco_jax.evaluate --model=FOLDER --file=book.txt --stride=512
python -m acco_jax.evaluate --model=FOLDER --lambada=lambada_test.jsonl --json

The model is a run's newest checkpoint, or a Hugging Face folder (config.json,
*.safetensors, tokenizer.json).

--split evaluates a run's own data, in the rows of the run: the held-out loss is the
run's. Ends of texts count as tokens. Where examples are cut or left out, words and
bytes count in proportion.
--file evaluates one text. Each token counts once. The first one follows the end of a
text. Each token is predicted from those before it in a window of as many tokens as the
model has positions, or of --window. Windows begin --stride tokens after each other.
--lambada reads a file with one JSON object {"text": ...} per line. It prints the
accuracy on each text's last word, for which all of its tokens must be the most likely,
the perplexity of that word, and the figures of the whole texts.

Perplexity is e to the power of the loss, in nats per token; per word it is e to the
power of the nats per word, and words are what spaces separate.
"""

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags

from acco_jax.command import devices, exits, program_store
from acco_jax.command.paths import expanded
from acco_jax.run.config import parsing

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_MODEL = parsing.ModelFlags()
_SPLIT = flags.DEFINE_enum(
    "split",
    None,
    ["train", "validation"],
    "Split of the run's data: train or validation; validation if no text is given.",
)
_FILE = flags.DEFINE_string("file", None, "A UTF-8 text file.")
_LAMBADA = flags.DEFINE_string(
    "lambada", None, 'A file with one {"text": ...} per line.'
)
_STRIDE = flags.DEFINE_integer(
    "stride",
    None,
    "Tokens from the start of a window of --file to the next; default: the window.",
    1,
)
_WINDOW = flags.DEFINE_integer(
    "window", None, "Tokens of a window of --file; default: the model's positions.", 1
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")


@exits.lines("use a device with more memory, or give a --file a smaller --window.")
def main(argv: list[str]) -> None:
    del argv
    devices.choose_platform(None, several_processes=False)
    program_store.keep_programs()
    figures = _figures()
    print(json.dumps(figures) if _JSON.value else "\n".join(_lines(figures)))


def _figures() -> dict[str, Any]:
    """Return the requested figures.

    Raises:
      ValueError: the model or the text cannot be read, or flags exclude each other.
      FloatingPointError: a loss is not finite.
    """
    asked = [f for f in (_SPLIT, _FILE, _LAMBADA) if f.value is not None]
    workdir, file, lambada = _MODEL.workdir, _FILE.value, _LAMBADA.value
    if len(asked) > 1:
        first, second = (f"--{f.name}={f.value}" for f in asked[:2])
        raise ValueError(f"{first} and {second}: give one of them.")
    for flag in (_STRIDE, _WINDOW):
        if flag.value is not None and file is None:
            raise ValueError(f"--{flag.name}={flag.value} is for --file: give both.")
    own = file is None and lambada is None
    if own and workdir is None:
        raise ValueError("a folder has no data of its own: give --file or --lambada.")
    # slow, and only now may anything touch devices
    from acco_jax.command.files import read_text
    from acco_jax.run.trained import language, perplexity, splits

    if own:
        return splits.of_split(str(workdir), _SPLIT.value or "validation")
    if file is not None:
        text = read_text(expanded(file))
        model = language.opened(_MODEL)
        return perplexity.of_text(model, text, _STRIDE.value, _WINDOW.value)
    path = expanded(str(lambada))
    return perplexity.of_lambada(language.opened(_MODEL), path)


def _lines(figures: dict[str, Any], indent: str = "") -> list[str]:
    """Return a line for each figure."""
    lines = []
    for name, value in figures.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            lines += [f"{indent}{label}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{label:<{22 - len(indent)}}{_shown(value)}")
    return lines


def _shown(value: float | int | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


if __name__ == "__main__":
    app.run(main, flags_parser=parsing.parser())
