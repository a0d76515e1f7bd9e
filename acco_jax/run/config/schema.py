"""The fields of an experiment's config: all that is known about each, in one table.

`default_config` (fields.py), the checks (field_checks.py), the identity of a run
(identity.py), `--help` (usage.py) and the site's page (benchmarks/config_page.py)
follow from it.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from acco_jax.methods import METHODS
from acco_jax.methods.gaps import TOLERANCE

STEPS = 2**30  # most steps of a run: counters are 32 bits wide
SCHEDULES = ("cosine", "linear", "wsd", "constant")
INTEGERS = 2**31 - 1  # the largest integer where a field sets no bound of its own
LIMITS = {
    "least": ("at least", operator.ge), "above": ("more than", operator.gt),
    "most": ("at most", operator.le), "below": ("below", operator.lt),
}  # fmt: skip


@dataclasses.dataclass
class Field:
    """One field of the config."""

    default: Any  # {}: a section whose names are free
    doc: str  # its first sentence is its line of --help
    kind: type = object  # of values; needed where the default is None
    form: str = ""  # of a str: 'path', 'dtype', 'package.module:function', 'START:STOP'
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    zero: str = ""  # what 0 stands for
    choices: Iterable[str] = ()
    unit: str = ""
    identity: bool = True  # False: a run may continue with another value
    place: tuple[str, ...] | None = None  # a path, except for these names: its content
    help: bool = False  # whether --help lists it

    def __post_init__(self) -> None:
        """Take the values' type from the default, unless it is given."""
        if self.kind is object and self.default is not None:
            self.kind = type(self.default)

    @property
    def word(self) -> bool:
        """Whether the default is a word beside values of another type."""
        return self.default is not None and not isinstance(self.default, self.kind)

    @property
    def summary(self) -> str:
        """First sentence of the documentation, with choices, unit and default."""
        first = self.doc.partition(". ")[0].removesuffix(".")
        says = ": ".join(filter(None, (first, ", ".join(self.choices))))
        default = f"{self.default} {self.unit}".strip()
        return says if self.default is None else f"{says} [{default}]"

    def broken(self, value: float) -> str:
        """Return what to do about a value out of bounds; '' for others."""
        limits = list(self.limits())
        broken = [words for words, holds, limit in limits if not holds(value, limit)]
        if not broken:
            return ""
        if self.zero and value < 0:
            return f"give 0 for {self.zero}."
        said = [words for words, *_ in limits] if self.kind is float else broken
        return f"it must be {' and '.join(said)}{', or None' * (self.default is None)}."

    def is_place(self, value: object) -> bool:
        """Return whether a value is a path whose content identifies a run."""
        place = self.place
        return place is not None and isinstance(value, str) and value not in place

    def limits(self) -> Iterator[tuple[str, Callable[[float, float], bool], float]]:
        """Yield the bounds: in words, as a comparison, and as a number."""
        for name, (words, holds) in LIMITS.items():
            if (limit := getattr(self, name)) is not None:
                yield f"{words} {limit}", holds, limit


# Names have dots. Bounds are of counters that are 32 bits wide, of CPU devices in one
# process, of arrays whose sizes 64 bits count.
FIELDS = {
    "scale": Field(None, "A name in `scales`, whose fields replace those here.", str),
    "scales": Field({}, "Fields of each scale: `{'smoke': {'model': {'width': 32}}}`."),
    "seed": Field(0, "Of the initialization and of the data's order.", least=0),
    "base": Field(None, "Workdir of a run of this model, whose parameters this run "
        "starts from, or adapts.", str, form="path"),
    "init_from": Field(None, "A Hugging Face folder to start from. Of `model` only "
        "dtypes, remat, attention, scan_layers and router_loss take effect.", str,
        form="path", place=(), help=True),
    "ignore_weights": Field(None, "Weights of `init_from` to leave out: a regular "
        "expression for whole names. None: weights without a place raise an error.",
        str, identity=False),
    "steps": Field(1000, "Optimizer steps; or give `tokens` or `epochs`.", least=1,
        most=STEPS, help=True),
    "tokens": Field(None, "Targets to train on. They determine `steps`.", int, above=0,
        most=math.inf),
    "epochs": Field(None, "Passes over the training documents. They determine `steps`.",
        float, above=0),
    "extended": Field((), "Pairs (step, steps): before that optimizer step the "
        "learning rate is that of a run of that many steps. `train --extend` adds a "
        "pair."),
    "devices": Field(None, "CPU devices of each process; None: one.", int, least=1,
        most=1024, identity=False, help=True),
    "domains": Field(None, "Groups of devices on a fast network each. Gradients are "
        "reduced within them first; reduce_bits is only between them. None: the slices "
        "that TPUs are in, otherwise one.", int, least=1, identity=False),
    "mesh.fsdp": Field(1, "Devices of a model-parallel group that split rows and "
        "parameters. workers = devices / (fsdp x tensor).", least=1, identity=False),
    "mesh.tensor": Field(1, "Devices that split attention's heads and the MLP's hidden "
        "units, too.", least=1, identity=False),
    "method": Field("acco", "How the workers' gradients or parameters are exchanged. "
        "`auto`: the fastest on these devices of zero1 and acco, also in 8 bits, "
        "which the run measures.", choices=(*METHODS, "auto"), help=True),
    "tolerance": Field(TOLERANCE, "Of `auto`: how far a method's loss, as measured for "
        "the optimizer, may lie above zero1's.", unit="per cent", identity=False),
    "method_options": Field({}, "Further arguments of the method."),
    "comm_dtype": Field(None, "Communication dtype; None: each parameter's own.", str,
        form="dtype"),
    "accumulate_dtype": Field(None, "Of accumulated gradients; None: each parameter's "
        "own.", str, form="dtype"),
    "form": Field("auto", "Single-program (`fused`) or two-thread execution (`split`).",
        choices=("auto", "fused", "split"), identity=False),
    "microbatch_size": Field(4, "Rows of a microbatch.", least=1, help=True),
    "microbatches_per_step": Field(4, "Of each worker in an optimizer step. acco "
        "divides them into two halves.", least=1, help=True),
    "batch": Field("kept", "When a run resumes with other workers: a step has the same "
        "microbatches, redistributed, or each worker computes as many as before.",
        choices=("kept", "per_worker")),
    "microbatches": Field("fixed", "How their number varies: `fixed`; `adaptive`, "
        "until communication is done (`split`); `balanced`, by measured speed "
        "(`fused`); `replay:FILE`, those of a counts.jsonl."),
    "first_half": Field("auto", "Of acco: microbatches of a step's first half. `auto`: "
        "a quarter of them where it covers the communication, which the run measures, "
        "otherwise half of them. The paper has half.", int, least=1, help=True),
    "most_microbatches": Field(16, "Of each worker in a half-round, where they vary."),
    "balance.floor": Field(0, "Of balanced: least per worker.", least=0, zero="none"),
    "balance.grows": Field(False, "Whether the others add what they finish while the "
        "slowest worker computes its equal share. Otherwise the batch stays."),
    "length": Field(256, "Targets of a row.", least=1, help=True),
    "counts": Field((), "Microbatches of each worker per half-round; empty: all."),
    "optimizer.name": Field("adamw", "Of optax or optax.contrib.", help=True),
    "optimizer.learning_rate": Field(1e-3, "Its peak.", above=0, help=True),
    "optimizer.options": Field({}, "Its arguments. Those of adamw are b2=0.95 and "
        "weight_decay=0.1 unless set."),
    "optimizer.schedule": Field("cosine", "cosine, linear, wsd (constant, then "
        "linear), constant, or one of optax.", help=True),
    "optimizer.schedule_options": Field({}, "Arguments of a schedule of optax."),
    "optimizer.final_fraction": Field(0.0, "Of the learning rate, at the last step.",
        least=0, most=1, zero="none"),
    "optimizer.decay_fraction": Field(0.2, "Of the steps: the last ones, in which wsd "
        "decays.", least=0, most=1),
    "optimizer.warmup_steps": Field(0, "Before the schedule.", least=0, zero="none",
        unit="steps", help=True),
    "optimizer.clip": Field(1.0, "Global norm of gradients.", least=0, zero="none"),
    "optimizer.no_decay": Field(None, "Parameters without weight decay: a regular "
        "expression for paths; None: biases, scales and all of one dimension.", str),
    "optimizer.groups": Field((), "Pairs (pattern, fields): a learning_rate and "
        "options for parameters with such a path. The first match counts."),
    "optimizer.ema": Field(0.0, "Decay per step of an average of the parameters, which "
        "is evaluated too.", least=0, below=1, zero="none"),
    "data.name": Field("stdlib", "stdlib, text_folder, jsonl, csv, parquet, "
        "huggingface (a folder of save_to_disk), or one of tfds.", help=True),
    "data.path": Field(None, "A folder; of jsonl, csv and parquet also a file, or "
        "a pattern.", str, form="path", identity=False, help=True),
    "data.task": Field("pretrain", "Documents, packed into rows; or per row an answer "
        "to an instruction (Alpaca's columns), or a conversation (column `messages`).",
        choices=("pretrain", "instruct", "chat")),
    "data.document_mask": Field(False, "Of pretrain: attention within documents."),
    "data.lengths": Field((), "Of instruct and chat: ascending numbers of targets that "
        "rows are padded to; empty: to `length`."),
    "data.text_feature": Field("text", "Of pretrain: the column of the text."),
    "data.train_split": Field("train", "A split, or a word in names of files and "
        "folders, with its synonyms; `all`: every file."),
    "data.validation_split": Field("validation", "As train_split, of held-out data."),
    "data.held_out": Field(0.05, "Fraction of the documents, where there is no "
        "validation or test split."),
    "data.data_dir": Field(None, "Folder of tokens; None: $ACCO_DATA_DIR or "
        "~/.cache/acco_jax.", str, form="path", identity=False),
    "data.tokenizer": Field("bytes", "`bytes`; `bpe`, trained on the training split; "
        "`init_from`, its own; or a tokenizer.json or SentencePiece .model.",
        place=("bytes", "bpe")),
    "data.vocab_size": Field(None, "Of `bpe`.", int, least=1, most=2**24),
    "data.end_of_text": Field(None, "The token that ends a text, of a tokenizer file; "
        "None: the one that files beside it name, or a well-known one.", str),
    "data.skew": Field(0.0, "Fraction of the rows of each worker's own documents that "
        "no other worker reads in an epoch; at 1 in any epoch.", least=0, most=1),
    "model.factory": Field(None, "`package.module:function`, called with vocab_size, "
        "length and options, which returns a Model. None: a transformer.", str),
    "model.options": Field({}, "Further arguments of the factory."),
    "model.vocab_size": Field(None, "None: the tokenizer's.", int, least=1, most=2**24),
    "model.size": Field(None, "A published size, of acco_jax.models.sizes.SIZES; None: "
        "the sizes below.", str, help=True),
    "model.family": Field("gpt-neo", "gpt-neo, llama, gemma3, ...; or a size.",
        help=True),
    "model.width": Field(128, "Of the residual stream.", most=2**20),
    "model.layers": Field(4, "Blocks of attention and an MLP.", most=2**12),
    "model.heads": Field(4, "Of attention."),
    "model.kv_heads": Field(None, "Heads of keys and values; None: heads.", int),
    "model.mlp_width": Field(None, "None: 4 * width; 3 * width if gated.", int,
        most=2**22),
    "model.experts": Field(None, "Of a layer of qwen3-moe; None: 128.", int),
    "model.experts_per_token": Field(None, "Of qwen3-moe; None: 8.", int),
    "model.router_loss": Field(0.0, "Factor of the load-balancing loss that is added."),
    "model.window": Field(256, "Of the local layers, unless `size` has its own.",
        unit="tokens"),
    "model.dtype": Field("bfloat16", "Of the computation."),
    "model.param_dtype": Field("bfloat16", "Of parameters, not of master weights."),
    "model.remat": Field(None, "What the backward pass recomputes: `none`, only norms "
        "and the MLP's activation; `elementwise`, all but matmuls and attention; "
        "`block`, everything. None: nothing on CPU, otherwise elementwise.", str),
    "model.attention": Field(None, "`xla` (scores in memory), `cudnn` or `pallas` "
        "(GPU), `splash` (TPU); None: the platform's kernel, if any.", str),
    "model.scan_layers": Field(None, "Whether the layers are a loop. False: each has "
        "code of its own, which is faster on GPUs and takes longer to compile. None: a "
        "loop, but on GPUs code of its own for up to 24, unless groups split them or "
        "the method is fused_zero1.",
        bool),
    "lora.rank": Field(0, "Of adapters that are trained instead of the model.", least=0,
        most=2**20, zero="no adapters"),
    "lora.pattern": Field("attn/(q|v)_proj/kernel", "Searched in parameters' paths."),
    "lora.ranks": Field((), "Instead: pairs (pattern, rank). The first counts."),
    "lora.scale": Field(1.0, "W + scale * a @ b."),
    "lora.init_from": Field(None, "A folder of adapters in PEFT's format to start "
        "from, of the model in `init_from`. It has ranks and scale.", str, form="path",
        place=()),
    "log_every": Field(10, "Between rows of metrics.", least=1, unit="steps",
        identity=False, help=True),
    "eval_every": Field(100, "Between evaluations.", least=1, unit="steps",
        identity=False, help=True),
    "eval_batches": Field(8, "Per evaluation; the last one takes all held-out "
        "documents.", least=1, identity=False),
    "samples": Field(0, "Texts sampled from the model at each evaluation.", least=0,
        most=1024, zero="none", identity=False),
    "sample_prompt": Field("", "Their beginning, the prompt.", identity=False),
    "sample_tokens": Field(64, "With the prompt's, at most `length`.", least=1,
        identity=False),
    "checkpoint_every": Field(500, "Between checkpoints.", least=1, unit="steps",
        identity=False, help=True),
    "checkpoints": Field("", "Their folder, also gs://bucket/run; empty: in the "
        "workdir.", form="path", identity=False),
    "compare_replicas_every": Field(100, "Between comparisons of the workers' copies.",
        least=0, zero="never", unit="steps", identity=False),
    "memory_copies": Field("/dev/shm", "Folder in memory for copies of the newest "
        "state and of the programs, from which a supervised run restarts; empty: "
        "none.", form="path", identity=False),
    "keep_checkpoints": Field(2, "The newest ones, beside the one with the best "
        "held-out loss.", least=1, identity=False),
    "spike.policy": Field("stop", "Action when the training loss rises by `threshold`. "
        "`rollback` goes to the newest checkpoint and continues with later rows, at "
        "most three times.", choices=("stop", "rollback", "off"), identity=False),
    "spike.threshold": Field(3.0, "Rise above the lowest loss.", least=0, unit="nats",
        identity=False),
    "spike.calls": Field(8, "Both losses are means over the newest calls, at least "
        "this many.", least=1, identity=False),
    "spike.tokens": Field(8192, "Least tokens of these.", least=1, identity=False),
    "drop_nonfinite": Field(None, "Whether a worker with a loss or gradients that are "
        "not finite does not count. None: with all methods but fused_zero1.", bool,
        identity=False),
    "most_dropped_in_a_row": Field(10, "Half-rounds without one worker that end the "
        "run.", least=1, identity=False),
    "profile": Field(None, "START:STOP, half-rounds to trace, both included and "
        "counted from 1.", str, form="START:STOP", identity=False, help=True),
    "metrics_hook": Field(None, "Function that process 0 calls with each row of "
        "metrics.jsonl.", str, form="package.module:function", identity=False),
    "wandb_project": Field(None, "Project of Weights & Biases.", str, identity=False),
}  # fmt: skip
