"""Loss of a model on texts: perplexities, bits per byte, LAMBADA's last words."""

import math
from pathlib import Path
from typing import Any

from acco_jax.command.files import read_rows
from acco_jax.run.trained.language import Language


def figures(nats: float, tokens: float, words: float, size: float) -> dict[str, Any]:
    """Return the figures of a text.

    Args:
      nats: the sum of its tokens' cross-entropies.
      tokens: their number.
      words: that spaces separate.
      size: in bytes of UTF-8.

    Raises:
      FloatingPointError: if the loss is not finite.
    """
    if not math.isfinite(nats):
        raise FloatingPointError(
            f"the loss is {nats / tokens}: the model's parameters or its dtype are of "
            "no use; try --dtype=float32 for a folder."
        )
    return {
        "loss": nats / tokens,
        "perplexity": _exp(nats / tokens),
        "perplexity_per_word": _exp(nats / words) if words else None,
        "bits_per_byte": nats / math.log(2) / size,
        "tokens": round(tokens),
        "words": round(words),
        "bytes": round(size),
    }


def _exp(x: float) -> float | None:
    """Return e to the power of x, None if it is too large for a float."""
    return math.exp(x) if x < 700 else None


def of_text(
    language: Language,
    text: str,
    stride: int | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """Return the figures of a text.

    Args:
      language: the model.
      text: any but an empty one.
      stride: as for `Language.rows`.
      window: as for `Language.rows`.

    Raises:
      ValueError: if the text is empty, or as `Language.rows`.
      FloatingPointError: if the loss is not finite.
    """
    rows = language.rows(text, stride, window)
    if not rows:
        raise ValueError("the text is empty: give one that has characters.")
    nats = math.fsum(score.nats for score in language.score(rows))
    tokens = sum(row.targets for row in rows)
    return figures(nats, tokens, len(text.split()), len(text.encode()))


def of_lambada(language: Language, path: Path) -> dict[str, Any]:
    """Return how well a model predicts the last words of texts.

    A text's last word follows its last space. It is predicted if each of its
    tokens is the likeliest one.

    Args:
      language: the model.
      path: of a file with a JSON object per line, whose "text" counts.

    Returns:
      accuracy, the share of last words predicted; perplexity of a last word:
      e to the mean of the words' nats; whole_text, the figures of all texts.

    Raises:
      ValueError: if there is no such file, or a text has no last word.
      FloatingPointError: if the loss is not finite.
    """
    texts = _texts(path)
    pairs = [(text[:i], text[i:]) for text in texts for i in [text.rindex(" ")]]
    words = language.score([language.pair(*pair) for pair in pairs])
    rows = [row for text in texts for row in language.rows(text)]
    whole = figures(
        math.fsum(score.nats for score in language.score(rows)),
        sum(row.targets for row in rows),
        sum(len(text.split()) for text in texts),
        sum(len(text.encode()) for text in texts),
    )
    return {
        "accuracy": sum(score.likeliest for score in words) / len(words),
        "perplexity": _exp(math.fsum(score.nats for score in words) / len(words)),
        "texts": len(texts),
        "whole_text": whole,
    }


def _texts(path: Path) -> list[str]:
    """Return the texts of a file of LAMBADA's format; raise as `of_lambada`."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a file of JSON objects.")
    rows = read_rows(path, {"text"}, whole=True)
    if not rows:
        raise ValueError(
            f"{path} has no texts: give a file of JSON objects, one a line."
        )
    for number, row in enumerate(rows, 1):
        text = row["text"]
        if not isinstance(text, str) or not text.strip().count(" ") or text[-1] == " ":
            raise ValueError(
                f'{path} has no last word in line {number}: give each line a "text" '
                "that ends with a word after a space."
            )
    return [row["text"] for row in rows]
