"""The fields of an experiment, their checks, and what is built from them."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import Mesh
from ml_collections import ConfigDict, config_dict

from acco_jax import methods
from acco_jax.methods import METHODS
from acco_jax.methods.per_layer import per_layer
from acco_jax.models import gpt_neo, lora
from acco_jax.runner.names import check_name, suggestion
from acco_jax.step import FORMS

PyTree = Any
PLACEHOLDER = config_dict.placeholder

# Keyword arguments of an optimizer where optimizer.options does not say otherwise.
DEFAULT_OPTIONS = {"adamw": {"b2": 0.95, "weight_decay": 0.1}}

# Optimizers that look across leaves or draw noise, and are elementwise otherwise: they
# are right on leaves that stack layers, and must not be shown a layer at a time.
ACROSS_LEAVES = frozenset({"dadapt_adamw", "dog", "dowg", "noisy_sgd", "prodigy"})

# Arguments of a method that are not method_options: the config has fields for them.
ARGUMENTS = ("mesh", "axis_name", "comm_dtype", "accumulate_dtype")

# The smallest value of numeric fields, and what to say of a smaller one.
MINIMA = {
    **dict.fromkeys(
        ("steps", "microbatch_size", "microbatches_per_step", "length", "log_every",
         "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints"),
        (1, "it must be at least 1."),
    ),
    "optimizer.clip": (0, "give 0 for none."),
    "optimizer.warmup_steps": (0, "give 0 for none."),
    "lora.rank": (0, "give 0 for no adapters."),
}  # fmt: skip

# A run may continue in its workdir with other values of these.
HARMLESS = frozenset(
    {"log_every", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints"}
)


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

    # These three count optimizer steps.
    c.log_every = 10
    c.eval_every = 100
    c.eval_batches = 8  # per evaluation; the last one takes all held-out documents
    c.checkpoint_every = 500
    c.keep_checkpoints = 2
    return c


def _optimizer_fields() -> ConfigDict:
    c = ConfigDict()
    # Any optimizer of optax or optax.contrib that takes a learning_rate, and its other
    # keyword arguments; adamw's are b2=0.95 and weight_decay=0.1 unless set here.
    c.name = "adamw"
    c.learning_rate = 1e-3
    c.options = ConfigDict(type_safe=False)
    c.schedule = "cosine"  # to zero at the last step; or 'constant'
    c.warmup_steps = 0
    c.clip = 1.0  # global norm of the mean gradient; 0: none
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
    c.size = PLACEHOLDER(str)  # a name of acco_jax.models.gpt_neo.size
    c.width = 128
    c.layers = 4
    c.heads = 4
    c.window = 256  # of the local layers
    c.vocab_size = PLACEHOLDER(int)  # None: the tokenizer's
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


def validate(config: ConfigDict) -> None:
    """Refuses a config that cannot run, before anything is built.

    Raises:
      ValueError: in one line, naming the field, its value and the remedy.
    """
    _check_fields(config, default_config())
    check_name("method", config.method, METHODS)
    names = [x for x in methods.options(config.method) if x not in ARGUMENTS]
    for field in config.method_options:
        check_name(f"method_options of {config.method}", field, names)
    check_name("form", config.form, FORMS)
    check_name("optimizer.schedule", config.optimizer.schedule, ("cosine", "constant"))
    dtype("comm_dtype", config.comm_dtype)
    dtype("accumulate_dtype", config.accumulate_dtype)
    for field, (least, remedy) in MINIMA.items():
        value = operator.attrgetter(field)(config)
        if not value >= least:
            raise ValueError(f"{field} is {value}: {remedy}")
    _check_microbatches(config)
    _check_ranks(config.lora)
    _check_data(config)
    optimizer(config)
    model(config, vocab_size=1)  # the tokenizer's comes with the corpus


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
    fits = len(counts) == workers and set(counts) <= set(range(microbatches + 1))
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
    return value


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Returns the schedule, counted in optimizer steps."""
    peak, warmup = config.optimizer.learning_rate, config.optimizer.warmup_steps
    if config.optimizer.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, max(config.steps - warmup, 1))
    else:
        decay = optax.constant_schedule(peak)
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    return optax.join_schedules([ramp, decay], [warmup]) if warmup else decay


def optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Returns the inner optimizer: clipping, then any optax optimizer by name.

    On the model, which stacks its layers, it does what it would do on one with a leaf
    for each of them; so too on adapters of the model.

    Raises:
      ValueError: optax has no such optimizer, or it does not take the options.
    """
    c = config.optimizer
    make = getattr(optax, c.name, None) or getattr(optax.contrib, c.name, None)
    if not callable(make):
        close = suggestion(c.name, [*dir(optax), *dir(optax.contrib)])
        raise ValueError(
            f"optimizer.name is {c.name!r}, which optax does not have"
            + (f":{close}" if close else ".")
        )
    names = list(inspect.signature(make).parameters)
    if "learning_rate" not in names:
        raise ValueError(
            f"optimizer.name is {c.name!r}, which takes no learning_rate: name an "
            "optax optimizer, such as adamw, lion or sgd."
        )
    names.remove("learning_rate")
    for field in c.options:
        check_name(f"optimizer.options of {c.name}", field, names)
    options = DEFAULT_OPTIONS.get(c.name, {}) | c.options.to_dict()
    try:
        inner = make(learning_rate(config), **options)
    except Exception as error:
        raise ValueError(
            f"optimizer.options {options} do not suit {c.name}: {error}"
        ) from error
    if c.name not in ACROSS_LEAVES:
        inner = per_layer(inner, gpt_neo.stacked)
    return optax.chain(optax.clip_by_global_norm(c.clip), inner) if c.clip else inner


def method(
    config: ConfigDict, name: str, mesh: Mesh, axis_name: str | tuple[str, ...]
) -> Any:
    """Builds a method around the config's optimizer.

    One that takes an `inner_learning_rate` gets the optimizer's schedule, unless
    method_options has another.

    Args:
      config: of the experiment.
      name: a key of METHODS.
      mesh: the devices.
      axis_name: the mesh's data axis or axes.

    Raises:
      ValueError: what the method refuses.
    """
    make, options = METHODS[name], config.method_options.to_dict()
    if "inner_learning_rate" in methods.options(name):
        options = {"inner_learning_rate": learning_rate(config)} | options
    return make(
        optimizer(config),
        mesh=mesh,
        axis_name=axis_name,
        comm_dtype=dtype("comm_dtype", config.comm_dtype),
        accumulate_dtype=dtype("accumulate_dtype", config.accumulate_dtype),
        **options,
    )


def model(config: ConfigDict, vocab_size: int) -> gpt_neo.GPTNeoConfig:
    """Returns the model's sizes, for a tokenizer of so many tokens.

    Raises:
      ValueError: sizes that do not fit together, or too small a vocabulary.
    """
    c = config.model
    rows = c.vocab_size or vocab_size
    if rows < vocab_size:
        raise ValueError(
            f"model.vocab_size is {rows}, but the tokenizer has {vocab_size} tokens: "
            "leave it unset or raise it."
        )
    sizes = {} if c.size else {k: c[k] for k in ("width", "layers", "heads")}
    make: Callable[..., gpt_neo.GPTNeoConfig] = gpt_neo.GPTNeoConfig
    if c.size:
        make = functools.partial(gpt_neo.size, c.size)
    return make(
        **sizes,
        vocab_size=rows,
        max_length=config.length,
        window=c.window,
        dtype=dtype("model.dtype", c.dtype),
        param_dtype=dtype("model.param_dtype", c.param_dtype),
        remat=c.remat,
        attention=c.attention,
    )


def trained(
    config: ConfigDict,
    model: gpt_neo.GPTNeoConfig,
    freeze: Callable[[Callable[[], PyTree]], PyTree],
) -> tuple[Callable[..., Any], Callable[[], PyTree]]:
    """Returns the loss of what is trained, the model or adapters, and its initializer.

    Where adapters are trained, `freeze` turns the function that makes the model's
    parameters into what stands for them.

    Raises:
      ValueError: the adapters do not fit the model.
    """
    c, loss_fn = config.lora, gpt_neo.loss_fn(model)

    def whole() -> PyTree:
        return gpt_neo.init_params(model, jax.random.key(config.seed))

    def adapters() -> PyTree:
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        shapes = jax.eval_shape(whole)
        if c.ranks:
            return lora.init(shapes, key, dict(c.ranks))
        return lora.init(shapes, key, c.rank, c.pattern)

    if not c.rank and not c.ranks:
        return loss_fn, whole
    jax.eval_shape(adapters)  # says what is wrong before there is a model
    return lora.loss_fn(loss_fn, freeze(whole), c.scale), adapters


def differing_field(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """Names the first field in which two configs differ; '' if none matters."""
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if difference := differing_field(a, b, f"{prefix}{key}."):
                return difference
        elif a != b and prefix + key not in HARMLESS:
            return f"{prefix}{key}={a!r}, not {b!r}"
    return ""


def _check_fields(config: ConfigDict, default: ConfigDict, prefix: str = "") -> None:
    """Refuses fields that do not exist, lack, or have a value of another type."""
    for field in config:
        if field not in default:
            close = suggestion(prefix + field, [prefix + name for name in default])
            raise ValueError(
                f"config has no field {prefix}{field}" + (f":{close}" if close else ".")
            )
        kind, value = default.get_type(field), config.get(field)
        if not _is_a(kind, value) and not (value is None and default[field] is None):
            raise ValueError(
                f"{prefix}{field} is {value!r}: give a value of type {kind.__name__}."
            )
        if kind is ConfigDict and field not in ("options", "method_options"):
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
