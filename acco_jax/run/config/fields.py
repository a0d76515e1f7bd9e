"""Fields of an experiment, and values that follow from them."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict, config_dict

from acco_jax.core.names import check_name

STEPS = 2**30  # most steps of a run: counters are 32 bits wide
PLACEHOLDER = config_dict.placeholder


def default_config() -> ConfigDict:
    """Return the config with all fields; an experiment starts from it and changes some.

    It is not locked, so that optimizer.options takes new keys from the command line;
    `validate` rejects fields that are not here.
    """
    c = ConfigDict()
    # A name in `scales`. A scale holds the fields that differ at it, in dicts like this
    # config's own: {"smoke": {"model": {"width": 32}}}. Where flags are read, `scaled`
    # merges them into one config. None: the config as written.
    c.scale = PLACEHOLDER(str)
    c.scales = ConfigDict(type_safe=False)
    c.seed = 0  # of the initialization and of the data's order
    # Workdir of a run of this model, on any devices. This run starts from its
    # parameters, or adapts them. None: from the initialization.
    c.base = PLACEHOLDER(str)
    # A Hugging Face folder whose model is trained, or adapted, starting from its
    # weights. Of `model` only the dtypes, remat and attention take effect. `length` is
    # at most the model's positions. The folder may move; a run resumes only with the
    # same model in it.
    c.init_from = PLACEHOLDER(str)
    # A regular expression: whole names of weights of init_from that its model has no
    # place for and that are left out. None: such weights raise an error.
    c.ignore_weights = PLACEHOLDER(str)
    c.steps = 1000  # optimizer steps (commits; inner steps of local methods)
    # They determine `steps` instead: the number of targets to train on, or of passes
    # over the training documents.
    c.tokens = PLACEHOLDER(int)
    c.epochs = PLACEHOLDER(float)
    # Pairs (step, steps): before that optimizer step the learning rate is that of a run
    # of so many steps. `train --extend` adds one when it makes a run longer.
    c.extended = ()
    c.devices = PLACEHOLDER(int)  # CPU devices of each process; None: one
    # Consecutive groups of devices, each on a fast network (hosts of GPUs, slices of
    # TPUs). Several make two data axes (hierarchical reduction): gradients are reduced
    # within a domain first and cross to others smaller; reduce_bits is only for that
    # crossing. None: the slices that TPUs are in, otherwise one.
    c.domains = PLACEHOLDER(int)

    # Sizes of a model-parallel group: one worker, of neighbouring devices in a domain.
    # Over fsdp its devices split a microbatch's rows and the parameters, which are
    # gathered layer by layer; over tensor also attention's heads and the MLP's hidden
    # units. workers = devices / (fsdp x tensor).
    c.mesh = ConfigDict({"fsdp": 1, "tensor": 1})

    c.method = "acco"  # a key of acco_jax.methods.METHODS
    c.method_options = ConfigDict(type_safe=False)  # further arguments of the method
    c.comm_dtype = PLACEHOLDER(str)  # None: each parameter's own
    c.accumulate_dtype = PLACEHOLDER(str)  # None: each parameter's own
    c.form = "auto"  # 'fused', 'split'

    # Rows of one microbatch, and the microbatches that each worker accumulates for one
    # optimizer step. acco takes half of them in each of a step's two half-rounds.
    c.microbatch_size = 8
    c.microbatches_per_step = 2
    # A run may resume with another number of workers. 'kept': they compute the same
    # microbatches of a step, redistributed. 'per_worker': each computes as many as
    # before, so that the batch grows or shrinks.
    c.batch = "kept"
    # 'fixed'; 'adaptive': each process adds microbatches until its communication is
    # done, from a half-round's number up to most_microbatches (two-thread execution,
    # form 'split'); 'balanced': they follow the workers' measured speed, so that all
    # end together (single-program execution, form 'fused'); 'halves': acco's
    # half-rounds differ; 'replay:FILE', a run's counts.jsonl: as in that run, in its
    # form.
    c.microbatches = "fixed"
    # For 'halves': how many of microbatches_per_step a step's first half-round has,
    # overlapped with the estimate's communication. The fewer, the closer acco is to
    # zero1. Use the smallest count that covers the communication.
    c.first_half = 1
    c.most_microbatches = 16  # of each worker in a half-round, where they vary
    # For 'balanced': the least microbatches of each worker, and whether the batch grows
    # or stays. If it grows, the slowest worker computes its equal share, and the others
    # all that they finish meanwhile.
    c.balance = ConfigDict({"floor": 0, "grows": False})
    c.length = 256  # targets per row
    # Microbatches that each worker computes per half-round: one number per worker, for
    # workers of unequal speed. Empty: all.
    c.counts = ()

    c.optimizer = _optimizer_fields()
    c.data = _data_fields()
    c.model = _model_fields()
    c.lora = _lora_fields()

    # These count optimizer steps.
    c.log_every = 10
    c.eval_every = 100
    c.eval_batches = 8  # per evaluation; the last one takes all held-out documents
    # Texts sampled from the model at each evaluation, for logs and metrics.jsonl: their
    # number, prompt and most tokens, at temperature 1.
    c.samples = 0
    c.sample_prompt = ""
    c.sample_tokens = 64  # together with the prompt's at most `length`
    c.checkpoint_every = 500
    c.checkpoints = ""  # their folder, also gs://bucket/run; empty: in the workdir
    c.compare_replicas_every = 100  # workers' copies (run/state/replicas.py); 0: never
    c.keep_checkpoints = 2  # the newest, and the one with the best held-out loss
    c.spike = _spike_fields()
    # Whether a worker whose loss or gradients are not finite does not count in that
    # half-round (with local methods: in that inner step). None: with every method that
    # supports it, all but fused_zero1. Drops are logged, and rows of metrics.jsonl
    # count them as `dropped`. most_dropped_in_a_row half-rounds of one worker in a row
    # end the run.
    c.drop_nonfinite = PLACEHOLDER(bool)
    c.most_dropped_in_a_row = 10
    # START:STOP, half-rounds to trace, both included and counted from 1, such as 20:23.
    # WORKDIR/profile gets the trace with a summary (run/observe/profiling.py). None: no
    # trace.
    c.profile = PLACEHOLDER(str)
    # 'package.module:function', which process 0 calls with each row of metrics.jsonl.
    c.metrics_hook = PLACEHOLDER(str)
    c.wandb_project = PLACEHOLDER(str)  # of Weights & Biases, where it is installed
    return c


def _spike_fields() -> ConfigDict:
    c = ConfigDict()
    # Action when the training loss rises by more than `threshold` nats above the lowest
    # one: 'stop', 'rollback' (to the newest checkpoint, continuing with later rows, at
    # most three times), 'off'. Both losses are means over the newest `calls` calls or
    # more, with at least `tokens` tokens; most of the calls must be as high.
    c.policy = "stop"
    c.threshold = 3.0
    c.calls = 8
    c.tokens = 8192
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
    # Pairs (pattern, fields) for parameters with such a path; the first match counts.
    # Fields are a learning_rate (with the same schedule) and options of their own.
    c.groups = ()
    # Decay per step of an average of the parameters, which is evaluated too; 0: none.
    c.ema = 0.0
    return c


def _data_fields() -> ConfigDict:
    c = ConfigDict()
    # 'text_folder', 'jsonl', 'parquet', 'huggingface' (a folder that datasets'
    # save_to_disk wrote), or any tensorflow_datasets name.
    c.name = "stdlib"
    # For the first four: a folder; for 'jsonl' and 'parquet' also a file, or a pattern
    # of files.
    c.path = PLACEHOLDER(str)
    # 'pretrain': documents, packed into rows; 'instruct': an answer to each instruction
    # (Alpaca's columns instruction, input, output), one per row.
    c.task = "pretrain"
    c.document_mask = False  # of 'pretrain': attention stays within a document
    # For 'instruct': ascending numbers of targets that rows are padded to, each global
    # batch to the smallest that fits; longer answers are cut. (): to `length`.
    c.lengths = ()
    c.text_feature = "text"  # of 'pretrain'
    # Words in the names of files and folders, or splits of 'huggingface' and tfds;
    # 'train' and 'validation' also stand for their synonyms. 'all': all files are for
    # training.
    c.train_split = "train"
    c.validation_split = "validation"
    c.held_out = 0.05  # of the documents, without a validation or test split
    c.data_dir = PLACEHOLDER(str)  # None: $ACCO_DATA_DIR or ~/.cache/acco_jax
    # 'bytes'; 'bpe', trained on the training split; 'init_from', the tokenizer of that
    # folder; or the path of a tokenizer.json or of a SentencePiece .model.
    c.tokenizer = "bytes"
    c.vocab_size = PLACEHOLDER(int)  # of 'bpe'
    # For a tokenizer file: the token that ends a text. None: the one named in
    # tokenizer_config.json or special_tokens_map.json next to it, or a well-known one.
    c.end_of_text = PLACEHOLDER(str)
    # Fraction of each worker's rows drawn from documents that no other worker reads. 0:
    # all workers have one distribution; 1: all rows are of such documents.
    c.skew = 0.0
    return c


def _model_fields() -> ConfigDict:
    c = ConfigDict()
    # 'package.module:function', called with vocab_size, length and the options. It
    # returns an acco_jax.models.model.Model; the fields below vocab_size then have no
    # effect. None: a transformer.
    c.factory = PLACEHOLDER(str)
    c.options = ConfigDict(type_safe=False)
    c.vocab_size = PLACEHOLDER(int)  # None: the tokenizer's
    # A name of acco_jax.models.sizes.SIZES; None: a model of `family` with the sizes
    # below.
    c.size = PLACEHOLDER(str)
    c.family = "gpt-neo"  # 'gpt2', 'llama', 'qwen3'
    c.width = 128
    c.layers = 4
    c.heads = 4
    c.kv_heads = PLACEHOLDER(int)  # heads of keys and values; None: heads
    c.mlp_width = PLACEHOLDER(int)  # None: 4 * width; llama and qwen3: 3 * width
    c.window = 256  # of the local layers
    c.dtype = "bfloat16"  # of the computation
    c.param_dtype = "bfloat16"  # the master weights are float32
    # What the backward pass recomputes: 'none', only norms and the MLP's activation;
    # 'elementwise', all but matmuls and attention; 'block', everything. None: nothing
    # on CPU, elsewhere elementwise operations.
    c.remat = PLACEHOLDER(str)
    # 'xla' (scores in memory), 'cudnn' or 'pallas' (GPU), 'splash' (TPU); None: the
    # platform's kernel, if it has one for this dtype.
    c.attention = PLACEHOLDER(str)
    return c


def _lora_fields() -> ConfigDict:
    c = ConfigDict()
    c.rank = 0  # of the adapters that are trained instead of the model; 0: none
    c.pattern = "attn/(q|v)_proj/kernel"  # searched in the parameters' paths
    # Instead of both: pairs (pattern, rank); the first match counts.
    c.ranks = ()
    c.scale = 1.0  # W + scale * a @ b
    return c


def scaled(config: ConfigDict, kept: Collection[str] = ()) -> ConfigDict:
    """Return a config with the fields of its `scale`, and without `scales`.

    Args:
      config: of the experiment.
      kept: dotted names of fields that keep their values: fields of the command line.

    Raises:
      ValueError: if there is no such scale, or it does not fit the config.
    """
    name, scales = config.get("scale"), config.get("scales")
    if not isinstance(scales, ConfigDict):
        return config  # `validate` reports the missing field
    if name is not None and not scales:
        raise ValueError(
            f"scale is {name!r}, but the config has no scales: leave it out."
        )
    if name is not None:
        check_name("scale", name, scales)
    config = config.copy_and_resolve_references()
    config.scale, config.scales = None, ConfigDict(type_safe=False)
    for field, value in _flat(scales[name].to_dict() if name else {}):
        if any(f"{field}.".startswith(f"{known}.") for known in kept):
            continue
        try:
            config.update_from_flattened_dict({field: value})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"scales.{name} has {field}={value!r}, which does not fit the field of "
                f"that name: {' '.join(str(error).split())}"
            ) from error
    return config


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def from_json(fields: Mapping[str, Any]) -> ConfigDict:
    """Return the config that a run's config.json describes.

    Missing fields, as in a config.json of an earlier version, have their defaults.

    Raises:
      TypeError: if a field has a value of another type.
    """

    def frozen(value: Any) -> Any:  # JSON makes lists of tuples
        if isinstance(value, dict):
            return {k: frozen(v) for k, v in value.items()}
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    config = default_config()
    config.update({k: frozen(v) for k, v in fields.items() if k in config})
    return config


def with_steps(
    config: ConfigDict,
    rows_per_step: int,
    rows_per_epoch: int,
    steps_per_call: int,
    most: int = STEPS,
) -> ConfigDict:
    """Return the config with the `steps` that `tokens` or `epochs` ask for.

    Args:
      config: of the experiment.
      rows_per_step: of all workers together.
      rows_per_epoch: rows of the training documents.
      steps_per_call: of the method, a multiple of which steps are rounded up to.
      most: largest number of steps of a run.

    Raises:
      ValueError: if there are more steps.
    """
    if config.tokens is None and config.epochs is None:
        return config
    if config.epochs is None:
        rows = config.tokens / config.length
    else:
        rows = config.epochs * rows_per_epoch
    calls = math.ceil(rows / rows_per_step / steps_per_call)
    steps = max(calls, 1) * steps_per_call
    if steps > most:
        field = "tokens" if config.epochs is None else "epochs"
        raise ValueError(
            f"{field} is {config[field]}, which takes {steps:.3g} steps, more than "
            f"{most}: lower it, or give steps."
        )
    config = config.copy_and_resolve_references()
    config.steps = steps
    return config


def call_microbatches(config: ConfigDict, calls_per_step: int, workers: int) -> int:
    """Return the microbatches of each worker in one of a step's half-rounds.

    Raises:
      ValueError: if the step does not divide into half-rounds, or counts do not fit.
    """
    per_step, counts = config.microbatches_per_step, tuple(config.counts)
    if per_step % calls_per_step:
        raise ValueError(
            f"microbatches_per_step is {per_step}, which does not divide into the "
            f"{calls_per_step} calls of a step of {config.method}: use a multiple."
        )
    microbatches = per_step // calls_per_step
    whole = all(type(c) is int and 0 <= c <= microbatches for c in counts)
    fits = len(counts) == workers and whole
    if counts and not fits:
        raise ValueError(
            f"counts is {counts}: give one number from 0 to {microbatches} for each of "
            f"the {workers} workers, or none."
        )
    return microbatches


def halves(config: ConfigDict, calls_per_step: int) -> tuple[int, int]:
    """Return each worker's microbatches in a step's first and second half.

    Raises:
      ValueError: if there are not two half-rounds, or too few microbatches.
    """
    per_step, first = config.microbatches_per_step, config.first_half
    if calls_per_step != 2 or not 0 < first < per_step:
        raise ValueError(
            f"first_half is {first} of microbatches_per_step={per_step} with "
            f"{config.method}: it is for acco, from 1 to one less than these."
        )
    return first, per_step - first


def replayed(config: ConfigDict) -> str:
    """Return the path of the log that a run repeats; '' if it repeats none."""
    kind, _, file = config.microbatches.partition(":")
    return file if kind == "replay" else ""


def dtype(field: str, name: str | None) -> Any:
    """Return a floating dtype by name, None for None; an error names the field."""
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


def profiled(text: str | None, total_calls: int | None = None) -> range:
    """Return the half-rounds that a config's `profile` names, counted from 1.

    Args:
      text: 'START:STOP', both included; None: none.
      total_calls: of the run, if that is known.

    Raises:
      ValueError: if it has another form, or goes beyond the run.
    """
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"profile is {text!r}: give START:STOP, the first and the last half-round "
            "to trace, counted from 1, such as 20:23."
        )
    if total_calls is not None and last > total_calls:
        raise ValueError(
            f"profile is {text!r}, but the run has {total_calls} half-rounds: lower it."
        )
    return range(first, last + 1)
