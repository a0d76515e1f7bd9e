"""Loss of a run's model on a split of the run's own data."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acco_jax import data
from acco_jax.command.files import read_object
from acco_jax.run.trained import perplexity
from acco_jax.run.trained.trained_runs import TrainedRun, load_run
from acco_jax.run.weights import pretrained


def of_split(workdir: str | Path, split: str) -> dict[str, Any]:
    """Return the figures of a split, as the run's own evaluations compute its loss.

    Where examples are cut or left out, the rows' share of the split's targets is also
    their share of its words and bytes.

    Args:
      workdir: of the run; its model may be a factory's.
      split: "train" or "validation".

    Raises:
      ValueError: as `load_run`, or if the data have changed or moved since.
      FloatingPointError: if the loss is not finite.
    """
    run = load_run(workdir)
    corpus = _corpus(run)
    if split == "train":
        names = [f.name for f in dataclasses.fields(corpus)]
        own = {n: n.replace("validation", "train") for n in names if "validation" in n}
        corpus = dataclasses.replace(
            corpus, **{to: getattr(corpus, of) for to, of in own.items()}
        )
    loss = run.model.evaluation_loss or run.model.loss
    add = jax.jit(lambda params, batch: jnp.stack(loss(params, batch, None)[:2]))
    c, sums = run.config, []
    for batch in data.validation_batches(
        corpus,
        length=c.length,
        batch_size=c.microbatch_size,
        lengths=c.data.lengths,
        document_mask=c.data.document_mask,
    ):
        sums.append(jax.device_get(add(run.params, batch)))
    nats, tokens = (math.fsum(column) for column in zip(*sums, strict=True))
    share = tokens / data.held_out_targets(corpus)  # of examples cut or left out, less
    words, size = share * _words(corpus), share * corpus.validation_bytes
    return perplexity.figures(nats, tokens, words, size)


def _corpus(run: TrainedRun) -> data.Corpus:
    """Return the data of a run, if they have not changed."""
    fields = run.config.data.copy_and_resolve_references()
    if fields.tokenizer == pretrained.TOKENIZER:  # its folder may be gone
        fields.tokenizer = str(run.workdir / "tokenizer.json")
    try:
        corpus = data.load_corpus(fields, workdir=run.workdir)
    except (OSError, ValueError) as error:  # its remedy is for a config
        reason = str(error).partition(": set ")[0]
        raise ValueError(
            f"the data of {run.workdir} cannot be read ({reason}): restore them, or "
            "give --file."
        ) from error
    then = read_object(run.workdir / "config.json").get("corpus", {})
    now = {"documents": corpus.documents, "tokens": corpus.checksum}
    if now != {name: then.get(name) for name in now}:
        raise ValueError(
            f"{run.workdir} was trained on other data than data.name="
            f"{run.config.data.name!r} gives now: restore them, or the chat template, "
            "or give --file."
        )
    return corpus


def _words(corpus: data.Corpus) -> int:
    """Return the number of words of a split's text: only of what is learnt."""
    tokens, spans = np.asarray(corpus.validation_tokens), corpus.validation_spans
    if spans is None:
        ends = np.flatnonzero(tokens == corpus.tokenizer.end_of_text)
        spans = np.stack([ends[:-1], ends[:-1] + 1, ends[1:]], axis=1)
    decode = corpus.tokenizer.decode
    if (targets := corpus.validation_targets) is not None:
        counted = np.asarray(targets) == 1
        parts = [slice(a, b + 1) for _, a, b in spans]
        return sum(len(decode(tokens[p][counted[p]]).split()) for p in parts)
    return sum(len(decode(tokens[a:b]).split()) for _, a, b in spans)
