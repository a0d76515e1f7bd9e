"""Language model as text: generation, and the loss of given texts."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from ml_collections import ConfigDict

from acco_jax import data
from acco_jax.command.files import read_object
from acco_jax.data.chat import ChatTemplate
from acco_jax.data.tasks import ASSISTANT, Chat
from acco_jax.models import sampling, scoring, transformer
from acco_jax.models.sampling import Sampling
from acco_jax.models.scoring import Score, ScoredRow
from acco_jax.run.config.fields import dtype as dtype_of
from acco_jax.run.config.parsing import ModelFlags
from acco_jax.run.trained.trained_runs import load_run
from acco_jax.run.weights import pretrained

PyTree = Any
_CUT = "\ufffd"  # a tokenizer's output for an incomplete character


@dataclasses.dataclass(frozen=True)
class Language:
    """A transformer, its parameters, and its tokenizer.

    Attributes:
      config: of the transformer.
      params: in the tree of `transformer.init_params`.
      tokenizer: the model's own tokens.
      prefix: tokens that it sees before a text; often none.
      ends: tokens that end its texts, beside the tokenizer's end of text.
    """

    config: transformer.Config
    params: PyTree
    tokenizer: data.Tokenizer
    prefix: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def before(self) -> tuple[int, ...]:
        """Tokens before a text's first one: the prefix, or end of text."""
        return self.prefix or (self.tokenizer.end_of_text,)

    def tokens(self, text: str, most: int | None = None) -> np.ndarray:
        """Return a prompt as the model's tokens, int32 (n,), at least one.

        Special tokens may be spelled in it. A prefix that it spells is not repeated.

        Args:
          text: any.
          most: tokens to return, more than the prefix has: a longer text keeps only its
            end. None: all of them.

        Raises:
          ValueError: if the text is not Unicode, or has a token that the model lacks.
        """
        encoded = self.encode(text, special=True)
        if tuple(encoded[: len(self.prefix)]) == self.prefix:
            encoded = encoded[len(self.prefix) :]
        if most is not None:
            encoded = encoded[max(len(self.prefix) + len(encoded) - most, 0) :]
        first = self.prefix if len(encoded) else self.before
        return np.concatenate([np.asarray(first, np.int32), encoded])

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return the tokens of a text, int32 (n,).

        Args:
          text: any.
          special: whether a tokenizer.json's special tokens may be spelled in it.

        Raises:
          ValueError: if the text is not Unicode, or has a token that the model lacks.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a text is not Unicode: {error}.") from error
        if not special or not isinstance(self.tokenizer, data.FileTokenizer):
            return self.tokenizer.encode(text)
        ((ids, _),) = self.tokenizer.encode_rendered([text])
        if (unknown := ids[ids >= self.config.vocab_size]).size:
            spelled = self.tokenizer.decode(unknown[:1])
            raise ValueError(
                f"a prompt has token {unknown[0]}, {spelled!r}, but the model knows "
                f"{self.config.vocab_size} tokens: leave it out."
            )
        return ids

    def rows(
        self, text: str, stride: int | None = None, window: int | None = None
    ) -> list[ScoredRow]:
        """Return rows that have each token of a text as a target once.

        Args:
          text: any; an empty one gives no row.
          stride: from a window's begin to the next one's, at least 1; None: `window`.
          window: tokens of a row, at least 1; None: the model's positions.

        Raises:
          ValueError: if the stride exceeds the window, the window the model's
            positions, or the text is not Unicode.
        """
        positions = self.config.max_length
        window = window or positions
        stride = stride or window
        if window > positions:
            raise ValueError(
                f"window is {window}, but the model has {positions} positions: give at "
                "most these."
            )
        if stride > window:
            raise ValueError(
                f"stride is {stride}, but a window has {window} tokens: give at most "
                "these."
            )
        tokens = np.concatenate([np.asarray(self.before[-1:]), self.encode(text)])
        return list(scoring.windows(tokens, window, stride))

    def pair(self, context: str, continuation: str) -> ScoredRow:
        """Return the row that has a continuation as its targets, after a context.

        Both are encoded as one text, and spaces at the context's end with what follows
        them. A context that is too long keeps only its end.

        Raises:
          ValueError: if the continuation is empty, or exceeds the model's positions.
        """
        context, spaces = (kept := context.rstrip()), context[len(kept) :]
        encoded = self.encode(context + spaces + continuation)
        before = len(self.encode(context))
        targets = len(encoded) - before
        first = self.prefix if before else self.before
        tokens = np.concatenate([np.asarray(first, np.int32), encoded])
        most = self.config.max_length
        if not 1 <= targets <= most:
            raise ValueError(
                f"a continuation has {targets} tokens, but must have from 1 to the "
                f"model's {most} positions: shorten it, or give one."
            )
        return ScoredRow(tokens[-most - 1 :], targets)

    def score(self, rows: Sequence[ScoredRow]) -> list[Score]:
        """Return the scores of rows."""
        return scoring.score(self.config, self.params, rows)

    def write(
        self,
        prompts: Sequence[np.ndarray],
        tokens: int | np.ndarray,
        how: Sampling,
        keys: jax.Array,
        chunk: int,
    ) -> Iterator[list[str]]:
        """Yield the text written after each prompt so far, repeatedly, to the end.

        A token that ends a text is left out. An incomplete character at the end is left
        out until its bytes are complete, or nothing more comes.

        Args:
          prompts: from `tokens`, so that each begins with the prefix.
          tokens: at most this many follow each prompt; (prompts,) for each its own.
          how: the sampling of the tokens.
          keys: (prompts,) of random numbers.
          chunk: further tokens per iteration.

        Raises:
          ValueError: if prompts and tokens exceed the model's positions.
        """
        skip = len(self.prefix)  # decoded is the rest
        ends = np.asarray([self.tokenizer.end_of_text, *self.ends], np.int32)
        given = [len(self.tokenizer.decode(p[skip:])) for p in prompts]
        texts = sampling.begin(self.config, self.params, list(prompts), tokens, keys)
        while True:
            texts = sampling.write(self.config, how, self.params, ends, texts, chunk)
            ids, lengths, ended = jax.device_get(texts[:3])
            found = []
            for row, n, begin, over in zip(ids, lengths, given, ended, strict=True):
                n -= over and row[n - 1] in ends
                text = self.tokenizer.decode(row[skip:n])[begin:]
                found.append(text if over else text.rstrip(_CUT))
            yield found
            if ended.all():
                return


def keys_of(seed: int, count: int) -> jax.Array:
    """Return `count` texts' keys: each is of the seed and the text's number."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return fold(jax.random.key(seed), np.arange(count))


def opened(named: ModelFlags) -> Language:
    """Open what flags name; raise as `from_run` and `from_folder`."""
    if (workdir := named.workdir) is not None:
        return from_run(workdir)
    return from_folder(*named.folder)


def from_run(
    workdir: str | Path, devices: Sequence[jax.Device] | None = None
) -> Language:
    """Load the model that a run has trained.

    Args:
      workdir: of the run.
      devices: as for `load_run`.

    Raises:
      ValueError: as `load_run`, or if its model is a factory's.
    """
    run = load_run(workdir, devices)
    if run.architecture is None:
        raise ValueError(
            f"{workdir} has the model of {run.config.model.factory}, of which only the "
            "loss is known: evaluate a split of its data, or use a transformer."
        )
    said = read_object(run.workdir / "config.json").get("generation")
    ends = ends_of(said, run.architecture)
    prefix = prefix_of(run.config, run.tokenizer)
    return Language(run.architecture, run.params, run.tokenizer, prefix, ends)


def from_folder(
    path: str | Path, dtype: str | None = None, ignored: str | None = None
) -> Language:
    """Read a Hugging Face folder to JAX's first device.

    Args:
      path: of the folder.
      dtype: of parameters and computation; None: config.json's, or float32.
      ignored: a regular expression of weights that its model may leave out.

    Raises:
      ValueError: with what is wrong with the folder.
    """
    folder = pretrained.folder_of(path)
    described = folder.config_json
    named = described.get("dtype") or described.get("torch_dtype") or "float32"
    of = dtype_of("dtype", str(named if dtype is None else dtype))
    config = pretrained.model_config(folder.path, described, dtype=of, param_dtype=of)
    pretrained.check_read(config, folder, ignored)
    tokenizer = data.read_tokenizer(folder.tokenizer)
    if tokenizer.text_vocab_size > config.vocab_size:
        raise ValueError(
            f"{folder.path} has a tokenizer of {tokenizer.text_vocab_size} tokens, but "
            f"its model knows {config.vocab_size}: restore both."
        )
    here = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: here, transformer.shapes_of(config))
    params = pretrained.load(config, folder, shardings)
    ends = ends_of(pretrained.generation(str(path)), config)
    return Language(config, params, tokenizer, tokenizer.prefix, ends)


def prefix_of(config: ConfigDict, tokenizer: data.Tokenizer) -> tuple[int, ...]:
    """Return the tokens that a run's documents had before a text.

    They are the tokenizer's if the chat template of the run writes them. Before an
    instruction it is the end of the text before.
    """
    if config.data.task == "instruct":
        return (tokenizer.end_of_text,)
    if config.data.task != "chat" or not tokenizer.prefix:
        return ()
    turns = Chat((("user", "a"), (ASSISTANT, "b")))
    try:
        ((ids, _, _),) = ChatTemplate(tokenizer).encode_batch([turns])
    except ValueError:  # of a template for other conversations
        return ()
    written = tuple(ids[: len(tokenizer.prefix)]) == tokenizer.prefix
    return tokenizer.prefix if written else ()


def ends_of(generation: Any, config: transformer.Config) -> tuple[int, ...]:
    """Return the model's tokens that settings of generation name as ends."""
    named = generation.get("eos_token_id") if isinstance(generation, dict) else ()
    return tuple(i for i in named or () if i < config.vocab_size)
