"""Export a run's model as a Hugging Face folder.

python -m acco_jax.export --workdir=runs/quickstart --out=FOLDER

The folder holds config.json, generation_config.json, the weights in safetensors files
and a tokenizer, which AutoModelForCausalLM and AutoTokenizer of transformers read. The
weights are the committed parameters of the newest checkpoint, or of --half_round; the
adapters of a LoRA run are merged into its model. With --adapters the folder holds only
the adapters, in the format of Hugging Face's PEFT, and the tokenizer. The end of text
of a 'bytes' or 'bpe' tokenizer becomes the special token <|endoftext|>. The folder is
written atomically.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags

from acco_jax.command import devices, exits
from acco_jax.command.paths import expanded
from acco_jax.run.config import parsing, usage

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_OUT = flags.DEFINE_string("out", None, "Folder to write, new or empty.")
_DTYPE = flags.DEFINE_string(
    "dtype", None, "float32, bfloat16 or float16; default: model.param_dtype."
)
_HALF_ROUND = flags.DEFINE_integer(
    "half_round", None, "Half-round of the checkpoint; default: the newest.", 0
)

_ADAPTERS = flags.DEFINE_bool(
    "adapters", False, "Write only the adapters, in the format of Hugging Face's PEFT."
)


@exits.lines("set JAX_PLATFORMS=cpu, or use more devices.")
def main(argv: list[str]) -> None:
    del argv
    devices.choose_platform(None, several_processes=False)
    # slow, and only now may anything touch devices
    from acco_jax.run.trained import exporting

    line = exporting.export(
        expanded(str(_WORKDIR.value)),
        expanded(str(_OUT.value)),
        _DTYPE.value,
        _HALF_ROUND.value,
        adapters=_ADAPTERS.value,
    )
    print(line)


if __name__ == "__main__":
    needed = {usage.NEEDED: ("workdir", "out")}
    app.run(main, flags_parser=parsing.parser(groups=needed))
