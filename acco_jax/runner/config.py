"""The fields of an experiment, and what their values must be."""

import math
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict, config_dict

from acco_jax import methods
from acco_jax.methods import METHODS
from acco_jax.runner.names import check_name, named, suggestion
from acco_jax.step import FORMS

PLACEHOLDER = config_dict.placeholder

# Arguments of a method that are not method_options: the config has fields for them.
ARGUMENTS = ("mesh", "axis_name", "comm_dtype", "accumulate_dtype")

# The smallest value of numeric fields, and what to say of a smaller one.
MINIMA = {
    **dict.fromkeys(
        ("steps", "microbatch_size", "microbatches_per_step", "length", "log_every",
         "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints",
         "most_dropped_in_a_row"),
        (1, "it must be at least 1."),
    ),
    "optimizer.clip": (0, "give 0 for none."),
    "optimizer.final_fraction": (0, "give 0 for none."),
    "optimizer.ema": (0, "give 0 for none."),
    "spike.threshold": (0, "give nats."),
    "compare_replicas_every": (0, "give 0 for never."),
    "optimizer.warmup_steps": (0, "give 0 for none."),
    "lora.rank": (0, "give 0 for no adapters."),
}  # fmt: skip
# The largest: of counters that are 32 bits wide, and of CPU devices in one process.
MAXIMA = {"steps": 2**30, "devices": 1024, "data.vocab_size": 2**24}
# Optional fields that must be at least 1 where they are given.
POSITIVE = ("devices", "domains", "data.vocab_size", "model.vocab_size")
DECAYS = ("b1", "b2", "b3", "momentum")  # options of optimizers, from 0 to below 1

# A run may continue in its workdir with other values of these.
HARMLESS = frozenset(
    {"log_every", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints",
     "checkpoints", "compare_replicas_every", "metrics_hook", "wandb_project",
     "spike.policy", "spike.threshold", "drop_nonfinite", "most_dropped_in_a_row"}
)  # fmt: skip
# Their fields have names that others choose.
OPEN = ("options", "method_options", "schedule_options")


def default_config() -> ConfigDict:
    """Returns every field there is; an experiment starts from this and changes some.

    It is not locked, so that optimizer.options takes new keys from the command line;
    `validate` refuses fields that are not here.
    """
    c = ConfigDict()
    c.seed = 0  # of the initialization and of the data's order
    # Workdir of a finished run of this model, on as many devices, from whose parameters
    # this one starts, or which its adapters adapt; None: from the initialization.
    c.base = PLACEHOLDER(str)
    c.steps = 1000  # optimizer steps (commits; inner steps of local methods)
    # Instead of steps, which then follow: as many as take so many targets, or pass so
    # often over the training documents.
    c.tokens = PLACEHOLDER(int)
    c.epochs = PLACEHOLDER(float)
    c.devices = PLACEHOLDER(int)  # CPU devices of each process; None: one
    # Groups of devices, one after the other, on a fast network each (hosts of GPUs,
    # slices of TPUs). Several make two data axes: what is reduced within a domain first
    # is smaller when it crosses to others, and reduce_bits is for that crossing alone.
    # None: the slices that TPUs are in, otherwise one.
    c.domains = PLACEHOLDER(int)

    c.method = "acco"  # a key of acco_jax.methods.METHODS
    c.method_options = ConfigDict(type_safe=False)  # further arguments of the method
    c.comm_dtype = PLACEHOLDER(str)  # None: each parameter's own
    c.accumulate_dtype = PLACEHOLDER(str)  # None: each parameter's own
    c.form = "auto"  # 'fused', 'split'

    # Rows of one microbatch, and how many of them each worker adds up for one optimizer
    # step. acco takes half of them in each of a step's two half-rounds.
    c.microbatch_size = 8
    c.microbatches_per_step = 2
    # 'fixed', or 'adaptive': each process keeps adding microbatches until its
    # communication is done, from those of a half-round up to most_microbatches; or
    # 'replay:FILE', a run's counts.jsonl: as that run did. Both in the split form.
    c.microbatches = "fixed"
    c.most_microbatches = 16  # of each worker in a half-round, where they adapt
    c.length = 256  # targets per row
    # How many of its microbatches each worker computes per half-round: one number per
    # worker, for workers of unequal speed. Empty: all.
    c.counts = ()

    c.optimizer = _optimizer_fields()
    c.data = _data_fields()
    c.model = _model_fields()
    c.lora = _lora_fields()

    # These count optimizer steps.
    c.log_every = 10
    c.eval_every = 100
    c.eval_batches = 8  # per evaluation; the last one takes all held-out documents
    c.checkpoint_every = 500
    c.checkpoints = ""  # their folder, also gs://bucket/run; empty: in the workdir
    c.compare_replicas_every = 100  # workers' copies (runner/replicas.py); 0: never
    c.keep_checkpoints = 2  # the newest, and the one with the best held-out loss
    c.spike = _spike_fields()
    # Whether a worker whose loss or gradients are not finite does not count in that
    # half-round (of local methods: in that inner step). None: wherever it can be, which
    # is with every method but fused_zero1. It is logged, and rows of metrics.jsonl have
    # the number as `dropped`; so many half-rounds of one worker in a row end the run.
    c.drop_nonfinite = PLACEHOLDER(bool)
    c.most_dropped_in_a_row = 10
    # 'package.module:function', which process 0 calls with each row of metrics.jsonl.
    c.metrics_hook = PLACEHOLDER(str)
    c.wandb_project = PLACEHOLDER(str)  # of Weights & Biases, where it is installed
    return c


def _spike_fields() -> ConfigDict:
    c = ConfigDict()
    # What a training loss does that rises by more than `threshold` nats above the
    # lowest one: 'stop', 'rollback' (to the newest checkpoint, going on with later
    # rows, at most three times), 'off'.
    c.policy = "stop"
    c.threshold = 3.0
    return c


def _optimizer_fields() -> ConfigDict:
    c = ConfigDict()
    # Any optimizer of optax or optax.contrib that takes a learning_rate, and its other
    # keyword arguments; adamw's are b2=0.95 and weight_decay=0.1 unless set here.
    c.name = "adamw"
    c.learning_rate = 1e-3
    c.options = ConfigDict(type_safe=False)
    # 'cosine', 'linear', 'wsd' (constant, then linear), 'constant', or the name of an
    # optax schedule, such as 'exponential_decay', which takes schedule_options.
    c.schedule = "cosine"
    c.schedule_options = ConfigDict(type_safe=False)
    c.final_fraction = 0.0  # of the learning rate, at the last step
    c.decay_fraction = 0.2  # of the steps: the last ones, in which 'wsd' decays
    c.warmup_steps = 0
    c.clip = 1.0  # global norm of the mean gradient; 0: none
    # Parameters whose weights do not decay: a regular expression that is searched in
    # their paths; '': none. None: biases, scales and all of one dimension.
    c.no_decay = PLACEHOLDER(str)
    # Pairs (pattern, fields) for parameters with such a path, the first that matches:
    # a learning_rate (whose schedule is the same) and options of their own.
    c.groups = ()
    # Decay of an average of the parameters, per step, which is evaluated beside them;
    # 0: none.
    c.ema = 0.0
    return c


def _data_fields() -> ConfigDict:
    c = ConfigDict()
    # 'text_folder', 'jsonl', 'parquet', 'huggingface' (a folder that datasets'
    # save_to_disk wrote), or any tensorflow_datasets name.
    c.name = "stdlib"
    # Of the first four: a folder; of 'jsonl' and 'parquet' also a file, or a pattern of
    # files. Those whose names begin with a split's name are that split.
    c.path = PLACEHOLDER(str)
    # 'pretrain': documents, packed into rows; 'instruct': an answer to each instruction
    # (Alpaca's columns instruction, input, output), a row each.
    c.task = "pretrain"
    c.document_mask = False  # of 'pretrain': attention stays within a document
    # Of 'instruct': to which numbers of targets rows are padded, ascending, each global
    # batch to the smallest that fits; longer answers are cut. (): to `length`.
    c.lengths = ()
    c.text_feature = "text"  # of 'pretrain'
    c.train_split = "train"
    c.validation_split = "validation"
    c.held_out = 0.05  # of the documents, where there is no validation split
    c.data_dir = PLACEHOLDER(str)  # None: $ACCO_DATA_DIR or ~/.cache/acco_jax
    # 'bytes', 'bpe', trained on the training split, or the path of a tokenizer.json or
    # of a SentencePiece .model.
    c.tokenizer = "bytes"
    c.vocab_size = PLACEHOLDER(int)  # of 'bpe'
    # Of a file the token that ends a text; None: the one that is named beside it
    # (tokenizer_config.json, special_tokens_map.json), or a well-known one.
    c.end_of_text = PLACEHOLDER(str)
    # Which part of its rows each worker reads from documents of its own, that no other
    # reads them from: 0: none, all workers have the same distribution; 1: all.
    c.skew = 0.0
    return c


def _model_fields() -> ConfigDict:
    c = ConfigDict()
    # 'package.module:function', called with vocab_size, length and the options, which
    # returns an acco_jax.models.base.Model; the fields below vocab_size are then
    # without effect. None: GPT-Neo.
    c.factory = PLACEHOLDER(str)
    c.options = ConfigDict(type_safe=False)
    c.vocab_size = PLACEHOLDER(int)  # None: the tokenizer's
    c.size = PLACEHOLDER(str)  # a name of acco_jax.models.gpt_neo.size
    c.width = 128
    c.layers = 4
    c.heads = 4
    c.window = 256  # of the local layers
    c.dtype = "bfloat16"  # of the computation
    c.param_dtype = "bfloat16"  # the master copy is float32 all the same
    c.remat = False
    c.attention = PLACEHOLDER(str)  # 'xla', 'cudnn'; None: what JAX chooses
    return c


def _lora_fields() -> ConfigDict:
    c = ConfigDict()
    c.rank = 0  # of the adapters that are trained instead of the model; 0: none
    c.pattern = "attn/(q|v)_proj/kernel"  # searched in the parameters' paths
    # Instead of both: pairs (pattern, rank), of which the first that matches counts.
    c.ranks = ()
    c.scale = 1.0  # W + scale * a @ b
    return c


def check(config: ConfigDict) -> None:
    """Refuses fields and values that no experiment can have; builds nothing.

    Raises:
      ValueError: in one line, naming the field, its value and the remedy.
    """
    _check_fields(config, default_config())
    check_name("method", config.method, METHODS)
    names = [x for x in methods.options(config.method) if x not in ARGUMENTS]
    for field in config.method_options:
        check_name(f"method_options of {config.method}", field, names)
    check_name("form", config.form, FORMS)
    check_name("spike.policy", config.spike.policy, ("stop", "rollback", "off"))
    dtype("comm_dtype", config.comm_dtype)
    dtype("accumulate_dtype", config.accumulate_dtype)
    for field, (least, remedy) in MINIMA.items():
        value = operator.attrgetter(field)(config)
        if not value >= least:
            raise ValueError(f"{field} is {value}: {remedy}")
    for field, most in MAXIMA.items():
        if (value := operator.attrgetter(field)(config)) is not None and value > most:
            raise ValueError(f"{field} is {value}: it must be at most {most}.")
    for field in POSITIVE:
        if (value := operator.attrgetter(field)(config)) is not None and value < 1:
            raise ValueError(f"{field} is {value}: it must be at least 1, or None.")
    _check_length(config)
    _check_microbatches(config)
    _check_optimizer(config.optimizer)
    given = config.tokens is None and config.epochs is None
    if given and (warmup := config.optimizer.warmup_steps) > config.steps:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup}, more than the "
            f"{config.steps} steps of the run: lower it."
        )
    _check_ranks(config.lora)
    _check_data(config)
    named("metrics_hook", config.metrics_hook)


def _check_length(config: ConfigDict) -> None:
    """Refuses a length of the run that is said twice, or cannot be counted in steps."""
    given = [f for f in ("tokens", "epochs") if config[f] is not None]
    for field in given:
        if not 0 < config[field] < math.inf:
            raise ValueError(f"{field} is {config[field]}: it must be more than 0.")
    if len(given) > 1:
        raise ValueError(
            f"tokens is {config.tokens} and epochs {config.epochs}: give one of them."
        )
    if config.tokens is not None and config.data.task == "instruct":
        raise ValueError(
            f"tokens is {config.tokens}, but answers differ in length: give epochs or "
            "steps."
        )
    if given and config.microbatches != "fixed":
        raise ValueError(
            f"{given[0]} is {config[given[0]]}, but microbatches="
            f"{config.microbatches!r} decides what a step takes: give steps."
        )


def with_steps(
    config: ConfigDict, rows_per_step: int, rows_per_epoch: int, steps_per_call: int
) -> ConfigDict:
    """Returns the config with the `steps` that `tokens` or `epochs` ask for.

    Args:
      config: of the experiment.
      rows_per_step: of all workers together.
      rows_per_epoch: rows of the training documents.
      steps_per_call: of the method, a multiple of which steps are rounded up to.
    """
    if config.tokens is None and config.epochs is None:
        return config
    if config.epochs is None:
        rows = config.tokens / config.length
    else:
        rows = config.epochs * rows_per_epoch
    calls = math.ceil(rows / rows_per_step / steps_per_call)
    config = config.copy_and_resolve_references()
    config.steps = max(calls, 1) * steps_per_call
    return config


def _check_optimizer(c: ConfigDict) -> None:
    """Refuses fractions beyond 1, patterns that are none, and groups that are none."""
    for field in ("final_fraction", "decay_fraction", "ema"):
        if not 0 <= c[field] <= 1 or (field == "ema" and c.ema == 1):
            most = "below 1" if field == "ema" else "at most 1"
            raise ValueError(
                f"optimizer.{field} is {c[field]}: it must be at least 0 and {most}."
            )
    if not 0 < c.learning_rate < math.inf:
        raise ValueError(
            f"optimizer.learning_rate is {c.learning_rate}: it must be more than 0 and "
            "finite."
        )
    for name in DECAYS:
        value = c.options.get(name)
        if isinstance(value, int | float) and not 0 <= value < 1:
            raise ValueError(
                f"optimizer.options.{name} is {value}: it must be at least 0 and "
                "below 1."
            )
    for group in c.groups:
        if not _is_a(tuple, group) or list(map(type, group)) != [str, dict]:
            raise ValueError(
                f"optimizer.groups has {group!r}: give pairs of a pattern and fields, "
                "such as (('wte', {'learning_rate': 1e-4}),)."
            )
    for pattern in (c.no_decay, *(pattern for pattern, _ in c.groups)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(
                f"optimizer has the pattern {pattern!r}, which is no regular "
                f"expression: {error}."
            ) from error


def _check_microbatches(config: ConfigDict) -> None:
    """Refuses `microbatches` and `counts` that exclude each other."""
    if config.microbatches not in ("fixed", "adaptive") and not replayed(config):
        raise ValueError(
            f"microbatches is {config.microbatches!r}: choose 'fixed', 'adaptive' or "
            "'replay:FILE'."
        )
    if config.microbatches != "fixed" and len(config.counts):
        raise ValueError(
            f"counts is {tuple(config.counts)}, but microbatches="
            f"{config.microbatches!r} determines them: leave one out."
        )
    if len(config.counts) and not any(config.counts):
        raise ValueError(
            "counts is 0 for every worker, so nothing would ever be computed: give at "
            "least one worker a microbatch."
        )


def _check_data(config: ConfigDict) -> None:
    """Refuses fields of `data` that exclude each other or are out of range."""
    c, lengths = config.data, tuple(config.data.lengths)
    check_name("data.task", c.task, ("pretrain", "instruct"))
    if not 0 <= c.skew <= 1:
        raise ValueError(f"data.skew is {c.skew}: it must lie from 0 to 1.")
    if c.document_mask and c.task != "pretrain":
        raise ValueError(
            f"data.document_mask is of task='pretrain': of {c.task!r} every row is one "
            "document; leave it out."
        )
    if lengths and c.task != "instruct":
        raise ValueError(
            f"data.lengths is {lengths}, but rows of {c.task!r} have one length: set "
            "`length`."
        )
    within = all(type(x) is int and 1 <= x <= config.length for x in lengths)
    if not within or list(lengths) != sorted(set(lengths)):
        raise ValueError(
            f"data.lengths is {lengths}: give ascending integers from 1 to length, "
            f"{config.length}."
        )


def half_round_microbatches(config: ConfigDict, half_rounds: int, workers: int) -> int:
    """Returns the microbatches of each worker in one of a step's half-rounds.

    Raises:
      ValueError: the step does not divide into half-rounds, or counts do not fit.
    """
    per_step, counts = config.microbatches_per_step, tuple(config.counts)
    if per_step % half_rounds:
        raise ValueError(
            f"microbatches_per_step is {per_step}, which does not divide into the "
            f"{half_rounds} half-rounds of a step of {config.method}: use a multiple."
        )
    microbatches = per_step // half_rounds
    whole = all(type(c) is int and 0 <= c <= microbatches for c in counts)
    fits = len(counts) == workers and whole
    if counts and not fits:
        raise ValueError(
            f"counts is {counts}: give one number from 0 to {microbatches} for each of "
            f"the {workers} workers, or none."
        )
    return microbatches


def replayed(config: ConfigDict) -> str:
    """Returns the log that a run repeats; '' if it repeats none."""
    kind, _, file = config.microbatches.partition(":")
    return file if kind == "replay" else ""


def _check_ranks(c: ConfigDict) -> None:
    """Refuses lora.ranks that are no pairs, or that stand beside lora.rank."""
    if not math.isfinite(c.scale):
        raise ValueError(f"lora.scale is {c.scale}: it must be finite.")
    for pair in c.ranks:
        if not _is_a(tuple, pair) or list(map(type, pair)) != [str, int]:
            raise ValueError(
                f"lora.ranks has {pair!r}: give pairs of a pattern and a rank, such as "
                "(('q_proj/kernel', 8), ('mlp/.*kernel', 4))."
            )
    if c.ranks and c.rank:
        raise ValueError(
            f"lora.ranks is {tuple(c.ranks)} and lora.rank {c.rank}: give one of them."
        )


def dtype(field: str, name: str | None) -> Any:
    """Returns a floating dtype by name, None for None; an error names the field."""
    if name is None:
        return None
    try:
        value = jnp.dtype(name)
    except TypeError:
        value = None
    if value is None or not jnp.issubdtype(value, jnp.floating):
        raise ValueError(f"{field} is {name!r}: give a floating dtype, e.g. bfloat16.")
    if value == jnp.float64 and not jax.config.values["jax_enable_x64"]:
        raise ValueError(
            f"{field} is {name!r}, which JAX makes float32 of: set JAX_ENABLE_X64=1, "
            "or give float32."
        )
    return value


def differing_field(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """Names the first field in which two configs differ; '' if none matters."""
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if difference := differing_field(a, b, f"{prefix}{key}."):
                return difference
        elif a != b and prefix + key not in HARMLESS:
            name = repr(prefix + key)[1:-1]  # of a file that may hold anything
            return f"{name}={a!r}, not {b!r}"
    return ""


def _check_fields(config: ConfigDict, default: ConfigDict, prefix: str = "") -> None:
    """Refuses fields that do not exist, lack, or have a value of another type."""
    for field in config:
        if field not in default:
            name = repr(f"{prefix}{field}")[1:-1]
            close = suggestion(name, [prefix + known for known in default])
            raise ValueError(
                f"config has no field {name}" + (f":{close}" if close else ".")
            )
        kind, value = default.get_type(field), config.get(field)
        if not _is_a(kind, value) and not (value is None and default[field] is None):
            shown = value.to_dict() if isinstance(value, ConfigDict) else value
            raise ValueError(
                f"{prefix}{field} is {shown!r}: give a value of type {kind.__name__}."
            )
        if kind is ConfigDict and field not in OPEN:
            _check_fields(value, default[field], f"{prefix}{field}.")
    missing = next((f for f in default if f not in config), None)
    if missing is not None:
        raise ValueError(
            f"config lacks the field {prefix}{missing}: build it from "
            "acco_jax.runner.config.default_config()."
        )


def _is_a(kind: type, value: Any) -> bool:
    wider = {float: (float, int), tuple: (tuple, list)}
    return isinstance(value, wider.get(kind, kind))
