"""A model for EleutherAI's lm-evaluation-harness, which must be installed.

    import acco_jax.lm_eval
    model = acco_jax.lm_eval.AccoLM(workdir="runs/quickstart")  # or model=FOLDER
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

It answers the three requests of `lm_eval.api.model.LM`, as "acco_jax" in its registry.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from acco_jax.run.trained import language
from acco_jax.run.trained.language import Sampling

TOKENS = 256  # of an answer, where a request does not say
CHUNK = 16  # tokens of an answer between looks for what ends it


@register_model("acco_jax")
class AccoLM(LM):
    """The model of a run or of a Hugging Face folder."""

    def __init__(
        self,
        workdir: str | None = None,
        model: str | None = None,
        dtype: str | None = None,
        ignore_weights: str | None = None,
        batch_size: int | str = 8,
        **unused: Any,
    ) -> None:
        """Open a model.

        Args:
          workdir: of a run.
          model: a Hugging Face folder, instead.
          dtype: of the folder's model; None: its own.
          ignore_weights: a regular expression of weights of the folder to leave out.
          batch_size: how many texts are generated together.
          **unused: what the harness gives every model: device, max_batch_size.

        Raises:
          ValueError: not exactly one of workdir and model is given, it cannot be
            opened, or another argument is given.
        """
        super().__init__()
        if unknown := sorted(unused.keys() - {"device", "max_batch_size"}):
            raise ValueError(
                f"{unknown[0]} is not an argument of AccoLM: give workdir or model, "
                "dtype, ignore_weights, batch_size."
            )
        if (workdir is None) == (model is None):
            raise ValueError(
                f"workdir is {workdir!r} and model {model!r}: give one of them."
            )
        if workdir is not None and (dtype, ignore_weights) != (None, None):
            raise ValueError(
                f"dtype is {dtype!r} and ignore_weights {ignore_weights!r}: they are "
                "for model, a run has its own."
            )
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 8
        if workdir is not None:
            self._language = language.from_run(workdir)
        else:
            self._language = language.from_folder(str(model), dtype, ignore_weights)

    @property
    def tokenizer_name(self) -> str:
        return self._language.tokenizer.fingerprint

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return log-probabilities of (context, continuation), and if it is greedy."""
        rows = [self._language.pair(*request.args) for request in requests]
        return [(-s.nats, s.likeliest) for s in self._language.score(rows)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-probabilities of (text,), in windows that do not overlap."""
        parts = [self._language.rows(r.args[0]) for r in requests]
        scores = iter(self._language.score([row for part in parts for row in part]))
        return [-sum(next(scores).nats for _ in part) for part in parts]

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Return continuations of (context, options), up to the first stop string.

        Options are the harness's: until, max_gen_toks, do_sample, temperature, top_k
        and top_p. A continuation has at most max_gen_toks tokens, fewer where its
        context leaves room for fewer. A context is cut to its end only where it leaves
        room for neither max_gen_toks nor half of the model's positions.

        Raises:
          ValueError: if max_gen_toks is not less than the model's positions.
        """
        found = [""] * len(requests)
        keys = language.keys_of(0, len(requests))  # of each its own: some are repeated
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            for start in range(0, len(numbers), self.batch_size):
                part = numbers[start : start + self.batch_size]
                contexts = [requests[i].args[0] for i in part]
                options = requests[part[0]].args[1]
                texts = self._until(contexts, options, keys[np.asarray(part)])
                for i, text in zip(part, texts, strict=True):
                    found[i] = text
        return found

    def _until(
        self, contexts: list[str], options: dict[str, Any], keys: jax.Array
    ) -> list[str]:
        """Return the texts that follow contexts, with equal options."""
        until = options.get("until") or []
        stops = [
            stop for stop in ([until] if isinstance(until, str) else until) if stop
        ]
        most = self._language.config.max_length
        asked = int(options.get("max_gen_toks", TOKENS))
        if asked < 1:
            raise ValueError(f"max_gen_toks is {asked}: give at least 1.")
        if "max_gen_toks" in options and asked >= most:
            raise ValueError(
                f"max_gen_toks is {asked}, but the model has {most} positions: give "
                "fewer, to leave room for contexts."
            )
        kept = most - min(asked, most // 2)
        prompts = [self._language.tokens(context, kept) for context in contexts]
        tokens = np.array([min(asked, most - len(prompt)) for prompt in prompts])
        texts = [""] * len(contexts)
        for texts in self._language.write(
            prompts, tokens, _sampling(options), keys, CHUNK
        ):
            if stops and all(any(s in text for s in stops) for text in texts):
                break
        return [_before(text, stops) for text in texts]


def _sampling(options: dict[str, Any]) -> Sampling:
    """Return the harness's options as `Sampling`: greedy unless they ask to sample."""
    temperature = options.get("temperature")
    if not options.get("do_sample", bool(temperature)) or temperature == 0:
        return Sampling()
    top_k = options.get("top_k") or None  # 0 is transformers' word for all
    return Sampling(temperature or 1.0, top_k, options.get("top_p"))


def _before(text: str, stops: list[str]) -> str:
    """Return a text up to the first of these strings in it."""
    return text[: min((text.find(s) for s in stops if s in text), default=None)]
