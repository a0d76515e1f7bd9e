"""Text to token ids and back: bytes, or a byte-level BPE trained on the corpus."""

import abc
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

_BYTES = 256


class Tokenizer(abc.ABC):
    """Turn text into token ids and back.

    Attributes:
      vocab_size: ids are 0 .. vocab_size - 1.
      end_of_text: the last of them, which ends a text.
      fingerprint: names the tokenizer; fit for a file name.
    """

    vocab_size: int
    end_of_text: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 (n,), without an end-of-text id."""
        return self.encode_batch([text])[0]

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, each int32 (n,)."""

    @abc.abstractmethod
    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, integers (n,), leaving out ends of text.

        Bytes that are not UTF-8 (a text cut in the middle) become U+FFFD.
        """


class ByteTokenizer(Tokenizer):
    """Take every byte of the UTF-8 text as a token; id 256 ends a text."""

    vocab_size = _BYTES + 1
    end_of_text = _BYTES
    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < _BYTES].astype(np.uint8).tobytes().decode(errors="replace")


class BpeTokenizer(Tokenizer):
    """Take the tokens of a byte-level BPE; the id after its last ends a text.

    The end of text is no string of the vocabulary, so that no text can contain it.

    Source: Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with
    Subword Units" (2016); over bytes as in GPT-2 (Radford et al., 2019).
    """

    def __init__(self, bpe: tokenizers.Tokenizer):
        self._bpe = bpe
        self.end_of_text = bpe.get_vocab_size()
        self.vocab_size = self.end_of_text + 1
        digest = hashlib.sha256(bpe.to_str().encode()).hexdigest()
        self.fingerprint = f"bpe-{digest[:16]}"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Train on texts until there are `vocab_size` ids, end of text included.

        Raises:
          ValueError: if the bytes alone need more ids, or the texts give fewer.
        """
        if vocab_size <= _BYTES:
            raise ValueError(
                f"vocab_size {vocab_size} is smaller than the {_BYTES} bytes and the "
                f"end of text: set it to {_BYTES + 1} or more"
            )
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        tokenizer = cls(bpe)
        if tokenizer.vocab_size != vocab_size:
            raise ValueError(
                f"the training documents give a BPE of {tokenizer.vocab_size} tokens, "
                f"not vocab_size {vocab_size}: lower it, or train on more text"
            )
        return tokenizer

    @classmethod
    def load(cls, path: str | os.PathLike) -> "BpeTokenizer":
        """Read a tokenizer.json."""
        return cls(tokenizers.Tokenizer.from_file(os.fspath(path)))

    def save(self, path: str | os.PathLike) -> None:
        """Write a tokenizer.json, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(self._bpe.to_str(), encoding="utf-8")
        os.replace(partial, path)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._bpe.encode_batch_fast(list(texts))  # in parallel threads
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return self._bpe.decode(ids[ids < self.end_of_text].tolist())
