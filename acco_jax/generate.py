"""Generate text from a prompt.

python -m acco_jax.generate --workdir=runs/quickstart --prompt='def mean(' --tokens=100
python -m acco_jax.generate --model=FOLDER --prompt='Once' --temperature=0.8 --samples=3

The model is a run's newest checkpoint, or a Hugging Face folder (config.json,
*.safetensors, tokenizer.json). Each sample is the prompt and the generated text. It is
printed as it is generated, up to the end of the text or --tokens tokens.
"""

import itertools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags

from acco_jax.command import devices, exits, program_store
from acco_jax.run.config import parsing

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_MODEL = parsing.ModelFlags()
_PROMPT = flags.DEFINE_string(
    "prompt", "", "Text to continue; empty: start a new text."
)
_TOKENS = flags.DEFINE_integer("tokens", 64, "Most tokens to generate.", 1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Sampling temperature; 0: greedy decoding."
)
_TOP_K = flags.DEFINE_integer(
    "top_k", None, "Sample only from this many most likely tokens."
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    None,
    "Sample from the fewest most likely tokens with this total probability.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Sampling seed.", 0, 2**63 - 1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Number of texts.", 1)


@exits.lines("lower --tokens, shorten --prompt, or use a device with more memory.")
def main(argv: list[str]) -> None:
    del argv
    sampled = [f for f in (_TOP_K, _TOP_P, _SAMPLES, _SEED) if f.value != f.default]
    if sampled and not _TEMPERATURE.value:
        raise ValueError(
            f"--{sampled[0].name}={sampled[0].value} needs sampling, but "
            "--temperature=0 decodes greedily: give --temperature."
        )
    devices.choose_platform(None, several_processes=False)
    program_store.keep_programs()
    # slow, and only now may anything touch devices
    from acco_jax.run.trained import language
    from acco_jax.run.trained.language import Sampling

    how = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    model = language.opened(_MODEL)
    keys = language.keys_of(_SEED.value, _SAMPLES.value)
    prompt = [model.tokens(_PROMPT.value)]
    for number, key in enumerate(keys):
        if number:
            _show(f"--- {number + 1} of {len(keys)}\n")
        texts = model.write(prompt, _TOKENS.value, how, key[None], chunk=1)
        first = next(texts)  # raises before anything is shown
        _show(_PROMPT.value)
        shown = 0
        for (text,) in itertools.chain([first], texts):
            _show(text[shown:])
            shown = len(text)
        _show("\n")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    app.run(main, flags_parser=parsing.parser())
